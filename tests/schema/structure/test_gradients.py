"""Backward kernels that take the gradients of a result as a structure, and return structures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Optional

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop
from torchop import RuleSignatureError


@dataclasses.dataclass
class Inputs:
    x: Tensor
    weight: Tensor
    bias: Optional[Tensor] = None
    named: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    factor: float = 1.0


class Saved(NamedTuple):
    value: Tensor
    tag: str


@dataclasses.dataclass
class Out:
    y: Tensor
    extra: Optional[Tensor]
    parts: list[Optional[Tensor]]
    saved: Optional[Saved]
    bits: int
    dtype: torch.dtype


@dataclasses.dataclass
class Gradients:
    x: Tensor
    bias: Optional[Tensor]
    weight: Optional[Tensor]
    named: dict[str, Tensor]


def forward(inputs: Inputs, saves: bool) -> Out:
    y = inputs.x @ inputs.weight.T * inputs.factor
    for each in (inputs.bias, *inputs.named.values()):
        y = y if each is None else y + each
    extra = None if inputs.bias is None else inputs.x * 2
    saved = Saved(inputs.x * 4, "x") if saves else None
    return Out(y, extra, [None, inputs.x * 3], saved, 8, torch.int8)


def backward(grad: Out, inputs: Inputs, output: Out) -> Gradients:
    assert type(grad) is Out
    assert type(output) is Out
    assert grad.bits is grad.dtype is grad.parts[0] is None
    assert (output.bits, output.dtype) == (8, torch.int8)
    assert (output.saved is None) == (grad.saved is None)
    (of_part,) = [each for each in grad.parts if each is not None]
    x = grad.y @ inputs.weight * inputs.factor + of_part * 3
    if grad.extra is not None:
        x = x + grad.extra * 2
    if grad.saved is not None:
        x = x + grad.saved.value * 4
    summed = grad.y.sum(0)
    return Gradients(
        x,
        None if inputs.bias is None else summed.clone(),
        grad.y.T @ inputs.x * inputs.factor,
        {key: summed.clone() for key in inputs.named},
    )


def define(namespace: str, kernel: Callable[..., Any] = backward) -> Any:
    op = torchop.custom_op(f"{namespace}::op", forward, mutates_args=())
    op.register_fake(forward)
    op.register_autograd(backward_kernel=kernel)
    return op


def inputs_of(*, has_bias: bool, has_names: bool) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, first, second = (
        torch.randn(*shape, generator=generator).requires_grad_()
        for shape in ((3, 4), (2, 4), (2,), (2,), (2,))
    )
    named = {"b": first, "a": second} if has_names else {}
    return Inputs(x, weight, bias if has_bias else None, named, 2.0)


def gradients(call: Callable[..., Out], inputs: Inputs, *, saves: bool) -> Any:
    out = call(inputs, saves)
    loss = out.y.square().sum() + sum(each.sum() for each in out.parts if each is not None)
    for each in (out.extra, None if out.saved is None else out.saved.value):
        loss = loss if each is None else loss + each.square().sum()
    tensors = [inputs.x, inputs.weight, inputs.bias, *inputs.named.values()]
    return torch.autograd.grad(loss, [each for each in tensors if each is not None])


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_names", [False, True])
@pytest.mark.parametrize("saves", [False, True])
def test_structures(
    namespace: str, backend: str, has_bias: bool, has_names: bool, saves: bool
) -> None:
    op = define(namespace)
    call = op if backend == "none" else torch.compile(op, fullgraph=True, backend=backend)
    inputs = inputs_of(has_bias=has_bias, has_names=has_names)
    expected = gradients(forward, inputs, saves=saves)
    assert_close(gradients(call, inputs, saves=saves), expected)


def test_opcheck_and_inductor(namespace: str) -> None:
    op, inputs = define(namespace), inputs_of(has_bias=True, has_names=True)
    torchop.testing.opcheck(op, (inputs, True))
    call = torch.compile(op, fullgraph=True)
    expected = gradients(forward, inputs, saves=True)
    assert_close(gradients(call, inputs, saves=True), expected)


def test_rules_of_the_helper_operator_take_structures(namespace: str) -> None:
    op, inputs = define(namespace), inputs_of(has_bias=True, has_names=True)
    ran = []
    name = f"{namespace}::op__backward_kernel"

    @torchop.register_kernel(name, "cpu")
    def _(grad: Out, inputs: Inputs, output: Out) -> Gradients:
        ran.append("kernel")
        return dataclasses.replace(backward(grad, inputs, output), weight=None)  # zeros

    @torchop.register_fake(name)
    def _(grad: Out, inputs: Inputs, output: Out) -> Gradients:
        ran.append("fake")
        return backward(grad, inputs, output)

    expected = list(gradients(forward, inputs, saves=True))
    expected[1] = torch.zeros(2, 4)
    for call in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        assert_close(gradients(call, inputs, saves=True), tuple(expected))
    assert ran.count("kernel") == 2
    assert "fake" in ran


class ByName(NamedTuple):
    weight: Tensor
    x: Tensor


def test_a_class_with_a_field_for_each_argument(namespace: str) -> None:
    def product(x: Tensor, weight: Tensor, power: int) -> Tensor:
        return x * weight**power

    def kernel(grad: Tensor, x: Tensor, weight: Tensor, power: int) -> ByName:
        return ByName(grad * x * power * weight ** (power - 1), grad * weight**power)

    op = torchop.custom_op(f"{namespace}::op", product, mutates_args=())
    op.register_fake(product)
    op.register_autograd(backward_kernel=kernel)
    x, weight = (torch.tensor(each, requires_grad=True) for each in (3.0, 4.0))
    for call in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        assert torch.autograd.grad(call(x, weight, 2), (x, weight)) == (16, 24)


def test_a_tuple_of_structures(namespace: str) -> None:
    def both(x: Tensor, pair: Saved) -> tuple[Saved, Tensor]:
        return Saved(x * pair.value, pair.tag), x + 1

    def kernel(first: Saved, second: Tensor, pair: Saved, x: Tensor) -> tuple[Tensor, Saved]:
        return first.value * pair.value + second, Saved(first.value * x, "")

    op = torchop.custom_op(f"{namespace}::op", both, mutates_args=())
    op.register_fake(both)
    op.register_autograd(backward_kernel=kernel)
    x, value = (torch.tensor(each, requires_grad=True) for each in (3.0, 4.0))
    for call in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        first, second = call(x, Saved(value, "a"))
        assert first.tag == "a"
        assert torch.autograd.grad(first.value + 2 * second, (x, value)) == (6, 3)


def returns_tensor(grad: Out, inputs: Inputs) -> Tensor: ...


def returns_other(grad: Out, inputs: Inputs) -> Out: ...


def takes_tensor(grad: Tensor, inputs: Inputs) -> Gradients: ...


def takes_other(grad: Saved, inputs: Inputs) -> Gradients: ...


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (returns_tensor, r"For inputs, use a class with fields of the same names\. Got torch"),
        (returns_other, r"For inputs, use a class with fields of the same names\. Got .*Out"),
        (takes_tensor, r"one gradient for each .* annotate the first parameters .*: .*\.Out\."),
        (takes_other, r"one gradient for each .* annotate the first parameters .*: .*\.Out\."),
    ],
)
def test_wrong_annotations(namespace: str, kernel: Callable[..., Any], message: str) -> None:
    with pytest.raises(RuleSignatureError, match=message):
        define(namespace, kernel)


@dataclasses.dataclass
class Everything:
    tensor: Tensor
    nothing: Optional[Tensor]
    count: int
    name: str
    dtype: torch.dtype
    maybe: Optional[int]
    eps: float
    pairs: list[Saved]
    named: dict[str, Tensor]
    some: list[Optional[Tensor]]


def everything(x: Tensor, has_all: bool) -> Everything:
    nothing, maybe, some = (x + 2, 5, x + 6) if has_all else (None, None, None)
    pairs, named = [Saved(x + 4, "b")], {"c": x + 5}
    return Everything(x + 1, nothing, 3, "a", torch.int8, maybe, -0.0, pairs, named, [some, None])


Residuals = torchop.Residuals(saved=Everything, label=Optional[str])


@pytest.mark.parametrize("has_all", [False, True])
@pytest.mark.parametrize("backend", ["none", "aot_eager"])
def test_residuals_of_every_type(namespace: str, has_all: bool, backend: str) -> None:
    def function(x: Tensor, has_all: bool) -> Annotated[Tensor, Residuals]:
        label = None if has_all else "label"
        return torchop.residuals(x * 2, everything(x, has_all), label)

    function.__annotations__["return"] = Annotated[Tensor, Residuals]
    seen: list[Any] = []

    def setup_context(ctx: Any, inputs: Any, output: Tensor, residuals: Any) -> None:
        seen.append((repr(residuals.saved).count("None"), residuals.label))
        saved = residuals.saved
        assert [type(each) for each in (saved, saved.pairs[0])] == [Everything, Saved]
        assert (saved.count, saved.name, saved.dtype) == (3, "a", torch.int8)
        ctx.save_for_backward(saved.tensor, saved.pairs[0].value, saved.named["c"])

    def formula(ctx: Any, grad: Tensor) -> Any:
        tensor, value, named = ctx.saved_tensors
        return grad * (tensor + value + named), None

    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    op.register_fake(function)
    op.register_autograd(formula, setup_context=setup_context)
    call = op if backend == "none" else torch.compile(op, fullgraph=True, backend=backend)
    x = torch.ones(2, requires_grad=True)
    call(x, has_all).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [13, 13]  # 2 + 5 + 6
    assert set(seen) == {(1, None) if has_all else (4, "label")}


@dataclasses.dataclass
class Kept:
    value: Tensor
    nothing: Optional[Tensor]
    count: int
    name: str
    dtype: torch.dtype


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
def test_a_backward_kernel_takes_a_residual_class(namespace: str, backend: str) -> None:
    def function(x: Tensor) -> Tensor:
        return torchop.residuals(x * 2, Kept(x + 1, None, 3, "a", torch.int8))

    def kernel(grad: Tensor, kept: Kept) -> Tensor:
        assert dataclasses.astuple(kept)[1:] == (None, 3, "a", torch.int8)
        return grad * kept.value * kept.count

    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=(), residuals={"kept": Kept})
    op.register_fake(function)
    op.register_autograd(backward_kernel=kernel)
    torchop.register_fake(f"{namespace}::op__backward_kernel", lambda grad, kept: grad + 0)
    call = op if backend == "none" else torch.compile(op, fullgraph=True, backend=backend)
    x = torch.ones(2, requires_grad=True)
    call(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6, 6]


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("saves", [False, True])
def test_forward_and_backward_are_operators_that_a_short_formula_ties(
    namespace: str, backend: str, has_bias: bool, saves: bool
) -> None:
    op = torchop.custom_op(f"{namespace}::forward", forward, mutates_args=())
    op.register_fake(forward)

    @torchop.custom_op(f"{namespace}::backward", mutates_args=())
    def backward_op(
        y: Tensor, part: Tensor, extra: Optional[Tensor], inputs: Inputs, saved: Optional[Saved]
    ) -> Gradients:
        assert (saved is not None) == saves
        grad = Out(y, extra, [None, part], None, 8, torch.int8)
        grad.bits = grad.dtype = None  # type: ignore[assignment]
        return backward(grad, inputs, forward(inputs, False))

    @backward_op.register_fake
    def _(
        y: Tensor, part: Tensor, extra: Optional[Tensor], inputs: Inputs, saved: Optional[Saved]
    ) -> Gradients:
        bias = None if inputs.bias is None else inputs.bias + 0
        named = {key: value + 0 for key, value in inputs.named.items()}
        return Gradients(inputs.x + 0, bias, inputs.weight + 0, named)

    @op.register_autograd(
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output.saved)
    )
    def _(ctx: Any, grad: Out) -> Gradients:
        return backward_op(grad.y, grad.parts[1], grad.extra, *ctx.saved_tensors)

    def call(inputs: Inputs, saves: bool) -> Out:
        out: Out = op(inputs, saves)
        return dataclasses.replace(out, saved=None)

    inputs = inputs_of(has_bias=has_bias, has_names=True)
    expected = gradients(lambda *args: forward(args[0], False), inputs, saves=saves)
    run = call if backend == "none" else torch.compile(call, fullgraph=True, backend=backend)
    assert_close(gradients(run, inputs, saves=saves), expected)


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
def test_saved_structures_are_equal(namespace: str, backend: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, has_all: bool) -> Everything:
        return everything(x, has_all)

    op.register_fake(everything)
    saved: list[Any] = []

    def setup_context(ctx: Any, inputs: Any, output: Everything) -> None:
        ctx.save_for_backward(output, [inputs[0], None], {"size": torch.Size([2])}, (1, "a"))

    @op.register_autograd(setup_context=setup_context)
    def _(ctx: Any, grad: Everything) -> Any:
        saved.append(ctx.saved_tensors)
        return grad.tensor * ctx.saved_tensors[0].tensor

    call = op if backend == "none" else torch.compile(op, fullgraph=True, backend=backend)
    x = torch.ones(2, requires_grad=True)
    call(x, True).tensor.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]
    output, inputs, named, rest = saved[0]
    assert type(output) is Everything
    assert (output.dtype, output.maybe, output.pairs[0].tag) == (torch.int8, 5, "b")
    assert output.some[1] is None
    assert inputs[1] is None
    assert (named, rest) == ({"size": torch.Size([2])}, (1, "a"))
    if backend == "none":
        assert inputs[0] is x
        assert output.pairs[0].value.tolist() == [5, 5]
