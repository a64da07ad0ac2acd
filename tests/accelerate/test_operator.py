"""Operators of torch.library mean the same, accelerated or not."""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests.support import needs_native
from torchop._accelerate import operator

pytestmark = needs_native

T = torch.arange(4.0)


@pytest.fixture
def accelerated(namespace):
    """Accelerates everything in the namespace until the test ends; returns the object for it."""
    made: list[torchop.Acceleration] = []

    def accelerate() -> torchop.Acceleration:
        made.append(torchop.accelerate(f"{namespace}::*"))
        return made[-1]

    yield accelerate
    for acceleration in made:
        acceleration.undo()


def stock(namespace: str, function: Callable[..., Any], **options: Any) -> Any:
    options.setdefault("mutates_args", ())
    return torch.library.custom_op(f"{namespace}::{function.__name__}", function, **options)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the exception that it raises."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def assert_same(accelerate: Callable[[], Any], op: Any, *calls: Callable[[], Any]) -> None:
    """Every call has the same outcome before and after, and after, every call is native."""
    before = [outcome(call) for call in calls]
    accelerate()
    after = [outcome(call) for call in calls]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0) if holds_tensors(old) else None
        assert holds_tensors(old) or (new == old and type(new) is type(old))
    assert torchop.native.counters(op) == {"native": len(calls)}


def holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, list | tuple) and any(map(holds_tensors, value))
    )


# --------------------------------------------------------------------------------------------------
# Arguments


@pytest.fixture
def seen():
    return []


def test_a_kernel_sees_the_same_arguments(namespace, accelerated, seen):
    def op(
        x: Tensor,
        y: Tensor | None,
        many: Sequence[Tensor],
        size: Sequence[int],
        count: int = 3,
        scale: float = 0.5,
        *,
        name: str = "a",
        flag: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        seen.append((y, len(many), size, count, scale, name, flag, dtype))
        return x.clone()

    schema = (
        "(Tensor x, Tensor? y, Tensor[] many, SymInt[] size, SymInt count=3, float scale=0.5, *, "
        'str name="a", bool flag=False, ScalarType dtype=float32) -> Tensor'
    )
    handle = stock(namespace, op, schema=schema)
    calls = [
        lambda: handle(T, None, [T, T], (1, 2)),
        lambda: handle(T, None, [T], [1, 2], 3, 0.5, name="a"),
        lambda: handle(T, None, (T,), [], 4, name="b", flag=True, dtype=torch.float64),
        lambda: handle(T, many=[T], y=None, size=[3], scale=1.5),
    ]
    assert_same(accelerated, handle, *calls)
    assert seen[:4] == seen[4:]
    assert [list(map(type, call)) for call in seen[:4]] == [list(map(type, c)) for c in seen[4:]]


def test_an_int_for_a_float_reaches_the_kernel_as_a_float(namespace, accelerated, seen):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(
        "op(Tensor x, float a, float? b=None, float c=0., float[] d=[], int e=0, *, float f=2.0) "
        "-> Tensor"
    )
    library.impl("op", lambda *args, **kwargs: seen.append((args[1:], kwargs)) or T.clone(), "CPU")
    op = getattr(torch.ops, namespace).op
    numbers = [2, 1, 2, 3]
    calls = [
        lambda: op(T, 1),
        lambda: op(T, -3, 4, 0, (1, 2.5), 7),  # 0 equals the default
        lambda: op(T, 1, None, 0, numbers, 0, f=2),
        lambda: op(T, 2**53 + 1, 2**70, 1, [-(2**63)], 5, f=10**308),
        lambda: op(x=T, a=0, e=1, f=0),
    ]

    def outcomes() -> str:
        seen.clear()
        for call in calls:
            call()
        return repr(seen)

    before = outcomes()
    accelerated()
    assert outcomes() == before
    assert numbers == [2, 1, 2, 3]  # what is converted is not the caller's list
    assert torchop.native.counters(op.default) == {"native": len(calls)}
    too_large = [lambda: op(T, 10**400), lambda: op(T, 1.0, 1, 1, [10**400])]
    found = [outcome(call) for call in too_large]
    with torchop.native.disabled():
        assert found == [outcome(call) for call in too_large]
    assert torchop.native.counters(op.default)["argument_type"] == 2
    library._destroy()


def test_a_converted_number_is_what_setup_context_sees(namespace, accelerated, seen):
    def op(xs: Sequence[Tensor], factor: float, count: int = 1) -> Tensor:
        return xs[0] * factor

    def setup_context(ctx, inputs, output):
        seen.append(repr(inputs[1:]))

    handle = stock(namespace, op)
    handle.register_autograd(lambda ctx, g: [[g] * 2, None], setup_context=setup_context)
    x = T.clone().requires_grad_()
    before = outcome(lambda: torch.autograd.grad(handle([x, T], 3).sum(), x))
    accelerated()
    assert repr(outcome(lambda: torch.autograd.grad(handle([x, T], 3).sum(), x))) == repr(before)
    assert seen == ["(3.0, 1)"] * 2
    assert torchop.native.counters(handle) == {"native": 1}


def test_a_packet_takes_an_int_for_the_float_of_its_first_overload(namespace, accelerated, seen):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x, float y) -> Tensor")
    library.define("op.int(Tensor x, int y) -> Tensor")
    library.impl("op", lambda x, y: seen.append(repr(y)) or x + 1, "CPU")
    library.impl("op.int", lambda x, y: seen.append("int") or x + 2, "CPU")
    packet = getattr(torch.ops, namespace).op
    packet(T, 3)
    accelerated()
    packet(T, 3)
    assert seen == ["3.0", "3.0"]
    assert torchop.native.counters(packet.default) == {"native": 1}
    library._destroy()


