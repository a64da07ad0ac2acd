"""Packets of torch.ops choose the same overload, accelerated or not."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native, outcome
from tests._support.devices import BACKEND
from tests.accelerate.support import T, holds_tensors

pytestmark = needs_native


def test_a_packet_takes_an_int_for_the_float_of_its_first_overload(
    namespace, accelerated, library, seen
):
    library.define("op(Tensor x, float y) -> Tensor")
    library.define("op.int(Tensor x, int y) -> Tensor")
    library.impl("op", lambda x, y: seen.append(repr(y)) or x + 1, BACKEND)
    library.impl("op.int", lambda x, y: seen.append("int") or x + 2, BACKEND)
    packet = getattr(torch.ops, namespace).op
    packet(T, 3)
    accelerated()
    packet(T, 3)
    assert seen == ["3.0", "3.0"]
    assert torchop.native.counters(packet.default) == {"native": 1}


def test_a_packet_calls_the_overload_that_pytorch_would(namespace, accelerated, library):
    schemas = {
        "op": "(Tensor x, *, int amount=1) -> Tensor",
        "op.out": "(Tensor x, *, int amount=1, Tensor(a!) out) -> Tensor(a!)",
        "op.two": "(Tensor x, int y) -> Tensor",
        "op.never": "(Tensor x, float y) -> Tensor",  # an int is a float to a schema, but too late
        "op.text": "(Tensor x, str y, *, int amount=1) -> Tensor",
    }
    seen: list[str] = []
    for name, schema in schemas.items():
        library.define(name + schema)

        def kernel(*args: Any, name: str = name, **kwargs: Any) -> Any:
            seen.append(f"{name} {args[1:]} {sorted(kwargs)}")
            return kwargs["out"].copy_(args[0]) if "out" in kwargs else args[0] + 1

        library.impl(name, kernel, BACKEND)
    packet = getattr(torch.ops, namespace).op
    out = torch.zeros(4)
    calls = [
        lambda: packet(T),
        lambda: packet(x=T, amount=2),
        lambda: packet(T, out=out),
        lambda: packet(T, amount=2, out=out),
        lambda: packet(T, 3),
        lambda: packet(T, y=3),
        lambda: packet(T, True),
        lambda: packet(T, 2.5),
        lambda: packet(T, "a"),
        lambda: packet(T, "a", amount=7),
        lambda: packet(T, "a", amount="b"),
        lambda: packet(T, 1, 2, 3),
        lambda: packet(T, nothing=1),
        lambda: packet(),
        lambda: packet("x"),
    ]

    def outcomes() -> tuple[list[Any], list[str]]:
        seen.clear()
        return list(map(outcome, calls)), list(seen)

    before = outcomes()
    function = packet._op
    acceleration = accelerated()
    after = outcomes()
    assert after[1] == before[1]
    for found, expected in zip(after[0], before[0], strict=True):
        if holds_tensors(expected):
            torch.testing.assert_close(found, expected)
        else:
            assert found == expected
    counted = {name: torchop.native.counters(getattr(packet, name)) for name in packet.overloads()}
    assert counted["default"]["native"] == 2
    assert counted["out"] == {"native": 2}
    # `two` takes True, and takes no 2.5, which leaves that to `never`.
    assert counted["two"] == {"native": 3}
    assert counted["never"] == {"native": 1}
    # All others refused the text, or the keyword by its name; what none can bind counts for the
    # last.
    assert counted["text"] == {"native": 2, "argument_type": 1, "binding": 4}
    acceleration.undo()
    assert packet._op is function


VALUES = (T, None, True, 3, 0.5, "a", [1, 2], (0.5,), [T], torch.float32, np.float32(2), 2**70, 1j)
KINDS = (
    "Tensor",
    "Tensor?",
    "int",
    "float",
    "float?",
    "bool",
    "str",
    "Scalar",
    "int[]",
    "Tensor[]",
)


@pytest.mark.parametrize("kind", KINDS)
def test_an_overload_is_passed_by_where_pytorch_would(namespace, accelerated, library, kind):
    seen: list[str] = []

    def kernel(number: int, x: Tensor, y: Any) -> Tensor:
        seen.append(f"{number} {y!r}")
        return x + 1

    packets = []
    for name, other in enumerate(KINDS):
        for number, overload in enumerate((kind, other)):
            qualified = f"op{name}.n{number}"
            library.define(f"{qualified}(Tensor x, {overload} y) -> Tensor")
            library.impl(qualified, functools.partial(kernel, number), BACKEND)
        packets.append(getattr(getattr(torch.ops, namespace), f"op{name}"))

    def called() -> list[Any]:
        seen.clear()
        calls = [lambda p=p, y=y: p(T, y) for p in packets for y in VALUES]
        return [str(outcome(call)) for call in calls] + seen

    before = called()
    accelerated()
    assert called() == before
    second = [torchop.native.counters(packet.n1) for packet in packets]
    natively = sum(counts.get("native", 0) for counts in second)
    assert natively > 0, second


@pytest.mark.parametrize("numbers_as_tensors", ["prims", "nvprims"])
def test_a_number_is_a_tensor_where_pytorch_takes_it_for_one(namespace, numbers_as_tensors):
    library = torch.library.Library(numbers_as_tensors, "FRAGMENT")
    for factor, kind in enumerate(("Tensor", "float"), 2):
        name = f"{namespace}.with_{kind}"
        library.define(f"{name}(Tensor x, {kind} y) -> Tensor")
        library.impl(name, lambda x, y, factor=factor: x * factor, BACKEND)
    packet = getattr(getattr(torch.ops, numbers_as_tensors), namespace)
    before = str(outcome(lambda: packet(T, 2.0)))
    with torchop.accelerate(f"{numbers_as_tensors}::{namespace}") as acceleration:
        assert all(row.accelerated for row in acceleration.operators)
        assert str(outcome(lambda: packet(T, 2.0))) == before
    library._destroy()


def test_an_overload_that_comes_later_is_seen_by_the_packet(namespace, accelerated, library):
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x + 1, BACKEND)
    accelerated()
    packet = getattr(torch.ops, namespace).op
    assert torch.equal(packet(T), T + 1)
    library.define("op.two(Tensor x, Tensor y) -> Tensor")
    library.impl("op.two", lambda x, y: x - y, BACKEND)
    assert torch.equal(packet(T), T + 1)
    assert torch.equal(packet(T, T), T - T)
    assert torchop.native.counters(packet.default) == {"native": 2}
    assert torchop.native.counters(packet.two) == {"native": 1}


def test_overloads_are_released_one_by_one(namespace, library):
    library.define("op(Tensor x) -> Tensor")
    library.define("op.two(Tensor x, Tensor y) -> Tensor")
    library.impl("op", lambda x: x + 1, BACKEND)
    library.impl("op.two", lambda x, y: x - y, BACKEND)
    packet = getattr(torch.ops, namespace).op
    function = packet._op
    # A name without overload stands for all of them.
    first, second = torchop.accelerate(f"{namespace}::op"), torchop.accelerate(f"{namespace}::*two")
    assert torch.equal(packet(T), T + 1)
    first.undo()
    assert packet._op.dispatch is function  # PyTorch asks the first overload first
    assert torch.equal(packet(T), T + 1)
    assert torch.equal(packet(T, T), T - T)
    assert torchop.explain(packet.two, T, T).native
    second.undo()
    assert packet._op is function
    assert not torchop.explain(packet.two, T, T).native
