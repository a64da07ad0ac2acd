"""The kernels of accelerated operators get the same arguments as from the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native, outcome
from tests._support.devices import BACKEND
from tests.accelerate.support import T, assert_same, stock
from torchop.extend import Schema


def schema(text: str) -> Schema:
    return Schema(torch._C.parse_schema(f"f{text} -> Tensor"))


# --------------------------------------------------------------------------------------------------
# Arguments of calls


@needs_native
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


@needs_native
def test_an_int_for_a_float_reaches_the_kernel_as_a_float(namespace, accelerated, library, seen):
    library.define(
        "op(Tensor x, float a, float? b=None, float c=0., float[] d=[], int e=0, *, float f=2.0) "
        "-> Tensor"
    )
    library.impl(
        "op", lambda *args, **kwargs: seen.append((args[1:], kwargs)) or T.clone(), BACKEND
    )
    op = getattr(torch.ops, namespace).op
    numbers = [2, 1, 2, 3]
    calls = [
        lambda: op(T, 1),
        lambda: op(T, -3, 4, 0, (1, 2.5), 7),  # for one argument, 0 is the default
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
    assert numbers == [2, 1, 2, 3]  # the caller's list is unchanged
    assert torchop.native.counters(op.default) == {"native": len(calls)}
    too_large = [lambda: op(T, 10**400), lambda: op(T, 1.0, 1, 1, [10**400])]
    found = [outcome(call) for call in too_large]
    with torchop.native.disabled():
        assert found == [outcome(call) for call in too_large]
    assert torchop.native.counters(op.default)["argument_type"] == 2


@needs_native
def test_setup_context_gets_converted_numbers(namespace, accelerated, seen):
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


@needs_native
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
    assert repr(seen[0]) == "(1, (1, 2), None)"  # the kernel's own default for `scale` is an int
    assert repr(seen[3]) == "(1.0, [2, 1], 3.0)"
