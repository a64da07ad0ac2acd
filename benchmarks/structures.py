"""Measure calls to an operator that takes and returns dataclasses.

The operator is the linear layer of `examples/structures/linear.py`. The variants are:

- torchop: the operator of `torchop.custom_op`.
- function: the Python function without an operator. With gradients, `torch.autograd.Function`
  calls the two functions.
- by hand: an operator of `torch.library.custom_op`, and code that splits the dataclasses into its
  arguments and rebuilds them from its results, as Transformer Engine does.

In the row "empty kernel", the function only returns its inputs' sizes and two new tensors, so the
row shows the cost of the call itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import harness
import torchop
from harness import Benchmark, Limit, Settings, Tables, Variant

sys.path.append(str(Path(__file__).parents[1] / "examples" / "structures"))
import linear as layer
from linear import Inputs, Outputs, Quantized, Quantizer, Saved

TABLE = "calls"
INFERENCE, TRAINING, EMPTY = "inference", "forward + backward", "empty kernel"
TORCHOP, FUNCTION, BY_HAND = "torchop", "function", "by hand"


def empty_function(inputs: Inputs) -> Outputs:
    y = inputs.x.new_empty(2)
    return Outputs(y, Saved(None, None) if inputs.saves else None)


# --------------------------------------------------------------------------------------------------
# The same operators with torch.library: schemas have no optional results, so empty tensors stand
# for None.


def _split(quantized: Quantized | None, like: Tensor) -> list[Tensor]:
    if quantized is None:
        return [like.new_empty(0), like.new_empty(0)]
    return [quantized.data, quantized.scale]


def _joined(data: Tensor, scale: Tensor, like: Tensor, bits: int | None) -> Quantized | None:
    return None if bits is None else Quantized(data, scale, like.dtype)


def _inputs(x: Tensor, weight: Tensor, bias: Tensor | None, bits: list[int], saves: bool) -> Inputs:
    quantizers = [Quantizer(each) if each else None for each in bits]
    return Inputs(x, weight, bias, *quantizers, saves=saves)


def _flat_forward(function: Callable[[Inputs], Outputs]) -> Callable[..., list[Tensor]]:
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, bits: list[int], saves: bool
    ) -> list[Tensor]:
        outputs = function(_inputs(x, weight, bias, bits, saves))
        saved = outputs.saved or Saved(None, None)
        return [outputs.y, *_split(saved.x, x), *_split(saved.weight, weight)]

    return forward


def _flat_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    saved: list[Tensor],
    bits: list[int],
    needs_x: bool,
    needs_weight: bool,
) -> list[Tensor]:
    parts = Saved(
        _joined(*saved[:2], x, bits[0] or None), _joined(*saved[2:], weight, bits[1] or None)
    )
    inputs = _inputs(x, weight, bias, bits, True)
    found = layer.linear_backward_function(grad, inputs, parts, needs_x, needs_weight)
    return [
        grad.new_empty(0) if each is None else each for each in (found.x, found.weight, found.bias)
    ]


def _setup_context(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    x, weight, bias, ctx.bits, _ = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])


def by_hand(name: str, function: Callable[[Inputs], Outputs]) -> Callable[[Inputs], Outputs]:
    flat = torch.library.custom_op(
        f"bench_structures::{name}", _flat_forward(function), mutates_args=()
    )
    flat_backward = torch.library.custom_op(
        f"bench_structures::{name}_backward", _flat_backward, mutates_args=()
    )

    def backward(ctx: Any, grads: list[Tensor]) -> Any:
        x, weight, bias, *saved = ctx.saved_tensors
        needs = ctx.needs_input_grad
        found = flat_backward(grads[0], x, weight, bias, saved, ctx.bits, needs[0], needs[1])
        of_bias = None if bias is None else found[2]
        return found[0] if needs[0] else None, found[1] if needs[1] else None, of_bias, None, None

    flat.register_autograd(backward, setup_context=_setup_context)

    def call(inputs: Inputs) -> Outputs:
        quantizers = (inputs.x_quantizer, inputs.weight_quantizer, inputs.grad_quantizer)
        bits = [0 if each is None else each.bits for each in quantizers]
        y, *saved = flat(inputs.x, inputs.weight, inputs.bias, bits, inputs.saves)
        if not inputs.saves:
            return Outputs(y, None)
        x = _joined(*saved[:2], inputs.x, bits[0] or None)
        return Outputs(y, Saved(x, _joined(*saved[2:], inputs.weight, bits[1] or None)))

    return call


# --------------------------------------------------------------------------------------------------
# Training without an operator


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, rest: dict[str, Any]) -> Tensor:
        ctx.inputs = Inputs(x, weight, bias, **rest)
        outputs = layer.linear_function(ctx.inputs)
        ctx.saved = outputs.saved
        return outputs.y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        needs = ctx.needs_input_grad
        found = layer.linear_backward_function(grad, ctx.inputs, ctx.saved, needs[0], needs[1])
        return found.x, found.weight, found.bias, None


def function_with_gradients(inputs: Inputs) -> Outputs:
    names = ("x_quantizer", "weight_quantizer", "grad_quantizer", "saves")
    rest = {name: getattr(inputs, name) for name in names}
    return Outputs(Linear.apply(inputs.x, inputs.weight, inputs.bias, rest), None)


def training(function: Callable[[Inputs], Outputs], inputs: Inputs) -> Variant:
    grad = torch.ones(inputs.x.shape[0], inputs.weight.shape[0])
    wanted = [inputs.weight, inputs.bias]

    def step() -> None:
        torch.autograd.grad(function(inputs).y, wanted, grad)

    return Variant(step)


def measure(settings: Settings) -> Tables:
    quantizer = Quantizer()
    x, weight, bias = torch.randn(16, 32), torch.randn(32, 32), torch.randn(32)
    quantizers = (quantizer, quantizer, quantizer)
    inputs = Inputs(x, weight, bias, *quantizers, saves=False)
    trained = Inputs(x, weight.requires_grad_(), bias.requires_grad_(), *quantizers)
    flat = by_hand("linear_by_hand", layer.linear_function)
    empty = torchop.custom_op("bench_structures::empty", empty_function, mutates_args=())
    with torch.no_grad():
        rows = {
            row: harness.measure(variants, settings["rounds"])
            for row, variants in {
                INFERENCE: {
                    TORCHOP: Variant(layer.linear, (inputs,)),
                    FUNCTION: Variant(layer.linear_function, (inputs,)),
                    BY_HAND: Variant(flat, (inputs,)),
                },
                EMPTY: {
                    TORCHOP: Variant(empty, (inputs,)),
                    FUNCTION: Variant(empty_function, (inputs,)),
                    BY_HAND: Variant(by_hand("empty_by_hand", empty_function), (inputs,)),
                },
            }.items()
        }
    steps = {
        TORCHOP: training(layer.linear, trained),
        FUNCTION: training(function_with_gradients, trained),
        BY_HAND: training(flat, trained),
    }
    return {TABLE: {**rows, TRAINING: harness.measure(steps, settings["rounds"])}}


BENCHMARK = Benchmark(
    name="structures",
    units={TABLE: "us"},
    parts={"calls": measure},
    settings={"processes": 3, "rounds": 100},
    limits=(
        Limit(TABLE, INFERENCE, TORCHOP, 1.15, FUNCTION),
        Limit(TABLE, EMPTY, TORCHOP, 0.25, BY_HAND),
        Limit(TABLE, TRAINING, TORCHOP, 0.9, BY_HAND),
    ),
)

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
