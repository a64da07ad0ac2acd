"""Features of torchop that torch.library does not have, on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import counting, needs_native
from tests._support.devices import BACKEND
from tests.integration.device import arms, standin, target
from tests.integration.device.arms import error_of
from tests.integration.device.target import FIRST, SECOND, TYPE

pytestmark = needs_native

Define = Callable[..., Any]


def ones(device: str = SECOND, **options: Any) -> Tensor:
    return torch.ones(2, device=device, **options)


@dataclasses.dataclass
class Pair:
    first: Tensor
    second: Tensor
    scale: float = 2.0


def structured_arguments(define: Define) -> Any:
    @define("combine", mutates_args=())
    def combine(pair: Pair, rest: list[Tensor]) -> Tensor:
        return pair.first * pair.scale + sum(rest, pair.second)

    combine.register_autograd(lambda ctx, grad: (Pair(grad * 2, grad), [grad]))
    pair = Pair(ones(requires_grad=True), ones())
    for _ in range(3):
        result = combine(pair, [ones()])
    result.sum().backward()
    return [combine(Pair(ones(), ones(), 3.0), []), result, pair.first.grad]


def derived_formula(define: Define) -> Any:
    @define("drop", mutates_args=())
    def drop(x: Tensor, weight: Tensor) -> Tensor:
        kept = torch.rand(x.shape, device=x.device) < 0.5
        return (x * weight).sin() * kept

    drop.derive_autograd()
    drop.register_autocast(TYPE, torch.bfloat16)
    results = []
    for context in (torch.enable_grad(), torch.autocast(TYPE, torch.bfloat16)):
        x, weight = ones(requires_grad=True), ones(requires_grad=True)
        drop(x, weight)  # prepare the operator, because a first call is never native
        with context:
            y = drop(x, weight)
        torch.rand(3, device=SECOND)  # so the backward must restore the random state
        y.sum().backward()
        results += [y, x.grad, weight.grad, torch.rand(1, device=SECOND)]
    return results


def family(define: Define) -> Any:
    def kernel(x: Tensor, *, out: Tensor) -> None:
        target.note(f"writes at {target.current_place()}")
        out.copy_(x * 2)

    double = define("double", kernel, by=torchop.out_op, like="x", inplace=True, elementwise=True)
    double.register_autograd(lambda ctx, grad: grad * 2)
    x, buffer, leaf = ones(), ones(), ones(requires_grad=True)
    double(x, out=buffer)
    double.inplace(x)
    double(leaf).sum().backward()
    wrong = error_of(lambda: double(x, out=ones("cpu")))
    return [double(x), x, buffer, leaf.grad, type(wrong).__name__]


def optional_lists(define: Define) -> Any:
    def total(x, ys):
        return sum((y for y in ys if y is not None), x.clone())

    op = define("total", total, mutates_args=(), schema="(Tensor x, Tensor?[] ys) -> Tensor")
    return [op(ones(), [None, ones()]), op(ones(), []), op(ones("cpu"), [None])]


SCENARIOS: dict[str, tuple[arms.Scenario, dict[str, int] | None]] = {
    "structured arguments": (structured_arguments, {"native": 3}),
    "derived formula": (derived_formula, None),
    "family": (family, None),
    "optional lists": (optional_lists, {"native": 3}),
}


@target.needs_accelerator
@pytest.mark.parametrize("name", SCENARIOS)
def test_native_and_dispatched_calls_agree(namespace: str, name: str) -> None:
    scenario, expected = SCENARIOS[name]
    native, dispatched = arms.native(scenario, namespace), arms.dispatched(scenario, namespace)
    assert native.outcome == dispatched.outcome
    assert native.trace == dispatched.trace
    assert native.calls["native"] > 0
    if expected is not None:
        assert native.calls == expected


@pytest.mark.parametrize("device_types", [None, TYPE])
def test_an_accelerated_operator_of_custom_op(namespace, device_types):
    @torch.library.custom_op(f"{namespace}::stock", mutates_args=(), device_types=device_types)
    def stock(x: Tensor) -> Tensor:
        return x * 2

    stock.register_autograd(lambda ctx, grad: grad * 2)

    def run() -> Any:
        x = ones(requires_grad=True)
        stock(x)
        result = stock(x)
        result.sum().backward()
        return [result, x.grad]

    assert_unchanged_by_acceleration(namespace, run, stock)


@pytest.mark.needs_torch("2.13", "its kernel that counts versions is known since then")
def test_an_accelerated_operator_that_mutates(namespace):
    @torch.library.custom_op(f"{namespace}::add_", mutates_args=("y",), device_types=TYPE)
    def add_(x: Tensor, y: Tensor) -> None:
        y.add_(x)

    def run() -> Any:
        y = ones()
        add_(ones(), y)
        add_(y, y.clone())
        return y

    assert_unchanged_by_acceleration(namespace, run, add_)


def test_an_accelerated_operator_of_the_low_level(namespace):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("low(Tensor x) -> Tensor")
    library.impl("low", lambda x: x * 3, BACKEND)
    low = getattr(torch.ops, namespace).low
    assert_unchanged_by_acceleration(namespace, lambda: [low(ones()), low(ones())], low)
    library._destroy()


@target.needs_accelerator
@pytest.mark.skipif(target.COUNT < 2, reason="needs two devices")
def test_a_provider_for_one_of_the_devices(namespace):
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_kernel(
        TYPE, lambda x: x * 10, provider="fast", supports=lambda x: x.device == torch.device(SECOND)
    )
    expected = [[10.0, 10.0], [2.0, 2.0]] * 3
    order = {op.name: ["fast", "reference"]}
    with torchop.priority(order):
        op(ones())
        with counting(op) as calls:
            natively = [op(ones(device)).tolist() for _ in range(3) for device in (SECOND, FIRST)]
    with torchop.priority(order), torchop.native.disabled():
        dispatched = [op(ones(device)).tolist() for _ in range(3) for device in (SECOND, FIRST)]
    assert natively == dispatched == expected
    assert calls == {"native": 6}


def assert_unchanged_by_acceleration(namespace: str, run: Callable[[], Any], op: Any) -> None:
    """Check that `accelerate` does not change results and traces, and that two calls are native."""

    def seen() -> Any:
        with target.trace() as trace:
            outcome = arms.described(run())
        return outcome, trace

    expected = seen()
    with torchop.accelerate(f"{namespace}::*"):
        run()
        with counting(op) as calls:
            assert seen() == expected
    assert calls == {"native": 2}


@target.only_on_the_standin
def test_a_call_that_is_captured(namespace):
    """During a capture, reading a generator's state raises, and so does waiting for the device.

    So native calls must do neither.
    """
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_autograd(lambda ctx, grad: grad * 2)
    x = ones(requires_grad=True)
    op(x)
    with counting(op) as calls, standin.capture():
        y = op(x)
        y.backward(torch.empty_like(y))
        op(x.detach())
    assert calls == {"native": 2}
