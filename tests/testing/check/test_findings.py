"""A report groups failures with the same cause into one finding. Uses private names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests.testing.zoo import WRONG
from torchop.testing import CheckReport, Result, check
from torchop.testing._check.findings import explaining, grouped
from torchop.testing._check.run import plan_checks, run_check


def failed(check: str, group: str = "plain", cause: str = "", *changes: str) -> Result:
    return Result(check, "failed", check, cause=cause, group=group, changes=changes)


def test_three_faults_are_three_findings() -> None:
    specimen = next(each for each in WRONG if each.name == "zoo::three_faults")
    checks = plan_checks(specimen.op, specimen.examples())
    results = tuple(run_check(check) for check in checks if not check.kind.is_costly)
    report = CheckReport(specimen.name, "", results)
    found = [finding.failure.check for finding in report.findings]
    assert found == ["contracts.kept", "memory.transposed", "subsystems.gradcheck"]
    others = dict(zip(found, (finding.others for finding in report.findings), strict=True))
    assert others["contracts.kept"] == ()
    assert {"memory.gaps", "memory.offset"} <= set(others["memory.transposed"])
    text = report.in_short()
    assert text.count("FAILED") == 3
    assert "  also fails: memory.gaps, memory.sliced" in text


def test_failures_with_equal_causes_are_one_finding() -> None:
    one, other = failed("memory.gaps", "layout", "KeyError: 'x'"), failed("subsystems.func")
    same = failed("contracts.leaks", "gradient", "KeyError: 'x'")
    findings = grouped([one, other, same])
    assert [(f.failure.check, f.others) for f in findings] == [
        ("memory.gaps", ("contracts.leaks",)),
        ("subsystems.func", ()),
    ]


def test_wrong_results_and_wrong_fake_kernels_are_separate_findings() -> None:
    layouts = [failed(name, "layout") for name in ("memory.gaps", "memory.offset")]
    fake = failed("subsystems.fake", "layout")
    assert [f.others for f in grouped([*layouts, fake])] == [("memory.offset",), ()]


def test_wrong_fake_kernel_explains_wrong_programs() -> None:
    fake = failed("subsystems.fake", "layout")
    compiled = failed("subsystems.compiled", "plain", "RuntimeError: sizes differ")
    assert [f.others for f in grouped([fake, compiled])] == [("subsystems.compiled",)]
    assert explaining(compiled, [failed("memory.gaps", "layout"), fake]) is fake
    assert explaining(failed("subsystems.gradcheck"), [fake]) is None


def test_failures_of_two_providers_are_separate_findings() -> None:
    kernels = [failed("memory.gaps", "layout"), failed("memory.gaps[fast]", "layout")]
    assert len(grouped(kernels)) == 2


def test_wrong_result_for_an_example_explains_failed_comparisons() -> None:
    found = grouped([failed("contracts.repeated"), failed("values.nan", "value")])
    assert [f.others for f in found] == [("values.nan",)]
    kept = grouped([failed("contracts.repeated"), failed("contracts.kept")])
    assert len(kept) == 2


def test_the_clearest_failure_is_first() -> None:
    """Failures for dtypes that the author's examples do not contain come last."""
    found = grouped([failed("dtypes.accepted", "dtype"), failed("subsystems.gradcheck")])
    assert [f.failure.check for f in found] == ["subsystems.gradcheck", "dtypes.accepted"]
    (finding,) = grouped([failed("contracts.repeated"), failed("memory.uninitialized")])
    assert finding.failure.check == "memory.uninitialized"
    (finding,) = grouped(
        [failed("subsystems.grad_strides", "gradient"), failed("subsystems.saved", "incoming")]
    )
    assert finding.failure.check == "subsystems.saved"


def test_an_undeclared_write_does_not_explain_unequal_calls() -> None:
    message = "argument x: UndeclaredMutationError: mylib::f: the kernel changed its values"
    write = Result("contracts.schema", "failed", message, group="plain")
    others = [failed("contracts.repeated"), failed("sharing.overlap", "sharing")]
    assert [f.others for f in grouped([write, *others])] == [("sharing.overlap",), ()]


