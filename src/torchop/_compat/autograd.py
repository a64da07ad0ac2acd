"""Autograd's thread-local state, `autograd.Function` and forward-mode tangents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import Context
from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.graph import _engine_run_backward, get_gradient_edge

from torchop._compat import functorch
from torchop._compat.classes import DispatchKey

below_autograd = torch._C._AutoDispatchBelowAutograd


def is_excluded() -> bool:
    """Return whether this thread excludes the autograd dispatch keys, as inside backend kernels."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradOther)


def is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def context_of_backward() -> Context:
    """Return the context variables of the code that started this thread's backward pass.

    Since 2.12, PyTorch copies these variables from the calling thread to the threads of the
    autograd engine (`_engine_run_backward` in torch/autograd/graph.py). The result is empty in 2.11
    and outside of a backward pass. It is also empty after a nested backward pass, because PyTorch
    removes the variables when the nested pass ends. pytorch/pytorch#186583 replaces this mechanism.
    """
    is_there = is_in_backward() and torch._C._is_key_in_tls("context")
    return (torch._C._get_obj_in_tls("context") if is_there else None) or Context()


def above_autograd() -> contextlib.AbstractContextManager[object]:
    """Return a context manager that enables autograd, even in a kernel that runs below autograd.

    `_InferenceMode(False)` enables both reverse and forward mode, and stops excluding the autograd
    dispatch keys in this thread.
    """
    return torch._C._InferenceMode(False)


def same_keys() -> contextlib.AbstractContextManager[object]:
    """Return a context manager that restores this thread's current dispatch keys when entered.

    The included and excluded keys to restore are those at the time of the call to this function.
    """
    include = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(include, torch._C._dispatch_tls_local_exclude_set())


def any_requires_grad(values: Iterable[Any]) -> bool:
    return torch._C._any_requires_grad(*values)


def at_single_level(run: Callable[[], Any]) -> Any:
    """Call `run`, applying its autograd functions only at the current functorch level."""
    with enable_single_level_autograd_function():
        return run()


def outer_levels_differentiate(run: Callable[[], Any]) -> Any:
    """Call `run` in the `forward` of an autograd function, with reverse and forward mode enabled.

    `autograd.Function.apply` disables reverse-mode and forward-mode autograd while `forward` runs,
    but a transform around the call, such as `torch.func.grad`, must still be able to differentiate
    the code in `forward`.
    """
    keys = same_keys()
    with above_autograd(), keys:
        return run()


