"""Rules get structured arguments as objects, like the operator's own function."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Optional

import pytest
import torch
import torch.utils.checkpoint
import torch.utils.flop_counter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from tests._support.devices import TYPE
from torchop import GradientError, RuleSignatureError


@dataclasses.dataclass(frozen=True)
class Layer:
    weight: Tensor
    scale: float = 1.0
    bias: Optional[Tensor] = None


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def linear(x: Tensor, layer: Layer, power: int = 1) -> Tensor:
    y = (x * layer.weight) ** power * layer.scale
    return y if layer.bias is None else y + layer.bias


def define(namespace: str) -> Any:
    op = torchop.custom_op(f"{namespace}::op", linear, mutates_args=())
    op.register_fake(lambda x, layer, power=1: torch.empty_like(x))
    return op


def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, layer, power = inputs
    assert power == 1
    ctx.save_for_backward(x, layer.weight)
    ctx.scale = layer.scale
    ctx.has_bias = layer.bias is not None


def as_mapping(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    gradients = {"weight": grad * x * ctx.scale}
    if ctx.has_bias:
        gradients["bias"] = grad.clone()
    return grad * weight * ctx.scale, gradients, None


def as_object(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    bias = grad.clone() if ctx.has_bias else None
    return grad * weight * ctx.scale, Layer(grad * x * ctx.scale, ctx.scale, bias), None


@pytest.mark.parametrize("backward", [as_mapping, as_object])
@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_reach_the_tensors_of_a_structure(
    namespace: str, backward: Any, has_bias: bool
) -> None:
    op = define(namespace)
    op.register_autograd(backward, setup_context=setup_context)

    def loss(call: Any, *tensors: Tensor) -> Tensor:
        x, weight, *bias = tensors
        return call(x, Layer(weight, 3.0, *bias)).square().sum()  # type: ignore[no-any-return]

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    tensors = [torch.randn(3, requires_grad=True, dtype=torch.float64) for _ in range(2 + has_bias)]
    expected = torch.autograd.grad(loss(linear, *tensors), tensors)
    for way in (loss, compiled):
        for found, right in zip(
            torch.autograd.grad(way(op, *tensors), tensors), expected, strict=True
        ):
            torch.testing.assert_close(found, right)
    assert torch.autograd.gradcheck(lambda *tensors: loss(op, *tensors), tensors)
    vjp = torch.func.grad(lambda weight: loss(op, tensors[0], weight, *tensors[2:]))
    torch.testing.assert_close(vjp(tensors[1].detach()), expected[1])


def test_the_context_says_which_tensors_need_a_gradient(namespace: str) -> None:
    op = define(namespace)
    seen = []

    @op.register_autograd
    def _(ctx: Any, grad: Tensor) -> Any:
        seen.append(ctx.needs_input_grad)
        return None, {"weight": grad}, None

    op(torch.ones(1), Layer(torch.ones(1, requires_grad=True))).sum().backward()
    assert seen == [(False, {"weight": True, "scale": None, "bias": False}, False)]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ((None,), r"incorrect number of gradients \(expected 3, got 1\).*x, layer, power"),
        (
            (None, 3.0, None),
            "for input 'layer': expected None, Layer, or a mapping with the fields",
        ),
        ((None, {"weigth": None}, None), "mapping with the fields weight, scale, bias, got dict"),
        ((None, {"weight": 3.0}, None), "for input 'layer\\.weight': expected a Tensor or None"),
    ],
)
def test_a_wrong_gradient_is_refused(namespace: str, returned: Any, message: str) -> None:
    op = define(namespace)
    op.register_autograd(lambda ctx, grad: returned)
    with pytest.raises(GradientError, match=message):
        op(torch.ones(1), Layer(torch.ones(1, requires_grad=True))).sum().backward()


def test_a_namedtuple_is_one_gradient(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(pair: Pair) -> Tensor:
        return pair.left * 2 + pair.right * 3

    @op.register_autograd
    def _(ctx: Any, grad: Tensor) -> Any:
        return Pair(grad * 2, grad * 3)

    pair = Pair(torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True))
    op(pair).sum().backward()
    assert pair.left.grad is not None and pair.right.grad is not None  # noqa: PT018
    assert (pair.left.grad.item(), pair.right.grad.item()) == (2, 3)


def test_keyword_only_structures_are_keyword_only_inputs(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, *, sizes: tuple[int, int] = (1, 2)) -> Tensor:
        return x * sizes[0]

    def setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.sizes = keyword_only_inputs["sizes"]

    op.register_autograd(lambda ctx, grad: grad * ctx.sizes[0], setup_context=setup)
    x = torch.ones(1, requires_grad=True)
    op(x, sizes=(5, 6)).sum().backward()
    assert x.grad is not None
    assert x.grad.item() == 5


def test_in_dims_have_the_names_of_fields(namespace: str) -> None:
    op = define(namespace)
    seen = []

    @op.register_vmap
    def _(info: Any, in_dims: Any, x: Tensor, layer: Layer, power: int = 1) -> Any:
        seen.append(in_dims)
        weight = layer.weight.movedim(in_dims[1]["weight"], 0)
        return op(x, dataclasses.replace(layer, weight=weight), power), 0

    x, weights = torch.randn(3), torch.randn(3, 2)
    mapped = torch.vmap(lambda weight: op(x, Layer(weight, 2.0)), in_dims=1)(weights)
    torch.testing.assert_close(mapped, x * weights.t() * 2)
    assert seen == [(None, {"weight": 1, "scale": None, "bias": None}, None)]


def test_a_declaration_describes_by_the_arguments_of_the_schema(namespace: str) -> None:
    op = define(namespace)
    op.register_fake(like="layer_weight", shape=lambda x: x.shape)
    x = torch.ones(2, device="meta")
    assert op(x, Layer(torch.ones(2, device="meta"))).shape == (2,)


def test_tangents_reach_the_tensors_of_a_structure(namespace: str) -> None:
    op = define(namespace)

    def jvp(ctx: Any, tangent: Any, layer: Any, power: Any) -> Any:
        x, weight = ctx.saved_tensors
        assert set(layer) == {"weight", "scale", "bias"}
        return (tangent * weight + x * layer["weight"]) * ctx.scale

    op.register_autograd(as_mapping, setup_context=setup_context, jvp=jvp)
    op.register_jvp(jvp, setup_context=setup_context)
    x, weight = torch.randn(3), torch.randn(3)
    tangents = torch.randn(3), torch.randn(3)
    found = torch.func.jvp(lambda x, w: op(x, Layer(w, 3.0)), (x, weight), tangents)
    expected = torch.func.jvp(lambda x, w: linear(x, Layer(w, 3.0)), (x, weight), tangents)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("is_derived", [True, False], ids=["derived", "registered"])
def test_compiled_formulas_take_structures(namespace: str, is_derived: bool) -> None:
    op = define(namespace)
    if is_derived:
        op.derive_autograd()
    else:
        op.register_autograd(as_object, setup_context=setup_context)
    for call in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        weight = torch.full((2,), 3.0, requires_grad=True)
        call(torch.ones(2), Layer(weight, 2.0)).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2, 2]


def test_rules_outside_the_dispatcher_get_structures(namespace: str) -> None:
    op = define(namespace)
    seen: list[Any] = []

    @op.register_flop_formula
    def _(x: Any, layer: Layer, power: int = 1) -> int:
        seen.append((x, layer))
        return 7

    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        op(torch.ones(2), Layer(torch.ones(2), 2.0))
    assert counter.get_total_flops() == 7
    assert seen == [((2,), Layer((2,), 2.0))]  # type: ignore[arg-type]  # shapes replace tensors

    op.register_inverse(lambda output, layer, power=1: output / layer.weight / layer.scale)
    layer = Layer(torch.full((2,), 4.0), 2.0)
    assert torchop.inverse(op)(op(torch.ones(2), layer), layer).tolist() == [1, 1]

    op.register_examples(lambda: [(torch.ones(2), Layer(torch.ones(2), 2.0))])
    torchop.opcheck(op, test_utils="test_schema")

    @op.register_checkpoint_policy
    def _(ctx: Any, x: Tensor, layer: Layer, power: int = 1) -> str:
        seen.append(type(layer))
        return "save"

    op.register_autograd(as_mapping, setup_context=setup_context)
    x = torch.ones(2, requires_grad=True)
    checkpointed(lambda x: op(x, layer) * 2, x).sum().backward()
    assert seen[-1] is Layer
    assert x.grad is not None
    assert x.grad.tolist() == [16, 16]


def test_an_inlined_operator_takes_and_returns_structures(namespace: str) -> None:
    def function(x: Tensor, layer: Layer) -> tuple[Tensor, Tensor | None]:
        return linear(x, layer), None

    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=(), compile="inline")
    call = torch.compile(lambda x, w: op(x, Layer(w, 2.0)), fullgraph=True, backend="aot_eager")
    result, other = call(torch.ones(2), torch.ones(2))
    assert result.tolist() == [2, 2]
    assert other is None


def test_the_class_form_takes_structures(namespace: str) -> None:
    @torchop.operator(f"{namespace}::op")
    class op:
        @staticmethod
        def forward(x: Tensor, layer: Layer) -> Tensor:
            return x * layer.weight * layer.scale

        @staticmethod
        def fake(x: Tensor, layer: Layer) -> Tensor:
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, {"weight": grad}

    weight = torch.ones(2, requires_grad=True)
    op(torch.ones(2), Layer(weight, 3.0)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]


def checkpointed(function: Any, x: Tensor) -> Tensor:
    def contexts() -> Any:
        return torch.utils.checkpoint.create_selective_checkpoint_contexts([])

    return torch.utils.checkpoint.checkpoint(  # type: ignore[no-any-return]
        function, x, use_reentrant=False, context_fn=contexts
    )


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_rule_for_a_mode_gets_structures_and_calls_with_them(namespace: str) -> None:
    op = define(namespace)

    @op.register_torch_dispatch(Mode)
    def _(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        x, layer, power = args
        return func(x, dataclasses.replace(layer, scale=10.0), power)

    with Mode():
        assert op(torch.ones(1), Layer(torch.ones(1), 2.0)).item() == 10


@pytest.mark.parametrize(
    "rule", ["kernel", "fake", "vmap", "backward", "setup_context", "dispatch"]
)
def test_a_rule_of_another_signature_is_refused(namespace: str, rule: str) -> None:
    op = define(namespace)

    def wrong() -> None: ...

    register = {
        "kernel": lambda: op.register_kernel("cpu", wrong),
        "fake": lambda: op.register_fake(wrong),
        "vmap": lambda: op.register_vmap(wrong),
        "backward": lambda: op.register_autograd(wrong),
        "setup_context": lambda: op.register_autograd(lambda ctx, grad: None, setup_context=wrong),
        "dispatch": lambda: op.register_torch_dispatch(Mode, wrong),
    }
    with pytest.raises(RuleSignatureError, match=r"is called with \(.*wrong takes \(\)"):
        register[rule]()
    assert op(torch.ones(1), Layer(torch.ones(1))).item() == 1


def test_vmap_autocast_and_opcheck_take_structures(namespace: str) -> None:
    op = define(namespace)
    x = torch.randn(2, 3)
    for _ in range(2):
        mapped = torch.vmap(lambda x: op(x, Layer(torch.ones(3), 2.0)))(x)
        torch.testing.assert_close(mapped, x * 2)
        op.register_vmap("sequential")
    op.register_autocast(TYPE, torch.bfloat16)
    with torch.autocast(TYPE):
        assert op(torch.ones(1), Layer(torch.ones(1))).dtype is torch.bfloat16
    op.register_autograd(as_mapping, setup_context=setup_context)
    layer = Layer(torch.randn(3, requires_grad=True), 2.0)
    results = torchop.opcheck(op, (torch.randn(3, requires_grad=True), layer))
    assert set(results.values()) == {"SUCCESS"}