def test_the_shape_of_a_tensor_is_a_list_of_int(namespace, accelerated, seen):
    def op(x: Tensor, size: Sequence[int]) -> Tensor:
        seen.append(size)
        return x.new_zeros(size)

    handle = stock(namespace, op)
    assert_same(accelerated, handle, lambda: handle(T, T.shape), lambda: handle(T, torch.Size([])))
    assert seen == [[4], [], [4], []]
    assert {type(size) for size in seen} == {list}


def test_a_kernel_sees_its_own_defaults(namespace, accelerated, seen):
    def op(x: Tensor, scale=1, size=(1, 2), *, factor=None) -> Tensor:
        seen.append((scale, size, factor))
        return x.clone()

    schema = "(Tensor x, float scale=1.0, int[] size=[1, 2], *, float factor=2.0) -> Tensor"
    handle = stock(namespace, op, schema=schema)
    calls = [
        lambda: handle(T),
        lambda: handle(T, 1.0),
        lambda: handle(T, 1.0, [1, 2], factor=2.0),
        lambda: handle(T, 1.0, [2, 1], factor=3.0),
        lambda: handle(T, 2.0, factor=2.0),
    ]
    assert_same(accelerated, handle, *calls)
    assert repr(seen[:5]) == repr(seen[5:])
    assert repr(seen[0]) == "(1, (1, 2), None)"  # not what the schema says
    assert repr(seen[3]) == "(1.0, [2, 1], 3.0)"


def test_a_kernel_sees_how_many_arguments_there_are(namespace, accelerated, seen):
    def op(*args, **kwargs) -> Tensor:
        seen.append((len(args), sorted(kwargs)))
        return args[0].clone()

    handle = stock(namespace, op, schema="(Tensor x, int a=1, int b=2, *, int c=3) -> Tensor")
    calls = [lambda: handle(T), lambda: handle(T, 1, 5, c=3), lambda: handle(T, 7, 2, c=4)]
    assert_same(accelerated, handle, *calls)
    assert seen[:3] == seen[3:] == [(1, []), (3, []), (2, ["c"])]


def test_forty_arguments_of_which_eight_are_written(namespace, accelerated):
    tensors = ", ".join(f"Tensor(a{i}!) t{i}" for i in range(8))
    numbers = ", ".join(f"float n{i}={float(i)}" for i in range(31))
    schema = f"({tensors}, Tensor?[] extra, {numbers}) -> ()"

    def op(t0, t1, t2, t3, t4, t5, t6, t7, extra, *numbers) -> None:
        for index, tensor in enumerate((t0, t1, t2, t3, t4, t5, t6, t7)):
            tensor.add_(sum(numbers) + index + sum(e.sum().item() for e in extra if e is not None))

    handle = stock(namespace, op, schema=schema, mutates_args=[f"t{i}" for i in range(8)])

    def call() -> Any:
        written = [torch.zeros(2) for _ in range(8)]
        result = handle(*written, [None, T], *map(float, range(5)), n30=7.0)
        return result, written, [tensor._version for tensor in written]

    before = call()
    accelerated()
    after = call()
    assert torchop.native.counters(handle) == {"native": 1}
    assert before[0] is after[0] is None
    assert all(map(torch.equal, before[1], after[1]))
    assert before[2] == after[2] == [2] * 8  # one of the operator, one of `add_`


# --------------------------------------------------------------------------------------------------
# Results


@pytest.mark.parametrize(
    ("returns", "made"),
    [
        ("Tensor", lambda x: x + 1),
        ("Tensor", lambda x: x),
        ("Tensor", lambda x: x[1:]),
        ("Tensor", lambda x: None),
        ("Tensor", lambda x: 3),
        ("Tensor", lambda x: (x + 1,)),
        ("Tensor", lambda x: torch.nn.Parameter(x + 1)),
        ("(Tensor, Tensor)", lambda x: (x + 1, x + 2)),
        ("(Tensor, Tensor)", lambda x: [x + 1, x + 2]),
        ("(Tensor, Tensor)", lambda x: (x + 1,)),
        ("(Tensor, Tensor)", lambda x: (x + 1, x)),
        ("(Tensor, Tensor)", lambda x: (lambda y: (y, y))(x + 1)),
        ("(Tensor, Tensor)", lambda x: (x + 1, None)),
        ("(Tensor, int)", lambda x: (x + 1, 2)),
        ("(Tensor, Tensor?)", lambda x: (x + 1, None)),
        ("(Tensor, Tensor?)", lambda x: (x + 1, x + 2)),
        ("Tensor[]", lambda x: [x + 1, x + 2]),
        ("Tensor[]", lambda x: (x + 1, x + 2)),
        ("Tensor[]", lambda x: [x]),
        ("Tensor[]", lambda x: [x + 1, 5]),
        ("int", lambda x: 7),
        ("int", lambda x: True),
        ("int", lambda x: "seven"),
        ("int", lambda x: 2**70),
        ("float", lambda x: 7),
        ("float", lambda x: 7.5),
        ("bool", lambda x: False),
        ("bool", lambda x: 1),
        ("str", lambda x: "text"),
        ("Scalar", lambda x: 2),
        ("()", lambda x: None),
        ("()", lambda x: 5),
    ],
)
@pytest.mark.parametrize("how", ["custom_op", "define"])
def test_results_are_converted_and_checked_as_before(namespace, accelerated, returns, made, how):
    schema = f"(Tensor x) -> {returns}"
    if how == "custom_op":
        op = torch.library.custom_op(f"{namespace}::op", made, mutates_args=(), schema=schema)
    else:
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define("op" + schema)
        library.impl("op", made, "CPU")
        op = getattr(torch.ops, namespace).op
    assert_same(accelerated, op, lambda: op(T))
    if how == "define":
        library._destroy()


