"""Checks of results detect unwritten memory, and wrong layouts and batches.

Uses private names.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchop
from torchop.testing import check
from torchop.testing._check.calls import Call
from torchop.testing._check.checks.results import writes_every_element


def test_unwritten_element_is_detected_in_memory_that_held_nan(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::leaves_last", mutates_args=())
    def leaves_last(x: Tensor) -> Tensor:
        result = torch.empty(x.shape)
        result.view(-1)[:-1] = x.reshape(-1)[:-1]
        return result

    outcomes = set()
    for length in range(1, 200, 30):
        freed = [torch.full((length,), float("nan")) for _ in range(100)]
        del freed
        report = check(
            leaves_last,
            (torch.ones(length),),
            only=["memory.uninitialized"],
            raise_exception=False,
        )
        outcomes.update(result.outcome for result in report.results)
    assert outcomes == {"failed"}


def test_unwritten_element_is_detected_if_several_calls_return_nan(namespace: str) -> None:
    calls = []

    @torchop.custom_op(f"{namespace}::leaves_last", mutates_args=())
    def leaves_last(x: Tensor) -> Tensor:
        calls.append(x)
        result = x.clone()
        result[-1] = float(len(calls)) if len(calls) % 6 == 0 else float("nan")
        return result

    with pytest.raises(AssertionError, match="has elements that the kernel does not write"):
        writes_every_element(Call(leaves_last.overload, (torch.ones(3),)))
    assert len(calls) == 6


def test_nan_written_by_the_operator_is_accepted(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::log", mutates_args=())
    def log(x: Tensor) -> Tensor:
        return x.log()

    writes_every_element(Call(log.overload, (torch.tensor([-1.0, 1.0]),)))


def test_value_checks_pass_if_only_a_layout_fails(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::takes_address", mutates_args=())
    def takes_address(x: Tensor) -> Tensor:
        return torch.empty(0).set_(x.untyped_storage())[: x.numel()].view(x.shape).clone()

    only = ["memory.sliced", "values.nan", "values.zeros"]
    report = check(takes_address, (torch.ones(2, 3),), only=only, raise_exception=False)
    assert [failure.check for failure in report.failures] == ["memory.sliced"]
    assert report.count("passed") == 2
    strides = []

    @torchop.custom_op(f"{namespace}::takes_contiguous", mutates_args=())
    def takes_contiguous(x: Tensor) -> Tensor:
        strides.append(x.stride())
        return x.clone()

    takes_contiguous.register_examples(
        lambda: [(torch.ones(2, 3),)], valid=lambda x: x.is_contiguous()
    )
    assert check(takes_contiguous, only=only).count("passed") == 2
    assert set(strides) == {(3, 1)}


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_num_threads_check_ignores_nondeterministic_results(
    namespace: str, is_repeatable: bool
) -> None:
    calls = []

    @torchop.custom_op(f"{namespace}::splits", mutates_args=())
    def splits(x: Tensor) -> Tensor:
        calls.append(x)
        if len(x) <= 2**15:
            return x.clone()
        return x * (torch.get_num_threads() if is_repeatable else len(calls))

    report = check(splits, (torch.ones(3),), only="contracts.num_threads", raise_exception=False)
    (result,) = report.results
    assert result.outcome == ("failed" if is_repeatable else "passed")


def test_exception_caused_by_earlier_calls_is_a_failure(namespace: str) -> None:
    state = [0.0]

    @torchop.custom_op(f"{namespace}::goes_on", mutates_args=())
    def goes_on(x: Tensor) -> Tensor:
        state[0] = x.flatten()[0].item() if x.numel() and x.is_complex() else state[0]
        return torch.full(x.shape, float(state[0]) * 0, dtype=x.dtype)

    only = ["contracts.schema", "contracts.repeated", "memory.gaps"]
    report = check(goes_on, (torch.ones(3),), only=only, raise_exception=False)
    (finding,) = report.findings
    assert finding.failure.check == "contracts.repeated"
    assert "raises TypeError" in finding.failure.message


def _normalize(x: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered * (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_amplified_rounding_errors_are_accepted(namespace: str, dtype: torch.dtype) -> None:
    # In a row of equal numbers, normalizing divides the rounding errors of the mean by almost 0.
    # The layout determines the order in which PyTorch adds the numbers, and so these errors.
    op = torchop.custom_op(f"{namespace}::normalize", _normalize, mutates_args=())
    x = (torch.randn(3, 37, generator=torch.Generator().manual_seed(0)) + 2).to(dtype)
    check(op, (x,), only=["memory"])


def test_wrong_strides_are_detected_beside_amplified_rounding_errors(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::normalize", mutates_args=())
    def normalize(x: Tensor) -> Tensor:
        return _normalize(torch.as_strided(x, x.shape, (x.shape[1], 1)))

    report = check(normalize, (torch.rand(4, 4),), only=["memory"], raise_exception=False)
    failed = {result.check for result in report.results if result.outcome == "failed"}
    assert {"memory.transposed", "memory.gaps"} <= failed
