"""Checks of an operator with several kernels, called providers. Uses private names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from torchop.testing import check
from torchop.testing._check.run import plan_checks

X = torch.arange(6.0).view(2, 3) + 1


def tripled(x: Tensor) -> Tensor:
    return (x * 3).contiguous()


@pytest.fixture
def op(namespace: str) -> Any:
    op = torchop.custom_op(f"{namespace}::op", tripled, mutates_args=())
    op.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype))
    return op


def test_operator_without_providers_has_no_provider_checks(op: Any) -> None:
    assert not any(each.name.startswith("providers.") for each in plan_checks(op, [(X,)]))
    (result,) = check(op, (X,), only="providers.agrees", raise_exception=False).results
    assert (result.outcome, result.message) == (
        "cannot be done",
        "the operator has no provider",
    )


def test_declared_properties_of_a_provider_select_its_checks(op: Any) -> None:
    op.register_kernel("cpu", tripled, provider="fast")
    op.register_kernel("cpu", tripled, provider="noisy", deterministic=False)
    op.register_kernel("cpu", tripled, provider="row", batch_invariant=True)
    names = [each.name for each in plan_checks(op, [(X,)])]
    assert "memory.transposed" in names
    assert "memory.transposed[fast]" not in names
    assert {"contracts.schema[fast]", "providers.agrees[fast]"} < set(names)
    for name, providers in (
        ("contracts.repeated", ["fast", "row"]),
        ("providers.batch_invariant", ["row"]),
        ("contracts.state", ["fast", "row"]),
        ("providers.configs", []),
    ):
        assert [n for n in names if n.startswith(f"{name}[")] == [f"{name}[{p}]" for p in providers]


def test_provider_that_replaces_another_on_one_device_is_checked(op: Any) -> None:
    op.register_kernel(
        ["cuda", "cpu"],
        lambda x, tile: tripled(x),
        provider="fast",
        configs=[{"tile": 1}, {"tile": 2}],
    )
    op.register_kernel("cpu", tripled, provider="fast", supports=lambda x: x.ndim == 2)
    assert [each.device_types for each in torchop.providers(op.name)] == [
        (None,),
        ("cuda",),
        ("cpu",),
    ]
    names = [each.name for each in plan_checks(op, [(X,)])]
    assert "providers.agrees[fast]" in names
    assert "providers.configs[fast]" not in names


@pytest.mark.parametrize(
    ("only", "count"),
    [
        ("providers.agrees", 2),
        ("agrees[fast]", 1),
        ("providers.agrees[fast]", 1),
        ("contracts.schema", 3),
        ("contracts.schema[fast]", 1),
        ("*.agrees[[]fast]", 0),
    ],
)
def test_patterns_select_provider_checks(op: Any, only: str, count: int) -> None:
    op.register_kernel("cpu", tripled, provider="fast")
    op.register_kernel("cpu", tripled, provider="other")
    if count:
        assert len(plan_checks(op, [(X,)], only=only)) == count
        return
    with pytest.raises(ValueError, match="no check has this name"):
        plan_checks(op, [(X,)], only=only)


def test_reference_is_checked_for_any_priority(op: Any) -> None:
    op.register_kernel("cpu", lambda x: x.clone(), provider="wrong")
    op.set_priority(["wrong"])
    report = check(
        op, (X,), reference=tripled, only=["memory.given", "agrees"], raise_exception=False
    )
    assert {r.check: r.outcome for r in report.results} == {
        "memory.given": "passed",
        "providers.agrees[wrong]": "failed",
    }
    assert torchop.explain(op, X).provider == "wrong"


def test_failure_names_the_provider_and_its_program_fails(op: Any) -> None:
    op.register_kernel("cpu", lambda x: x * 3 + (x > 100), provider="fast")
    (failure,) = check(op, (100 * X,), only="agrees", raise_exception=False).failures
    assert failure.check == "providers.agrees[fast]"
    assert "the provider 'fast': result 0 of 1 is [" in failure.message
    program = failure.program
    assert (
        f'with torchop.priority({{"{op.name}": ["fast"]}}):\n    agrees_with_reference(' in program
    )
    assert f"providers.agrees[fast] of {op.name}" in " ".join(program.split())
    with pytest.raises(AssertionError, match="the provider 'fast'"):
        exec(program, {})


def test_unsupported_providers_are_listed_with_the_reason(op: Any) -> None:
    op.register_kernel("cuda", tripled, provider="device")
    op.register_kernel("cpu", tripled, provider="off", supported=False)
    op.register_kernel("cpu", tripled, provider="on")
    report = check(op, (X,), only=["agrees", "supports"])
    outcomes = {r.check: r.outcome for r in report.results}
    assert outcomes == {
        "providers.agrees[device]": "cannot be done",
        "providers.agrees[off]": "cannot be done",
        "providers.agrees[on]": "passed",
        "providers.supports[device]": "cannot be done",
        "providers.supports[off]": "cannot be done",
        "providers.supports[on]": "passed",
    }
    text = str(report)
    assert "providers.supports[device], providers.agrees[device]: cannot be done because" in text
    assert "the provider cannot run here: it is for cuda, and the examples are on cpu" in text
    assert "the provider cannot run here: it is registered with supported=False" in text


def test_results_may_differ_by_the_declared_tolerance(op: Any) -> None:
    op.register_kernel("cpu", lambda x: x * 3.01, provider="fast")
    assert not check(op, (X,), only="agrees", raise_exception=False).ok
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    op.register_kernel(
        "cpu",
        lambda x: x * 3.01,
        provider="fast",
        supports=lambda x: x.is_floating_point(),
        tolerance=dict.fromkeys(floats, (1e-2, 1e-2)),
    )
    assert check(op, (X,), only="agrees").ok


def test_provider_may_round_less_than_the_reference(op: Any, namespace: str) -> None:
    def in_steps(x: Tensor) -> Tensor:
        return ((x * 1.3 + 0.7) * 1.9 - 0.3).contiguous()

    op = torchop.custom_op(f"{namespace}::steps", in_steps, mutates_args=())

    def once(x: Tensor) -> Tensor:
        return in_steps(x.double()).to(x.dtype)

    op.register_kernel("cpu", once, provider="once", supports=lambda x: x.is_floating_point())
    half = (torch.randn(64, generator=torch.Generator().manual_seed(0)).half(),)
    with pytest.raises(AssertionError, match="close"):
        torch.testing.assert_close(in_steps(half[0].double()).half(), in_steps(half[0]))
    assert check(op, half, only="memory.given").ok
    assert check(op, half, only="agrees", raise_exception=False).results[0].outcome == "passed"
    op.register_kernel("cpu", lambda x: once(x) * 1.05, provider="once")
    assert not check(op, half, only="agrees", raise_exception=False).ok
