"""What `check` makes of preconditions, and of failures that are no fault of a layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

import torchop
from torchop import preconditions
from torchop.testing import CheckReport, check


def run(op: Any, *examples: Any, only: Any, **options: Any) -> CheckReport:
    return check(op, *examples, only=only, raise_exception=False, **options)


def define(namespace: str, function: Any) -> Any:
    return torchop.custom_op(
        f"{namespace}::op", function, mutates_args=(), schema="(Tensor x) -> Tensor"
    )


def test_nothing_else_is_tried(namespace: str) -> None:
    """Neither in the checks of values and dtypes, nor where sizes change."""
    seen: list[Tensor] = []

    def sine(x: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        return x.contiguous().asin()

    op = define(namespace, sine)
    allowed = (
        preconditions.Shape("n", 2, least=1),
        preconditions.Dtype(torch.float32, torch.float64),
        constraints.interval(-1, 1),
        lambda x: len(x) != 2,
    )
    op.register_preconditions({"x": allowed})
    report = run(op, (torch.tensor([[0.5, -0.5]] * 3),), only=["memory", "values", "dtypes"])
    assert report.ok, report
    assert {x.dtype for x in seen} == {torch.float32, torch.float64}
    assert {x.shape[1] for x in seen} == {2}
    assert {1, 3, 1025} <= {len(x) for x in seen}
    assert {0, 2}.isdisjoint({len(x) for x in seen})
    assert all(bool((x.abs() <= 1).all()) for x in seen)
    outcomes = {result.check: (result.outcome, result.message) for result in report.results}
    assert outcomes["values.nan"][0] == "cannot be done"
    assert "'x' is not valid, because Interval" in outcomes["values.nan"][1]
    dtypes = next(r.details["dtypes"] for r in report.results if r.check == "dtypes.accepted")
    assert dtypes["float64"] == "-> float64"
    assert dtypes["int64"] == "excluded"


def test_what_is_allowed_has_to_be_taken(namespace: str) -> None:
    def positive(x: Tensor) -> Tensor:
        if x.numel() and x.min() <= 0:
            raise ValueError("zero is too small")
        return x.log()

    op = define(namespace, positive)
    op.register_preconditions({"x": constraints.nonnegative})
    (failure,) = run(op, (torch.ones(3),), only="values.declared").failures
    assert failure.message.startswith(
        "x at a limit of GreaterThanEq(lower_bound=0.0): the preconditions allow the call, and the "
        "kernel refuses it: ValueError: zero is too small"
    )
    with pytest.raises(
        AssertionError, match="the kernel refuses it: ValueError: zero is too small"
    ):
        exec(failure.program, {})  # a program of ours
    op.register_preconditions({"x": constraints.greater_than(0.5)})
    assert run(op, (torch.ones(3),), only="values.declared").ok


def test_without_preconditions_there_is_nothing_to_take(namespace: str) -> None:
    report = run(define(namespace, torch.sin), (torch.ones(3),), only="values.declared")
    (result,) = report.results
    assert (result.outcome, result.message) == ("cannot be done", "no preconditions are declared")


def test_an_example_has_to_be_allowed(namespace: str) -> None:
    op = define(namespace, torch.sin)
    op.register_preconditions({"x": constraints.unit_interval})
    with pytest.raises(
        ValueError,
        match=r"check\(.*::op, ...\): example 1 breaks the preconditions: 'x' is not valid, .* "
        "Change it, or what register_preconditions says",
    ):
        check(op, (torch.ones(3),), (2 * torch.ones(3),))


def test_a_layout_is_not_blamed_for_values(namespace: str) -> None:
    """One row, repeated, gives another result at each call, wherever it lies in memory."""
    calls = iter(range(1000))

    def counted(x: Tensor) -> Tensor:
        is_constant = x.numel() > 1 and bool((x == x.flatten()[0]).all())
        return x + (next(calls) if is_constant else 0)

    op = define(namespace, counted)
    (failure,) = run(op, (torch.randn(5),), only="memory.expanded").failures
    assert "It is not the layout: the same values fail in contiguous memory too." in failure.message
    assert "declare what one may pass: register_preconditions" in failure.message

    def by_address(x: Tensor) -> Tensor:
        return (
            torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())[: x.numel()].view(x.shape) + 1
        )

    (failure,) = run(
        torchop.custom_op(
            f"{namespace}::address", by_address, mutates_args=(), schema="(Tensor x) -> Tensor"
        ),
        (torch.randn(5),),
        only="memory.gaps",
    ).failures
    assert "not the layout" not in failure.message