def test_a_tensor_is_the_very_one_that_the_kernel_returned(namespace, accelerated):
    made = []
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> (Tensor, Tensor[])")

    def kernel(x):
        made.append((x + 1, [x + 2]))
        return made[-1]

    library.impl("op", kernel, "CPU")
    accelerated()
    first, rest = getattr(torch.ops, namespace).op(T)
    assert first is made[0][0]
    assert rest[0] is made[0][1][0]


def test_the_kernel_runs_once_whatever_it_returns(namespace, accelerated, seen):
    def op(x: Tensor) -> Tensor:
        seen.append(1)
        return x

    handle = stock(namespace, op)
    accelerated()
    with pytest.raises(RuntimeError, match="may not alias any inputs"):
        handle(T)
    assert seen == [1]


def test_an_exception_of_the_kernel_is_the_very_one(namespace, accelerated):
    error = KeyError("mine")

    def op(x: Tensor) -> Tensor:
        raise error

    handle = stock(namespace, op)
    accelerated()
    with pytest.raises(KeyError, match="mine") as caught:
        handle(T)
    assert caught.value is error


@pytest.mark.skipif(not hasattr(torch.Tag, "inplace"), reason="this PyTorch has no such tags")
def test_forms_must_return_what_they_write(namespace, accelerated):
    def right_(x: Tensor) -> Tensor:
        return x.add_(1)

    def wrong_(x: Tensor) -> Tensor:
        return x + 1

    options = {"mutates_args": {"x"}, "tags": torch.Tag.inplace}
    right = stock(namespace, right_, **options)
    wrong = stock(namespace, wrong_, **options)
    before = outcome(lambda: wrong(T.clone()))
    accelerated()
    x = T.clone()
    assert right(x) is x
    assert x._version == 2
    assert outcome(lambda: wrong(T.clone())) == before
    assert "must return its first argument" in before[1]
    assert torchop.native.counters(right) == torchop.native.counters(wrong) == {"native": 1}


# --------------------------------------------------------------------------------------------------
# Kernels


def test_a_kernel_that_was_registered_later_runs(namespace, accelerated):
    def op(x: Tensor) -> Tensor:
        return x + 1

    handle = stock(namespace, op)
    accelerated()
    assert torch.equal(handle(T), T + 1)
    handle.register_kernel("cpu")(lambda x: x + 2)
    assert torch.equal(handle(T), T + 2)
    handle.register_kernel("cpu")(lambda x: x + 3)  # PyTorch's table does not change for this one
    assert torch.equal(handle(T), T + 3)
    assert torch.equal(handle(T), T + 3)
    assert torchop.native.counters(handle) == {"native": 3, "kernel": 1}


def test_a_disabled_kernel_does_not_run(namespace, accelerated):
    def op(x: Tensor) -> Tensor:
        return x + 1

    handle = stock(namespace, op)
    handle.register_kernel("cpu")(lambda x: x + 2)
    accelerated()
    assert torch.equal(handle(T), T + 2)
    with handle.set_kernel_enabled("cpu", enabled=False):
        assert torch.equal(handle(T), T + 1)
    assert torch.equal(handle(T), T + 2)
    assert torchop.native.counters(handle) == {"native": 3}


def test_a_list_of_devices_keeps_what_torch_library_makes_of_it(namespace, accelerated):
    def op(x: Tensor) -> Tensor:
        return x + 1

    # The kernel of the CPU looks up that of the device which came last.
    handle = stock(namespace, op, device_types=["cpu", "cuda"])
    handle.register_kernel("cpu")(lambda x: x + 2)
    before = handle(T)
    accelerated()
    assert torch.equal(handle(T), before)
    assert torchop.native.counters(handle) == {"native": 1}
    handle.register_kernel("cuda")(lambda x: x + 3)
    assert torch.equal(handle(T), T + 3)


def test_a_device_that_is_more_than_a_str_is_left_to_the_dispatcher(namespace, accelerated):
    class Device(str, enum.Enum):
        CPU = "cpu"

    def op(x: Tensor) -> Tensor:
        return x + 1

    handle = stock(namespace, op, device_types=Device.CPU)
    acceleration = accelerated()
    assert torch.equal(handle(T), T + 1)
    (row,) = acceleration.operators
    assert (row.accelerated, row.reason) == (
        False,
        "its kernel for CPU is not as custom_op left it",
    )


@pytest.mark.parametrize("is_older", [True, False])
def test_an_override_runs_whenever_it_was_made(namespace, accelerated, is_older):
    def op(x: Tensor) -> Tensor:
        return x + 1

    handle = stock(namespace, op)
    if not is_older:
        accelerated()
        assert torch.equal(handle(T), T + 1)
    library = torch.library.Library(namespace, "FRAGMENT")
    library.impl("op", lambda x: x, "CPU")  # no check of aliases for this one
    accelerated()
    assert handle(T) is T
    assert handle(T) is T
    library._destroy()
    assert torch.equal(handle(T), T + 1)
    assert torch.equal(handle(T), T + 1)
    assert torchop.native.counters(handle)["native"] >= 2


