"""None in every position of arguments and results, however an operator is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import pytest
import torch
from torch import Tensor

import torchop
from tests.schema.structure.generated import Mode, same
from tests.schema.structure.test_generated_results import renewed, tensors_of


@torchop.opaque(value=True)
@dataclasses.dataclass(frozen=True)
class Constant:
    bits: int = 8


class Inner(NamedTuple):
    tensor: Optional[Tensor]
    number: Optional[int]


@dataclasses.dataclass
class Fields:
    tensor: Optional[Tensor]
    tensors: Optional[list[Tensor]]
    some: list[Optional[Tensor]]
    inner: Optional[Inner]
    number: Optional[int]
    real: Optional[float]
    flag: Optional[bool]
    text: Optional[str]
    dtype: Optional[torch.dtype]
    device: Optional[torch.device]
    mode: Optional[Mode]
    sizes: Optional[list[int]]
    named: Optional[dict[str, Tensor]]
    constant: Optional[Constant]


@dataclasses.dataclass
class Items:
    """What only results support: items that are None, or that have optional fields."""

    rows: Optional[list[Optional[Fields]]]
    pairs: dict[str, Optional[Inner]]
    nested: list[Optional[list[Optional[Tensor]]]]


ONE = torch.ones(1)
FULL = Fields(
    ONE,
    [ONE, ONE],
    [ONE, ONE],
    Inner(ONE, 3),
    4,
    0.5,
    True,
    "text",
    torch.int8,
    torch.device("cpu"),
    Mode.CUBIC,
    [1, 2],
    {"a": ONE, "b": ONE},
    Constant(4),
)
NAMES = [field.name for field in dataclasses.fields(Fields) if field.name != "some"]
VALUES = {
    "full": FULL,
    **{name: dataclasses.replace(FULL, **{name: None}) for name in NAMES},
    "some[0]": dataclasses.replace(FULL, some=[None, ONE]),
    "some[1]": dataclasses.replace(FULL, some=[ONE, None]),
    "inner.tensor": dataclasses.replace(FULL, inner=Inner(None, 3)),
    "inner.number": dataclasses.replace(FULL, inner=Inner(ONE, None)),
    "all": dataclasses.replace(FULL, some=[None], **dict.fromkeys(NAMES)),
}
INNER = [Inner(ONE, 3), None, Inner(None, 3), Inner(ONE, None), Inner(None, None)]
ITEMS = {
    "rows": Items(None, {}, []),
    "rows[...]": Items([None, *VALUES.values(), None], {}, []),
    "pairs": Items([], {f"pair {index}": each for index, each in enumerate(INNER)}, []),
    "nested": Items([], {}, [None, [None], [ONE, None, ONE], [], [None, None]]),
}


# The calls of a program, as a list of arguments for each call
Calls = list[tuple[Any, ...]]


def eager(op: Any, calls: Calls) -> list[Any]:
    return [op(*args) for args in calls]


def compiled(op: Any, calls: Calls) -> list[Any]:
    def program(x: Tensor) -> Any:
        return [op(*args) for args in calls], x + 1

    torch._dynamo.reset()
    results: list[Any]
    results, _ = torch.compile(program, fullgraph=True, backend="aot_eager")(ONE)
    return results


def exported(op: Any, calls: Calls) -> list[Any]:
    class Program(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return [tensors_of([op(*args)]) for args in calls], x + 1

    results: list[Any]
    results, _ = torch.export.export(Program(), (ONE,)).module()(ONE)
    return results


def recorded(op: Any, calls: Calls) -> list[Any]:
    results = []
    for args in calls:
        with torchop.record(op.name) as found:
            op(*args)
        (((call, _),),) = found.values()
        example = call.example()
        assert example is not None
        result = op.overload(*example[0], **example[1])
        results.append(op._definition.structure.rebuilt_result(result))
    return results


@pytest.mark.parametrize("run", [eager, compiled, exported, recorded])
def test_arguments(namespace: str, run: Callable[[Any, Calls], list[Any]]) -> None:
    seen: list[Any] = []

    def function(x: Tensor, value: Optional[Fields]) -> Tensor:
        seen.append(value)
        return x + 1

    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    op.register_fake(lambda x, value: torch.empty_like(x))
    values = [None, *VALUES.values()]
    if run is recorded:  # records contain no objects
        values = [value and dataclasses.replace(value, constant=None) for value in values]
    assert len(run(op, [(ONE, value) for value in values])) == len(values)
    expected = [value for value in values for _ in range(2 if run is recorded else 1)]
    assert len(seen) == len(expected)
    assert all(map(same, seen, expected))


def operator_returning(namespace: str, annotation: Any, values: dict[str, Any]) -> Any:
    def function(x: Tensor, name: str) -> Any:
        return renewed(values[name])

    function.__annotations__["return"] = annotation
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    op.register_fake(function)
    return op


@pytest.mark.parametrize("run", [eager, compiled, exported, recorded])
@pytest.mark.parametrize(
    ("annotation", "values"),
    [(Optional[Fields], {"none": None, **VALUES}), (Items, ITEMS)],
    ids=["fields", "items"],
)
def test_results(
    namespace: str, run: Callable[[Any, Calls], list[Any]], annotation: Any, values: dict[str, Any]
) -> None:
    op = operator_returning(namespace, annotation, values)
    found = run(op, [(ONE, name) for name in values])
    expected = list(values.values())
    assert same(found, [tensors_of([v]) for v in expected] if run is exported else expected)
