"""The text of a schema, read and written."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from torchop._schema import text


class Read(NamedTuple):
    schema: str
    arguments: list[str]
    results: list[str]


SCHEMAS = (
    Read("() -> ()", [], []),
    Read("(Tensor x) -> Tensor", ["Tensor x"], ["Tensor"]),
    Read("(*, Tensor x) -> ()", ["*", "Tensor x"], []),
    Read("(Tensor(a!)[] xs)->(Tensor)", ["Tensor(a!)[] xs"], ["Tensor"]),
    Read("(Tensor x) -> (Tensor, Tensor[])", ["Tensor x"], ["Tensor", "Tensor[]"]),
    Read("(Tensor x) -> ((Tensor))", ["Tensor x"], ["(Tensor)"]),
    Read("(Tensor x) -> ((Tensor, int))", ["Tensor x"], ["(Tensor, int)"]),
    Read("(Tensor x) -> Dict(str, Tensor)", ["Tensor x"], ["Dict(str, Tensor)"]),
    Read("(Tensor(a -> *) x) -> Tensor(a -> *)", ["Tensor(a -> *) x"], ["Tensor(a -> *)"]),
    Read(
        "(Tensor(a|b) x, int[2] dims=[1, 2]) -> (Tensor(a|b) y, Tensor(a!) z)",
        ["Tensor(a|b) x", "int[2] dims=[1, 2]"],
        ["Tensor(a|b) y", "Tensor(a!) z"],
    ),
    Read(
        '(str s="a, \\") -> (", *, str t=\'"(\', float by=0.5) -> Tensor',
        ['str s="a, \\") -> ("', "*", "str t='\"('", "float by=0.5"],
        ["Tensor"],
    ),
)


@pytest.mark.parametrize("read", SCHEMAS, ids=lambda read: read.schema)
def test_a_schema_is_read_into_its_parts(read: Read) -> None:
    for name in ("", "op", "op.overload", "lib::op.overload"):
        assert text.arguments_of(name + read.schema) == read.arguments
        assert text.results_of(name + read.schema) == read.results


@pytest.mark.parametrize("read", SCHEMAS, ids=lambda read: read.schema)
def test_what_is_written_of_the_parts_means_the_same(read: Read) -> None:
    written = text.write(read.arguments, text.write_results(read.results))
    assert text.arguments_of(written) == read.arguments
    assert text.results_of(written) == read.results
    parsed = torch._C.parse_schema(f"op{written}")
    assert str(parsed) == str(torch._C.parse_schema(f"op{read.schema}"))
    assert (len(parsed.arguments), len(parsed.returns)) == (
        len([argument for argument in read.arguments if argument != "*"]),
        len(read.results),
    )


def test_writes_are_put_in_and_taken_out() -> None:
    for argument in ("Tensor x", "Tensor?[] xs", "Tensor[2] pair=[]"):
        written = text.with_write(argument, text.numbered_alias(3))
        assert written == argument.replace("Tensor", "Tensor(a3!)")
        assert text.without_writes(written) == argument
    assert text.without_writes("Tensor(a) x") == "Tensor(a) x"
    assert text.without_aliases("Tensor(a -> *)[] x") == "Tensor[] x"
    assert text.without_aliases("Dict(str, Tensor(a!))") == "Dict(str, Tensor)"