@pytest.mark.parametrize("key", ["AutogradCPU", "ADInplaceOrView", "AutocastCPU", "BackendSelect"])
def test_a_kernel_that_takes_keys_is_left_to_the_dispatcher(namespace, accelerated, key):
    def op(x: Tensor) -> Tensor:
        return x + 1

    handle = stock(namespace, op)
    library = torch.library.Library(namespace, "FRAGMENT")
    library.impl("op", lambda keys, x: x + 5, key, with_keyset=True)
    with torch.autocast("cpu", enabled=key == "AutocastCPU"):
        before = handle(T)
        accelerated()
        assert torch.equal(handle(T), before)
    assert torch.equal(before, T + 5) or key == "BackendSelect"
    library._destroy()


def test_kernels_of_a_library(namespace, accelerated):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x, int y=2) -> Tensor")
    library.define("op.two(Tensor x, Tensor y) -> Tensor")
    library.define("with_keys(Tensor x, int y=2) -> Tensor")
    library.define("composite(Tensor x) -> Tensor")
    library.define("empty(Tensor x) -> Tensor")
    library.impl("op", lambda x, y=2: x + y, "CPU")
    library.impl("op.two", lambda x, y: x - y, "CPU")
    # With its default, the arguments alone would fit too.
    library.impl("with_keys", lambda keys, x=None, y=2: x * y, "CPU", with_keyset=True)
    library.impl("composite", lambda x: x * 3, "CompositeImplicitAutograd")
    acceleration = accelerated()
    ops = getattr(torch.ops, namespace)
    assert torch.equal(ops.op.default(T), T + 2)
    assert torch.equal(ops.op(T, 3), T + 3)
    assert torch.equal(ops.op.two(T, T), T - T)
    assert torch.equal(ops.with_keys(T, 5), T * 5)
    x = T.clone().requires_grad_()
    ops.composite(x).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 3.0))
    with pytest.raises(NotImplementedError, match="Could not run"):
        ops.empty(T)
    assert torchop.native.counters(ops.op.default) == {"native": 2}
    assert torchop.native.counters(ops.op.two) == {"native": 1}
    assert torchop.native.counters(ops.composite) == {"native": 1}
    rows = {row.op: row for row in acceleration.operators}
    assert rows[f"{namespace}::with_keys"].reason == "its kernel for CPU takes dispatch keys"
    assert rows[f"{namespace}::empty"].reason == "it has no kernel that is a Python function"
    assert rows[f"{namespace}::op.two"] == (f"{namespace}::op.two", True, "")
    library._destroy()


def test_a_packet_calls_the_overload_that_pytorch_would(namespace, accelerated):
    library = torch.library.Library(namespace, "FRAGMENT")
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

        library.impl(name, kernel, "CPU")
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
    assert counted["two"]["native"] == 2
    # By their number, `two` and `never` might take these.
    assert counted["never"] == {}
    # All others refused the keyword by its name; what none can bind counts for the last.
    assert counted["text"] == {"native": 1, "argument_type": 1, "binding": 3}
    acceleration.undo()
    assert packet._op is function
    library._destroy()


def test_an_overload_that_comes_later_is_seen_by_the_packet(namespace, accelerated):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x + 1, "CPU")
    accelerated()
    packet = getattr(torch.ops, namespace).op
    assert torch.equal(packet(T), T + 1)
    library.define("op.two(Tensor x, Tensor y) -> Tensor")
    library.impl("op.two", lambda x, y: x - y, "CPU")
    assert torch.equal(packet(T), T + 1)
    assert torch.equal(packet(T, T), T - T)
    assert torchop.native.counters(packet.default) == {"native": 2}
    assert torchop.native.counters(packet.two) == {"native": 1}
    library._destroy()


def test_overloads_are_released_one_by_one(namespace):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.define("op.two(Tensor x, Tensor y) -> Tensor")
    library.impl("op", lambda x: x + 1, "CPU")
    library.impl("op.two", lambda x, y: x - y, "CPU")
    packet = getattr(torch.ops, namespace).op
    function = packet._op
    # A name without overload stands for all of them.
    first, second = torchop.accelerate(f"{namespace}::op"), torchop.accelerate(f"{namespace}::*two")
    assert torch.equal(packet(T), T + 1)
    first.undo()
    assert packet._op is function  # PyTorch asks the first overload first
    assert torch.equal(packet(T), T + 1)
    assert torch.equal(packet(T, T), T - T)
    assert torchop.explain(packet.two, T, T).native
    second.undo()
    assert packet._op is function
    assert not torchop.explain(packet.two, T, T).native
    library._destroy()


def test_a_scripted_function_calls_a_packet_of_several_overloads(namespace, accelerated):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.define("op.two(Tensor x, Tensor y) -> Tensor")
    library.impl("op", lambda x: x + 1, "CPU")
    library.impl("op.two", lambda x, y: x - y, "CPU")
    accelerated()
    packet = getattr(torch.ops, namespace).op

    def both(x, y):
        return packet(packet(x, y))

    scripted = torch.jit.script(both)
    assert torch.equal(scripted(T, T), torch.ones(4))
    library._destroy()


def test_what_torch_library_impl_puts_around_a_kernel_is_spared(namespace, accelerated, seen):
    torch.library.define(f"{namespace}::op", "(Tensor x, int a=1) -> Tensor")

    @torch.library.impl(f"{namespace}::op", "default")
    def kernel(x, a=1):
        seen.append(sys._getframe(1).f_code.co_name)
        return x + a

    @torch.library.register_kernel(f"{namespace}::op", "cuda")
    def unused(x, a=1):
        raise AssertionError

    accelerated()
    op = getattr(torch.ops, namespace).op
    assert torch.equal(op(T), T + 1)
    assert torch.equal(op(T, 2), T + 2)
    assert set(seen) == {"test_what_torch_library_impl_puts_around_a_kernel_is_spared"}
    assert torchop.native.counters(op) == {"native": 2}


