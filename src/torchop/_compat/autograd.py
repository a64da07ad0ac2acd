"""Autograd in this thread, the `autograd.Function` of an operator, and tangents of forward mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import Context
from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad
from torch.autograd.graph import _engine_run_backward

from torchop._compat import functorch
from torchop._compat.classes import DispatchKey
from torchop._compat.settings import changed

below_autograd = torch._C._AutoDispatchBelowAutograd


def is_excluded() -> bool:
    """Whether this thread is below autograd, inside a kernel that the dispatcher called."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradOther)


def is_in_backward() -> bool:
    """Whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1


def context_of_backward() -> Context:
    """What context variables were where the backward began that this thread runs, perhaps for it.

    An empty context outside of backward, and where PyTorch does not carry one to its threads: in
    2.11, and after a backward has run inside of this one.
    """
    is_there = is_in_backward() and torch._C._is_key_in_tls("context")
    return (torch._C._get_obj_in_tls("context") if is_there else None) or Context()


def above_autograd() -> contextlib.AbstractContextManager[object]:
    """Lets autograd record, inside a kernel that the dispatcher called below it too.

    It ends inference mode, which turns both gradient modes and the keys of autograd on.
    """
    return torch._C._InferenceMode(False)


def same_keys() -> contextlib.AbstractContextManager[object]:
    """Goes back to the dispatch keys that this thread has now."""
    include = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(include, torch._C._dispatch_tls_local_exclude_set())


def any_requires_grad(values: Iterable[Any]) -> bool:
    """Whether a tensor among the values, or in a list among them, requires grad."""
    return torch._C._any_requires_grad(*values)


def at_single_level(run: Callable[[], Any]) -> Any:
    """Applies an autograd.Function at the functorch level that called the operator."""
    functorch: Any = torch._C._functorch
    allowed = functorch.get_single_level_autograd_function_allowed()
    change = functorch.set_single_level_autograd_function_allowed
    with changed(change, True, allowed):
        return run()


def outer_levels_differentiate(run: Callable[[], Any]) -> Any:
    """Turns both gradient modes back on, inside the forward of an autograd.Function.

    The function has turned them off for its own level; a transform further out still needs them.
    """
    keys = same_keys()
    with above_autograd(), keys:
        return run()


def input_gradients(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    create_graph: bool,
) -> Sequence[torch.Tensor | None]:
    """What `torch.autograd.grad` returns, given outputs with their gradients.

    Its checks take as long as the engine, so they are left out where all plainly pass them.
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


# The code that applies a function is in C. `autograd.Function` adds a Python `apply` that goes
# through functorch's own scheme, which needs a `setup_context` staticmethod and a function per
# level.
_FunctionBase: Any = torch.autograd.function._SingleLevelFunction


def make_autograd_function(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], jvp: Callable[..., Any]
) -> Any:
    """Makes an autograd function that is applied at the level that calls it."""
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
    """The inputs of a node that need a gradient: their positions, and what autograd knows of each.

    An entry of a list is an input of its own. What is known has a `shape` (a list), a `device` and
    a `dtype`. Nested tensors are left out.
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
    """The class of the `ctx` objects that an autograd.Function hands out."""
    return function._backward_cls


def node_maker(function: Any, take_node: Callable[[Any], Any] | None) -> Any:
    """What makes a node for an autograd.Function, one without inputs and outputs yet.

    Since 2.13 that is the class of its `ctx` objects. Before, only a function that is applied gets
    a node: then `take_node(ctx)` is what it computes, and what it returns is returned here.
    """
    if take_node is None:
        return context_type(function)
    if "_torchop_blank" not in vars(function):  # one for all plans: Python 3.13t frees no class
        # Not of PyTorch's metaclass, which would make a class of nodes for it.
        attributes = {
            "_backward_cls": context_type(function),
            "forward": take_node,
            "setup_context": _FunctionBase.setup_context,  # so PyTorch knows that there is none
            "clear_saved_tensors_on_access": False,
        }
        function._torchop_blank = type("Blank", (torch._C._FunctionBase,), attributes)
    return function._torchop_blank.apply


# `ctx.saved_tensors` past any property that hides it.
saved_tensors: Any = torch._C._FunctionBase.saved_tensors
raw_saved_tensors: Callable[[Any], tuple[torch.Tensor | None, ...]] = saved_tensors.__get__


def is_dual_level() -> bool:
    """Whether tensors may carry tangents in this thread."""
    if not torch._C._is_fwd_grad_enabled():
        return False
    if _forward_ad._current_level >= 0:
        return True
    # Asking for the stack creates it if there is none, and then every node of every later backward
    # in this thread copies it.
    if not functorch.is_active():
        return False
    # A compiled graph enters the level without telling Python.
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return interpreter is not None and interpreter.key() == torch._C._functorch.TransformType.Jvp


_DUAL_LEVEL = 0  # PyTorch has no other yet: transforms inside transforms wrap tensors instead


def unpack_dual(value: Any) -> tuple[Any, torch.Tensor | None]:
    """A tensor without the tangent with which forward mode follows it, and that tangent.

    A tensor without a tangent is returned as it is, and so is a value that is no tensor.
    """
    if not isinstance(value, torch.Tensor):
        return value, None
    try:
        primal, tangent = torch._VF._unpack_dual(value, level=_DUAL_LEVEL)
    except RuntimeError:
        if value.layout is torch.strided:
            raise
        return value, None  # PyTorch looks through a view; a layout without views has no tangents
    return value if tangent is None else primal, tangent


def make_dual(tensor: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """Gives a tensor a tangent."""
    dual: torch.Tensor = torch._VF._make_dual(tensor, tangent, level=_DUAL_LEVEL)
    return dual
