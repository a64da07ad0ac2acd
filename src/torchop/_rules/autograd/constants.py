"""Raise if a double backward differentiates saved tensors whose derivative is unknown.

These tensors are residuals (extra kernel outputs for the backward pass), and tensors that
`setup_context` computes from inputs, results or residuals. Autograd is disabled while
`setup_context` runs, so a double backward would otherwise treat them as constants, and the second
derivative would silently be wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from torchop._compat import autograd, functorch
from torchop._compat.classes import tree_leaves, tree_map
from torchop._core.call import replaced, tensors_in
from torchop._errors import MissingFormulaError
from torchop._rules.autograd.gradients import flatten, is_differentiable


class _Constant(torch.autograd.Function):
    """An identity function whose backward pass raises an error.

    Autograd runs a node only if it leads to a tensor that requires grad, so the caller passes such
    tensors as `anchors`.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, error: MissingFormulaError, *anchors: Tensor) -> Tensor:
        ctx.error = error
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ctx.error


def constant(tensor: Tensor, error: MissingFormulaError, *anchors: Tensor) -> Tensor:
    """Return `tensor` as a constant that raises `error` if it is differentiated."""
    made: Tensor = _Constant.apply(tensor, error, *anchors)  # type: ignore[no-untyped-call]
    return made


class Computed(NamedTuple):
    """The tensors that `setup_context` computed from differentiable tensors.

    Operands are the inputs of the autograd node, where each tensor in a list is a separate operand.

    Attributes:
        size: the number of saved tensors.
        saved: the operands that each computed tensor depends on, keyed by the position of this
            tensor among the saved tensors.
        attributes: the operands that the tensors in each attribute of `ctx` depend on.
        operands: for each operand that is itself saved, its position among the saved tensors.
    """

    size: int = 0
    saved: Mapping[int, frozenset[int]] = {}
    attributes: Mapping[str, frozenset[int]] = {}
    operands: Mapping[int, int] = {}

    def guarded(self, op: object, ctx: Any, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace tensors that `setup_context` computed, to raise if they are differentiated."""
        if len(tensors) != self.size or not self.saved:
            return tensors
        return tuple(
            self.guard(op, ctx, self.saved.get(place, frozenset()), tensor)
            for place, tensor in enumerate(tensors)
        )

    def guard(self, op: object, ctx: Any, operands: frozenset[int], tensor: Any) -> Any:
        flags = flatten(ctx.needs_input_grad, ctx._torchop_inputs)
        edges = (node for node, _ in ctx.next_functions if node is not None)
        needed = dict(zip((n for n, flag in enumerate(flags) if flag), edges, strict=False))
        sources = operands & needed.keys()
        # A tensor that requires grad needs no guard: `setup_context`, which runs without autograd,
        # did not compute it, and if it is a residual (a kernel output for the backward pass), it
        # has a guard already.
        if not sources or not isinstance(tensor, Tensor) or tensor.requires_grad:
            return tensor
        raw = autograd.raw_saved_tensors(ctx) if self.operands else ()
        anchors = [
            raw[self.operands[n]] if n in self.operands else getattr(needed[n], "variable", None)
            for n in sources
        ]
        recorded = [t for t in anchors if t is not None and t.requires_grad]
        error = _through_computed(op)
        if len(recorded) < len(anchors):  # an input is neither saved nor a leaf
            raise error
        return constant(tensor, error, *recorded)


def find_computed(
    setup: Callable[..., Any],
    ctx: Any,
    operands: Sequence[Any],
    values: tuple[Any, ...],
    residuals: Callable[[Any], Mapping[str, Any]],
) -> Computed:
    """Find the tensors that `setup_context` has computed and stored on `ctx`.

    If `ctx` holds tensors other than `values`, run `setup_context` again with autograd enabled, to
    find out which operands these tensors depend on.
    """
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    known = set(map(id, tensors))
    stored = tensors_in((*(ctx.to_save or ()), *vars(ctx).values()))
    if all(id(tensor) in known or not is_differentiable(tensor) for tensor in stored):
        return Computed()
    leaves: dict[int, Tensor] = {}
    devices = {tensor.device.index for tensor in tensors if tensor.is_cuda}
    try:
        with autograd.above_autograd(), torch.random.fork_rng(devices):
            for tensor in tensors:
                if is_differentiable(tensor):
                    leaves[id(tensor)] = tensor.detach().requires_grad_()
            *arguments, flat = tree_map(lambda value: leaves.get(id(value), value), values)
            again: Any = FunctionCtx()
            again.needs_input_grad = ctx.needs_input_grad
            setup(again, *arguments, **residuals(flat))
    except Exception:
        return Computed()  # `setup_context` does not support tensors that require grad
    saved = again.__dict__.pop("to_save", ())
    places = {id(leaf): n for n, leaf in _places(operands, leaves)}
    every = frozenset(places.values())

    def sources(value: Any) -> frozenset[int]:
        found: set[int] = set()
        for tensor in tensors_in((value,)):
            if tensor.requires_grad and tensor.grad_fn is not None:
                for node, _ in autograd.reached_edges([tensor]):
                    if (leaf := getattr(node, "variable", None)) is not None:
                        # Any other leaf is a result or a residual (a kernel output for the backward
                        # pass), which depends on all inputs.
                        found |= {places[id(leaf)]} if id(leaf) in places else every
        return frozenset(found)

    of_saved = {n: sources(tensor) for n, tensor in enumerate(saved)}
    of_attributes = {name: sources(value) for name, value in vars(again).items()}
    return Computed(
        size=len(saved),
        saved={n: of for n, of in of_saved.items() if of},
        attributes={name: of for name, of in of_attributes.items() if of},
        operands={places[id(t)]: n for n, t in enumerate(saved) if id(t) in places},
    )


class ComputedAttribute:
    """A descriptor that raises if a double backward differentiates an attribute of `ctx`.

    The descriptor is set on the class of `ctx`, and the value is stored in the `__dict__` of `ctx`.
    """

    def __init__(self, name: str, op: object, computed: Callable[[], Sequence[Computed]]) -> None:
        self.name = name
        self.op = op
        self.computed = computed

    def __get__(self, ctx: Any, owner: Any = None) -> Any:
        if ctx is None:
            return self
        if self.name not in vars(ctx):
            raise AttributeError(f"ctx has no attribute {self.name!r}", name=self.name, obj=ctx)
        value = vars(ctx)[self.name]
        if not (torch.is_grad_enabled() and autograd.is_in_backward()) or functorch.is_active():
            return value
        for computed in self.computed():
            operands = computed.attributes.get(self.name, frozenset())
            guard = functools.partial(computed.guard, self.op, ctx, operands)
            value = replaced(value, Tensor, guard)
        return value

    def __set__(self, ctx: Any, value: Any) -> None:
        vars(ctx)[self.name] = value

    def __delete__(self, ctx: Any) -> None:
        del vars(ctx)[self.name]


def _through_computed(op: object) -> MissingFormulaError:
    return MissingFormulaError(
        f"{op}: the second derivative depends on a tensor that setup_context computes, whose "
        "derivative is unknown. Save the inputs instead, and compute the tensor in backward with "
        "differentiable operators. If the tensor is constant, call .detach() on it in backward."
    )


def _places(operands: Iterable[Any], leaves: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
    for index, operand in enumerate(operands):
        if id(operand) in leaves:
            yield index, leaves[id(operand)]
