"""The arguments, the report and the exceptions of `check`. Uses private names."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import outcome
from torchop.testing import CheckReport, check
from torchop.testing._check.calls import Call
from torchop.testing._check.checks import leaking
from torchop.testing._check.run import plan_checks, run_check
from torchop.testing._check.table import CHECKS, alone
from torchop.testing.process_state import process_state


@pytest.fixture
def good(namespace: str) -> Any:
    op = torchop.custom_op(f"{namespace}::good", _double, mutates_args=())
    op.register_fake(lambda x, scale=2.0: torch.empty_like(x * scale))
    return op


def _double(x: Tensor, scale: float = 2.0) -> Tensor:
    return x * scale


@pytest.fixture
def flat(namespace: str) -> Any:
    def kernel(x: Tensor) -> Tensor:
        memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        return memory[: x.numel()].reshape(x.shape) * 2

    return torchop.custom_op(f"{namespace}::flat", kernel, mutates_args=())


_UNARY = "(Tensor x) -> Tensor"
EXAMPLE = (torch.arange(12.0).reshape(3, 4),)


def test_correct_operator_has_a_passing_report(good: Any) -> None:
    report = check(good, EXAMPLE, only=["memory", "contracts"])
    assert isinstance(report, CheckReport)
    assert report.ok
    assert report.failures == ()
    assert report.op == good.name
    assert {result.family for result in report.results} == {"memory", "contracts"}
    assert all(result.seconds >= 0 for result in report.results)


def test_failures_are_raised_with_the_report(flat: Any) -> None:
    from torch.testing._internal.optests import OpCheckError

    with pytest.raises(torchop.testing.OpCheckError, match=r"FAILED memory\.transposed") as error:
        check(flat, EXAMPLE, only="memory")
    assert isinstance(error.value, OpCheckError)  # the class that torch.library.opcheck raises
    assert "torch.tensor(" in str(error.value)
    # Only the printed report lists the checks that cannot be done.
    assert "cannot be done because" not in str(error.value)


def test_failures_name_check_message_and_program(flat: Any) -> None:
    report = check(flat, EXAMPLE, only="memory.transposed", raise_exception=False)
    (failure,) = report.failures
    assert not report.ok
    assert failure.check == "memory.transposed"
    assert "should be" in failure.message
    # The program uses the smallest argument that fails. 2 by 2 is the smallest matrix that is not
    # contiguous when transposed.
    assert ".as_strided((2, 2), (1, 2), 0)" in failure.program


def test_examples_may_contain_keywords_or_be_dicts(good: Any) -> None:
    for example in (((EXAMPLE[0],), {"scale": 3.0}), {"x": EXAMPLE[0]}, (EXAMPLE[0], 4.0)):
        assert check(good, example, only="memory.given").ok


def test_registered_examples_are_used(good: Any) -> None:
    with pytest.raises(torchop.MissingRuleError, match="no examples"):
        check(good)
    good.register_examples(lambda: [EXAMPLE])
    assert check(good, only="memory.given").results[0].outcome == "passed"


def test_wrong_examples_are_refused(good: Any) -> None:
    with pytest.raises(TypeError, match=r"Write \(x,\) for one argument"):
        check(good, torch.ones(2))
    with pytest.raises(TypeError, match="is not a call of"):
        check(good, (torch.ones(2), 2.0, 3.0))
    with pytest.raises(TypeError, match=r"Pass several examples one by one, as in check\(op, \*"):
        check(good, [EXAMPLE, EXAMPLE, EXAMPLE])
    with pytest.raises(TypeError, match=r"'x' is a list or tuple, not a tensor. Pass"):
        check(good, [EXAMPLE])
    with pytest.raises(ValueError, match="no data"):
        check(good, (torch.ones(2, device="meta"),))


def test_unknown_checks_are_refused(good: Any) -> None:
    with pytest.raises(ValueError, match=r"only='memory.sideways'\): no check has this name"):
        check(good, EXAMPLE, only="memory.sideways")
    with pytest.raises(ValueError, match=r"only='memory.sideways'\): no check has this name"):
        check(good, EXAMPLE, only=["memory.given", "memory.sideways"])
    for name, nearest in (
        ("subsystem.gradcheck", "subsystems.gradcheck"),
        ("gradchek", "subsystems.gradcheck"),
        ("memroy", "memory"),
    ):
        with pytest.raises(ValueError, match=f"has this name. Did you mean {nearest}[?]"):
            check(good, EXAMPLE, only=name)
    with pytest.raises(ValueError, match=r"only=\[\]\): no check has this name. Give"):
        check(good, EXAMPLE, only=[])


def test_operator_that_refuses_its_example_fails(namespace: str) -> None:
    def kernel(x: Tensor) -> Tensor:
        raise RuntimeError("never")

    op = torchop.custom_op(f"{namespace}::refusing", kernel, mutates_args=())
    report = check(op, EXAMPLE, only="memory", raise_exception=False)
    assert [failure.check for failure in report.failures] == ["memory.given"]
    assert "never" in report.failures[0].message
    transposed = next(r for r in report.results if r.check == "memory.transposed")
    assert transposed.outcome == "cannot be done"
    assert "refuses every example" in transposed.message


def test_results_are_compared_with_the_reference(good: Any) -> None:
    assert check(good, EXAMPLE, reference=lambda x: x + x, only="memory").ok
    report = check(good, EXAMPLE, reference=lambda x: x + 1, only="given", raise_exception=False)
    assert [failure.check for failure in report.failures] == ["memory.given"]


def test_reference_may_refuse_a_variant(good: Any) -> None:
    def reference(x: Tensor) -> Tensor:
        if not x.numel():
            raise ValueError("no elements")
        return x * 2

    report = check(good, EXAMPLE, reference=reference, only=["memory.empty", "memory.given"])
    empty = next(r for r in report.results if r.check == "memory.empty")
    assert empty.outcome == "cannot be done"
    assert "the reference refuses it: ValueError: no elements" in empty.message


def test_tolerances_apply_to_the_reference(good: Any) -> None:
    options: dict[str, Any] = {"reference": lambda x: x * 2.001, "raise_exception": False}
    assert not check(good, EXAMPLE, only="given", **options).ok
    assert check(good, EXAMPLE, only="given", rtol=0.01, atol=0.0, **options).ok


def test_report_lists_checks_that_exceed_the_budget(good: Any) -> None:
    report = check(good, EXAMPLE, budget=0.0, allow_not_run=True)
    assert report.ok
    assert {result.outcome for result in report.results} == {"not run"}
    assert report.results[0].message == "the budget ended after 0 cases"
    assert "not run" in str(report)


def test_skipped_checks_fail_unless_allow_not_run_is_set(good: Any) -> None:
    told = r"1 not run .*1 checks did not run: the budget ended after 0 cases"
    with pytest.raises(torchop.testing.OpCheckError, match=f"(?s){told}.*allow_not_run"):
        check(good, EXAMPLE, only="memory.given", budget=0)
    report = check(good, EXAMPLE, only="memory.given", budget=0, raise_exception=False)
    assert (report.ok, report.failures) == (False, ())
    assert CheckReport.from_dict(report.to_dict()).ok is False
    allowed = check(good, EXAMPLE, only="memory.given", budget=0, allow_not_run=True)
    assert CheckReport.from_dict(allowed.to_dict()).ok is True
    assert "allow_not_run" not in str(allowed)


def test_inapplicable_check_is_not_a_failure(good: Any) -> None:
    report = check(good, EXAMPLE, only=["memory.channels_last", "memory.given"])
    assert {r.outcome for r in report.results} == {"cannot be done", "passed"}
    assert report.ok
    assert "1 passed, 1 cannot be done" in report.summary()


def test_report_is_not_ok_if_no_check_could_be_done(good: Any) -> None:
    with pytest.raises(torchop.testing.OpCheckError, match=r"no check could be done\. Choose"):
        check(good, EXAMPLE, only="memory.channels_last")
    report = check(good, EXAMPLE, only="vmap", raise_exception=False)
    assert (report.ok, report.failures) == (False, ())


def test_check_stops_between_cases_after_its_deadline(good: Any) -> None:
    (item,) = plan_checks(good, [EXAMPLE], only="subsystems.fake")
    result = run_check(item, end=time.perf_counter() - 1)
    assert result.outcome == "not run"
    assert "after 0 cases" in result.message


def test_inapplicable_check_reports_the_reason(good: Any) -> None:
    names = ["vmap", "gradcheck", "accelerator", "channels_last"]
    report = check(good, EXAMPLE, only=names, raise_exception=False)
    reasons = {r.check.partition(".")[2]: r.message for r in report.results}
    assert reasons["vmap"] == "no vmap rule"
    assert reasons["gradcheck"].startswith("no autograd formula that runs: MissingFormulaError")
    assert reasons["channels_last"] == "no tensor has four or five dimensions"
    assert all(result.outcome == "cannot be done" for result in report.results)
    assert str(report).count("cannot be done because:") == 4


def test_costly_checks_come_last(good: Any) -> None:
    names = [item.name for item in plan_checks(good, [EXAMPLE])]
    assert names[-1] == "subsystems.export_dynamic"


def test_plan_checks_returns_checks_for_run_check(flat: Any) -> None:
    checks = plan_checks(flat, [EXAMPLE])
    planned = [kind.name for kind in sorted(CHECKS, key=lambda kind: kind.is_costly)]
    # All checks are planned, except those of providers, because the operator has none.
    assert [item.name for item in checks] == [n for n in planned if "providers." not in n]
    assert len({item.name for item in checks}) == len(checks)
    assert all(item.kind.question.endswith(("?", ".)")) for item in checks)
    (item,) = plan_checks(flat.name, [EXAMPLE], only="memory.gaps")
    result = run_check(item)
    assert (result.check, result.outcome) == ("memory.gaps", "failed")


def test_run_check_does_not_raise_if_every_second_call_raises(namespace: str) -> None:
    answers = iter([True, False] * 1000)

    def kernel(x: Tensor) -> Tensor:
        if next(answers):
            return x + 1
        raise RuntimeError("every other time")

    op = torchop.custom_op(f"{namespace}::moody", kernel, mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))
    results = [run_check(item) for item in plan_checks(op, [EXAMPLE], only=["dtypes", "memory"])]
    assert "every other time" in " ".join(result.message for result in results)


@pytest.mark.parametrize(("left", "is_leak"), [([100] * 4, True), ([160, 100, 75, 60], False)])
def test_slowing_growth_is_not_a_leak(
    left: list[int], is_leak: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = itertools.cycle(itertools.accumulate([0, *left]))
    monkeypatch.setattr(leaking, "open_files", lambda: next(counts))
    found = outcome(lambda: leaking.leaks_nothing(Call(torch.ops.aten.neg.default, EXAMPLE)))
    expected = AssertionError, f"memory grows with every 50 calls: {{'open files': {left[1:]}}}."
    assert found == (expected if is_leak else None)


def test_leak_check_skips_slow_operators(namespace: str) -> None:
    def kernel(x: Tensor) -> Tensor:
        time.sleep(0.3)
        return x + 1

    op = torchop.custom_op(f"{namespace}::slow", kernel, mutates_args=())
    (item,) = plan_checks(op, [EXAMPLE], only="leaks")
    result = run_check(item)
    assert result.outcome == "cannot be done"
    assert "200 calls of this example would take" in result.message


def test_wrong_gradients_of_large_tensors_are_reported_quickly(namespace: str) -> None:
    """PyTorch's `gradcheck` would compute the whole Jacobian for its message, which is slow."""
    op = torchop.custom_op(f"{namespace}::large", lambda x: x.exp(), mutates_args=(), schema=_UNARY)
    example = (torch.linspace(-1, 1, 4096).view(64, 64),)
    errors = []
    for sign in (1, -1):
        op.register_autograd(
            lambda ctx, grad, sign=sign: sign * grad * ctx.saved_tensors[0].exp(),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
        )
        (item,) = plan_checks(op, [example], only="gradcheck")
        case = next(item.kind.cases(item.subject, {}))
        started = time.process_time()
        try:
            case.probe(Call(item.subject.op, *case.arguments()))
        except RuntimeError as error:
            errors.append(str(error))
        assert time.process_time() - started < 10
    assert [error.partition(" is -")[0] for error in errors] == [
        "in a random direction, the gradient"
    ]


