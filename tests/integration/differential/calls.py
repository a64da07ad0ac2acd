"""Generate calls: the arguments and the way to pass them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from tests._support.opaque_types import (
    CONSTANT,
    REFERENCE,
    Computing,
    Constant,
    Derived,
    Overriding,
    Reference,
    Slotted,
    Touchy,
)
from tests.integration.differential.chance import one_in
from tests.integration.differential.spec import Kind, OperatorSpec, Parameter
from tests.integration.differential.tensors import TensorSpec, tensors


class Same(NamedTuple):
    """Stands for the tensor with this number among the call's arguments, which is passed again."""

    number: int


class Items(NamedTuple):
    items: tuple[Any, ...]
    type: type = list

    def __repr__(self) -> str:
        return f"{self.type.__name__}({list(self.items)!r})"


class OurList(list):  # type: ignore[type-arg]
    pass


class Passed(NamedTuple):
    name: str | None
    value: Any

    def __repr__(self) -> str:
        return repr(self.value) if self.name is None else f"{self.name}={self.value!r}"


class CallSpec(NamedTuple):
    arguments: tuple[Passed, ...]
    through: str = "handle"  # or "packet", or "overload"

    def __repr__(self) -> str:
        return f"{self.through}({', '.join(map(repr, self.arguments))})"


class Arguments:
    def __init__(self, call: CallSpec) -> None:
        self.tensors: list[Tensor] = []
        self._call = call
        self._values = [self._make(passed.value) for passed in call.arguments]

    def _make(self, value: Any) -> Any:
        if isinstance(value, TensorSpec):
            self.tensors.append(value.make())
            return self.tensors[-1]
        if isinstance(value, Same):
            return self.tensors[value.number % len(self.tensors)] if self.tensors else None
        if isinstance(value, Items):
            return value.type([self._make(item) for item in value.items])
        return value

    def pass_to(self, function: Callable[..., Any], tensors: list[Tensor] | None = None) -> Any:
        """Call a function, optionally with other tensors in place of the generated ones."""
        replaced = {} if tensors is None else dict(zip(map(id, self.tensors), tensors, strict=True))
        values = self._values if tensors is None else [_replace(v, replaced) for v in self._values]
        args, kwargs = [], {}
        for passed, value in zip(self._call.arguments, values, strict=True):
            if passed.name is None:
                args.append(value)
            else:
                kwargs[passed.name] = value
        return function(*args, **kwargs)

    @property
    def values(self) -> list[Any]:
        return self._values


def _replace(value: Any, replaced: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return replaced.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return type(value)([_replace(item, replaced) for item in value])
    return value


# --------------------------------------------------------------------------------------------------
# Strategies


class Level(enum.IntEnum):
    """Members are passed as arguments. Kernels must get the plain integers instead."""

    ZERO = 0
    THREE = 3


class Mode(str, enum.Enum):
    """Members are passed as arguments. Kernels must get the plain string instead."""

    MEAN = "mean"


class OurFloat(float):
    pass


_integers = st.sampled_from([0, 1, -1, 3, 7, 2**62, -(2**63), 2**63 - 1, *Level, True])
_floats = st.sampled_from(
    [
        *(0.0, 1.0, -1.5, 0.25, 1e300, float("inf"), float("nan"), 3.0),
        *(OurFloat(0.25), numpy.float64(1.5), Level.THREE, False),
    ]
)
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "SymInt": _integers,
    "int": _integers,
    "float": _floats,
    "bool": st.booleans(),
    "str": st.sampled_from(["", "mean", "é\n", "a" * 100, Mode.MEAN, numpy.str_("é")]),
    "Scalar": st.one_of(_integers, _floats, st.booleans()),
    "ScalarType": st.sampled_from([torch.float32, torch.int64, torch.complex64, torch.bool]),
    "Device": st.sampled_from([torch.device("cpu"), torch.device("cpu", 0), torch.device("meta")]),
    "Layout": st.sampled_from([torch.strided, torch.sparse_coo]),
    "MemoryFormat": st.sampled_from([torch.contiguous_format, torch.preserve_format]),
    "Generator": st.just(torch.default_generator),
    REFERENCE: st.one_of(
        st.sampled_from([Reference(1), Reference(1), Derived(2), None]), st.builds(Touchy)
    ),
    CONSTANT: st.sampled_from([Constant(1), Constant(1), Constant(2), Slotted(), 3]),
    "NoneType": st.none(),
    "Any": st.one_of(
        st.none(), _integers, _floats, st.sampled_from([True, "mean", 1j, torch.device("cpu")])
    ),
}

# Arguments of incorrect or unusual types, which the dispatcher converts or rejects.
_ODD: tuple[Any, ...] = (
    *(-0.0, 1, 2**64, -(2**63) - 1, 10**400, True, 1.5, 2.0, 1j, None, "cpu", "mean", b"bytes", ()),
    *(numpy.float64(1.5), numpy.int64(3), numpy.bool_(True), numpy.float32(-0.0), numpy.ones(2)),
    *(torch.float32, torch.strided, torch.device("cpu"), torch.channels_last, object, float("nan")),
    *(Reference(1), Constant(1), Overriding(), Computing()),
    *(torch.Size([1, 2]), {}, 0, "\ud800", torch.default_generator, range(3), numpy.str_("mean")),
)