def test_a_wrong_property_of_a_fake_result_is_one_finding() -> None:
    @torchop.custom_op("test_findings::halved", mutates_args=())
    def halved(x: Tensor) -> Tensor:
        return (x * 0.5).contiguous()

    halved.register_fake(lambda x: torch.empty(x.shape, device=x.device))
    report = check(halved, (torch.ones(2, 3),), only=["fake", "accepted"], raise_exception=False)
    (finding,) = report.findings
    assert (finding.failure.check, finding.others) == ("subsystems.fake", ("dtypes.accepted",))
    assert "torch.float32 from the fake kernel" in finding.failure.message


def without_strides(x: Tensor) -> Tensor:
    return x.as_strided(x.shape, torch.empty(x.shape).stride()).square()


def writing_double(x: Tensor) -> Tensor:
    return x.mul_(x).clone() if x.dtype is torch.double else x.square()


def wrong_for_size_1(x: Tensor) -> Tensor:
    return x.square() + int(1 in x.shape and not x.requires_grad)


def findings_with_gradient(
    name: str, kernel: Callable[[Tensor], Tensor], factor: float, only: list[str]
) -> dict[str, tuple[str, ...]]:
    op = torch.library.custom_op(name, kernel, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype))

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * factor * ctx.saved_tensors[0]

    op.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    example = (torch.linspace(0.5, 2, 12).view(3, 4),)
    report = check(op, example, only=only, raise_exception=False)
    return {finding.failure.check: finding.others for finding in report.findings}


def test_kernel_that_ignores_strides_explains_gradients_of_transposed_tensors(
    namespace: str,
) -> None:
    only = ["transposed", "gradcheck"]
    right = findings_with_gradient(f"{namespace}::right", without_strides, 2, only)
    assert right == {"memory.transposed": ("subsystems.gradcheck",)}
    wrong = findings_with_gradient(f"{namespace}::wrong", without_strides, 3, only)
    assert wrong == {"memory.transposed": (), "subsystems.gradcheck": ()}


def test_kernel_that_writes_double_arguments_explains_gradients_in_double(namespace: str) -> None:
    only = ["contracts.schema", "subsystems.saved", "gradcheck"]
    found = findings_with_gradient(f"{namespace}::square", writing_double, 2, only)
    (first,) = found
    assert first == "contracts.schema"
    assert "subsystems.saved" in found[first]


@pytest.mark.parametrize(
    ("group", "change"), [("layout", "layout"), ("dtype", "torch.float64"), ("size", "size 0")]
)
def test_kernel_explains_gradients_only_in_the_same_case(group: str, change: str) -> None:
    kernel = failed("contracts.schema", group, "", change)
    same = failed("subsystems.saved", "gradient", "", "size 9", change)
    assert [f.others for f in grouped([same, kernel])] == [("subsystems.saved",)]
    assert explaining(same, [kernel]) is kernel
    for other in (
        failed("subsystems.saved", "gradient", "", "size 9"),
        failed("subsystems.saved[fast]", "gradient", "", change),
        failed("subsystems.fake", "plain", "", change),
    ):
        assert explaining(other, [kernel]) is None
    # An explained failure does not explain further failures, which may have causes of their own.
    more = failed("subsystems.forward_mode", "gradient")
    found = grouped([kernel, failed("subsystems.gradcheck", "gradient", "", change), more])
    assert [f.others for f in found] == [("subsystems.gradcheck",), ()]


def test_changes_are_the_differences_from_all_examples(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::op", wrong_for_size_1, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    examples = [(torch.ones(3, 4),), (torch.ones(2, 4),)]
    options: dict[str, Any] = {"only": "single", "reference": torch.square}
    report = check(op, *examples, raise_exception=False, **options)
    (failure,) = report.failures
    assert failure.changes == ("size 1",)
    assert CheckReport.from_dict(report.to_dict()) == report
