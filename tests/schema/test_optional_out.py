"""Functions that return their out= argument if it is given, which no schema can express."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

import torchop


def allocates(x: Tensor, out: Optional[Tensor] = None) -> Tensor:
    if out is None:
        out = torch.empty_like(x)
    out.copy_(x)
    return out


def conditional(x: Tensor, out: Optional[Tensor] = None) -> Tensor:
    return x.clone() if out is None else out


def by_keyword(x: Tensor, result: Optional[Tensor] = None) -> Tensor:
    return torch.sin(x, out=result)


def by_method(x: Tensor, cache: Tensor | None) -> Tensor:
    if cache is None:
        return x.clone()
    return cache.copy_(x)


def one_of_two(x: Tensor, out: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    return x + 1, out if out is not None else x + 2


def by_another_name(x: Tensor, out: Optional[Tensor] = None) -> Tensor:
    result = torch.sin(x, out=out)
    return result


def implicitly_optional(x: Tensor, out: Tensor = None) -> Tensor:  # type: ignore[assignment]
    return x.clone() if out is None else out


# Maps each function to the name of the argument that it mutates and returns.
MAYBE_OUT: dict[Callable[..., Any], str] = {
    allocates: "out",
    conditional: "out",
    by_keyword: "result",
    by_method: "cache",
    one_of_two: "out",
    by_another_name: "out",
    implicitly_optional: "out",
}


@pytest.mark.parametrize("function", MAYBE_OUT, ids=lambda f: f.__name__)
def test_returning_the_optional_argument_raises_the_reason_and_the_fix(
    namespace: str, function: Callable[..., Any]
) -> None:
    mutated = MAYBE_OUT[function]
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=(mutated,))
    x = torch.zeros(2)
    op(x, **{mutated: None})  # returns a new tensor, which is allowed
    message = rf"is input '{mutated}' itself.*a schema cannot express.*torchop\.maybe_out combines"
    with pytest.raises(torchop.AliasError, match=message):
        op(x, **{mutated: torch.ones(2)})


def test_schema_with_the_alias_is_rejected(namespace: str) -> None:
    with pytest.raises(torchop.SchemaError, match="maybe-out: it returns the mutated argument"):
        torchop.custom_op(
            f"{namespace}::op",
            max,
            mutates_args=("out",),
            schema="(Tensor x, Tensor(a!)? out=None) -> Tensor(a!)",
        )


def returns_nothing(x: Tensor, out: Optional[Tensor] = None) -> None:
    if out is not None:
        out.copy_(x)


def unrelated(x: Tensor, cache: Optional[Tensor] = None) -> Tensor:
    if cache is not None:
        cache.copy_(x)
    return x * 2 if cache is None else x * 3


def reads_it(x: Tensor, out: Optional[Tensor] = None) -> Tensor:
    def inner() -> Optional[Tensor]:
        return out  # only the inner function returns `out`, not the operator

    return x + (0 if inner() is None else 1)


def measures_it(x: Tensor, out: Optional[Tensor] = None) -> int:
    return 0 if out is None else len(out.copy_(x))


def not_mutated(x: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    return x.clone() if bias is None else x + bias


def required(x: Tensor, out: Tensor) -> Tensor:
    out.copy_(x)
    return x + 1


OTHERS: dict[Callable[..., Any], tuple[str, ...]] = {
    returns_nothing: ("out",),
    unrelated: ("cache",),
    reads_it: ("out",),
    measures_it: ("out",),
    not_mutated: (),
    required: ("out",),
}


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_operators_that_only_look_like_maybe_out_work(
    namespace: str, function: Callable[..., Any]
) -> None:
    for library, name in ((torchop, namespace), (torch.library, f"{namespace}_stock")):
        op = library.custom_op(f"{name}::op", function, mutates_args=OTHERS[function])
        x = torch.ones(2)
        expected, result = function(x, torch.zeros(2)), op(x, torch.zeros(2))
        assert torch.equal(result, expected) if isinstance(expected, Tensor) else result == expected
