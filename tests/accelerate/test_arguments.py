"""Which defaults a schema keeps as Python has them."""

from __future__ import annotations

import pytest

from torchop._accelerate.arguments import has_simple_defaults
from torchop._compat import schemas
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
    assert has_simple_defaults(schema(text)) is simple
