"""Compilers' traces: what is in one, which of its tensors share memory, which calls it keeps."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch._higher_order_ops.auto_functionalize import get_base
from torch._higher_order_ops.invoke_subgraph import InvokeSubgraphAutogradOp
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, PythonFunctionalizeAPI
from torch.fx.experimental import proxy_tensor

from torchop._compat import fake_tensors
from torchop._compat.classes import EffectType


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a compiler's trace: fake, or functionalized."""
    return fake_tensors.is_fake(tensor) or (
        torch._is_functional_tensor(tensor) or type(tensor).__name__ == "FunctionalTensor"
    )


def has_no_data(tensor: torch.Tensor) -> bool:
    """Return whether reading the data of a tensor raises.

    That is so for tensors of a trace or a transform, meta tensors, and wrappers such as DTensor.
    """
    is_wrapper = type(tensor) not in (torch.Tensor, torch.nn.Parameter)
    has_memory = tensor.layout is not torch.strided or torch._C._has_storage(tensor)
    return is_wrapper or tensor.is_meta or is_traced(tensor) or not has_memory


_TRACING_MODES = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def is_tracing(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether what runs here becomes part of a graph, or has no data: a compiler's trace."""
    modes = map(torch._C._get_dispatch_mode, _TRACING_MODES)
    return any(mode is not None for mode in modes) or any(map(is_traced, tensors))


def is_traceable_type(cls: type) -> bool:
    """Whether a compiler's functional trace knows what to do with tensors of a class."""
    return cls in (torch.Tensor, FunctionalTensor) or issubclass(cls, FakeTensor)


def show_mutation(tensor: torch.Tensor) -> None:
    """Tells functionalization that a tensor was written in a way that autograd follows.

    Without this, it assumes that a write by an operator that it does not know is hidden from
    autograd, and that a write without grad mode, as inside of an `autograd.Function`, should have
    no history. So an input of a compiled graph would be overwritten, but keep its old history.
    """
    elem = getattr(tensor, "elem", None)
    if elem is not None and torch._is_functional_tensor(elem):
        with torch.enable_grad():
            torch._functionalize_sync(elem)
            torch._functionalize_replace(elem, torch._from_functional_tensor(elem))
            torch._functionalize_commit_update(elem)
            torch._functionalize_sync(elem)


def traced_memory(tensor: torch.Tensor) -> int:
    """What tells whether two tensors of a compiler's trace have the same memory."""
    return _traced_base(tensor)._cdata


def functional_storage(tensor: torch.Tensor) -> int:
    """What tells whether two tensors of a functional trace have the same memory, below autograd."""
    return int(getattr(tensor, "elem", tensor).untyped_storage()._cdata)


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of a functional trace are not known to be disjoint in memory.

    Adds no guard on a size that is a symbol.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if functional_storage(one) != functional_storage(other):
        return False

    def end(tensor: torch.Tensor) -> Any:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        return tensor.storage_offset() + sum((n - 1) * step for n, step in steps) + 1

    return one.dtype is not other.dtype or not (
        statically_known_true(end(one) <= other.storage_offset())
        or statically_known_true(end(other) <= one.storage_offset())
    )


def is_view_of_other_type(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a compiler's trace is a view of one with another dtype."""
    return _traced_base(tensor).dtype is not tensor.dtype


def _traced_base(tensor: torch.Tensor) -> torch.Tensor:
    base = get_base(tensor)
    return tensor if base is None else cast(torch.Tensor, base)


def traced_node(mode: Any, tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node of the graph being traced that computes a functional tensor; None without a graph.

    The tensor is one of `mode`, the `FunctionalTensorMode` that makes the trace functional.
    """
    proxy_mode = proxy_tensor.get_proxy_mode()
    if proxy_mode is None:
        return None
    value: Any = PythonFunctionalizeAPI(mode).unwrap_tensors(tensor)
    proxy: Any = proxy_tensor.get_proxy_slot(value, proxy_mode.tracer, None)
    return None if proxy is None else proxy.proxy.node


_RECORDS_A_REGION = InvokeSubgraphAutogradOp.forward.__code__


def effect_is_threaded(mode: Any, effect: EffectType) -> bool:
    """Whether the graph that is being traced orders calls that have an effect, and so keeps them.

    PyTorch hands a token from one such call to the next, and `mode`, the FunctionalTensorMode, has
    the last. Most graphs inside a graph (the branches of a `torch.cond`, the body of a loop)
    neither take nor return it, so a call there is dead code. A nested region takes it, but from its
    third call on, PyTorch counts the token among the results and loses the gradient of the region.
    """
    proxy_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if proxy_mode is None:  # nothing is traced yet
        callers = traceback.walk_stack(sys._getframe())
        return not any(frame.f_code is _RECORDS_A_REGION for frame, _ in callers)
    token = mode._tokens.get(effect)
    if token is None:
        # A backward makes its first token itself.
        tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
        return tracer is None or not tracer.is_hop_subgraph_tracer()
    if hasattr(token, "elem"):
        token = torch._from_functional_tensor(token.elem)
    return proxy_tensor.has_proxy_slot(token, cast(Any, proxy_mode).tracer)
