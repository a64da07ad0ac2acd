"""Whether a call, or a tensor, belongs to a graph that is being traced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torchop._compat import fake_tensors


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a compiler's trace: fake, or functionalized."""
    return fake_tensors.is_fake(tensor) or (
        torch._is_functional_tensor(tensor) or type(tensor).__name__ == "FunctionalTensor"
    )


_TRACING_MODES = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def is_tracing(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether what runs here becomes part of a graph, or has no data: a compiler's trace."""
    modes = map(torch._C._get_dispatch_mode, _TRACING_MODES)
    return any(mode is not None for mode in modes) or any(map(is_traced, tensors))


def shown_to_tracer(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """A size that a tracer did not see computed, computed again from the sizes of tensors.

    The tracer could write its formula into the graph without that, but in 2.13 it uses an operator
    for sums that an exported file cannot hold.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(shown_to_tracer(item, tensors) for item in value)
    if not isinstance(value, torch.SymInt):
        return value
    if get_proxy_mode() is None:
        return value
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    sizes: list[Any] = [size for tensor in tensors for size in tensor.shape]
    symbols = {size.node.expr: size for size in sizes if isinstance(size, torch.SymInt)}
    formula = value.node.expr
    if not formula.free_symbols <= symbols.keys():
        return value
    return sympy_interp(PythonReferenceAnalysis, symbols, formula)