def test_a_kernel_of_a_library_that_comes_later_runs(namespace, accelerated):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    accelerated()
    op = getattr(torch.ops, namespace).op
    with pytest.raises(NotImplementedError):
        op(T)
    library.impl("op", lambda x: x + 1, "CPU")
    assert torch.equal(op(T), T + 1)
    assert torch.equal(op(T), T + 1)
    assert torchop.native.counters(op) == {"operator": 1, "native": 2}
    library._destroy()


def test_a_fallback_for_all_operators_is_no_kernel_of_this_one(namespace, accelerated):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    everywhere = torch.library.Library("_", "IMPL")
    everywhere.fallback(lambda op, x: x + 9, "CPU")
    try:
        op = getattr(torch.ops, namespace).op
        before = op(T)
        acceleration = accelerated()
        assert torch.equal(op(T), before)
        assert acceleration.operators[0].reason.startswith("a fallback for all operators")
    finally:
        everywhere._destroy()
        library._destroy()


# --------------------------------------------------------------------------------------------------
# Autograd


def test_without_a_formula_pytorch_says_so_in_backward(namespace, accelerated):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x.detach() * 2, "CPU")
    op = getattr(torch.ops, namespace).op
    accelerated()
    assert not op(T).requires_grad
    result = op(T.clone().requires_grad_())
    assert result.requires_grad
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        result.sum().backward()
    assert torchop.native.counters(op) == {"native": 1, "gradient": 1}
    library._destroy()


def with_formula(namespace: str, seen: list[Any]) -> Any:
    def op(x: Tensor, k: int, y: Tensor | None = None, z: float = 1.0) -> tuple[Tensor, Tensor]:
        return x * k, (x > 0).to(torch.int64)

    def setup_context(ctx, inputs, output):
        seen.append(("setup", ctx.needs_input_grad, list(map(type, inputs)), len(output)))
        ctx.save_for_backward(inputs[0], output[0])
        ctx.k = inputs[1]

    def backward(ctx, first, second):
        seen.append(("backward", ctx.needs_input_grad, ctx.name()))
        return first * ctx.k, None, None, None

    handle = stock(namespace, op)
    handle.register_autograd(backward, setup_context=setup_context)
    return handle


def test_a_formula_sees_the_same(namespace, accelerated, seen):
    handle = with_formula(namespace, seen)

    def calls():
        for args in ((3,), (3, None, 1.0), (3, T), (3, T.clone().requires_grad_(), 2.0)):
            x = T.clone().requires_grad_()
            first, second = handle(x, *args)
            first.sum().backward()
            yield x.grad, second.requires_grad, type(first.grad_fn).__name__, first.grad_fn.name()

    before = list(calls())
    told = seen[:]
    seen.clear()
    accelerated()
    after = list(calls())
    assert torchop.native.counters(handle) == {"native": 4}
    assert seen == told
    assert told[0][1] == (True, False, False)  # one for each argument passed, and PyTorch's own
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[0], new[0])
        assert old[1:] == new[1:]


def test_keyword_only_arguments_reach_setup_context(namespace, accelerated, seen):
    def op(x: Tensor, *, k: int = 2, m: float = 0.5) -> Tensor:
        return x * k

    def setup_context(ctx, inputs, keyword_only_inputs, output):
        seen.append((len(inputs), keyword_only_inputs))
        ctx.k = keyword_only_inputs["k"]

    handle = stock(namespace, op)
    handle.register_autograd(lambda ctx, g: g * ctx.k, setup_context=setup_context)
    x = T.clone().requires_grad_()

    def calls():
        return [torch.autograd.grad(handle(x, **k).sum(), x)[0] for k in ({}, {"k": 3}, {"k": 2})]

    before = calls()
    accelerated()
    assert all(map(torch.equal, calls(), before))
    assert seen[:3] == seen[3:]
    assert torchop.native.counters(handle) == {"native": 3}


