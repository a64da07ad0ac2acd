"""The cases that `calls.py` measures. Each case is a function and a way to call it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

Arguments = tuple[Sequence[Any], dict[str, Any]]


# --------------------------------------------------------------------------------------------------
# Functions


def of_tensors(count: int, body: str) -> Callable[..., Tensor]:
    """Return a function with `count` tensor parameters x1, x2, ...

    The function cannot take `*xs` instead, because torchop cannot infer a schema from `*xs`.
    """
    parameters = ", ".join(f"x{index}: Tensor" for index in range(1, count + 1))
    namespace: dict[str, Any] = {"Tensor": Tensor}
    exec(f"def function({parameters}) -> Tensor:\n    return {body}", namespace)
    function: Callable[..., Tensor] = namespace["function"]
    return function


CLONE = of_tensors(1, "x1.clone()")
CLONE_FIRST_OF_4 = of_tensors(4, "x1.clone()")
CLONE_FIRST = of_tensors(14, "x1.clone()")  # the benchmark of pytorch/pytorch#177109
ZERO_AND_CLONE_FIRST = of_tensors(14, "x1.zero_().clone()")
ZERO_THREE_OF_21 = of_tensors(21, "[x.zero_() for x in (x1, x2, x3)][0].clone()")
ZERO_IN_PLACE = of_tensors(14, "x1.zero_()")


def negate(x1: Tensor, *, out: Tensor) -> Tensor:
    return torch.neg(x1, out=out)


def clone_typed(
    x: Tensor,
    mask: Tensor | None,
    sizes: Sequence[int],
    scale: float,
    count: int = 1,
    flag: bool = False,
    mode: str = "linear",
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return x.clone()


# --------------------------------------------------------------------------------------------------
# Gradient formulas, shared by operators and `torch.autograd.Function`


class Formula(NamedTuple):
    backward: Callable[..., Any]
    setup_context: Callable[..., None] | None = None


class CloneFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Tensor:
        return xs[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


class CloneFirstAndSave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Tensor:
        ctx.save_for_backward(xs[0])
        return xs[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return grad * x, *[None] * (len(ctx.needs_input_grad) - 1)


def save_first(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


CLONE_FORMULA = Formula(CloneFirst.backward)
SAVE_ONE = Formula(CloneFirstAndSave.backward, save_first)


# --------------------------------------------------------------------------------------------------
# Arguments


def tensors(count: int, *, requires_grad: bool = False) -> Callable[[], Arguments]:
    return lambda: ([torch.randn(4, requires_grad=requires_grad) for _ in range(count)], {})


def one_and_out() -> Arguments:
    return [torch.randn(4)], {"out": torch.empty(4)}


def leaves(count: int) -> Callable[[], Arguments]:
    return tensors(count, requires_grad=True)


def parameter() -> Arguments:
    """Return a leaf tensor that has an AccumulateGrad node, like a parameter in a training step."""
    x = torch.randn(4, requires_grad=True)
    x.edge = get_gradient_edge(x)  # type: ignore[attr-defined]  # keeps the node alive
    return [x], {}


def non_leaves() -> Arguments:
    return [torch.randn(4, requires_grad=True) * 2 for _ in range(14)], {}


def wrapped_first() -> Arguments:
    return [Wrapper(torch.randn(4)), *(torch.randn(4) for _ in range(13))], {}


def nine_arguments() -> Arguments:
    positional = [torch.randn(4), None, [2, 2], 0.5, 3, True, "cubic"]
    return positional, {"dtype": torch.float32, "device": torch.device("cpu")}


# --------------------------------------------------------------------------------------------------
# A minimal profiler, dispatch mode and tensor subclass


def profiler() -> contextlib.AbstractContextManager[Any]:
    """Return a profiler that is called for every operator but stores nothing."""
    return torch.autograd.profiler.emit_itt()


class PassThrough(TorchDispatchMode):
    """A dispatch mode that calls each operator with unchanged arguments."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Wrapper(Tensor):
    wrapped: Tensor

    @staticmethod
    def __new__(cls, wrapped: Tensor) -> Wrapper:
        wrapper: Wrapper = Tensor._make_wrapper_subclass(cls, wrapped.shape)
        wrapper.wrapped = wrapped
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared as a function, with other defaults
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(args[0].wrapped, *args[1:], **(kwargs or {}))


