"""Definitions that out_op rejects, and the lifetime of its operators. Uses private names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.releases import OUT, needs_tags
from tests.define.families import exists, forms_of, sine, write_sine


def _no_output(x: Tensor) -> None: ...


def _default_output(x: Tensor, *, out: Optional[Tensor] = None) -> None: ...


def _listed_output(x: Tensor, *, out: list[Tensor]) -> None: ...


def _wrong_return(x: Tensor, *, out: Tensor) -> int: ...


def _no_return(x: Tensor, *, out: Tensor): ...  # type: ignore[no-untyped-def]


def _unknown_type(x: dict, *, out: Tensor) -> None: ...


def _number_first(n: int, x: Tensor, *, out: Tensor) -> None: ...


def _two(x: Tensor, *, low: Tensor, high: Tensor) -> None: ...


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "no output": (_no_output, {"like": "x"}, r"has no output.*\(x: Tensor, \*, out: Tensor\)"),
    "default": (_default_output, {"like": "x"}, "'out' is an output, so it must be a Tensor"),
    "list": (_listed_output, {"like": "x"}, "'out' is an output, so it must be a Tensor"),
    "return": (_wrong_return, {"like": "x"}, "the return annotation must be None, or Tensor"),
    "no return": (_no_return, {"like": "x"}, "the return annotation must be None"),
    "type": (_unknown_type, {"like": "x"}, "parameter 'x' has unsupported type"),
    "no rule": (write_sine, {}, "needs either like"),
    "two rules": (write_sine, {"like": "x", "allocate": torch.empty_like}, "needs either like"),
    "like nothing": (write_sine, {"like": "y"}, "like='y' is not a Tensor argument.*are x"),
    "rule": (write_sine, {"allocate": lambda: None}, "allocate is called with"),
    "in place": (_number_first, {"like": "x", "inplace": True}, "whose first argument is a Tensor"),
    "in place of two": (_two, {"like": "x", "inplace": True}, "with one result"),
    "tag": (write_sine, {"like": "x", "tags": OUT}, "adds the tags of the forms"),
}


@pytest.mark.parametrize(
    "reason", [pytest.param(r, marks=needs_tags if r == "tag" else ()) for r in REFUSED]
)
def test_invalid_definition_defines_nothing(namespace: str, reason: str) -> None:
    kernel, options, message = REFUSED[reason]
    with pytest.raises((ValueError, TypeError), match=message):
        torchop.out_op(f"{namespace}::op", kernel, **options)
    assert not exists(namespace, "op")
    assert not exists(namespace, "op_")


def test_non_function_is_rejected(namespace: str) -> None:
    with pytest.raises(TypeError, match="must be a function"):
        torchop.out_op(f"{namespace}::op", 3, like="x")  # type: ignore[call-overload]


@pytest.mark.parametrize("taken", ["op", "op.out", "op_"])
def test_a_taken_name_is_rejected_before_anything_is_defined(namespace: str, taken: str) -> None:
    old = sine(namespace, inplace=False)
    torchop.define(f"{namespace}::{taken}", "(Tensor x) -> Tensor")
    with pytest.raises(RuntimeError, match="exists already"):
        torchop.out_op(f"{namespace}::op", write_sine, like="x", inplace=True)
    assert {name for name in ("op", "op_") if exists(namespace, name)} == {taken.split(".")[0]}
    assert torch.allclose(old(torch.ones(1)), torch.ones(1).sin())


def test_failure_of_a_later_form_deregisters_the_earlier_forms(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchop._define import out_op

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(out_op, "define_member", fail)
    with pytest.raises(MemoryError):
        torchop.out_op(f"{namespace}::op", write_sine, like="x")
    assert not exists(namespace, "op")


def test_defining_again_replaces_all_forms(namespace: str) -> None:
    old, new = sine(namespace), sine(namespace)
    for op in forms_of(old):
        with pytest.raises(torchop.OperatorGoneError, match="replaced"):
            op(torch.ones(1))
    assert torch.allclose(new(torch.ones(1)), torch.ones(1).sin())


def test_forms_live_as_long_as_their_library(namespace: str) -> None:
    with torchop.Library(namespace, "FRAGMENT") as library:
        family = sine(namespace, lib=library)
        family(torch.ones(1), out=torch.empty(1))
    for op in forms_of(family):
        with pytest.raises(torchop.OperatorGoneError, match="closed"):
            op(torch.ones(1))


def test_redefining_a_family_deregisters_its_forms(namespace: str) -> None:
    def write(x: Tensor, *, out: Tensor) -> None:
        out.copy_(x + 1)

    old = torchop.out_op(f"{namespace}::op", write, like="x", inplace=True)
    new = torchop.out_op(f"{namespace}::op", write, like="x")
    assert new(torch.zeros(1)).tolist() == [1]
    for call in (old, old.inplace, lambda x: old.out(x, out=torch.empty(1))):
        with pytest.raises(torchop.OperatorGoneError):
            call(torch.zeros(1))


def test_like_is_a_name(namespace: str) -> None:
    with pytest.raises(ValueError, match=r"like expects the name of an argument, got \['x'\]"):
        torchop.out_op(f"{namespace}::op", like=["x"])
