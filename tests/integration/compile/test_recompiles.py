"""The recompilations that the table in `docs/how-to/torch-compile.md` lists."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import torchop
from tests._support import combinations
from tests._support.opaque_types import Constant, Reference

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "torch-compile.md"
# Matches a row of the table: the argument, the number of graphs with torchop, the number with
# torch.library, and advice.
ROW = re.compile(r"^\| ([^|]+?) \| ([1-3]) \| ([1-3]|refused) \| (.*)\|$", re.M)


class _Color(enum.Enum):
    RED = "red"
    GREEN = "green"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True)
class _Options:
    scale: float = 1.0
    count: int = 1


@dataclasses.dataclass(frozen=True)
class _Weighted:
    weight: Tensor


class _Pair(NamedTuple):
    weight: Tensor
    count: int


class _Calls(NamedTuple):
    """Three calls of an operator whose argument has this annotation and these values."""

    annotation: Any
    values: tuple[Any, Any, Any]
    # Most cases need only Dynamo. A `Number` needs AOT Autograd, which recompiles for each value.
    backend: str = "eager"


_ones = torch.ones
_one, _other = _ones(2), torch.zeros(2)
_number: Any = torch.types.Number
CALLS = {
    "`Tensor`: values": _Calls(Tensor, (_one, _other, _one)),
    "`Tensor`: the size of a dimension": _Calls(Tensor, (_ones(3), _ones(4), _ones(5))),
    "`Tensor`: a size of 0 or 1": _Calls(Tensor, (_ones(3), _ones(1), _ones(0))),
    "`Tensor`: how many dimensions": _Calls(Tensor, (_ones(2), _ones(2, 2), _ones(2, 2, 2))),
    "`Tensor`: the dtype": _Calls(Tensor, (_one, _one.double(), _one.half())),
    "`Tensor`: the strides": _Calls(Tensor, (_ones(4, 4), _ones(4, 4).t(), _ones(8, 8)[::2, ::2])),
    "`Tensor`: `requires_grad`": _Calls(Tensor, (_one, _ones(2, requires_grad=True), _other)),
    "`Optional[Tensor]`: None, or not": _Calls(Optional[Tensor], (None, _one, _other)),
    "`list[Tensor]`: other tensors": _Calls(list[Tensor], ([_one], [_other], [_one])),
    "`list[Tensor]`: how many": _Calls(list[Tensor], ([_one], [_one] * 2, [_one] * 3)),
    "`list[Optional[Tensor]]`: where None is": _Calls(
        list[Optional[Tensor]], ([None, _one], [_one, None], [_one, _other])
    ),
    "`int`": _Calls(int, (3, 0, 5)),
    "`float`": _Calls(float, (0.5, 1.5, 2.5)),
    "`torch.types.Number`: ints": _Calls(_number, (3, 4, 5)),
    "`torch.types.Number`: floats": _Calls(_number, (0.5, 1.5, 2.5), "aot_eager"),
    "`bool`": _Calls(bool, (True, False, True)),
    "`str`": _Calls(str, ("a", "b", "c")),
    "`torch.dtype`": _Calls(torch.dtype, (torch.float32, torch.float64, torch.half)),
    "`torch.device`": _Calls(
        torch.device, (torch.device("cpu"), torch.device("meta"), torch.device("cuda:0"))
    ),
    "`list[int]`: values": _Calls(list[int], ([3], [4], [5])),
    "`list[int]`: how many": _Calls(list[int], ([3], [3, 3], [3, 3, 3])),
    "`list[float]`": _Calls(list[float], ([0.5], [1.5], [2.5])),
    "`Optional[int]`": _Calls(Optional[int], (None, 3, 4)),
    "an opaque reference": _Calls(Reference, (Reference(1), Reference(2), Reference(3))),
    "an opaque constant: an equal one": _Calls(Constant, (Constant(1), Constant(1), Constant(1))),
    "an opaque constant: another one": _Calls(Constant, (Constant(1), Constant(2), Constant(3))),
    "an `Enum`": _Calls(_Color, tuple(_Color)),
    "a dataclass: an equal one": _Calls(_Options, (_Options(), _Options(), _Options())),
    "a dataclass: an int in it": _Calls(
        _Options, (_Options(count=3), _Options(count=4), _Options(count=5))
    ),
    "a dataclass: a float in it": _Calls(_Options, (_Options(0.5), _Options(1.5), _Options(2.5))),
    "a dataclass: a tensor in it": _Calls(
        _Weighted, (_Weighted(_one), _Weighted(_other), _Weighted(_one))
    ),
    "an `Optional` dataclass: None, or not": _Calls(
        Optional[_Options], (None, _Options(), _Options())
    ),
    "a `NamedTuple`: an int in it": _Calls(_Pair, (_Pair(_one, 3), _Pair(_one, 4), _Pair(_one, 5))),
    "`dict[str, int]`: values": _Calls(dict[str, int], ({"a": 3}, {"a": 4}, {"a": 5})),
    "`dict[str, int]`: keys": _Calls(dict[str, int], ({"a": 3}, {"b": 3}, {"c": 3})),
}


def _graphs(
    define: Callable[..., Any], name: str, calls: _Calls, dynamic: bool | None = None
) -> str:
    def function(x: Tensor, a: Any) -> Tensor:
        return x.clone()

    function.__annotations__ = {"x": Tensor, "a": calls.annotation, "return": Tensor}
    try:
        op = define(name, function, mutates_args=())
    except ValueError:
        return "refused"
    op.register_fake(lambda x, a: torch.empty_like(x))
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(
        lambda x, a: op(x, a), backend=calls.backend, fullgraph=True, dynamic=dynamic
    )
    for value in calls.values:
        compiled(torch.ones(2), value)
    return str(counters["stats"]["unique_graphs"])


@pytest.mark.exhaustive
def test_the_table_says_how_many_graphs_three_calls_need(namespace, request):
    rows = {row: said for row, *said in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    ours = {
        row: _graphs(torchop.custom_op, f"{namespace}::f{number}", calls)
        for number, (row, calls) in enumerate(CALLS.items())
    }
    assert ours == {row: graphs for row, (graphs, _, _) in rows.items()}
    if not request.config.getoption(combinations.OPTION):
        return
    for number, (row, calls) in enumerate(CALLS.items()):
        _, graphs, advice = rows[row]
        name = f"{namespace}::stock{number}"
        assert _graphs(torch.library.custom_op, name, calls) == graphs, row
        if "dynamic=True" in advice:
            assert _graphs(torchop.custom_op, f"{namespace}::d{number}", calls, True) == "1", row