def test_gradients_without_setup_context_and_of_higher_order(namespace, accelerated):
    def op(x: Tensor) -> Tensor:
        return x.sin()

    handle = stock(namespace, op)
    handle.register_autograd(lambda ctx, g: g * 2)
    accelerated()
    x = T.clone().double().requires_grad_()
    (grad,) = torch.autograd.grad(handle(x).sum(), x)
    assert torch.equal(grad, torch.full((4,), 2.0).double())

    def cube(x: Tensor) -> Tensor:
        return x**3

    cubed = stock(namespace, cube)
    cubed.register_autograd(
        lambda ctx, g: g * 3 * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    assert torch.autograd.gradcheck(cubed, x)
    assert torch.autograd.gradgradcheck(cubed, x)
    assert torchop.native.counters(cubed)["native"] > 2


def test_a_formula_registered_later_is_used(namespace, accelerated):
    def op(x: Tensor) -> Tensor:
        return x.clone()

    handle = stock(namespace, op)
    before = outcome(lambda: handle(T.clone().requires_grad_()).sum().backward())
    accelerated()
    x = T.clone().requires_grad_()
    assert outcome(lambda: handle(x).sum().backward()) == before
    assert "no autograd formula was registered" in before[1]
    for factor in (2, 3):
        handle.register_autograd(
            lambda ctx, g: g * ctx.factor,
            setup_context=lambda ctx, inputs, output, factor=factor: setattr(ctx, "factor", factor),
        )
        (grad,) = torch.autograd.grad(handle(x).sum(), x)
        assert torch.equal(grad, torch.full((4,), float(factor)))
    assert torchop.native.counters(handle) == {"native": 3}


def test_gradients_through_lists(namespace, accelerated, seen):
    def op(
        xs: Sequence[Tensor], sizes: Sequence[int], w: Tensor, rest: Sequence[Tensor], k: int = 2
    ) -> tuple[Tensor, Tensor]:
        return sum([*xs, *rest]) * w, w * k

    def setup_context(ctx, inputs, output):
        seen.append(("setup", [type(item).__name__ for item in inputs], ctx.needs_input_grad))
        ctx.save_for_backward(inputs[2], *inputs[0])
        ctx.count, ctx.k = len(inputs[3]), inputs[4]

    def backward(ctx, first, second):
        w, *xs = ctx.saved_tensors
        seen.append(("backward", ctx.needs_input_grad))
        grads = [first * w for _ in xs]
        inputs = grads, None, second * ctx.k, [first * w] * ctx.count, None
        return inputs[: len(ctx.needs_input_grad)]  # PyTorch drops what equals its default

    handle = stock(namespace, op)
    handle.register_autograd(backward, setup_context=setup_context)
    x, y, w = (T.clone().requires_grad_() for _ in range(3))
    calls = [
        lambda: ([x, T, y], [1], w, []),
        lambda: ([x, x], [1, 2], T, [y, T], 3),
        lambda: ([], [1], w, [x]),
        lambda: ([T], [], T, [x], 2),  # an empty list is one of tensors to PyTorch
    ]

    def gradients() -> list[Any]:
        def of(arguments: tuple[Any, ...]) -> Any:
            results = handle(*arguments)
            shown = [(r.requires_grad, type(r.grad_fn).__name__) for r in results]
            wanted = torch.autograd.grad(
                results[0].sum() + results[1].sum(), (x, y, w), allow_unused=True
            )
            return [[None if g is None else g.tolist() for g in wanted], shown]

        return [outcome(lambda call=call: of(call())) for call in calls]

    before = gradients()
    told = seen[:]
    seen.clear()
    accelerated()
    assert gradients() == before
    assert seen == told
    assert len(told) == 8
    assert torchop.native.counters(handle) == {"native": len(calls)}


def test_gradients_past_a_none_in_a_list_go_to_the_dispatcher(namespace, accelerated):
    def op(xs: Sequence[Tensor | None], w: Tensor) -> Tensor:
        return w * 2

    handle = stock(namespace, op)
    handle.register_autograd(lambda ctx, g: (None, g * 2))
    accelerated()
    w = T.clone().requires_grad_()
    handle([T, None], w).sum().backward()
    assert torch.equal(w.grad, torch.full((4,), 2.0))
    assert torchop.native.counters(handle) == {"gradient": 1}


@pytest.mark.parametrize("schema", ["(Tensor x, Tensor y)", "(Tensor[] x, Tensor y)"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_kernel_that_returns_its_inputs_leaves_them_alone(namespace, accelerated, schema, count):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(f"op{schema} -> {'Tensor' if count == 1 else '(Tensor, Tensor)'}")

    def kernel(x, y):
        return y if count == 1 else (y, x[0] if isinstance(x, list) else x)

    library.impl("op", kernel, "CPU")
    op = getattr(torch.ops, namespace).op.default

    def backward(ctx, *grads):
        return ([3 * grads[0]] if "[]" in schema else 3 * grads[0]), 5 * grads[0]

    torch.library.register_autograd(op, backward, lib=library)

    def called():
        x, y, leaf = (
            torch.ones(2, requires_grad=True),
            torch.ones(2),
            torch.ones(2).requires_grad_(),
        )
        found: list[Any] = []
        for second in (y, leaf):
            result = op([x] if "[]" in schema else x, second)
            outputs = [result] if count == 1 else list(result)
            found += [(out is x, out is second, out._is_view(), out.output_nr) for out in outputs]
            outputs[0].sum().backward()
            found += [x.is_leaf, second.is_leaf, second.requires_grad, x.grad, second.grad]
        return str(found)

    expected = called()
    accelerated()
    assert called() == expected
    assert torchop.native.counters(op) == {"native": 2}
    library._destroy()


def test_the_name_that_pytorch_keeps_in_ctx_is_refused(namespace, accelerated):
    op = torch.library.custom_op(
        f"{namespace}::op", lambda x: x[0] * 2, mutates_args=(), schema="(Tensor[] x) -> Tensor"
    )

    def setup_context(ctx, inputs, output):
        ctx._pt_metadata = 3

    op.register_autograd(lambda ctx, grad: [grad], setup_context=setup_context)
    accelerated()
    refused = r"^Please don't set ctx\._pt_metadata; PyTorch"
    for context in (contextlib.nullcontext(), torchop.native.disabled()):
        with context, pytest.raises(RuntimeError, match=refused):
            op([torch.ones(2, requires_grad=True)])
    assert torchop.native.counters(op)["native"] == 1


def test_a_formula_sees_defaults_as_the_schema_keeps_them(namespace, accelerated, seen):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(
        "op(Tensor x, int[] sizes=[1, 2], Device? device='cpu', float f=0.5, ScalarType? type=int, "
        "*, MemoryFormat layout=contiguous_format, float[] scales=[1.0]) -> Tensor"
    )
    library.impl("op", lambda x, *args, **kwargs: x * len(args), "CPU")

    def setup_context(ctx, inputs, keyword_only_inputs, output):
        seen.append((ctx.needs_input_grad, inputs[1:], keyword_only_inputs))
        ctx.count = len(inputs)

    def backward(ctx, g):
        seen.append(ctx.needs_input_grad)
        return (g * ctx.count, *[None] * (len(ctx.needs_input_grad) - 1))

    torch.library.register_autograd(
        f"{namespace}::op", backward, setup_context=setup_context, lib=library
    )
    op = getattr(torch.ops, namespace).op
    cpu = torch.device("cpu")
    calls = [
        ((), {}),
        (([1, 2],), {"layout": torch.contiguous_format}),
        (([1, 2], cpu), {"scales": [1.0]}),
        (([3], cpu, 0.5, torch.int32), {"scales": [2.0]}),
        (([3], cpu, 0.25, torch.float32), {"layout": torch.channels_last}),
        (([1, 2], None, 0.5), {}),
    ]

    def gradients() -> list[Any]:
        x = T.clone().requires_grad_()
        return [torch.autograd.grad(op(x, *a, **k).sum(), x)[0].tolist() for a, k in calls]

    before = gradients()
    told = repr(seen)
    seen.clear()
    accelerated()
    assert gradients() == before
    assert repr(seen) == told
    assert "layout': 0" in told  # not torch.contiguous_format
    assert torchop.native.counters(op) == {"native": len(calls)}
    library._destroy()


def test_a_library_with_a_formula(namespace, accelerated):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x * 2, "CPU")
    torch.library.register_autograd(f"{namespace}::op", lambda ctx, g: g * 2, lib=library)
    accelerated()
    x = T.clone().requires_grad_()
    op = getattr(torch.ops, namespace).op
    op(x).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 2.0))
    assert torchop.native.counters(op) == {"native": 1}
    library._destroy()