# --------------------------------------------------------------------------------------------------
# Cases


class Case(NamedTuple):
    """A row of the table: a function and a way to call it.

    `written` is a `torch.autograd.Function` that computes the same result as `function`. `cpp` is
    the name of an operator in clone_first.cpp that computes this result too. If `backward` is true,
    the backward runs after each call. `counters` lists the counters of `torchop.native` that each
    call must increment.
    """

    name: str
    title: str
    function: Callable[..., Tensor]
    arguments: Callable[[], Arguments]
    formula: Formula | None = None
    mutates_args: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    written: type[torch.autograd.Function] | None = None
    cpp: str | None = None
    backward: bool = False
    counters: tuple[str, ...] = ("native",)


FOURTEEN = Case("fourteen", "14 tensors", CLONE_FIRST, tensors(14), cpp="fourteen")
FOUR = Case("four", "4 tensors", CLONE_FIRST_OF_4, tensors(4), cpp="four")
ONE = Case("one", "1 tensor", CLONE, tensors(1), cpp="one")
INFERENCE = FOURTEEN._replace(
    name="inference", title="inference mode", context=torch.inference_mode
)
TYPED = Case("typed", "9 typed arguments", clone_typed, nine_arguments)
MUTATION = Case(
    "mutation",
    "mutates one",
    ZERO_AND_CLONE_FIRST,
    tensors(14),
    mutates_args=("x1",),
    cpp="mutation",
)
MUTATION_OF_3 = MUTATION._replace(
    name="mutation_of_3",
    title="mutates 3 of 21",
    function=ZERO_THREE_OF_21,
    arguments=tensors(21),
    mutates_args=("x1", "x2", "x3"),
    cpp=None,
)
# Inference engines call operators like this one to write their key-value caches.
MUTATION_INFERENCE = MUTATION._replace(
    name="mutation_inference", title="inference, mutates", context=torch.inference_mode
)
IN_PLACE = Case(
    "in_place",
    "in place",
    ZERO_IN_PLACE,
    tensors(14),
    mutates_args=("x1",),
    tags=("inplace",),
)
OUT = Case("out", "out=", negate, one_and_out, mutates_args=("out",), tags=("out",))
GRAD = Case(
    "grad",
    "grad, 14 leaves",
    CLONE_FIRST,
    leaves(14),
    CLONE_FORMULA,
    written=CloneFirst,
    cpp="grad",
)
GRAD_1 = GRAD._replace(
    name="leaf", title="grad, 1 leaf", function=CLONE, arguments=leaves(1), cpp=None
)
PARAMETER = GRAD_1._replace(name="parameter", title="grad, 1 parameter", arguments=parameter)
GRAD_NON_LEAVES = GRAD._replace(name="inner", title="grad, 14 non-leaves", arguments=non_leaves)
SAVES = GRAD._replace(
    name="saves", title="grad, saves one", formula=SAVE_ONE, written=CloneFirstAndSave, cpp=None
)
TRAINING = GRAD._replace(name="training", title="forward + backward", backward=True)
# The operators of the following cases have a gradient formula. Without one, an operator of
# `torch.library.define` would have no autograd kernel and so be faster, and the comparison would be
# unfair.
RULES = Case("rules", "", CLONE_FIRST, tensors(14), CLONE_FORMULA)
PROFILED = RULES._replace(
    name="profiled", title="profiler", context=profiler, counters=("profiler",)
)
# The mode and the subclass call the operator a second time. The second call is not native either,
# so it is counted too.
IN_MODE = RULES._replace(
    name="in_mode", title="dispatch mode", context=PassThrough, counters=("mode",)
)
SUBCLASS = RULES._replace(
    name="subclass",
    title="tensor subclass",
    arguments=wrapped_first,
    counters=("tensor_subclass", "mode"),
)
_ALL = (
    *(FOURTEEN, FOUR, ONE, INFERENCE, TYPED),
    *(MUTATION, MUTATION_OF_3, MUTATION_INFERENCE, IN_PLACE, OUT),
    *(GRAD_1, PARAMETER, GRAD, GRAD_NON_LEAVES, SAVES, TRAINING),
    *(PROFILED, IN_MODE, SUBCLASS),
)
# Leave out cases whose tags do not exist in the installed PyTorch (before 2.13).
CASES = tuple(case for case in _ALL if all(hasattr(torch.Tag, tag) for tag in case.tags))
