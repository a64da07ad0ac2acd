"""A packet calls the overload that PyTorch would choose.

The call is native if torchop can be certain of the choice.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import torchop
from tests._support.common import needs_native, outcome
from tests._support.strategies import (
    manifold as stable,  # many examples, because the choice of overload depends on many conditions
)

pytestmark = needs_native

T = torch.arange(4.0)


class Subclass(Tensor):
    pass


class Loud:
    def __repr__(self) -> str:
        raise ValueError("its repr raises")


# Arguments by name. Some are tensors with one element, because PyTorch accepts them as numbers.
VALUES: dict[str, Any] = {
    "floats": T,
    "ints": torch.tensor([1, 2]),
    "bools": torch.tensor([True, False]),
    "empty": torch.zeros(0, dtype=torch.int64),
    "one float": torch.tensor(2.0),
    "one int": torch.tensor([3]),
    "one complex": torch.tensor(1j),
    "matrix": torch.ones(2, 2),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.ones(2, device="meta"),
    "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
    "subclass": T.as_subclass(Subclass),
    "None": None,
    "True": True,
    "3": 3,
    "2 ** 70": 2**70,
    "0.5": 0.5,
    "-0.0": -0.0,
    "1j": 1j,
    "'a'": "a",
    "'cpu'": "cpu",
    "surrogate": "\ud800",
    "b'a'": b"a",
    "[]": [],
    "[1, 2]": [1, 2],
    "(0.5,)": (0.5,),
    "[True]": [True],
    "[None]": [None],
    "['a']": ["a"],
    "[[1]]": [[1]],
    "[1, 'a']": [1, "a"],
    "[T]": [T],
    "[T, None]": [T, None],
    "[T, 1]": [T, 1],
    "[one int]": [torch.tensor(3)],
    "[subclass]": [T.as_subclass(Subclass)],
    "Size": torch.Size([2, 2]),
    "range": range(2),
    "dict": {},
    "dtype": torch.float64,
    "device": torch.device("cpu"),
    "generator": torch.Generator(),
    "numpy": np.float32(2),
    "loud": Loud(),
    "[loud]": [Loud()],
}
KINDS: dict[str, tuple[str, ...]] = {
    "Tensor": ("floats", "ints", "one float"),
    "Tensor?": ("floats", "None"),
    "int": ("3",),
    "int?": ("3", "None"),
    "float": ("0.5", "3"),
    "bool": ("True",),
    "str": ("'a'", "'cpu'"),
    "Scalar": ("3", "0.5"),
    "ScalarType": ("dtype",),
    "Device": ("device", "'cpu'", "'a'"),
    "Generator?": ("None", "generator"),
    "int[]": ("[1, 2]", "[]", "Size"),
    "int[]?": ("[1, 2]", "None"),
    "int[2]": ("[1, 2]", "3"),
    "float[]": ("(0.5,)", "[1, 2]"),
    "float[2]": ("(0.5,)", "0.5"),
    "bool[]": ("[True]",),
    "str[]": ("['a']",),
    "Scalar[]": ("[1, 2]", "(0.5,)"),
    "Tensor[]": ("[T]", "[]"),
    "Tensor[]?": ("[T]", "None"),
    "Tensor?[]": ("[T]", "[T, None]"),
    "SymInt": ("3",),
    "SymInt[]": ("[1, 2]",),
}
DEFAULTS = {"int": "7", "float": "0.25", "bool": "False", "Tensor?": "None", "int[]": "[4]"}


class Parameter(NamedTuple):
    name: str
    kind: str
    has_default: bool

    def __str__(self) -> str:
        default = f"={DEFAULTS[self.kind]}" if self.has_default else ""
        return f"{self.kind} {self.name}{default}"


class Overload(NamedTuple):
    positional: tuple[Parameter, ...]
    keyword_only: tuple[Parameter, ...]

    def schema(self) -> str:
        parts = ["Tensor x", *map(str, self.positional)]
        parts += ["*", *map(str, self.keyword_only)] if self.keyword_only else []
        return f"({', '.join(parts)}) -> Tensor"

    def signature(self) -> tuple[tuple[str, str, bool], ...]:
        """Return the names and types by which TorchScript tells overloads apart."""
        arguments = torch._C.parse_schema(f"op{self.schema()}").arguments
        return tuple((each.name, str(each.type), each.kwarg_only) for each in arguments)


class Call(NamedTuple):
    args: tuple[str, ...]
    kwargs: dict[str, str]


def parameters(names: str) -> st.SearchStrategy[tuple[Parameter, ...]]:
    # Only the last parameter may have a default, because all positional parameters after it would
    # need one too.
    def made(kinds: list[str], has_default: bool) -> tuple[Parameter, ...]:
        last = len(kinds) - 1
        return tuple(
            Parameter(name, kind, has_default and index == last and kind in DEFAULTS)
            for index, (name, kind) in enumerate(zip(names, kinds, strict=False))
        )

    kinds = st.lists(st.sampled_from(list(KINDS)), max_size=len(names))
    return st.builds(made, kinds, st.booleans())


overloads = st.builds(Overload, parameters("abc"), parameters("de"))


@st.composite
def calls(draw: st.DrawFn, of: list[Overload]) -> Call:
    """Generate a call whose arguments fit one of the overloads, or nearly fit it."""
    overload = draw(st.sampled_from(of))
    # Decide for the whole call whether all values must fit. If each value were drawn independently,
    # few calls would fit.
    all_fit = draw(st.booleans())

    def value(parameter: Parameter) -> str:
        fits = st.sampled_from(KINDS[parameter.kind])
        return draw(fits if all_fit else st.one_of(fits, fits, st.sampled_from(list(VALUES))))

    by_position = draw(st.integers(0, len(overload.positional)))
    args = tuple(map(value, overload.positional[:by_position]))
    named = (*overload.positional[by_position:], *overload.keyword_only)
    kwargs = {p.name: value(p) for p in named if draw(st.integers(0, 9))}
    if not draw(st.integers(0, 9)):
        kwargs[draw(st.sampled_from(["a", "e", "wrong"]))] = "3"
    if not draw(st.integers(0, 9)):
        args = (*args, "3")
    return Call(args, kwargs)


@st.composite
def packets(draw: st.DrawFn) -> tuple[list[Overload], list[Call]]:
    of = draw(st.lists(overloads, min_size=2, max_size=3, unique_by=Overload.signature))
    return of, draw(st.lists(calls(of), min_size=8, max_size=16))


def defined(
    library: torch.library.Library, name: str, schemas: list[str], seen: list[str]
) -> tuple[Any, list[str]]:
    names = ["", *(f"o{index}" for index in range(1, len(schemas)))]

    def kernel(which: str, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(re.sub("0x[0-9a-f]+", "", f"{which!r} {args!r} {kwargs!r}"))
        return torch.ones(1)

    for each, schema in zip(names, schemas, strict=True):
        local = f"{name}.{each}" if each else name
        library.define(local + schema)
        library.impl(local, functools.partial(kernel, each), "CompositeExplicitAutograd")
    return getattr(getattr(torch.ops, library.ns), name), [each or "default" for each in names]


def assert_calls_the_same(
    packet: Any, names: list[str], calls: list[Callable[[], Any]], seen: list[str]
) -> Counter[str]:
    """Check that calls have the same outcome with native calls and without.

    Return the number of native calls of each overload.
    """

    def observed(call: Callable[[], Any]) -> tuple[str, list[str]]:
        seen.clear()
        return str(outcome(call)), list(seen)

    def native() -> Counter[str]:
        counted = {name: torchop.native.counters(getattr(packet, name)) for name in names}
        return Counter({name: counts.get("native", 0) for name, counts in counted.items()})

    before = native()
    for call in calls:
        found = []
        for context in (torchop.native.disabled(), contextlib.nullcontext()):
            with context:
                # Both kinds of calls must be made in the same line, because PyTorch's messages
                # contain the line number.
                found.append(observed(call))
        assert found[0] == found[1]
    return native() - before


@pytest.fixture(params=["accelerated", "ours"])
def library(request: pytest.FixtureRequest, namespace: str) -> Iterator[torch.library.Library]:
    if request.param == "ours":
        with torchop.Library(namespace, "FRAGMENT") as ours:
            yield ours
        return
    stock = torch.library.Library(namespace, "FRAGMENT")
    stock.define("first() -> ()")  # otherwise `accelerate` warns that nothing matches
    with torchop.accelerate(f"{namespace}::*"):
        yield stock
    stock._destroy()


numbers = itertools.count()


# Ignore warnings, because PyTorch warns about some conversions, such as from complex to real.
@pytest.mark.filterwarnings("ignore")
def test_a_packet_calls_the_overload_that_pytorch_would(library: torch.library.Library) -> None:
    native: Counter[str] = Counter()
    seen: list[str] = []

    @stable
    @given(packets())
    def check(packet_and_calls: tuple[list[Overload], list[Call]]) -> None:
        of, made = packet_and_calls
        schemas = [overload.schema() for overload in of]
        packet, names = defined(library, f"generated{next(numbers)}", schemas, seen)
        outcome(lambda: packet(T))  # the first call of a torchop operator is not native
        found = [
            functools.partial(
                packet,
                T,
                *(VALUES[value] for value in call.args),
                **{name: VALUES[value] for name, value in call.kwargs.items()},
            )
            for call in made
        ]
        native.update(assert_calls_the_same(packet, names, found, seen))

    check()
    assert min(native["default"], native["o1"], native["o2"]) > 20, native


# For each case: the parameters of two overloads, and the arguments of a call that only the second
# overload accepts.
SECOND = {
    "lists of ints": ("Tensor a, int[] b", "Tensor a, Tensor b", ("floats", "floats")),
    "ints": ("int a", "Tensor a", ("floats",)),
    "optional ints": ("int? a, int[]? b", "Tensor? a, Tensor? b", ("floats", "ints")),
    "floats": ("float a", "Tensor a", ("matrix",)),
    "bools": ("bool a", "Tensor a", ("bools",)),
    "a Scalar": ("Scalar a", "Tensor a", ("one float",)),
    "a str": ("str a", "Tensor a", ("one int",)),
    "a dtype": ("ScalarType a", "Tensor a", ("floats",)),
    "a device": ("Device a", "Tensor a", ("floats",)),
    "tensors": ("Tensor[] a", "Tensor a", ("floats",)),
    "a tensor": ("Tensor a", "Tensor[] a", ("[T]",)),
    "a list of tensors": ("int[] a", "Tensor[] a", ("[T]",)),
    "a list of ints": ("Tensor[] a", "int[] a", ("[1, 2]",)),
    "a list of floats": ("int[] a", "float[] a", ("(0.5,)",)),
    "a None": ("int[] a", "int? a", ("None",)),
    "a keyword": ("Tensor a, *, int b", "Tensor a, *, Tensor c", ("floats", "c=floats")),
    "too few": ("Tensor a, int b", "Tensor a", ("floats",)),
}


@pytest.mark.parametrize("case", SECOND)
def test_overload_that_cannot_fit_is_skipped_natively(
    library: torch.library.Library, case: str
) -> None:
    first, second, given_values = SECOND[case]
    seen: list[str] = []
    schemas = [f"(Tensor x, {each}) -> Tensor" for each in (first, second)]
    packet, names = defined(library, "op", schemas, seen)
    args = [VALUES[each] for each in given_values if "=" not in each]
    pairs = [each.split("=") for each in given_values if "=" in each]
    call = functools.partial(packet, T, *args, **{name: VALUES[value] for name, value in pairs})
    call()
    assert assert_calls_the_same(packet, names, [call] * 3, seen) == {"o1": 3}
    assert seen[0].startswith("'o1'")


# For each case: the parameters of two overloads, and the arguments of a call that does not reach
# the second overload, because the first one accepts the argument, or because converting the
# argument to the type of the first one raises.
FIRST = {
    "a tensor as an int": ("int a", "Tensor a", ("one int",)),
    "a tensor as a float": ("float a", "Tensor a", ("one float",)),
    "a tensor as a bool": ("bool a", "Tensor a", ("one complex",)),
    "a number as a list": ("int[2] a", "int a", ("3",)),
    "None as a tensor": ("Tensor a", "int? a", ("None",)),
    "a str as a list": ("str[] a", "str a", ("'a'",)),
    "a tensor as a list": ("Tensor?[] a", "Tensor a", ("floats",)),
    "a list of a tensor": ("int[] a", "Tensor[] a", ("[one int]",)),
    "no device": ("Device a, int b", "str a", ("'a'",)),
    "no number": ("Scalar a, int b", "float a", ("2 ** 70",)),
    "a sparse tensor": ("int a, int b", "Tensor a", ("sparse",)),
}


@pytest.mark.parametrize("case", FIRST)
def test_uncertain_overload_is_dispatched(library: torch.library.Library, case: str) -> None:
    first, second, values = FIRST[case]
    seen: list[str] = []
    schemas = [f"(Tensor x, {each}) -> Tensor" for each in (first, second)]
    packet, names = defined(library, "op", schemas, seen)
    torchop.explain(packet.o1, T, *(VALUES[each] for each in values))
    packet.o1(T, {"Tensor a": T, "Tensor[] a": [T]}.get(second, 3 if "str" not in second else "a"))
    call = functools.partial(packet, T, *(VALUES[each] for each in values))
    assert assert_calls_the_same(packet, names, [call] * 3, seen) == {}
    assert "'o1'" not in str(seen)


@pytest.mark.parametrize("order", [("", ".ints"), (".ints", "")])
def test_a_packet_calls_an_operator_natively_although_the_others_were_never_called(
    namespace: str, order: tuple[str, str]
) -> None:
    def with_tensor(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def with_ints(x: Tensor, y: list[int]) -> Tensor:
        return x + len(y)

    functions: dict[str, Callable[..., Any]] = {"": with_tensor, ".ints": with_ints}
    ops = {
        name: torchop.custom_op(f"{namespace}::op{name}", functions[name], mutates_args=())
        for name in order
    }
    packet = getattr(torch.ops, namespace).op
    last = order[-1]
    y: Any = [1, 2] if last else T
    for _ in range(4):
        assert torch.equal(packet(T, y), functions[last](T, y))
    # The first of the four calls uses the dispatcher, and prepares the native calls.
    assert torchop.native.counters(ops[last]) == {"native": 3}
