from __future__ import annotations

import enum
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import counting, needs_native, outcome
from tests._support.opaque_types import (
    CONSTANT,
    REFERENCE,
    Constant,
    Derived,
    Impostor,
    OfNoClass,
    OfTouchyClass,
    Overriding,
    Reference,
    Slotted,
    Touchy,
)
from tests.native.scenarios import Makers

pytestmark = needs_native

T = torch.arange(3.0)


class Color(enum.Enum):
    RED = 1


def dispatched(op: Any, *args: Any, **kwargs: Any) -> Any:
    with torchop.native.disabled():
        return outcome(lambda: op(*args, **kwargs))


OBJECTS: dict[str, Any] = {
    "reference": Reference(3),
    "constant": Constant(3),
    "subclass": Derived(3),
    "another class": Slotted(),
    "None": None,
    "enum": Color.RED,
    "int of 70 bits": 2**70,
    "negative zero": -0.0,
    "str": "\ud800",
    "function": len,
    "dtype": torch.float32,
    "touchy": Touchy(),
    "of a touchy class": OfTouchyClass(),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("what", OBJECTS)
@pytest.mark.parametrize("kind", [REFERENCE, CONSTANT, f"{REFERENCE}?"])
def test_kernel_gets_the_same_object(make, what, kind):
    seen: list[Any] = []
    op = make(lambda x, a: seen.append(a) or x + 1, f"(Tensor x, {kind} a) -> Tensor", Constant(1))
    seen.clear()
    value = OBJECTS[what]
    expected = dispatched(op.call, T, value)
    with counting(op.name) as calls:
        assert torch.equal(op.call(T, value), expected)
        assert torch.equal(op.call(T, a=value), expected)
    assert calls == {"native": 2}
    assert len(seen) == 3
    assert all(got is value for got in seen)


class WithRaisingFunction:
    @property
    def __torch_function__(self):
        raise KeyError("not yet")


class WithAttributes:
    def __getattr__(self, name):
        if name != "__torch_function__":
            raise AttributeError(name)
        return lambda func, types, args=(), kwargs=None: "computed"


def with_own_function() -> Any:
    value = Reference(1)
    value.__torch_function__ = lambda func, types, args=(), kwargs=None: "its own"
    return value


LOOKED_INTO: dict[str, Callable[[], Any]] = {
    "__torch_function__": Overriding,
    "__torch_function__ that raises": WithRaisingFunction,
    "__torch_function__ of its own": with_own_function,
    "attributes": WithAttributes,
    "no class": OfNoClass,
    "mock": unittest.mock.MagicMock,
    "class": lambda: Reference,
    "tensor": lambda: torch.ones(2),
    "tensor that requires grad": lambda: torch.ones(2, requires_grad=True),
    "list": lambda: [torch.ones(1)],
    "tuple": lambda: (torch.ones(1),),
    "dict": lambda: {"a": torch.ones(1)},
}


@pytest.mark.pairwise
@pytest.mark.parametrize("what", LOOKED_INTO)
@pytest.mark.parametrize("in_list", [False, True])
def test_objects_that_pytorch_inspects_are_dispatched(make, what, in_list):
    value = [LOOKED_INTO[what]()] if in_list else LOOKED_INTO[what]()
    kind = f"{REFERENCE}[]" if in_list else REFERENCE
    warm_up = [Reference(1)] if in_list else Reference(1)
    op = make(lambda x, a: x + 1, f"(Tensor x, {kind} a) -> Tensor", warm_up)
    expected = dispatched(op.call, T, value)
    with counting(op.name) as calls:
        found = outcome(lambda: op.call(T, value))
    assert calls == {"argument_type": 1}
    assert type(found) is type(expected)
    assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected
    if what != "no class":  # for "no class", `explain` raises, because it reads `__class__`
        reason = torchop.explain(op.name, T, value).reason
        assert f"'a' {'has' if in_list else 'is'} an object that PyTorch may inspect" in reason


def test_class_attributes_are_not_read_more_often_than_by_the_dispatcher(make):
    asked: list[int] = []

    class Asked:
        @property
        def __torch_function__(self):
            asked.append(1)
            raise KeyError

    op = make(lambda x, a: x + 1, f"(Tensor x, {REFERENCE} a) -> Tensor", Reference(1))
    dispatched(op.call, T, Asked())
    expected = len(asked)
    assert expected > 0
    asked.clear()
    assert torch.equal(op.call(T, Asked()), T + 1)
    assert len(asked) == expected


@pytest.mark.parametrize(
    ("value", "overrides"),
    [
        # The dispatcher looks only at the first object, which has no override.
        ([Reference(1), Overriding()], False),
        ([Overriding(), Reference(1)], True),
    ],
)
def test_lists_with_an_override_are_dispatched(make, value, overrides):
    op = make(lambda x, a: x + 1, f"(Tensor x, {REFERENCE}[] a) -> Tensor", [])
    expected = dispatched(op.call, T, value)
    assert (expected == "overridden") if overrides else torch.equal(expected, T + 1)
    with counting(op.name) as calls:
        found = op.call(T, value)
    assert calls == {"argument_type": 1}
    assert (found == expected) if overrides else torch.equal(found, expected)


LISTS = {
    f"{REFERENCE}[]": [[], [Reference(1), Derived(2), None, 5, Touchy()], (Slotted(),)],
    f"{REFERENCE}[]?": [None, [Reference(1)], ()],
    f"{REFERENCE}?[]": [[None, Reference(1)], []],
    "Any[]": [[1, "a", None, 2.5], (), [True]],
    "Any[]?": [None, [3]],
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_objects_are_new_lists(make, kind):
    seen: list[Any] = []
    op = make(lambda x, a: seen.append(a) or x + 1, f"(Tensor x, {kind} a) -> Tensor", [])
    for value in LISTS[kind]:
        seen.clear()
        dispatched(op.call, T, value)
        with counting(op.name) as calls:
            op.call(T, value)
        assert calls == {"native": 1}
        expected, got = seen
        assert (got is None) is (expected is None) is (value is None)
        if value is not None:
            assert type(got) is type(expected) is list
            assert got is not value
            assert list(map(id, got)) == list(map(id, value)) == list(map(id, expected)) or (
                "Any" in kind and got == expected
            )


def test_only_none_is_accepted_for_none(make):
    seen: list[Any] = []
    op = make(lambda x, a: seen.append(a) or x + 1, "(Tensor x, NoneType a) -> Tensor", None)
    with counting(op.name) as calls:
        op.call(T, None)
    assert calls == {"native": 1}
    assert seen == [None, None]
    for value in (0, False, Reference(1), Touchy(), torch.ones(1)):
        expected = dispatched(op.call, T, value)
        assert "Expected a value of type 'NoneType'" in expected[1]
        with counting(op.name) as calls:
            assert outcome(lambda value=value: op.call(T, value)) == expected
        assert calls == {"argument_type": 1}


PLAIN = [None, True, 3, -(2**63), 2.5, -0.0, float("inf"), "é", "", 1j, torch.device("cpu")]
INFERRED = [
    2**70,
    "\ud800",
    torch.float32,
    torch.strided,
    torch.contiguous_format,
    Color.RED,
    Reference(1),
    [1],
    (1, "x"),
    {"a": 1},
    [],
    torch.Size([2]),
    b"x",
    len,
]


@pytest.mark.parametrize("kind", ["Any", "Any?"])
def test_plain_values_are_accepted_for_any(make, kind):
    seen: list[Any] = []
    op = make(lambda x, a: seen.append(a) or x + 1, f"(Tensor x, {kind} a) -> Tensor", None)
    for value in PLAIN:
        seen.clear()
        dispatched(op.call, T, value)
        with counting(op.name) as calls:
            op.call(T, value)
        assert calls == {"native": 1}
        assert [repr(item) for item in seen] == [repr(value)] * 2
        assert type(seen[0]) is type(seen[1]) is type(value)
    for value in INFERRED:
        seen.clear()
        expected = dispatched(op.call, T, value)
        with counting(op.name) as calls:
            found = outcome(lambda value=value: op.call(T, value))
        assert calls == {"argument_type": 1}
        assert type(found) is type(expected)
        if isinstance(found, tuple):
            assert found == expected
        else:
            assert type(seen[0]) is type(seen[1])


@pytest.mark.parametrize("kind", [f"{REFERENCE}?", "Any?"])
def test_defaults(make, kind):
    seen: list[Any] = []

    def kernel(x: Tensor, a: Any = None, *, b: Any = None) -> Tensor:
        seen.append((a, b))
        return x + 1

    op = make(kernel, f"(Tensor x, {kind} a=None, *, {kind} b=None) -> Tensor")
    value = Reference(1) if "Any" not in kind else 4
    with counting(op.name) as calls:
        op.call(T, b=value)
        op.call(T, value)
        op.call(T, a=value, b=None)
    assert calls == {"native": 3}
    assert seen[1:] == [(None, value), (value, None), (value, None)]


RESULTS = {
    "PyObject": (f"{REFERENCE}", lambda x, a: a),
    "None": (f"{REFERENCE}?", lambda x, a: None),
    "with a tensor": (f"(Tensor, {REFERENCE})", lambda x, a: (x + 1, a)),
    "of any class": (f"({REFERENCE}, Tensor)", lambda x, a: (Touchy, x + 1)),
    "a list for a tuple": (f"({REFERENCE}, Tensor)", lambda x, a: [a, x + 1]),
    "a parameter": (f"({REFERENCE}, Tensor)", lambda x, a: (a, torch.nn.Parameter(x + 1))),
    "no tensor": (f"({REFERENCE}, Tensor)", lambda x, a: (a, 5)),
}


@pytest.mark.parametrize("what", RESULTS)
def test_objects_are_returned(make, what):
    returns, kernel = RESULTS[what]
    value = Reference(4)
    good = [True]
    op = make(
        lambda x, a: kernel(x, a) if not good[0] else RESULTS[GOOD[returns]][1](x, a),
        f"(Tensor x, {REFERENCE} a) -> {returns}",
        value,
    )
    good[0] = False
    expected = dispatched(op.call, T, value)
    with counting(op.name) as calls:
        found = outcome(lambda: op.call(T, value))
    assert calls == {"native": 1}
    assert type(found) is type(expected)
    for one, other in zip(*map(parts, (found, expected)), strict=True):
        assert type(one) is type(other)
        assert one is other or (
            torch.equal(one, other) if isinstance(one, Tensor) else one == other
        )


GOOD = {
    f"{REFERENCE}": "PyObject",
    f"{REFERENCE}?": "None",
    f"(Tensor, {REFERENCE})": "with a tensor",
    f"({REFERENCE}, Tensor)": "a list for a tuple",
}


def parts(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("how", ["custom_op", "stock_custom_op"])
@pytest.mark.parametrize("with_list", [False, True])
def test_gradients_are_recorded(namespace, how, with_list):
    made: dict[str, Any] = {}
    value, nothing = Reference(5), Touchy()

    def kernel(x, a, xs, b, c):
        return x * a.number

    def setup_context(ctx, inputs, output):
        made["inputs"] = inputs
        ctx.a = inputs[1]

    def backward(ctx, grad):
        made["needs"] = ctx.needs_input_grad
        rest = ([None] if with_list else None), None, None
        return grad * ctx.a.number, None, *rest

    kind = "Tensor[]" if with_list else "Tensor"
    schema = f"(Tensor x, {REFERENCE} a, {kind} xs, {REFERENCE} b, NoneType c) -> Tensor"
    makers = Makers(namespace)
    op = getattr(makers, how)(kernel, schema)
    op.register_autograd(backward, setup_context=setup_context)
    x = T.clone().requires_grad_()
    arguments = (x, value, [T] if with_list else T, nothing, None)
    seen = []
    try:
        op(*arguments)
        for native in (False, True):
            x.grad = None
            with counting(op) as calls:
                result = op(*arguments) if native else dispatched(op, *arguments)
            result.sum().backward()
            assert calls == ({"native": 1} if native else {"switched_off": 1})
            assert made["inputs"][1] is value
            assert made["inputs"][3] is nothing
            seen.append((x.grad.tolist(), made["needs"], type(result.grad_fn).__name__))
    finally:
        for undo in makers.undo:
            undo()
    assert seen[0] == seen[1]
    assert seen[0][0] == [5, 5, 5]


# PyTorch treats an object as a tensor if its `__class__` is `torch.Tensor`, and may crash if it is
# not one. Native calls must leave such objects to the dispatcher.
@pytest.mark.parametrize("how", ["low_level", "stock_low_level"])
def test_an_object_that_says_it_is_a_tensor_is_dispatched(namespace, how):
    makers = Makers(namespace)
    schema = f"(Tensor x, {REFERENCE} a) -> Tensor"
    op = getattr(makers, how)(lambda x, a: x + 1, schema)
    op(T, Reference(1))
    with counting(f"{namespace}::op") as calls:
        assert torch.equal(op(T, Impostor()), T + 1)
    assert calls == {"argument_type": 1}
    for undo in reversed(makers.undo):
        undo()
