"""An accelerated packet of torch.ops chooses the same overload as before."""

from __future__ import annotations

from typing import Any

import torch

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
        "op.never": "(Tensor x, float y) -> Tensor",  # fits an int too, but `two` is tried first
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
    # The call with True runs `two`. The call with 2.5 runs `never`, because `two` accepts no
    # floats.
    assert counted["two"] == {"native": 3}
    assert counted["never"] == {"native": 1}
    # Two calls fit only `text`. The calls that fit no overload are counted for `text`, too, because
    # it is the last overload.
    assert counted["text"] == {"native": 2, "argument_type": 1, "binding": 4}
    acceleration.undo()
    assert packet._op is function


def test_packet_finds_an_overload_defined_later(namespace, accelerated, library):
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
