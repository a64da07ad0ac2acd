"""Functionalization: tensors of a compiler's trace, and which of them share memory."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._higher_order_ops.auto_functionalize import get_base
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, PythonFunctionalizeAPI
from torch.fx.experimental import proxy_tensor

from torchop._compat.classes import OpOverload


def is_traceable_type(cls: type) -> bool:
    """Whether a compiler's functional trace knows what to do with tensors of a class."""
    return cls in (torch.Tensor, FunctionalTensor) or issubclass(cls, FakeTensor)


def show_mutation(tensor: torch.Tensor) -> None:
    """Tells functionalization that a tensor was written in a way that autograd follows.

    It takes what an operator that it does not know writes for hidden from autograd, and what is
    written without grad mode, as inside of an `autograd.Function`, for meant to be without history.
    An input of a compiled graph would then be overwritten and keep its old history.
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


def untraced(mode: Any, op: OpOverload, args: Any, kwargs: Any) -> Any:
    """What an operator returns for tensors of a functional trace, without being recorded."""
    functionalize: Any = PythonFunctionalizeAPI(mode)
    args, kwargs = functionalize.unwrap_tensors((tuple(args), kwargs))
    with functionalize.redispatch_to_next(), proxy_tensor.disable_proxy_modes_tracing():
        return op(*args, **kwargs)
