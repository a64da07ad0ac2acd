"""Query compiler traces: which tensors are traced, share memory, or have effects."""

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
    """Return whether a tensor is fake or functional, and so belongs to a compiler trace."""
    return fake_tensors.is_fake(tensor) or (
        torch._is_functional_tensor(tensor) or type(tensor).__name__ == "FunctionalTensor"
    )


def has_no_data(tensor: torch.Tensor) -> bool:
    """Return whether code cannot read the data of a tensor.

    That is so for traced tensors, tensors of a transform, meta tensors, and subclasses such as
    DTensor.
    """
    is_wrapper = type(tensor) not in (torch.Tensor, torch.nn.Parameter)
    has_memory = tensor.layout is not torch.strided or torch._C._has_storage(tensor)
    return is_wrapper or tensor.is_meta or is_traced(tensor) or not has_memory


_TRACING_MODES = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def is_tracing(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether this thread is tracing, or any of `tensors` belongs to a trace."""
    modes = map(torch._C._get_dispatch_mode, _TRACING_MODES)
    return any(mode is not None for mode in modes) or any(map(is_traced, tensors))


def is_traceable_type(cls: type) -> bool:
    """Return whether functional traces support tensors of a class."""
    return cls in (torch.Tensor, FunctionalTensor) or issubclass(cls, FakeTensor)


def show_mutation(tensor: torch.Tensor) -> None:
    """Make a write to a functional tensor visible to autograd, if the tensor has a history.

    By default, functionalization hides writes by unknown operators from autograd. It also assumes
    that writes in no_grad mode, such as those inside an `autograd.Function`, do not change the
    history. So a compiled graph would mutate its input, but the input would keep the history from
    before the write.
    """
    elem = getattr(tensor, "elem", None)
    if elem is not None and torch._is_functional_tensor(elem):
        with torch.enable_grad():
            torch._functionalize_sync(elem)
            torch._functionalize_replace(elem, torch._from_functional_tensor(elem))
            torch._functionalize_commit_update(elem)
            torch._functionalize_sync(elem)


def traced_memory(tensor: torch.Tensor) -> int:
    """Return a number that identifies the memory of a traced tensor."""
    return _traced_base(tensor)._cdata


def functional_storage(tensor: torch.Tensor) -> int:
    """Return a number that identifies the storage of a functional tensor."""
    return int(getattr(tensor, "elem", tensor).untyped_storage()._cdata)


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two functional tensors may overlap, without adding guards."""
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
    """Return whether a traced tensor is a view of a base with another dtype."""
    return _traced_base(tensor).dtype is not tensor.dtype


def _traced_base(tensor: torch.Tensor) -> torch.Tensor:
    base = get_base(tensor)
    return tensor if base is None else cast(torch.Tensor, base)


def traced_node(mode: Any, tensor: torch.Tensor) -> torch.fx.Node | None:
    """Return the FX node of a functional tensor of `mode`, or None if no graph is traced."""
    proxy_mode = proxy_tensor.get_proxy_mode()
    if proxy_mode is None:
        return None
    value: Any = PythonFunctionalizeAPI(mode).unwrap_tensors(tensor)
    proxy: Any = proxy_tensor.get_proxy_slot(value, proxy_mode.tracer, None)
    return None if proxy is None else proxy.proxy.node


_RECORDS_A_REGION = InvokeSubgraphAutogradOp.forward.__code__


def effect_is_threaded(mode: Any, effect: EffectType) -> bool:
    """Return whether an effect token in the traced graph orders and preserves effectful calls.

    `mode` is the FunctionalTensorMode, which owns the token. Branches of `torch.cond`
    (pytorch/pytorch#185116) and loop bodies (pytorch/pytorch#191122) get no token, so effectful
    calls in them would be eliminated as dead code. `invoke_subgraph` gets a token, but from the
    third call on, PyTorch counts the token as a result, and loses the gradient of the region.
    """
    proxy_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if proxy_mode is None:  # no graph yet
        callers = traceback.walk_stack(sys._getframe())
        return not any(frame.f_code is _RECORDS_A_REGION for frame, _ in callers)
    token = mode._tokens.get(effect)
    if token is None:
        # A backward graph creates the first token; only subgraphs of higher-order operators do not.
        tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
        return tracer is None or not tracer.is_hop_subgraph_tracer()
    if hasattr(token, "elem"):
        token = torch._from_functional_tensor(token.elem)
    return proxy_tensor.has_proxy_slot(token, cast(Any, proxy_mode).tracer)
