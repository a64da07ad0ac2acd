"""Query compiler traces: traced tensors, the memory that they share, and effect tokens."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch._higher_order_ops.auto_functionalize import get_base, is_alias, try_use_slice
from torch._higher_order_ops.invoke_subgraph import InvokeSubgraphAutogradOp
from torch._library.fake_class_registry import FakeScriptObject, maybe_to_fake_obj
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, PythonFunctionalizeAPI
from torch.fx.experimental import proxy_tensor

from torchop._compat import fake_tensors, inductor_writes, opaque_types, traced_objects
from torchop._compat.classes import EffectType


def is_traced(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is part of a compiler trace, because it is fake or functional."""
    return fake_tensors.is_fake(tensor) or (
        torch._is_functional_tensor(tensor) or type(tensor).__name__ == "FunctionalTensor"
    )


def has_no_data(tensor: torch.Tensor) -> bool:
    """Return whether the data of a tensor is not accessible.

    This is the case for traced tensors, tensors inside a transform, meta tensors, and subclasses
    such as DTensor.
    """
    is_wrapper = type(tensor) not in (torch.Tensor, torch.nn.Parameter)
    has_memory = tensor.layout is not torch.strided or torch._C._has_storage(tensor)
    return is_wrapper or tensor.is_meta or is_traced(tensor) or not has_memory


_TRACING_MODES = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def is_tracing(tensors: Iterable[torch.Tensor]) -> bool:
    modes = map(torch._C._get_dispatch_mode, _TRACING_MODES)
    return any(mode is not None for mode in modes) or any(map(is_traced, tensors))


def is_functionalizing() -> bool:
    """Return whether AOTAutograd is tracing a graph with functional tensors in this thread."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    return mode is not None


def records_graph() -> bool:
    """Return whether AOTAutograd or `make_fx` is tracing a graph in this thread."""
    key = torch._C._TorchDispatchModeKey.PROXY
    return is_functionalizing() or torch._C._get_dispatch_mode(key) is not None


def without_attributes(
    value: Any, is_replaced: Callable[[type], bool] = opaque_types.is_by_reference
) -> Any:
    """Replace opaque objects with the stand-ins that PyTorch uses for opaque inputs of a graph.

    Reading an attribute of a stand-in raises. If a stand-in is passed to an operator, the trace
    records the original object. `value` may be a tuple, list or dict that contains opaque objects.
    Only classes for which `is_replaced` returns true are replaced.
    """
    if type(value) in (tuple, list):
        return type(value)(without_attributes(item, is_replaced) for item in value)
    if type(value) is dict:
        return {key: without_attributes(item, is_replaced) for key, item in value.items()}
    if isinstance(value, torch.Tensor) or not is_replaced(type(value)):
        return value
    stand_in = maybe_to_fake_obj(fake_tensors.active_fake_mode(), value)
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is not None:
        # PyTorch tracks the results of operators by identity (`set_proxy_slot` in
        # torch/fx/experimental/proxy_tensor.py), so it must track the stand-in too.
        proxy: Any = proxy_tensor.get_proxy_slot(value, mode.tracer, None)
        if proxy is not None:
            proxy_tensor.set_proxy_slot(stand_in, mode.tracer, proxy)
    return stand_in


def with_traced_objects(value: Any, arguments: Sequence[Any]) -> Any:
    """Replace objects of opaque types in a fake kernel's result with stand-ins without contents.

    `arguments` contains the objects that the caller passed. If the result contains some of them,
    they are kept, because a graph just passes them on.
    """
    if type(value) in (tuple, list):
        return type(value)(with_traced_objects(item, arguments) for item in value)
    cls, original = type(value), value
    if cls is FakeScriptObject:
        original = value.real_obj
    if any(original is argument for argument in arguments):
        return original
    return traced_objects.make(cls) if traced_objects.is_replaceable(cls) else value


def attribute_without_value(error: Exception) -> str | None:
    """Return the attribute of an opaque object that code tried to read in a trace, or None."""
    is_read = isinstance(error, AttributeError) and traced_objects.has_no_contents(error.obj)
    return error.name if is_read else None  # type: ignore[attr-defined]


def is_traceable_type(cls: type) -> bool:
    """Return whether traces with functional tensors support tensors of this class."""
    return cls in (torch.Tensor, FunctionalTensor) or issubclass(cls, FakeTensor)


def show_mutation(tensor: torch.Tensor) -> None:
    """Make autograd record a write to a functional tensor.

    By default, functionalization hides writes by custom operators from autograd. It also assumes
    that a write in no_grad mode, for example inside an `autograd.Function`, does not change the
    tensor's autograd history. So an input that a compiled graph mutates would get the new value,
    but still have the autograd history of the old one.
    """
    elem = getattr(tensor, "elem", None)
    if elem is not None and torch._is_functional_tensor(elem):
        with torch.enable_grad():
            torch._functionalize_sync(elem)
            torch._functionalize_replace(elem, torch._from_functional_tensor(elem))
            torch._functionalize_commit_update(elem)
            torch._functionalize_sync(elem)


def traced_memory(tensor: torch.Tensor) -> int:
    """Return a number that is the same for all traced views of the same tensor."""
    return traced_base(tensor)._cdata


def functional_storage(tensor: torch.Tensor) -> int:
    """Return a number that is the same for all functional tensors with the same storage."""
    return int(getattr(tensor, "elem", tensor).untyped_storage()._cdata)


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two functional tensors may overlap, without adding guards on their sizes."""
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


