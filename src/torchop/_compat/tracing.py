"""Compiler traces: traced tensors, their memory, and effects."""

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
    """Return whether a tensor belongs to a compiler trace: fake or functional."""
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
    """Return whether a trace is active in this thread, or a tensor belongs to one."""
    modes = map(torch._C._get_dispatch_mode, _TRACING_MODES)
    return any(mode is not None for mode in modes) or any(map(is_traced, tensors))


def is_traceable_type(cls: type) -> bool:
    """Return whether functional traces support tensors of a class."""
    return cls in (torch.Tensor, FunctionalTensor) or issubclass(cls, FakeTensor)


def show_mutation(tensor: torch.Tensor) -> None:
    """Record a write that autograd tracks on a functional tensor.

    Functionalization assumes that unknown operators write behind autograd's back, and that writes
    without grad mode, as inside an `autograd.Function`, carry no history. A compiled graph would
    then mutate an input but keep the old history.
    """
    elem = getattr(tensor, "elem", None)
    if elem is not None and torch._is_functional_tensor(elem):
        with torch.enable_grad():
            torch._functionalize_sync(elem)
            torch._functionalize_replace(elem, torch._from_functional_tensor(elem))
            torch._functionalize_commit_update(elem)
            torch._functionalize_sync(elem)


def traced_memory(tensor: torch.Tensor) -> int:
    """Return an identifier of the memory of a traced tensor."""
    return _traced_base(tensor)._cdata


def functional_storage(tensor: torch.Tensor) -> int:
    """Return an identifier of the memory of a functional tensor, below autograd."""
    return int(getattr(tensor, "elem", tensor).untyped_storage()._cdata)


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two functional tensors may overlap, without guards on symbolic sizes."""
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
    """Return whether a traced tensor is a view of a tensor with another dtype."""
    return _traced_base(tensor).dtype is not tensor.dtype


def _traced_base(tensor: torch.Tensor) -> torch.Tensor:
    base = get_base(tensor)
    return tensor if base is None else cast(torch.Tensor, base)


def traced_node(mode: Any, tensor: torch.Tensor) -> torch.fx.Node | None:
    """Return the FX node that computes a functional tensor of `mode`; None without a graph."""
    proxy_mode = proxy_tensor.get_proxy_mode()
    if proxy_mode is None:
        return None
    value: Any = PythonFunctionalizeAPI(mode).unwrap_tensors(tensor)
    proxy: Any = proxy_tensor.get_proxy_slot(value, proxy_mode.tracer, None)
    return None if proxy is None else proxy.proxy.node


_RECORDS_A_REGION = InvokeSubgraphAutogradOp.forward.__code__


def effect_is_threaded(mode: Any, effect: EffectType) -> bool:
    """Return whether the traced graph orders effectful calls, and so does not eliminate them.

    Effectful calls are chained by a token, which `mode` (a FunctionalTensorMode) holds. Branches of
    `torch.cond` (pytorch/pytorch#185116) and loop bodies (pytorch/pytorch#191122) have no token, so
    effectful calls in them are dead code. `invoke_subgraph` passes the token, but from the third
    call on PyTorch counts it among the results and loses the region's gradient.
    """
    proxy_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if proxy_mode is None:  # no graph yet
        callers = traceback.walk_stack(sys._getframe())
        return not any(frame.f_code is _RECORDS_A_REGION for frame, _ in callers)
    token = mode._tokens.get(effect)
    if token is None:
        # A backward creates its first token itself.
        tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
        return tracer is None or not tracer.is_hop_subgraph_tracer()
    if hasattr(token, "elem"):
        token = torch._from_functional_tensor(token.elem)
    return proxy_tensor.has_proxy_slot(token, cast(Any, proxy_mode).tracer)
