"""`nox -s realworld` detects differences between the programs that it compares."""

from __future__ import annotations

import itertools
import math
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests._support.common import needs_native

pytestmark = pytest.mark.project

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "realworld"
sys.path.insert(0, str(BENCHMARKS))
try:
    import _case
    import _overhead
    import operators
    import own_tests
    import steps
finally:
    sys.path.remove(str(BENCHMARKS))

X = torch.tensor([1.0, math.nan, 0.0])


@pytest.mark.parametrize(
    ("found", "expected", "said"),
    [
        ([X], [X.clone()], ""),
        ([X, 1], [X.clone()], "2 values instead of 1"),
        ([X], [torch.tensor([1.0, math.nan, -0.0])], "tensor 0 has other values"),
        ([X], [X.double()], "tensor 0 is (torch.float32"),
        ([torch.ones(2, 3)], [torch.ones(3, 2).T], "tensor 0 is"),
        ([X], [X.clone().requires_grad_()], "instead of"),
        ([torch.tensor(1.0)], [torch.tensor(2.0)], "tensor 0 has other values"),
        ([X, 1], [X, 2], "value 1 is 1 instead of 2"),
        ([None], [X], "value 0 is None"),
        ([1], [True], "value 0 is 1 instead of True"),
    ],
)
def test_difference_in_any_bit_is_detected(found, expected, said) -> None:
    difference = _case.difference(found, expected)
    assert said in difference
    assert bool(difference) == bool(said)


def test_run_returns_results_writes_versions_and_gradients() -> None:
    def scaled(x: Tensor, log: Tensor) -> Tensor:
        log.add_(x.detach().sum())
        return x * 3

    x = torch.ones(2, requires_grad=True)
    result, same, log, grad, written_x, written_log = _case.run(scaled, (x, torch.zeros(1)))
    assert result.tolist() == [3, 3]
    assert same is x
    assert log.tolist() == [2]
    assert grad.tolist() == [3, 3]
    assert (written_x, written_log) == (0, 1)


@needs_native
def test_case_is_compared_with_and_without_acceleration(namespace) -> None:
    numbers = itertools.count()

    @torch.library.custom_op(f"{namespace}::good", mutates_args=())
    def good(x: Tensor, by: float = 1.0) -> Tensor:
        return x * by

    @torch.library.custom_op(f"{namespace}::counted", mutates_args=())
    def counted(x: Tensor) -> Tensor:
        return x + next(numbers)

    ones = torch.ones(2)
    check = operators.check
    assert check(_case.Case(f"{namespace}::good", lambda: (ones, 2.0))) == ""
    assert "has other values" in check(_case.Case(f"{namespace}::counted", lambda: (ones,)))
    converted = check(_case.Case(f"{namespace}::good", lambda: (ones, np.float32(2.0))))
    assert converted.startswith(
        "the call is not native: argument 'by' does not have exactly the schema's type"
    )


@needs_native
def test_operator_without_a_case_needs_a_reason(namespace) -> None:
    library = torch.library.Library(namespace, "FRAGMENT")
    for name in ("has_case", "has_reason", "forgotten"):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x + 1, "CPU")
    library.define("has_no_kernel(Tensor x) -> Tensor")
    cases = [_case.Case(f"{namespace}::has_case", lambda: (torch.ones(2),))]
    left_out = {f"{namespace}::has_reason": "it needs a GPU"}
    package = _case.Package("mine", (namespace,), cases, left_out)
    assert operators.without_case(package) == {
        f"{namespace}::forgotten": "",
        f"{namespace}::has_no_kernel": "none of its kernels is a Python function",
        f"{namespace}::has_reason": "it needs a GPU",
    }
    library._destroy()


@pytest.mark.parametrize("first", ["call", "kernel"])
def test_overhead_does_not_depend_on_the_order(monkeypatch, first) -> None:
    now = 0
    calls = []

    def takes(name: str, nanoseconds: int) -> None:
        nonlocal now
        # Simulate that the second call of each pair is slower, as if the first had changed caches.
        is_second = len(calls) % 2 == 1
        calls.append(name)
        now += nanoseconds + 500 * (is_second == (first == "call"))

    monkeypatch.setattr(_overhead.time, "perf_counter_ns", lambda: now)
    measured = _overhead.overhead(lambda: takes("call", 9000), lambda: takes("kernel", 7000))
    assert measured.over == pytest.approx(2.0)
    assert measured.call == pytest.approx(9.25)
    assert measured.margin == 0
    assert calls[:4] == ["call", "kernel", "kernel", "call"]


GOOD = own_tests.Run({"a": "passed", "b": "skipped"}, {"quanto::op": {"native": 2}}, "")


@pytest.mark.parametrize(
    ("accelerated", "said"),
    [
        (GOOD, []),
        (GOOD._replace(outcomes={"a": "failed", "b": "skipped"}), ["a: passed without"]),
        (
            GOOD._replace(outcomes={"a": "passed"}),
            ["b: skipped without acceleration, missing with it"],
        ),
        (GOOD._replace(calls={}), ["no test called an accelerated operator of quanto::"]),
        (GOOD._replace(calls={"other::op": {"native": 1}}), ["no test called"]),
        (
            GOOD._replace(calls={"quanto::op": {"mode": 2}}),
            ["quanto::op: no call was native"],
        ),
    ],
)
def test_outcomes_of_two_test_runs_are_compared(accelerated, said) -> None:
    found = own_tests.problems(GOOD, accelerated)
    assert len(found) == len(said)
    assert all(text.startswith(start) for text, start in zip(found, said, strict=True))


@needs_native
def test_package_is_tested_with_and_without_acceleration(tmp_path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    folder = tmp_path / "test" / "library"
    folder.mkdir(parents=True)
    program = """
        import pytest, torch, torchop

        @torch.library.custom_op("quanto::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def test_same():
            assert twice(torch.ones(2)).tolist() == [2, 2]

        def test_random():
            assert torch.rand(1).item() < 0, "fails either way, with the same number"

        def test_skipped():
            pytest.skip("not here")

        def test_is_not_native():
            twice(torch.ones(2))
            assert not torchop.native.counters(twice)
    """
    (folder / "test_twice.py").write_text(textwrap.dedent(program))
    reports = [tmp_path / "plain.json", tmp_path / "accelerated.json"]
    started = [
        own_tests.start(tmp_path / "test", ("library",), report, pattern)
        for report, pattern in zip(reports, ("", "quanto::*"), strict=True)
    ]
    plain, accelerated = map(own_tests.finish, started, reports)
    assert sorted(plain.outcomes.values()) == ["failed", "passed", "passed", "skipped"]
    assert plain.calls == {}
    assert accelerated.calls == {"quanto::twice": {"native": 2}}
    (found,) = own_tests.problems(plain, accelerated)
    assert found.endswith("test_is_not_native: passed without acceleration, failed with it")
    numbers = [run.output.partition("assert 0.")[2][:12] for run in (plain, accelerated)]
    assert numbers[0] == numbers[1] != ""


@needs_native
def test_operator_and_training_step_are_measured(namespace: str, monkeypatch) -> None:
    """Measure only one round, because this test does not check the times."""

    @torch.library.custom_op(f"{namespace}::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    measured = operators.measure(_case.Case(f"{namespace}::twice", lambda: (torch.ones(2),)))
    assert min(measured.before, measured.after, measured.kernel) > 0
    assert not measured.records
    monkeypatch.setattr(steps, "PATTERNS", (f"{namespace}::*",))
    monkeypatch.setattr(steps, "ROUNDS", 1)
    assert min(steps.measure(lambda: twice(torch.ones(2)))) > 0