def test_float32_gradients_are_not_compared_with_finite_differences(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::rounds", lambda x: x.float() * 2, mutates_args=(), schema=_UNARY
    )
    op.register_autograd(lambda ctx, grad: grad.double() * 2)
    report = check(op, EXAMPLE, only="gradcheck", raise_exception=False)
    assert report.results[0].outcome == "cannot be done"
    assert "dtype torch.float32 for arguments in double" in report.results[0].message


def test_free_list_of_tuples_is_not_a_leak(namespace: str) -> None:
    # CPython keeps up to 2,000 freed tuples of each length for reuse. Memory grows until this list
    # is full, which is not a leak.
    @torchop.out_op(f"{namespace}::negate", like="x")
    def negate(x: Tensor, *, out: Tensor) -> None:
        torch.neg(x, out=out)

    gc.collect()  # empties the free list of tuples, as in a new process
    assert check(negate.functional, EXAMPLE, only="leaks").ok


def test_structured_arguments_are_checked(namespace: str) -> None:
    @dataclasses.dataclass
    class Scale:
        factor: float
        offset: Tensor

    def kernel(x: Tensor, scale: Scale) -> Tensor:
        return x * scale.factor + scale.offset

    kernel.__annotations__["scale"] = Scale
    op = torchop.custom_op(f"{namespace}::structured", kernel, mutates_args=())
    example = (torch.ones(2, 3), Scale(2.0, torch.ones(3)))
    report = check(op, example, only="memory", reference=kernel)
    assert report.ok
    assert len([r for r in report.results if r.outcome == "passed"]) > 10
    overload = getattr(torch.ops, namespace).structured.default
    flat = ((example[0], torch.ones(3)), {"scale_factor": 2.0})
    for named, passed in ((op, example), (str(op.name), example), (overload, flat)):
        assert check(named, passed, only="memory.transposed").results[0].outcome == "passed"
    op.register_examples(lambda: [example])
    for named in (op, str(op.name), overload):
        assert check(named, only="memory.transposed").results[0].outcome == "passed"
        assert torchop.opcheck(named, test_utils="test_schema") == {"test_schema": "SUCCESS"}


