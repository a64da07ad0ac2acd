"""mutate: what becomes of the changes, in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests.testing.mutate import operators
from torchop.testing import MutationReport, _processes, mutate
from torchop.testing._mutate import api

EXAMPLE = (torch.arange(6.0).reshape(2, 3) + 1, torch.full((2, 3), 2.0))
# Quick ones that see kernels, fake kernels and formulas.
CHECKS = (
    *("memory.given", "memory.single", "memory.zero_dim", "memory.transposed"),
    *("dtypes.accepted", "gradcheck", "subsystems.fake"),
)


def fates(report: MutationReport) -> dict[tuple[str, int, str], str]:
    """What became of each change; several of one name in a line count as the one that is last."""
    start = min(verdict.mutant.line for verdict in report.verdicts)
    return {
        (v.mutant.role, v.mutant.line - start, v.mutant.change): v.outcome for v in report.verdicts
    }


@pytest.fixture(scope="module")
def report() -> MutationReport:
    op = operators.make_scale("mutated")
    return mutate(op, EXAMPLE, reference=lambda x, weight: x * weight, only=CHECKS)


def test_changes_that_matter_are_noticed(report: MutationReport) -> None:
    found = fates(report)
    assert found["kernel", 2, "* to /"] == "killed"
    assert found["kernel", 0, "condition always true"] == "killed"
    assert found["fake kernel", 6, "dtype= left out"] == "killed"
    assert found["backward", 14, "results swapped"] == "killed"
    assert found["backward", 14, "gradient None"] == "killed"
    assert found["setup_context", 9, "statement left out"] == "killed"
    gradients = [v for v in report.verdicts if v.mutant.change == "gradient zero"]
    assert [v.check for v in gradients] == ["subsystems.gradcheck"] * 2
    assert all("Jacobian mismatch" in v.message for v in gradients)


def test_changes_without_effect_are_told_from_survivors(report: MutationReport) -> None:
    found = fates(report)
    assert found["kernel", 0, "condition always false"] == "equal"
    # On a machine without a second device, a device that is forgotten shows on meta tensors alone.
    assert found["fake kernel", 6, "device= left out"] == "survived"
    assert [v.mutant.change for v in report.survivors] == ["device= left out"]


def test_a_report_shows_survivors_with_their_diff(report: MutationReport) -> None:
    text = str(report)
    assert report.summary() in text
    assert "SURVIVED, although calls have other results: device= left out, in the fake" in text
    assert f"{operators.__file__}:" in text
    assert "    -        return torch.empty(x.shape, dtype=x.dtype, device=x.device)\n" in text
    assert "    +        return torch.empty(x.shape, dtype=x.dtype)\n" in text
    assert "noticed by: " in text
    assert "unless there is a reference" not in text  # as there is one


def test_a_report_is_written_as_json(report: MutationReport, tmp_path: Path) -> None:
    report.to_json(tmp_path / "report.json")
    values = json.loads((tmp_path / "report.json").read_text())
    assert values["op"] == "mutated::scale"
    assert values["verdicts"][0].keys() == {"mutant", "outcome", "check", "message"}


def test_without_a_reference_nothing_tells_what_a_kernel_should_return(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    report = mutate(twice, EXAMPLE[:1], only=("memory.given", "memory.transposed"))
    assert fates(report)["kernel", 0, "* to /"] == "survived"
    assert "unless there is a reference: pass reference=, or --reference." in str(report)


def test_what_never_returns_is_told(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_LEAST_SECONDS", 1.0)
    report = mutate(operators.make_looping(namespace), (torch.ones(2),), only="memory.given")
    late = report.with_outcome("timed out")
    assert {verdict.mutant.change for verdict in late} == {"+ to -", "statement left out"}
    assert {verdict.check for verdict in late} == {"memory.given"}
    assert all(verdict.message.startswith("it took over ") for verdict in late)


def test_no_check_may_take_longer_than_the_timeout(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[float] = []

    def answers(method: Any, function: Any, args: Any, limits: Iterator[float], *more: Any) -> Any:
        def noted() -> Iterator[float]:
            for seconds in limits:
                allowed.append(seconds)
                yield seconds

        return _processes.answers(method, function, args, noted(), *more)

    monkeypatch.setattr(api, "answers", answers)
    monkeypatch.setattr(api, "_LEAST_SECONDS", 1000.0)
    crashing = operators.make_crashing(namespace)  # of which there are few changes
    options = {"only": "memory.given", "seed": 0, "reference": None}
    examples = [(torch.ones(2),)]
    report = api.run(crashing, lambda: examples, options, timeout=100.0)
    assert len(allowed) > 3 * len(report.verdicts) > 0
    assert set(allowed) == {100.0}
    with pytest.raises(RuntimeError, match="without a change, it took over 0 seconds, in "):
        api.run(crashing, lambda: examples, options, timeout=1e-6)


def test_what_crashes_is_noticed(namespace: str) -> None:
    report = mutate(operators.make_crashing(namespace), (torch.ones(2),), only="memory.given")
    (crash,) = [v for v in report.verdicts if v.mutant.change == "!= to =="]
    assert (crash.outcome, crash.message) == ("killed", "it ended the process, by SIGABRT")


def test_the_process_itself_is_not_changed(namespace: str) -> None:
    op = operators.make_scale(namespace)
    before = op._init_fn.__code__
    mutate(op, EXAMPLE, only="memory.given", budget=0)
    assert op._init_fn.__code__ is before
    assert torch.equal(op(*EXAMPLE), EXAMPLE[0] * 2)


def test_a_budget_leaves_changes_out(namespace: str) -> None:
    report = mutate(operators.make_scale(namespace), EXAMPLE, only="memory.given", budget=0)
    assert {verdict.outcome for verdict in report.verdicts} == {"not run"}
    assert f"{len(report.verdicts)} not run" in report.summary()
    with pytest.raises(ValueError, match=r"^mutate\(..., budget=-1\): no check would run"):
        mutate(operators.make_scale(namespace), EXAMPLE, budget=-1)


def test_an_operator_of_torch_library(namespace: str) -> None:
    @torch.library.custom_op(f"{namespace}::stock", mutates_args=())
    def stock(x: Tensor) -> Tensor:
        return x * 2

    report = mutate(
        f"{namespace}::stock", (torch.ones(2),), reference=lambda x: x + x, only="memory.given"
    )
    assert [(v.mutant.change, v.outcome) for v in report.verdicts] == [
        ("* to /", "killed"),
        ("2 to 3", "killed"),
    ]


def test_what_cannot_be_changed_is_told() -> None:
    report = mutate("aten::sin", (torch.ones(2),), only="memory.given")
    assert report.verdicts == ()
    assert report.refused == {"the operator": "it has no function in Python"}
    assert "not changed: the operator: it has no function in Python" in str(report)


def test_mistakes_of_the_caller_are_raised_as_by_check(namespace: str) -> None:
    op = operators.make_scale(namespace)
    with pytest.raises(torchop.MissingRuleError, match="no examples"):
        mutate(op)
    with pytest.raises(ValueError, match="no check has such a name"):
        mutate(op, EXAMPLE, only="sideways")
    with pytest.raises(TypeError, match="is not a call of"):
        mutate(op, (torch.ones(1),))


def test_an_operator_that_is_wrong_already(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::wrong", mutates_args=())
    def wrong(x: Tensor) -> Tensor:
        raise RuntimeError("never")

    with pytest.raises(RuntimeError, match=r"no check passes without a change.*never"):
        mutate(wrong, (torch.ones(1),), only="memory.given")
    report = mutate(
        operators.make_scale(namespace),
        EXAMPLE,
        reference=lambda x, weight: x,
        only=("memory.given", "gradcheck"),
        budget=0,
    )
    assert report.failing == ("memory.given",)
    assert "fail without a change, and notice none: memory.given" in str(report)


def test_forks_that_cannot_run_a_backward(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Unable to handle autograd's threading")  # in PyTorch's words

    monkeypatch.setattr(Tensor, "backward", refuse)
    with pytest.raises(
        RuntimeError, match=r"refuses to run a backward.*Call it before, on the CPU"
    ):
        mutate(operators.make_scale(namespace), EXAMPLE, only="memory.given", budget=0)


def test_an_operator_that_ends_the_process_already(namespace: str) -> None:
    def crash(x: Tensor) -> Tensor:
        import os

        os.abort()

    op: Any = torchop.custom_op(f"{namespace}::crash", crash, mutates_args=())
    with pytest.raises(RuntimeError, match=r"it ended the process, by SIGABRT, in memory\.given\."):
        mutate(op, (torch.ones(1),), only="memory.given")
