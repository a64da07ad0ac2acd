"""Operators with arguments such as dataclasses, under torch.compile.

If possible, Dynamo must not trace the code that flattens and checks their fields.
"""

from __future__ import annotations

import dataclasses
import enum
import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import pytest
import torch
from torch import Tensor
from torch._dynamo.variables.builder import VariableBuilder
from torch.testing import assert_close

import torchop
from tests.integration.compile.graphs import Recorder


class _Axis(enum.Enum):
    ROWS = "rows"
    COLUMNS = "columns"


@dataclasses.dataclass(frozen=True)
class _Options:
    weight: Tensor
    scale: float = 2.0
    bias: Optional[Tensor] = None
    axis: _Axis = _Axis.ROWS


def _structured(namespace: str) -> torchop.CustomOp:
    @torchop.custom_op(f"{namespace}::structured", mutates_args=())
    def op(x: Tensor, options: _Options, *, times: int = 1) -> Tensor:
        return x * options.weight * options.scale * times - int(options.axis is _Axis.COLUMNS)

    op.register_fake(lambda x, options, *, times=1: torch.empty_like(x))
    return op


def test_dynamo_traces_nothing_for_a_dataclass_with_correct_types(namespace, traced):
    op = _structured(namespace)
    recorder = Recorder()
    compiled = torch.compile(lambda x, o: op(x, o, times=2), backend=recorder, fullgraph=True)
    x = torch.ones(2)
    for options in (_Options(x), _Options(x, 3.0), _Options(x, axis=_Axis.COLUMNS)):
        assert_close(compiled(x, options), op(x, options, times=2))
    assert traced == []
    assert recorder.targets == [op.overload] * 3


@dataclasses.dataclass
class _Mutable:
    weight: Tensor
    count: int
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class _Slots:
    weight: Tensor
    count: int
    scale: float = 2.0


@dataclasses.dataclass(frozen=True)
class _Nested:
    inner: _Mutable


class _Pair(NamedTuple):
    weight: Tensor
    count: int
    scale: float = 2.0


def _product(x: Tensor, weight: Tensor, count: int, scale: float) -> Tensor:
    return x * weight * scale + count


def _of_object(x: Tensor, config: Any) -> Tensor:
    return _product(x, config.weight, config.count, config.scale)


def _operator(namespace: str, cls: Any, function: Callable[..., Any] = _of_object) -> Any:
    def op(x: Tensor, config: Any) -> Tensor:
        return function(x, config)

    op.__annotations__ = {"x": Tensor, "config": cls, "return": Tensor}
    handle = torchop.custom_op(f"{namespace}::op", op, mutates_args=())
    handle.register_fake(lambda x, config: torch.empty_like(x))
    return handle


KINDS = {
    "mutable": (_Mutable, _Mutable, _of_object),
    "slots": (_Slots, _Slots, _of_object),
    "nested": (
        _Nested,
        lambda *args: _Nested(_Mutable(*args)),
        lambda x, c: _of_object(x, c.inner),
    ),
    "NamedTuple": (_Pair, _Pair, _of_object),
}


@pytest.mark.parametrize("kind", KINDS)
def test_dynamo_traces_nothing_for_fields_with_correct_types(namespace, traced, kind):
    cls, make, function = KINDS[kind]
    op = _operator(namespace, cls, function)
    recorder = Recorder()
    compiled = torch.compile(lambda x, c: op(op(x, c), c), backend=recorder, fullgraph=True)
    x, weight = torch.randn(2), torch.randn(2)
    values = [(weight, 1, 2.0), (weight, 1, 2.0), (weight, 7, 2.0), (weight, 8, 2.5), (x, 1, 2.0)]
    for arguments in values:
        config = make(*arguments)
        assert_close(compiled(x, config), op(op(x, config), config), rtol=0, atol=0)
    assert traced == []
    # A call with an equal configuration must not recompile, so there are fewer graphs than values.
    assert 2 <= len(recorder.graphs) <= 4
    assert set(recorder.targets) == {op.overload}


def test_dynamo_does_not_trace_a_dataclass_that_is_only_passed(namespace, monkeypatch):
    wrapped = []
    wrap = VariableBuilder._wrap

    def wrap_and_note(builder: Any, value: Any) -> Any:
        wrapped.append(type(value))
        return wrap(builder, value)

    monkeypatch.setattr(VariableBuilder, "_wrap", wrap_and_note)
    op = _operator(namespace, _Nested, KINDS["nested"][2])
    config = _Nested(_Mutable(torch.ones(2), 1))
    torch.compile(lambda x: op(x, config), backend="eager", fullgraph=True)(torch.ones(2))
    assert Tensor in wrapped
    assert not {_Nested, _Mutable} & set(wrapped)


def _set_before(op: Any) -> Any:
    def program(x: Tensor, config: _Mutable, other: _Mutable) -> Tensor:
        config.scale = 5.0
        return op(x, config)

    return program


def _set_by_another_name(op: Any) -> Any:
    def program(x: Tensor, config: _Mutable, other: _Mutable) -> Tensor:
        config.scale = 5.0
        return op(x, other)

    return program


def _set_in_a_list(op: Any) -> Any:
    def program(x: Tensor, config: _Mutable, other: _Mutable) -> Tensor:
        configs = [config, other]
        configs[0].scale = 5.0
        return op(x, configs[0]) + op(x, configs[1])

    return program


