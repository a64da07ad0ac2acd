"""A report groups failures with the same cause into one finding. Uses private names."""

from __future__ import annotations

import torch
from torch import Tensor

import torchop
from tests.testing.zoo import WRONG
from torchop.testing import CheckReport, Result, check
from torchop.testing._check.findings import explaining, grouped
from torchop.testing._check.run import plan_checks, run_check


def failed(check: str, group: str = "plain", cause: str = "") -> Result:
    return Result(check, "failed", check, cause=cause, group=group)


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