def all_affect(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether autograd recorded a path from each input to at least one of the outputs."""
    wanted = set(_edges_of(inputs))
    return wanted <= set(reached_edges(outputs, wanted))


def reached_edges(
    tensors: Iterable[torch.Tensor], end: Collection[tuple[Any, int]] = ()
) -> Iterator[tuple[Any, int]]:
    """Follow the autograd graph from tensors that require grad to the leaves, and yield the edges.

    An edge consists of a node and the index of one of the node's outputs. The search does not
    continue past the edges in `end`.
    """
    edges = _edges_of(tensors)
    seen: set[Any] = {None}
    while edges:
        edge = edges.pop()
        yield edge
        if edge not in end and edge[0] not in seen:
            seen.add(edge[0])
            edges += edge[0].next_functions


def _edges_of(tensors: Iterable[torch.Tensor]) -> list[tuple[Any, int]]:
    edges: list[Any] = list(map(get_gradient_edge, tensors))
    return [(edge.node, edge.output_nr) for edge in edges]


def input_gradients(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    create_graph: bool,
) -> Sequence[torch.Tensor | None]:
    """Return the gradients of `inputs`, as `torch.autograd.grad` does.

    `pairs` contains an (output, gradient of that output) tuple for each output. The checks in
    `torch.autograd.grad` take as long as the backward pass itself, so if all outputs and gradients
    are plain tensors with matching shapes and dtypes, call the autograd engine directly.
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


# The `apply` of this base class always runs PyTorch's C++ code. Inside a torch.func transform,
# `autograd.Function.apply` would call functorch's `custom_function_call` instead, which requires a
# `setup_context` staticmethod and creates an autograd function for each level.
_FunctionBase: Any = torch.autograd.function._SingleLevelFunction


def make_autograd_function(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], jvp: Callable[..., Any]
) -> Any:
    """Create an `autograd.Function` class that applies only at the caller's functorch level."""
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
    """Yield the position and metadata of each input that needs a gradient.

    For the positions, each tensor in a list counts separately. The metadata has the attributes
    `shape` (a list), `device` and `dtype`.
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
    """Return a callable that creates a node of an autograd function, without inputs or outputs.

    Since 2.13, instantiating the class of `ctx` creates a node, so this function returns that
    class. Before 2.13, nodes are only created by `apply` (see `THPFunction_apply` in
    torch/csrc/autograd/python_function.cpp). So on these releases, callers pass a function
    `take_node`, which becomes the `forward` of an autograd function. The returned callable is the
    `apply` of that autograd function: it creates a node, calls `take_node` with the node as `ctx`,
    and returns the result.
    """
    if take_node is None:
        return context_type(function)
    # Create this class only once per function, because Python 3.13t never frees classes.
    if "_torchop_blank" not in vars(function):
        # Call `type` rather than PyTorch's metaclass `FunctionMeta`, which would create another
        # class for the nodes.
        attributes = {
            "_backward_cls": context_type(function),
            "forward": take_node,
            # PyTorch checks by identity whether `setup_context` is overridden, so pass the default
            # function itself.
            "setup_context": _FunctionBase.setup_context,
            "clear_saved_tensors_on_access": False,
        }
        function._torchop_blank = type("Blank", (torch._C._FunctionBase,), attributes)
    return function._torchop_blank.apply


# The descriptor behind `ctx.saved_tensors`. torchop overrides `saved_tensors` with a property in
# the class of `ctx`, and the property reads the original value through this descriptor.
saved_tensors: Any = torch._C._FunctionBase.saved_tensors
raw_saved_tensors: Callable[[Any], tuple[torch.Tensor | None, ...]] = saved_tensors.__get__


def is_dual_level() -> bool:
    """Return whether forward-mode AD is active, in which case tensors may carry tangents."""
    if not torch._C._is_fwd_grad_enabled():
        return False
    if _forward_ad._current_level >= 0:
        return True
    # Return early if no transform is active. Otherwise `peek_interpreter_stack` would create
    # functorch's interpreter stack for this thread, and from then on every autograd node would copy
    # the stack in each backward pass of this thread.
    if not functorch.is_active():
        return False
    # Also check functorch's innermost transform, because `_current_level` may be wrong inside
    # `torch.func.jvp`: compiled graphs call `_enter_dual_level` (torch/_functorch/predispatch.py),
    # which does not update `_current_level`.
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return interpreter is not None and interpreter.key() == torch._C._functorch.TransformType.Jvp


# The only level of PyTorch's forward mode. Nested `jvp` transforms wrap their tensors instead.
_DUAL_LEVEL = 0


def unpack_dual(value: Any) -> tuple[Any, torch.Tensor | None]:
    """Return the primal and tangent of `value`, or `value` and None if it has no tangent."""
    if not isinstance(value, torch.Tensor):
        return value, None
    try:
        primal, tangent = torch._VF._unpack_dual(value, level=_DUAL_LEVEL)
    except RuntimeError:
        if value.layout is torch.strided:
            raise
        # `_unpack_dual` creates a view, which fails for sparse and other non-strided layouts.
        # Tensors with these layouts cannot have a tangent anyway.
        return value, None
    return value if tangent is None else primal, tangent


def make_dual(tensor: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    dual: torch.Tensor = torch._VF._make_dual(tensor, tangent, level=_DUAL_LEVEL)
    return dual