def _set_between(op: Any) -> Any:
    def program(x: Tensor, config: _Mutable, other: _Mutable) -> Tensor:
        y = op(x, other)
        config.scale, config.weight = config.scale + 3.0, y
        return op(op(y, other), config)

    return program


PROGRAMS = [_set_before, _set_by_another_name, _set_in_a_list, _set_between]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("is_same", [True, False])
def test_operator_gets_fields_changed_by_the_program(namespace, program, is_same):
    function = program(_operator(namespace, _Mutable))
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    x = torch.randn(2)

    def run(call: Any) -> Any:
        config = _Mutable(torch.ones(2), 1)
        other = config if is_same else _Mutable(torch.ones(2), 2)
        return call(x, config, other), dataclasses.astuple(config), dataclasses.astuple(other)

    for _ in range(2):
        assert_close(run(compiled), run(function), rtol=0, atol=0)


def test_a_graph_is_not_used_for_an_object_of_another_class(namespace):
    @dataclasses.dataclass
    class Longer(_Mutable):
        pass

    op = _operator(namespace, _Mutable)
    compiled = torch.compile(lambda x, c: op(x, c), backend="eager")
    compiled(torch.ones(2), _Mutable(torch.ones(2), 1))
    with pytest.raises(torchop.ArgumentError, match="expected _Mutable, got Longer"):
        compiled(torch.ones(2), Longer(torch.ones(2), 1))
    makes_one = torch.compile(lambda x: op(x, Longer(x, 1)), backend="eager")
    with pytest.raises(torchop.ArgumentError, match="expected _Mutable, got Longer"):
        makes_one(torch.ones(2))
    assert_close(compiled(torch.ones(2), _Mutable(torch.ones(2), 2)), torch.full((2,), 4.0))


def test_deleted_field_raises_the_same_error_during_tracing(namespace):
    op = _operator(namespace, _Mutable)
    config = _Mutable(torch.ones(2), 1)
    del config.count
    for call in (op, torch.compile(lambda x, c: op(x, c), backend="eager")):
        with pytest.raises(AttributeError, match="'_Mutable' object has no attribute 'count'"):
            call(torch.ones(2), config)


class _Doubled:
    def __get__(self, instance: Any, owner: type) -> Any:
        return 1.0 if instance is None else instance._scale * 2

    def __set__(self, instance: Any, value: float) -> None:
        instance._scale = value


@dataclasses.dataclass
class _WithDescriptor:
    weight: Tensor
    count: int
    scale: float = _Doubled()


def test_a_descriptor_is_traced(namespace, traced):
    op = _operator(namespace, _WithDescriptor)
    compiled = torch.compile(lambda x, c: op(x, c), backend="eager", fullgraph=True)
    config = _WithDescriptor(torch.ones(2), 1, 3.0)
    assert_close(compiled(torch.ones(2), config), op(torch.ones(2), config))
    assert "__get__" in traced


def test_wrong_fields_are_rejected_during_tracing(namespace, traced):
    op = _structured(namespace)
    compiled = torch.compile(lambda x, o: op(x, o), backend="eager")
    compiled(torch.ones(2), _Options(torch.ones(2), 1))
    assert traced
    with pytest.raises(torchop.ArgumentError, match=r"options.scale: expected float, got str"):
        compiled(torch.ones(2), _Options(torch.ones(2), "a"))
    with pytest.raises(torchop.ArgumentError, match="expected _Options, got dict"):
        compiled(torch.ones(2), {})


@dataclasses.dataclass
class _Numbers:
    factor: float = 1.0
    turn: complex = 1j
    weights: list[float] = dataclasses.field(default_factory=lambda: [0.0])


NUMBERS = {
    "factor": (2, 3, 4, 2.5, 3.5, True),
    "turn": (2, 3, 4.0, 5.0, 2 + 1j),
    "weights": ([2], [3], [4], [1.5]),
}


@pytest.mark.parametrize("field", NUMBERS)
def test_symbolic_numbers_are_converted_as_in_eager_mode(namespace, field):
    def of_numbers(x: Tensor, config: _Numbers) -> Tensor:
        assert isinstance(config.turn, complex)
        return x * config.factor * config.turn.real + config.turn.imag + sum(config.weights)

    op = _operator(namespace, _Numbers, of_numbers)
    compiled = torch.compile(op, backend="eager", fullgraph=True)
    for value in NUMBERS[field]:  # from the second value on, Dynamo passes a symbolic number
        numbers = _Numbers(**{field: value})
        assert_close(compiled(torch.ones(2), numbers), op(torch.ones(2), numbers))


def test_a_replaced_structured_handle_is_freed_with_its_graphs(namespace):
    def compile_and_forget() -> Any:
        op = _structured(namespace)
        compiled = torch.compile(lambda x, o: op(x, o), backend="eager")
        compiled(torch.ones(2), _Options(torch.ones(2)))
        return weakref.ref(type(op))

    handle_class = compile_and_forget()
    _structured(namespace)
    torch._dynamo.reset()
    # Workaround for CPython 3.12, in which the cache of `inspect._shadowed_dict_from_mro_tuple`
    # keeps the last 128 classes alive.
    cached = getattr(inspect, "_shadowed_dict_from_mro_tuple", None)
    if cached is not None:
        cached.cache_clear()
    gc.collect()
    assert handle_class() is None
