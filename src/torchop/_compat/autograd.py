"""Autograd's thread-local state, `autograd.Function` and forward-mode tangents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import Context
from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.graph import _engine_run_backward

from torchop._compat import functorch
from torchop._compat.classes import DispatchKey

below_autograd = torch._C._AutoDispatchBelowAutograd


def is_excluded() -> bool:
    """Return whether this thread excludes autograd, as in a kernel that the dispatcher calls."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradOther)


def is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def context_of_backward() -> Context:
    """Return the context variables of the code that called the backward that this thread runs.

    `_engine_run_backward` (torch/autograd/graph.py) passes them to the engine's threads since 2.12.
    The result is empty in 2.11, outside of a backward, and after a nested backward, because that
    removes the variables. pytorch/pytorch#186583 replaces this mechanism.
    """
    is_there = is_in_backward() and torch._C._is_key_in_tls("context")
    return (torch._C._get_obj_in_tls("context") if is_there else None) or Context()


def above_autograd() -> contextlib.AbstractContextManager[object]:
    """Enable autograd in a block, even inside a kernel that runs below autograd.

    Leaving inference mode enables both gradient modes and the autograd dispatch keys.
    """
    return torch._C._InferenceMode(False)


def same_keys() -> contextlib.AbstractContextManager[object]:
    """Return a context manager that restores the current dispatch keys of this thread."""
    include = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(include, torch._C._dispatch_tls_local_exclude_set())


def any_requires_grad(values: Iterable[Any]) -> bool:
    """Return whether any tensor in `values`, or in a list in `values`, requires grad."""
    return torch._C._any_requires_grad(*values)


def at_single_level(run: Callable[[], Any]) -> Any:
    """Call `run` with autograd functions applied at the current functorch level only."""
    with enable_single_level_autograd_function():
        return run()


def outer_levels_differentiate(run: Callable[[], Any]) -> Any:
    """Call `run` with both gradient modes enabled, inside the forward of an autograd function.

    `apply` disables gradient modes, but enclosing transforms still differentiate the forward.
    """
    keys = same_keys()
    with above_autograd(), keys:
        return run()


def input_gradients(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    create_graph: bool,
) -> Sequence[torch.Tensor | None]:
    """Return the gradients of `inputs`, as `torch.autograd.grad` does.

    `pairs` contains outputs with their gradients. If these are plain tensors of equal shape and
    dtype, the engine is called directly, because the checks of `torch.autograd.grad` take as long
    as the engine.
    """
    outputs, grads = zip(*pairs, strict=True)
    if all(
        type(output) is type(grad) is torch.Tensor
        and not output.is_nested
        and output.shape == grad.shape
        and output.dtype is grad.dtype
        for output, grad in pairs
    ):
        return _engine_run_backward(
            outputs, grads, create_graph, create_graph, tuple(inputs), True, accumulate_grad=False
        )
    return torch.autograd.grad(outputs, inputs, grads, create_graph=create_graph, allow_unused=True)


# The `apply` of this base class is C++ code. `autograd.Function.apply` would enter functorch's
# `custom_function_call`, which requires a `setup_context` staticmethod and creates a function per
# level.
_FunctionBase: Any = torch.autograd.function._SingleLevelFunction


def make_autograd_function(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], jvp: Callable[..., Any]
) -> Any:
    """Create an autograd function that applies at the caller's functorch level."""
    return type(
        name,
        (_FunctionBase,),
        {
            "forward": staticmethod(forward),
            "backward": staticmethod(backward),
            "jvp": staticmethod(jvp),
            "_compiled_autograd_key": staticmethod(torch.autograd.Function._compiled_autograd_key),
        },
    )


def described_inputs(ctx: Any) -> Iterator[tuple[int, Any]]:
    """Yield the position and metadata of each input of a node that needs a gradient.

    Each item of a list counts as one input. The metadata has the attributes `shape` (a list),
    `device` and `dtype`. Nested tensors are skipped.
    """
    flags = [
        needs
        for flag in ctx.needs_input_grad
        for needs in (flag if isinstance(flag, list) else [flag])
    ]
    needed = [index for index, needs in enumerate(flags) if needs]
    edges = [edge for edge in ctx.next_functions if edge[0] is not None]
    if len(needed) != len(edges):
        return
    for index, (node, number) in zip(needed, edges, strict=True):
        described = node._input_metadata[number]
        if not (described.is_nested_tensor or described.is_cpp_nested_tensor):
            yield index, described


def context_type(function: Any) -> Any:
    return function._backward_cls


def node_maker(function: Any, take_node: Callable[[Any], Any] | None) -> Any:
    """Return a callable that creates an autograd function's node, without inputs or outputs.

    Since 2.13, the callable is the class of `ctx`. Before 2.13, only `apply` creates nodes
    (`THPFunction_apply` in torch/csrc/autograd/python_function.cpp). On these releases, the
    callable runs `take_node(ctx)` as the forward of an autograd function, and returns its result.
    """
    if take_node is None:
        return context_type(function)
    # Create the class once per function, because Python 3.13t never frees classes.
    if "_torchop_blank" not in vars(function):
        # Call `type` directly, because PyTorch's metaclass would create another node class.
        attributes = {
            "_backward_cls": context_type(function),
            "forward": take_node,
            # PyTorch compares this attribute with the default by identity.
            "setup_context": _FunctionBase.setup_context,
            "clear_saved_tensors_on_access": False,
        }
        function._torchop_blank = type("Blank", (torch._C._FunctionBase,), attributes)
    return function._torchop_blank.apply


# The descriptor of `ctx.saved_tensors`, for subclasses that override it with a property.
saved_tensors: Any = torch._C._FunctionBase.saved_tensors
raw_saved_tensors: Callable[[Any], tuple[torch.Tensor | None, ...]] = saved_tensors.__get__


def is_dual_level() -> bool:
    """Return whether tensors of this thread may carry tangents."""
    if not torch._C._is_fwd_grad_enabled():
        return False
    if _forward_ad._current_level >= 0:
        return True
    # Check first, because `peek_interpreter_stack` creates a missing stack, and then every node of
    # every later backward in this thread would copy the stack.
    if not functorch.is_active():
        return False
    # A compiled graph calls `_enter_dual_level` (torch/_functorch/predispatch.py), which does not
    # update `_current_level`.
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return interpreter is not None and interpreter.key() == torch._C._functorch.TransformType.Jvp


_DUAL_LEVEL = 0  # PyTorch supports only one level, because nested transforms wrap tensors


def unpack_dual(value: Any) -> tuple[Any, torch.Tensor | None]:
    """Return the primal and tangent of `value`. If it has no tangent, return `value` and None."""
    if not isinstance(value, torch.Tensor):
        return value, None
    try:
        primal, tangent = torch._VF._unpack_dual(value, level=_DUAL_LEVEL)
    except RuntimeError:
        if value.layout is torch.strided:
            raise
        return value, None  # `_unpack_dual` creates a view; these layouts do not support tangents
    return value if tangent is None else primal, tangent


def make_dual(tensor: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    dual: torch.Tensor = torch._VF._make_dual(tensor, tangent, level=_DUAL_LEVEL)
    return dual
