"""Smaller examples are calls that the preconditions allow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

import torchop
from torchop.preconditions import Offsets, Shape
from torchop.testing import check


def test_smaller_examples_fit_the_declaration(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::segments",
        lambda values, offsets: torch.segment_reduce(values, "sum", offsets=offsets),
        mutates_args=(),
        schema="(Tensor values, Tensor offsets) -> Tensor",
    )
    op.register_preconditions(
        {
            "values": (Shape("n", least=1), constraints.greater_than(10.0)),
            "offsets": (Shape("m", least=2), Offsets("values")),
        }
    )
    calls: list[Any] = []

    def wrong(values: Tensor, offsets: Tensor) -> Tensor:
        calls.append((values.clone(), offsets.clone()))
        return torch.zeros(len(offsets) - 1)

    examples = torch.rand(12) + 11.0, torch.tensor([0, 3, 7, 12])
    report = check(op, examples, reference=wrong, only="memory.given", raise_exception=False)
    (failure,) = report.failures
    sizes = {(len(values), int(offsets[-1])) for values, offsets in calls}
    assert min(n for n, _ in sizes) < 12, "no smaller example was tried"
    assert all(n == last for n, last in sizes)
    assert all(float(values.min()) > 10.0 for values, _ in calls)
    assert "torch.tensor([10" in failure.program or "torch.tensor([11" in failure.program


def test_a_weight_that_is_a_part_of_what_is_written_is_no_call(namespace: str) -> None:
    def norm(x: Tensor, weight: Tensor) -> None:
        for row in x:
            row.copy_(row / row.norm() * weight)

    op = torchop.custom_op(f"{namespace}::norm_", norm, mutates_args={"x"})
    report = check(op, (torch.rand(3, 4) + 1, torch.rand(4)), only="sharing.written")
    assert report.count("cannot be done") == 1


def test_explain_tells_preconditions(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::root", torch.sqrt, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    assert torchop.explain(op, torch.ones(2)).preconditions == ()
    op.register_preconditions({"x": constraints.positive})
    assert torchop.explain(op, torch.ones(2)).preconditions == ("x: GreaterThan(lower_bound=0.0)",)
    text = str(torchop.explain(op, torch.zeros(2)))
    assert "precondition: x: GreaterThan(lower_bound=0.0)\n" in text
    assert "precondition: broken by this call: 'x' is not valid, because GreaterThan" in text
