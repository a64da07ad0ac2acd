"""Arguments of operators of others, as the dispatcher hands them over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native, outcome
from tests._support.devices import BACKEND
from tests.accelerate.support import T, assert_same, counts_versions_once, stock
from torchop._compat import schemas
from torchop._native.table.gradients import _has_simple_defaults
from torchop._schema.schema import Schema


def schema(text: str) -> Schema:
    return Schema(schemas.parse(f"f{text} -> Tensor"))


@pytest.mark.parametrize(
    ("text", "simple"),
    [
        ('(Tensor x, int a=1, float? b=None, str c="c", bool d=True, Scalar e=1)', True),
        ("(Tensor x, ScalarType d=float32)", False),
        ("(Tensor x, ScalarType? d=None)", True),
        ('(Tensor x, Device? d="cpu")', False),
        ("(Tensor x, int[] a=[1])", False),
    ],
)
def test_defaults_that_a_schema_keeps_as_python_has_them(text, simple):
    assert _has_simple_defaults(schema(text)) is simple


# --------------------------------------------------------------------------------------------------
# In calls


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


@needs_native
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


@needs_native
def test_the_shape_of_a_tensor_is_a_list_of_int(namespace, accelerated, seen):
    def op(x: Tensor, size: Sequence[int]) -> Tensor:
        seen.append(size)
        return x.new_zeros(size)

    handle = stock(namespace, op)
    assert_same(accelerated, handle, lambda: handle(T, T.shape), lambda: handle(T, torch.Size([])))
    assert seen == [[4], [], [4], []]
    assert {type(size) for size in seen} == {list}


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
    assert repr(seen[0]) == "(1, (1, 2), None)"  # not what the schema says
    assert repr(seen[3]) == "(1.0, [2, 1], 3.0)"


@needs_native
def test_a_kernel_sees_how_many_arguments_there_are(namespace, accelerated, seen):
    def op(*args, **kwargs) -> Tensor:
        seen.append((len(args), sorted(kwargs)))
        return args[0].clone()

    handle = stock(namespace, op, schema="(Tensor x, int a=1, int b=2, *, int c=3) -> Tensor")
    calls = [lambda: handle(T), lambda: handle(T, 1, 5, c=3), lambda: handle(T, 7, 2, c=4)]
    assert_same(accelerated, handle, *calls)
    assert seen[:3] == seen[3:] == [(1, []), (3, []), (2, ["c"])]


@counts_versions_once
@needs_native
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
