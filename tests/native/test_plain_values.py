"""Native calls convert instances of subclasses of int, float and str."""

from __future__ import annotations

import enum
from typing import Any

import numpy
import pytest
import torch

import torchop
from tests._support.common import counting, needs_native, outcome
from tests.native.scenarios import T, define, inputs

pytestmark = needs_native


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


class Mode(str, enum.Enum):
    MEAN = "mean"


class _Raising:
    """Methods that raise. No call may run them, because the dispatcher reads the value in C."""

    def _refuse(self, *args: Any) -> Any:
        raise AssertionError

    __index__ = __int__ = __str__ = __repr__ = __bool__ = __eq__ = _refuse


class Int(_Raising, int):
    pass


class Float(_Raising, float):
    __float__ = _Raising._refuse


class Str(_Raising, str):
    pass


class ReadAsFloat(int):
    def __float__(self) -> float:
        return 79.5


class Overriding(int):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return T + 100


class Answering(int):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


# Maps each schema type to values that native calls accept and convert.
TAKEN: dict[str, list[Any]] = {
    "int": [Level.HIGH, Access.READ | Access.WRITE, True, False, Int(5), Int(2**63 - 1)],
    "SymInt": [Level.HIGH, True, Int(-(2**63))],
    "float": [Level.HIGH, True, Float(2.5), numpy.float64(2.5), Float("nan"), Float("inf")],
    "str": [Mode.MEAN, Str("é\0"), numpy.str_("mean")],
    "Scalar": [Level.HIGH, True, Int(5), Float(2.5), numpy.float64(-1.5)],
}
# Maps each schema type to values that native calls leave to the dispatcher, which converts or
# rejects them.
LEFT: dict[str, list[Any]] = {
    "int": [Int(2**63), Float(2.0), Mode.MEAN, numpy.int64(3), Overriding(3), Answering(3)],
    "SymInt": [Int(2**63), Overriding(3)],
    "float": [ReadAsFloat(1), Float(-0.0), numpy.float32(2.5), Overriding(3), Mode.MEAN],
    "str": [Str("\ud800"), Level.HIGH, b"mean"],
    "Scalar": [Int(2**63), Float(-0.0), Overriding(3), Mode.MEAN],
    "bool": [Level.HIGH, 1, 0.0],
}
# Maps each variant of a schema type, such as a list, to a function that makes an argument of that
# type from a value.
PASSED: dict[str, Any] = {
    "{}": lambda value: value,
    "{}?": lambda value: value,
    "{}[]": lambda value: [value, value],
    "{}[]?": lambda value: (value,),
}


def described(value: Any) -> str:
    if type(value) is list:
        return f"[{', '.join(map(described, value))}]"
    if type(value) not in (int, float, bool, str):
        return f"not plain: {type(value).__name__}"
    return f"{type(value).__name__} {value!r}"


def received(made: Any, seen: list[Any], *args: Any) -> Any:
    seen.clear()
    found = outcome(lambda: made.call(T, *args))
    if isinstance(found, torch.Tensor):
        found = found.tolist()
    return found, [described(value) for value in seen]


@pytest.mark.pairwise
@pytest.mark.parametrize("form", PASSED)
@pytest.mark.parametrize("kind", TAKEN)
def test_a_kernel_gets_the_plain_value_natively(make, kind, form):
    seen: list[Any] = []

    def op(x, value):
        seen.append(value)
        return x + 1

    values = list(map(PASSED[form], TAKEN[kind]))
    made = make(op, f"(Tensor x, {form.format(kind)} value) -> Tensor", values[0])
    with torchop.native.disabled():
        expected = [received(made, seen, value) for value in values]
    assert [result for result, _ in expected] == [[1, 1]] * len(values)
    assert "not plain" not in str(expected)
    with counting(made.name) as calls:
        assert [received(made, seen, value) for value in values] == expected
    assert calls == {"native": len(values)}


@pytest.mark.pairwise
@pytest.mark.parametrize("form", PASSED)
@pytest.mark.parametrize("kind", LEFT)
def test_other_values_are_dispatched(make, kind, form):
    seen: list[Any] = []

    def op(x, value):
        seen.append(value)
        return x + 1

    plain: Any = {"str": "a", "float": 0.5, "bool": True}.get(kind, 1)
    values = list(map(PASSED[form], LEFT[kind]))
    made = make(op, f"(Tensor x, {form.format(kind)} value) -> Tensor", PASSED[form](plain))
    with torchop.native.disabled():
        expected = [received(made, seen, value) for value in values]
    with counting(made.name) as calls:
        assert [received(made, seen, value) for value in values] == expected
    assert calls == {"argument_type": len(values)}


@pytest.mark.pairwise
@pytest.mark.filterwarnings("ignore:.* has the default None in the function")
@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("int value=3", Level.HIGH),
        ("int value=1", True),
        ("float value=3.0", Level.HIGH),
        ("float value=2.5", numpy.float64(2.5)),
        ('str value="mean"', Mode.MEAN),
        ("Scalar value=3", Level.HIGH),
        ("Scalar value=3.0", Level.HIGH),
        ("int[] value=[3]", [Level.HIGH]),
    ],
)
def test_a_value_that_equals_the_default(make, parameter, value):
    """The dispatcher omits a value that equals the default, so the kernel's own default applies."""
    seen: list[Any] = []

    def op(x, value=None, *, named=None):
        seen.append((value, named))
        return x + 1

    named = parameter.replace("value", "named")
    made = make(op, f"(Tensor x, {parameter}, *, {named}) -> Tensor")
    for disabled in (True, False):
        before = len(seen)
        with torchop.native.disabled() if disabled else counting(made.name) as calls:
            made.call(T, value, named=value)
            made.call(T, named=value)
        assert len(seen) == before + 2
    assert calls == {"native": 2}
    assert repr(seen[-2:]) == repr(seen[-4:-2])


def test_setup_context_gets_the_plain_value(namespace):
    seen: list[Any] = []

    def setup_context(ctx, inputs, keyword_only_inputs, output):
        seen.append([*map(described, inputs[1:]), *map(described, keyword_only_inputs.values())])
        ctx.scale = inputs[1]

    op = define(
        namespace,
        lambda x, scale, mode, levels, *, extra: x * scale + extra,
        "(Tensor x, float scale, str mode, int[] levels, *, int extra) -> Tensor",
    )
    op.register_autograd(
        lambda ctx, grad: (grad * ctx.scale, None, None, None), setup_context=setup_context
    )
    x = inputs(True)
    arguments = (Level.HIGH, Mode.MEAN, [Level.LOW, True])
    op(x, *arguments, extra=Level.LOW)
    with counting(op) as calls:
        result = op(x, *arguments, extra=Level.LOW)
    assert calls == {"native": 1}
    with torchop.native.disabled():
        op(x, *arguments, extra=Level.LOW)
    assert seen == [["float 3.0", "str 'mean'", "[int 1, int 1]", "int 1"]] * 3
    assert result.tolist() == [1, 1]
    assert torch.autograd.grad(result.sum(), x)[0].tolist() == [3, 3]