def test_other_ways_through_a_graph(namespace, accelerated):
    from torch._dynamo import compiled_autograd
    from torch.utils.checkpoint import checkpoint

    def op(x: Tensor, k: float = 2.0) -> Tensor:
        return x.exp() * k

    handle = stock(namespace, op)
    handle.register_autograd(
        lambda ctx, g: (g * ctx.saved_tensors[0], None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    accelerated()
    x = T.clone().requires_grad_()
    expected = x.detach().exp() * 2

    def grad(run: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(run(x).sum(), x)[0]

    assert torch.equal(grad(handle), expected)
    for use_reentrant in (True, False):
        run = functools.partial(checkpoint, handle, use_reentrant=use_reentrant)
        x.grad = None
        run(x).sum().backward()
        assert torch.equal(x.grad, expected)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        assert torch.equal(grad(handle), expected)
    assert len(packed) == 1
    x.grad = None
    # PyTorch's trace reads the gradient of a saved output, and warns of that.
    with compiled_autograd._enable(torch.compile(backend="eager")), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle(x).sum().backward()
    assert torch.equal(x.grad, expected)
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(grad(handle), expected)
    counted = torchop.native.counters(handle)
    assert counted["anomaly"] == 1
    assert counted["native"] >= 5
    assert torch.equal(torch.func.grad(lambda x: x.exp().sum())(T), T.exp())


def test_four_threads(namespace, accelerated):
    def op(x: Tensor, k: int = 2) -> Tensor:
        return x * k

    handle = stock(namespace, op)
    handle.register_autograd(
        lambda ctx, g: (g * ctx.k, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "k", inputs[1]),
    )
    accelerated()
    wrong = []

    def work(k: int) -> None:
        for _ in range(500):
            x = torch.ones(2, requires_grad=True)
            handle(x, k).sum().backward()
            if x.grad[0].item() != k:
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        handle.register_kernel("cpu")(lambda x, k=2: x * k)
        acceleration = torchop.accelerate(f"{namespace}::*")
        acceleration.undo()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_calls_keep_nothing(namespace, accelerated):
    def op(x: Tensor, k: int = 2) -> tuple[Tensor, Tensor]:
        return x * k, x + k

    handle = stock(namespace, op)
    accelerated()
    handle(T)
    x, kernel = T.clone(), handle._init_fn
    before = sys.getrefcount(x), sys.getrefcount(kernel), sys.getrefcount(None)
    for _ in range(2000):
        handle(x, 3)
    after = sys.getrefcount(x), sys.getrefcount(kernel), sys.getrefcount(None)
    assert before[:2] == after[:2]
    assert abs(before[2] - after[2]) < 100


def test_what_is_freed_is_freed(namespace, accelerated, seen):
    handle = with_formula(namespace, seen)
    accelerated()
    x = T.clone().requires_grad_()
    first, _ = handle(x, 2)
    node, tensor = weakref.ref(first.grad_fn), weakref.ref(first)
    del first, _
    gc.collect()
    assert node() is None
    assert tensor() is None


# --------------------------------------------------------------------------------------------------
# Everything else


def test_versions_are_counted(namespace, accelerated):
    def op(x: Tensor, ys: Sequence[Tensor]) -> None:
        x.zero_()

    handle = stock(namespace, op, mutates_args={"x", "ys"})
    accelerated()
    x, y, z = T.clone(), T.clone(), T.clone()
    handle(x, [y, z])
    assert (x._version, y._version, z._version) == (2, 1, 1)
    leaf = torch.ones(4, requires_grad=True)
    saved = leaf * x
    handle(x, [y])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
    assert torchop.native.counters(handle) == {"native": 2}


def test_none_for_what_is_written_is_passed_over_as_before(namespace, accelerated):
    def op(x: Tensor, y: Tensor | None) -> None:
        x.zero_()

    handle = stock(namespace, op, mutates_args={"x", "y"})
    assert_same(accelerated, handle, lambda: handle(T.clone(), None))


def test_a_tensor_of_inference_mode_is_refused_as_before(namespace, accelerated):
    def op(x: Tensor) -> None:
        x.numpy()[0] = 1

    handle = stock(namespace, op, mutates_args={"x"})
    with torch.inference_mode():
        x = T.clone()
    before = outcome(lambda: handle(x))
    accelerated()
    assert outcome(lambda: handle(x)) == before
    with torch.inference_mode():
        handle(x)
    assert torchop.native.counters(handle) == {"mutation": 1, "native": 1}


def test_rules_keep_their_meaning(namespace, accelerated, seen):
    def op(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x + 1

    handle = stock(namespace, op)
    handle.register_fake(lambda x: torch.empty_like(x))
    handle.register_vmap(lambda info, in_dims, x: (handle(x), in_dims[0]))
    torch.library.register_autocast(handle, "cpu", torch.bfloat16)

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    accelerated()
    assert handle(T.to("meta")).device.type == "meta"
    assert torch.equal(torch.vmap(handle)(torch.ones(2, 3)), torch.full((2, 3), 2.0))
    with torch.autocast("cpu"):
        assert handle(T).dtype is torch.bfloat16
    with Mode():
        handle(T)
    assert f"{namespace}.op.default" in seen
    counted = torchop.native.counters(handle)
    assert counted["keys"] >= 1  # meta
    assert counted["autocast"] == 1
    assert counted["thread"] >= 1
    assert torchop.explain(handle, T).native


def test_compiled_graphs_call_natively(namespace, accelerated):
    def op(x: Tensor) -> Tensor:
        return x + 1

    handle = stock(namespace, op)
    handle.register_fake(lambda x: torch.empty_like(x))
    accelerated()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def program(x):
        return handle(x * 2) + getattr(torch.ops, namespace).op(x)

    expected = (T * 2 + 1) + (T + 1)
    assert torch.equal(program(T), expected)
    before = torchop.native.counters(handle)["native"] if torchop.native.counters(handle) else 0
    assert torch.equal(program(T), expected)
    assert torchop.native.counters(handle)["native"] == before + 2


def test_turning_native_calls_off(namespace, accelerated):
    def op(x: Tensor) -> Tensor:
        return x + 1

    handle = stock(namespace, op)
    accelerated()
    with torchop.native.disabled():
        assert torch.equal(handle(T), T + 1)
    assert torchop.native.counters(handle) == {"switched_off": 1}
    explanation = torchop.explain(handle, T)
    assert explanation.kernels[-1].startswith("kernel: ")
    assert "test_turning_native_calls_off" in explanation.kernels[-1]


def test_a_python_frame_is_spared(namespace, accelerated, seen):
    def op(x: Tensor) -> Tensor:
        seen.append(sys._getframe(1).f_code.co_name)
        return x + 1

    handle = stock(namespace, op)
    handle(T)
    accelerated()
    handle(T)
    assert seen == ["wrapped_fn", "test_a_python_frame_is_spared"]


def test_an_operator_of_torchop_keeps_its_own_native_calls(namespace, accelerated):
    @torchop.custom_op(f"{namespace}::ours", mutates_args=())
    def ours(x: Tensor) -> Tensor:
        return x + 1

    library = torchop.Library(namespace, "FRAGMENT")
    library.define("low(Tensor x) -> Tensor")
    library.impl("low", lambda x: x + 2, "CPU")
    low = getattr(torch.ops, namespace).low
    acceleration = accelerated()
    low(T), low(T), ours(T)
    assert torchop.native.counters(ours)["native"] == 1
    assert torchop.native.counters(low)["native"] >= 1
    assert [row.reason for row in acceleration.operators] == [
        "it was made with torchop, which makes its calls native"
    ] * 2
    library.close() if hasattr(library, "close") else library._destroy()


def test_a_later_kernel_of_torchops_takes_the_operator_over(namespace, accelerated):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    acceleration = accelerated()
    torchop.impl(f"{namespace}::op", "CPU", lambda x: x + 2, lib=library)
    op = getattr(torch.ops, namespace).op
    assert torch.equal(op(T), T + 2)
    assert torch.equal(op(T), T + 2)
    acceleration.undo()
    assert torch.equal(op(T), T + 2)
    library._destroy()


def test_an_operator_that_is_destroyed_is_let_go(namespace, accelerated):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x + 1, "CPU")
    overload = getattr(torch.ops, namespace).op.default
    acceleration = accelerated()
    overload(T)
    known = operator.find(torchop._schema.naming.parse(f"{namespace}::op"))
    assert known is not None
    library._destroy()
    assert operator.find(known.name) is None
    assert type(overload._op).__name__ == "builtin_function_or_method"
    assert acceleration.operators == ()


def test_a_redefinition_is_accelerated_too(namespace, accelerated):
    def op(x: Tensor) -> Tensor:
        return x + 1

    first = stock(namespace, op)
    acceleration = accelerated()
    first(T)

    def op(x: Tensor, y: Tensor) -> Tensor:
        return x - y

    second = stock(namespace, op)
    assert torch.equal(second(T, T), T - T)
    assert torchop.native.counters(second) == {"native": 1}
    assert len(acceleration.operators) == 1