class _Odd(int):
    """An int whose `__float__` returns a different number."""

    def __float__(self) -> float:
        return 7.5


class _OddFloat(float):
    """A float whose `__float__` must not be called, because C reads its value directly."""

    def __float__(self) -> float:
        raise AssertionError


class _Overriding(int):
    """An int whose `__torch_function__` intercepts the call."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return torch.ones(3)


@st.composite
def _values(draw: DrawFn, kind: Kind, focus: str) -> Any:
    if kind.is_optional and draw(one_in(4 if kind.holds_tensors else 2)):
        return None
    if kind.base == "Tensor":
        single: st.SearchStrategy[Any] = tensors(focus)
        if draw(one_in(8)):
            single = st.builds(Same, st.integers(0, 2))
        if kind.schema.startswith("Tensor?["):
            single = st.one_of(st.none(), single, single)
    else:
        single = _VALUES[kind.base]
    if not kind.is_list:
        return draw(single)
    if kind.schema == "int[2]":
        items = (draw(single), draw(single))
    else:
        # Generate few empty lists of tensors, because without a tensor there is no device.
        least = 1 if kind.holds_tensors and not draw(one_in(8)) else 0
        items = tuple(draw(st.lists(single, min_size=least, max_size=3)))
    return Items(items, draw(st.sampled_from([list, list, tuple])))


# For these types, PyTorch accepts any number or tensor, and crashes if the value is out of range.
# So omit values that it could convert to a number.
_ENUMERATIONS = ("ScalarType", "Layout", "MemoryFormat")
_NO_NUMBERS = tuple(value for value in _ODD if not hasattr(value, "__index__"))
_NO_NUMBERS = tuple(value for value in _NO_NUMBERS if not hasattr(value, "__float__"))


@st.composite
def _odd_values(draw: DrawFn, kind: Kind) -> Any:
    if kind.base in _ENUMERATIONS:
        return draw(st.sampled_from(_NO_NUMBERS))
    odd = st.one_of(
        st.sampled_from(_ODD),
        st.sampled_from([_Odd(3), _Odd(2**63), _OddFloat(1.5), _OddFloat(-0.0), _Overriding(3)]),
        st.builds(Touchy),
        tensors(),
        st.just(TensorSpec(shape=())),
    )
    if kind.is_list and draw(st.booleans()):
        container = st.sampled_from([list, tuple, OurList])
        return Items(tuple(draw(st.lists(odd, min_size=1, max_size=3))), draw(container))
    return draw(odd)


@st.composite
def calls(draw: DrawFn, spec: OperatorSpec, focus: str = "plain") -> CallSpec:
    first_keyword = draw(st.sampled_from([99, 99, 0, 1, 2]))
    positional: list[Passed] = []
    keywords: list[Passed] = []
    for index, parameter in enumerate(spec.parameters):
        value = draw(_values(parameter.kind, focus))
        if parameter.has_default and draw(st.booleans()):
            if draw(st.booleans()):
                # Leave this argument out. The arguments after it must then be passed by keyword.
                first_keyword = min(first_keyword, index)
                continue
            value = _default(parameter)
        if parameter.keyword_only or index >= first_keyword:
            keywords.append(Passed(parameter.name, value))
        else:
            positional.append(Passed(None, value))
    if draw(st.booleans()):
        keywords = draw(st.permutations(keywords))
    arguments = [*positional, *keywords]
    if focus == "binding":
        arguments = _misplaced(draw, spec, arguments)
    elif focus == "argument type" and arguments:
        place = draw(st.integers(0, len(arguments) - 1))
        kinds = {p.name: p.kind for p in spec.parameters}
        name = arguments[place].name
        kind = spec.parameters[place].kind if name is None else kinds[name]
        arguments[place] = arguments[place]._replace(value=draw(_odd_values(kind)))
    through = draw(st.sampled_from(["handle", "handle", "packet", "overload"]))
    return CallSpec(tuple(arguments), through)


def _default(parameter: Parameter) -> Any:
    value = parameter.default_value
    return Items(tuple(value)) if isinstance(value, list) else value


def _misplaced(draw: DrawFn, spec: OperatorSpec, arguments: list[Passed]) -> list[Passed]:
    how = draw(st.sampled_from(["too many", "unknown", "twice", "too few", "none", "not a word"]))
    if how == "too many":
        return [Passed(None, 1), *arguments]
    if how == "unknown":
        return [*arguments, Passed("unknown", 1)]
    if how == "twice" and spec.parameters:
        name = spec.parameters[0].name
        kept = [passed for passed in arguments if passed.name != name]
        return [Passed(None, TensorSpec()), *kept, Passed(name, TensorSpec())]
    if how == "too few":
        return arguments[:-1]
    if how == "none":
        return []
    return [*arguments, Passed("not a word", None)]
