"""Kernels of others see the arguments that the dispatcher would pass."""

from __future__ import annotations

import pytest
import torch

from torchop._accelerate.arguments import as_dispatched, has_simple_defaults
from torchop._compat import schemas
from torchop._schema.schema import Schema

T = torch.ones(1)


def schema(text: str) -> Schema:
    return Schema(schemas.parse(f"f{text} -> Tensor"))


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        ("(Tensor x)", lambda x: x),
        ("(Tensor x)", lambda *args: args),
        ("(Tensor x, int a=1, float b=2.0)", lambda x, a=1, b=2.0: x),
        ('(Tensor x, *, str? a=None, str b="b")', lambda x, *, a=None, b="b": x),
        ("(Tensor x, ScalarType d=float32, bool c=True)", lambda x, d=torch.float32, c=True: x),
    ],
)
def test_a_kernel_with_the_defaults_of_the_schema_is_called_as_it_is(text, kernel):
    assert as_dispatched(kernel, schema(text)) is kernel


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        ("(Tensor x, int a=1)", lambda x, a=2: x),
        ("(Tensor x, int a=1)", lambda x, a=True: x),
        ("(Tensor x, int a=1)", lambda x, a=1.0: x),
        ("(Tensor x, int a=1)", lambda x, a: x),
        ("(Tensor x, int a=1)", lambda *args: args),
        ("(Tensor x, float a=0.0)", lambda x, a=-0.0: x),
        ("(Tensor x, int[] a=[1])", lambda x, a=(1,): x),
        ("(Tensor x, int[] a=[1])", lambda x, a=[1]: x),
        ("(Tensor x, *, int a=1)", lambda x, *, a=2: x),
        ("(Tensor x, *, int a=1)", lambda x, **rest: x),
        ("(Tensor x, Tensor? y=None)", print),
    ],
)
def test_any_other_is_called_without_what_equals_a_default(text, kernel):
    assert as_dispatched(kernel, schema(text)) is not kernel


def test_only_the_last_positional_arguments_are_dropped():
    kernel = as_dispatched(
        lambda *args, **kwargs: (args[1:], kwargs),
        schema("(Tensor x, int a=1, Scalar b=2, int[] c=[3], *, int d=4, int e=5)"),
    )

    def passed(a, b, c, d=4, e=5):
        return kernel(T, a, b, c, d=d, e=e)

    assert passed(1, 2, [3]) == ((), {})
    assert passed(1, 3, [3]) == ((1, 3), {})
    assert passed(1, 2, [3, 3]) == ((1, 2, [3, 3]), {})
    assert repr(passed(1, 2.0, [3])) == "((1, 2.0), {})"  # no int, so no default
    assert passed(1, 2, [3], d=5) == ((), {"d": 5})
    assert passed(1, 2, [3], e=4) == ((), {"e": 4})


def test_the_dispatcher_does_the_same(namespace):
    seen = []
    library = torch.library.Library(namespace, "FRAGMENT")
    text = "(Tensor x, int a=1, Scalar b=2, int[] c=[3], *, int d=4, Device? e='cpu')"
    text = text.replace("'", '"')
    library.define(f"op{text} -> Tensor")

    def kernel(*args, **kwargs):
        seen.append(repr((args[1:], kwargs)))
        return args[0].clone()

    library.impl("op", kernel, "CPU")
    op = getattr(torch.ops, namespace).op
    parsed = schema(text)
    alone = as_dispatched(kernel, parsed)
    default = parsed.keyword_only[1].default
    cpu = torch.device("cpu")
    for a, b, c, d, e in [
        (1, 2, [3], 4, default),
        (1, 2, [3], 4, cpu),
        (1, True, [3], 4, cpu),
        (2, 2, [3], 5, None),
        (1, 2.0, [3], 4, None),
        (1, 2, [], 4, None),
    ]:
        if e is default:
            op(T, a, b, c, d=d)
        else:
            op(T, a, b, c, d=d, e=e)
        alone(T, a, b, c, d=d, e=e)
        assert seen[-2] == seen[-1]
    library._destroy()


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
