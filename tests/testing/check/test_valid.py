"""The predicate `valid` that is passed to `register_examples`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from torchop.testing import CheckReport, check


@dataclass
class Layer:
    weight: Tensor
    scale: float


def run(op: Any, *examples: Any, only: Any, **options: Any) -> CheckReport:
    return check(op, *examples, only=only, raise_exception=False, **options)


def define(namespace: str, function: Any, schema: str = "(Tensor x) -> Tensor") -> Any:
    return torchop.custom_op(f"{namespace}::op", function, mutates_args=(), schema=schema)


def test_rejected_variants_are_counted_and_not_tried(namespace: str) -> None:
    seen: list[Tensor] = []

    def sine(x: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        return x.contiguous().asin()

    def valid(x: Tensor) -> bool:
        is_float = x.dtype in (torch.float32, torch.float64)
        return is_float and x.shape[1:] == (2,) and len(x) != 2 and bool((x.abs() <= 1).all())

    op = define(namespace, sine)
    op.register_examples(lambda: [(torch.tensor([[0.5, -0.5]] * 3),)], valid=valid)
    report = run(op, only=["memory", "values", "dtypes"])
    assert report.ok, report
    assert {x.dtype for x in seen} == {torch.float32, torch.float64}
    assert {x.shape[1] for x in seen} == {2}
    assert {1, 3, 1025} <= {len(x) for x in seen}
    assert 2 not in {len(x) for x in seen}
    assert all(bool((x.abs() <= 1).all()) for x in seen)
    results = {result.check: result for result in report.results}
    assert (results["values.nan"].outcome, results["values.nan"].rejected) == ("cannot be done", 2)
    assert results["values.nan"].message == "'valid' of register_examples rejects all 2 variants"
    assert results["memory.gaps"].rejected == 0
    table = results["dtypes.accepted"].details["dtypes"]
    assert (table["float64"], table["int64"]) == ("-> float64", "excluded")
    total = sum(result.rejected for result in report.results)
    assert f"\n  not tried: {total} variants that 'valid' rejects\n" in str(report)
    assert CheckReport.from_dict(report.to_dict()).results == report.results


def test_smaller_examples_are_valid(namespace: str) -> None:
    schema = "(Tensor values, Tensor offsets) -> Tensor"
    op = define(
        namespace,
        lambda values, offsets: torch.segment_reduce(values, "sum", offsets=offsets),
        schema,
    )
    op.register_examples(
        lambda: [(torch.rand(12) + 11.0, torch.tensor([0, 3, 7, 12]))],
        valid=lambda values, offsets: bool((values > 10).all()),
    )
    calls: list[Any] = []

    def wrong(values: Tensor, offsets: Tensor) -> Tensor:
        calls.append((values.clone(), offsets.clone()))
        return torch.zeros(len(offsets) - 1)

    (failure,) = run(op, reference=wrong, only="memory.given").failures
    sizes = {(len(values), int(offsets[-1])) for values, offsets in calls}
    assert min(n for n, _ in sizes) < 12, "no smaller example was tried"
    assert all(n == last for n, last in sizes)
    assert all(float(values.min()) > 10.0 for values, _ in calls)
    assert "torch.tensor([10" in failure.program or "torch.tensor([11" in failure.program


def test_valid_receives_structures_defaults_and_copies(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::apply", mutates_args=())
    def apply(x: Tensor, layer: Layer, twice: bool = False) -> Tensor:
        return x * layer.weight * layer.scale

    seen: list[Any] = []

    def valid(x: Tensor, layer: Layer, twice: bool) -> bool:
        seen.append((layer.scale, twice))
        assert torch.equal(layer.weight, torch.ones_like(layer.weight))
        x.zero_()
        layer.weight.zero_()
        return True

    apply.register_examples(lambda: [(torch.ones(2), Layer(torch.ones(2), 3.0))], valid=valid)
    assert run(apply, only=["memory.given", "memory.gaps"]).count("passed") == 2
    assert set(seen) == {(3.0, False)}


def test_derived_operators_use_the_same_valid(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::root", torch.sqrt, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_fake(torch.empty_like)
    op.register_examples(lambda: [(torch.ones(3),)], valid=lambda x: x.dtype is torch.float32)
    forms = {op.derive_inplace(): {}, op.derive_out(): {"out": torch.empty(3)}}
    for form, out in forms.items():
        (result,) = run(form, ((torch.ones(3),), out), only="dtypes.accepted").results
        assert result.details["dtypes"]["float64"] == "excluded"
        with pytest.raises(ValueError, match="rejects example 0"):
            check(form, ((torch.ones(3, dtype=torch.double),), out))


def test_exception_in_valid_is_one_cause_of_failures(namespace: str) -> None:
    op = define(namespace, torch.clone)
    op.register_examples(lambda: [(torch.ones(2, 3),)], valid=lambda x: float(x[0, 0]) == 1)
    report = run(op, only=["memory.empty", "memory.gaps", "memory.zero_dim"])
    assert {failure.check for failure in report.failures} == {"memory.empty", "memory.zero_dim"}
    for failure in report.failures:
        assert "'valid' of register_examples raised IndexError: " in failure.message
        assert (
            "Return False for arguments that no caller may pass; these were ((tensor("
            in failure.message
        )
    # PyTorch raises IndexError with two different texts.
    assert len({failure.cause for failure in report.failures}) == 2


@pytest.mark.parametrize("answer", [None, torch.tensor(True), 1])
def test_valid_must_return_a_bool(namespace: str, answer: Any) -> None:
    op = define(namespace, torch.clone)
    op.register_examples(lambda: [(torch.ones(2),)], valid=lambda x: answer)
    with pytest.raises(
        ValueError, match=r"'valid' of register_examples returned .* Return True or"
    ):
        check(op, only="memory.gaps")


def test_invalid_example_is_rejected(namespace: str) -> None:
    op = define(namespace, torch.sin)
    op.register_examples(
        lambda: [(torch.ones(3),), (2 * torch.ones(3),)], valid=lambda x: bool((x <= 1).all())
    )
    message = (
        r"check\(.*::op, ...\): 'valid' of register_examples rejects example 1. "
        "Change the example, or 'valid'."
    )
    with pytest.raises(ValueError, match=message):
        check(op)
    with pytest.raises(ValueError, match="rejects example 0"):
        check(op, (3 * torch.ones(2),))


def test_message_says_if_the_layout_is_not_the_cause(namespace: str) -> None:
    """The operator fails for any row of equal numbers, so the message must not blame the layout."""
    calls = iter(range(1000))

    def counted(x: Tensor) -> Tensor:
        is_constant = x.numel() > 1 and bool((x == x.flatten()[0]).all())
        return x + (next(calls) if is_constant else 0)

    op = define(namespace, counted)
    (failure,) = run(op, (torch.randn(5),), only="memory.expanded").failures
    assert (
        "The layout is not the cause: the same values fail in contiguous memory too."
        in failure.message
    )
    assert "reject them: register_examples(..., valid=...)" in failure.message

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


def test_weight_never_overlaps_a_written_tensor(namespace: str) -> None:
    def norm(x: Tensor, weight: Tensor) -> None:
        for row in x:
            row.copy_(row / row.norm() * weight)

    op = torchop.custom_op(f"{namespace}::norm_", norm, mutates_args={"x"})
    report = run(op, (torch.rand(3, 4) + 1, torch.rand(4)), only="sharing.written")
    assert report.count("cannot be done") == 1