def test_operators_of_pytorch_are_checked() -> None:
    assert check("aten::sin", (torch.ones(2, 3),), only=["memory", "values"]).ok
    with pytest.raises(torchop.OperatorNotFoundError):
        check("nobody::defined_this", EXAMPLE)


def test_check_restores_process_state(good: Any) -> None:
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    check(good, EXAMPLE, only=["memory", "contracts", "gradcheck"])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_deterministic_debug_mode() == 0


def test_state_changed_by_the_operator_is_restored(
    namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np = pytest.importorskip("numpy")
    threads = torch.get_num_threads()

    def kernel(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(threads + 1)
        torch.set_deterministic_debug_mode("warn")
        torch.set_autocast_enabled("cpu", True)
        os.environ["CHANGED_BY_A_KERNEL"] = "1"
        os.chdir("/")
        random.seed(7)
        np.random.seed(7)
        return x + 1

    before = process_state()
    op = torchop.custom_op(f"{namespace}::changes", kernel, mutates_args=())
    report = check(op, EXAMPLE, only=["process", "given"], raise_exception=False)
    after = process_state()
    assert {name for name in before if before[name] != after[name]} == set()
    assert [failure.check for failure in report.failures] == ["contracts.process"]


def test_system_exit_and_unprintable_exceptions_are_reported(namespace: str) -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def kernel(x: Tensor) -> Tensor:
        if x.is_contiguous():
            raise UnprintableError
        raise SystemExit(3)

    op = torchop.custom_op(f"{namespace}::ends", kernel, mutates_args=())
    given, transposed = (
        run_check(plan_checks(op, [(x,)], only="memory.given")[0])
        for x in (torch.ones(2, 3), torch.ones(2, 3).T)
    )
    assert given.outcome == transposed.outcome == "failed"
    assert given.message == (
        "the example as it was passed: UnprintableError: (its text cannot be read)"
    )
    assert transposed.message == "the call raised SystemExit"


@pytest.mark.parametrize("budget", [-1, float("nan")])
def test_negative_or_nan_budget_is_rejected(namespace: str, budget: float) -> None:
    op = torchop.custom_op(f"{namespace}::op", _double, mutates_args=())
    with pytest.raises(ValueError, match=rf"budget={budget}\): budget must be 0 or more"):
        check(op, EXAMPLE, budget=budget)


def test_whole_run_is_quick_and_complete(namespace: str) -> None:
    op = torchop.custom_op(f"{namespace}::whole", _double, mutates_args=())
    op.register_fake(lambda x, scale=2.0: torch.empty_like(x * scale))
    op.register_autograd(
        lambda ctx, grad: (grad * ctx.scale, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[1]),
    )
    op.register_vmap(lambda info, dims, x, scale: (op(x, scale), dims[0]))
    results = [run_check(item) for item in plan_checks(op, [EXAMPLE])]
    assert [(r.check, r.message) for r in results if r.outcome == "failed"] == []
    passed = {r.check for r in results if r.outcome == "passed"}
    assert {
        "subsystems.gradcheck",
        "subsystems.vmap",
        "subsystems.func",
        "subsystems.vmap_compiled",
        "subsystems.compiled",
        "subsystems.export_dynamic",
    } <= passed


def test_checks_exist_without_docstrings() -> None:
    def quiet(subject: Any, details: Any) -> Any:
        yield from ()

    (kind,) = alone("memory", quiet)  # with python -OO, no function has a docstring
    assert (kind.name, kind.question) == ("memory.quiet", "")


def test_budget_must_be_a_number(good: Any) -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match=r"budget='30'\): budget must be a number of seconds"):
        check(good, (x,), budget="30")  # type: ignore[arg-type]


def test_missing_integer_promotion_fails_unless_valid_rejects_integers(
    namespace: str,
) -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * 0.5

    op = torchop.custom_op(f"{namespace}::scaled", scaled, mutates_args=())
    op.register_fake(torch.empty_like)
    with pytest.raises(torchop.testing.OpCheckError, match=r"dtypes.accepted: in int64"):
        check(op, EXAMPLE, only="dtypes.accepted")
    op.register_examples(list, valid=lambda x: x.dtype in (torch.float32, torch.float16))
    report = check(op, EXAMPLE, only="dtypes.accepted")
    assert report.results[0].details["dtypes"]["float16"] == "-> float16"
