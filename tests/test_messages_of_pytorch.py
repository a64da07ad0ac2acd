"""torchop's messages contain the words of `torch.library`'s for which programs search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests._support.common import on_both

Scenario = Callable[[Any, str], Any]


def inferred(function: Callable[..., Any]) -> Scenario:
    return lambda library, namespace: library.infer_schema(function, mutates_args=())


def called(function: Callable[..., Any], **options: Any) -> Scenario:
    def scenario(library: Any, namespace: str) -> Any:
        return library.custom_op(f"{namespace}::op", function, **options)(torch.ones(2))

    return scenario


def implemented(op: Any, kernel: Any) -> Scenario:
    def scenario(library: Any, namespace: str) -> None:
        library.Library(namespace, "FRAGMENT").impl(op, kernel, "CPU")

    return scenario


def unannotated(x: Tensor): ...


def variadic(*args: Tensor) -> Tensor: ...


def with_keywords(x: Tensor, **options: int) -> Tensor: ...


def of_unknown(x: list[_Missing]) -> Tensor: ...  # noqa: F821


def same(x: Tensor) -> Tensor:
    return x


def doubled(x: Tensor) -> Tensor:
    return x.mul_(2)


WORDS: dict[str, tuple[Scenario, type[Exception], str]] = {
    "no annotation of the result": (
        inferred(unannotated),
        ValueError,
        "No return type annotation was provided. Please add one",
    ),
    "*args": (inferred(variadic), ValueError, "varargs"),
    "**kwargs": (inferred(with_keywords), ValueError, "varkwargs"),
    "an unknown name": (
        inferred(of_unknown),
        ValueError,
        "Unsupported type annotation list[_Missing]. It is not a type.",
    ),
    "a result that is an input": (called(same, mutates_args=()), RuntimeError, "may not alias"),
    "a result that is written": (
        called(doubled, mutates_args={"x"}),
        RuntimeError,
        "may not alias",
    ),
    "a schema that writes": (
        called(doubled, mutates_args=(), schema="(Tensor(a!) x) -> ()"),
        ValueError,
        "the op mutates {'x'}",
    ),
    "no kernel": (
        implemented("op", []),
        TypeError,
        "Input function is required to be a callable",
    ),
    "another namespace": (
        implemented(torch.ops.aten.neg.default, same),
        RuntimeError,
        "operator name does not match namespace",
    ),
    "a function, not an operator": (
        lambda library, namespace: library.opcheck(torch.sin, (torch.ones(2),)),
        ValueError,
        "OpOverload",
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_both_messages_contain_the_same_words(namespace, name):
    scenario, kind, words = WORDS[name]
    both = on_both(scenario, namespace)
    for error in (both.stock, both.ours):
        assert isinstance(error, kind)
        assert words in str(error)