def is_misread_view(
    tensor: torch.Tensor, base_node: torch.fx.Node | None, base_has_offset: bool
) -> bool:
    """Return whether PyTorch's functionalization describes a mutated view incorrectly.

    In the compiled program, functionalization replaces the view with its base, and recreates the
    view from the base. `write_view_information_to_args`
    (torch/_higher_order_ops/auto_functionalize.py) describes the view without its dtype. In the
    same file, `try_use_slice` computes the start of a slice from the storage offset of the view
    without subtracting the storage offset of the base, and fails if the size is data-dependent. All
    other views are described by their own storage offset, which is only correct if the base has the
    same offset in the compiled program. This does not hold if the base is computed, or before 2.13.

    `base_has_offset` is true if the base may have a storage offset in the compiled program.
    """
    from torch.fx.experimental.symbolic_shapes import (
        GuardOnDataDependentSymNode,
        statically_known_true,
    )

    base = traced_base(tensor)
    if base is tensor:
        return False
    if base.dtype is not tensor.dtype:
        return True
    if is_alias(base, tensor):
        return False
    try:
        is_slice = try_use_slice(base, tensor) is not None
    except GuardOnDataDependentSymNode:
        return True
    is_at_start = statically_known_true(base.storage_offset() == 0)
    if is_slice or (is_at_start and not base_has_offset):
        return not is_at_start
    is_computed = base_node is not None and base_node.op != "placeholder"
    return is_computed or inductor_writes.as_strided_ignores_offsets()


def traced_base(tensor: torch.Tensor) -> torch.Tensor:
    """Return the base of a traced view, or the tensor itself if it is not a view."""
    base = get_base(tensor)
    return tensor if base is None else cast(torch.Tensor, base)


def traced_node(mode: Any, tensor: torch.Tensor) -> torch.fx.Node | None:
    """Return the FX node of a functional tensor of `mode`, or None if no graph is being traced."""
    proxy_mode = proxy_tensor.get_proxy_mode()
    if proxy_mode is None:
        return None
    value: Any = PythonFunctionalizeAPI(mode).unwrap_tensors(tensor)
    proxy: Any = proxy_tensor.get_proxy_slot(value, proxy_mode.tracer, None)
    return None if proxy is None else proxy.proxy.node


def have_different_shapes(one: Any, other: Any) -> bool:
    """Return whether the traced tensors of two FX nodes are known to have different shapes.

    This adds no guards on sizes, and does not evaluate data-dependent sizes.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    shapes = [node.meta["val"].shape for node in (one, other)]
    return len(shapes[0]) != len(shapes[1]) or any(
        statically_known_true(size != other_size) for size, other_size in zip(*shapes, strict=True)
    )


def may_have_offset(node: torch.fx.Node) -> bool:
    """Return whether the tensor of an FX node may have a storage offset in the compiled program.

    An input of a subgraph, such as a branch of `torch.cond`, may have one although the traced
    tensor has none, because Inductor may remove a copy that produces the input outside of the
    subgraph.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
    is_subgraph = tracer is not None and tracer.is_hop_subgraph_tracer()
    return (is_subgraph and node.op == "placeholder") or not statically_known_true(
        value.storage_offset() == 0
    )


_RECORDS_A_REGION = InvokeSubgraphAutogradOp.forward.__code__


def effect_is_threaded(mode: Any, effect: EffectType) -> bool:
    """Return whether the traced graph has a token that preserves calls with this effect.

    An effect token is a graph value that each effectful call takes and returns, so that the calls
    keep their order and are not removed as dead code. PyTorch passes no token into the branches of
    `torch.cond` (pytorch/pytorch#185116) or into loop bodies (pytorch/pytorch#191122), so effectful
    calls there would be removed. It does pass a token into an `invoke_subgraph` region. But from
    the third call of the region on, PyTorch treats the token as a result of the region, and the
    region then has no gradient. So this function returns False while PyTorch records the region for
    autograd.
    """
    proxy_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if proxy_mode is None:  # no graph yet
        callers = traceback.walk_stack(sys._getframe())
        return not any(frame.f_code is _RECORDS_A_REGION for frame, _ in callers)
    token = mode._tokens.get(effect)
    if token is None:
        # In a backward graph, the token is created by the first effectful call. Only subgraphs of
        # higher-order operators never get a token.
        tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
        return tracer is None or not tracer.is_hop_subgraph_tracer()
    if hasattr(token, "elem"):
        token = torch._from_functional_tensor(token.elem)
    return proxy_tensor.has_proxy_slot(token, cast(Any, proxy_mode).tracer)
