"""`pytest --torchop-check` checks a package that does not use torchop. Uses private names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.testing.planted.__main__ import CHECKS, STYLES, build, found
from torchop.testing._suite_calls import SuiteCalls, examples_of

ROOT = Path(__file__).parents[2]
pytest_plugins = ["pytester"]

PACKAGE = """
import os, torch
from torch import Tensor

@torch.library.custom_op("suited::flat", mutates_args=())
def flat(x: Tensor, factor: float) -> Tensor:
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return (memory[: x.numel()] * factor).view(x.shape)

@torch.library.custom_op("suited::right", mutates_args=())
def right(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).contiguous()

@torch.library.custom_op("suited::crash", mutates_args=())
def crash(x: Tensor) -> Tensor:
    if x.numel() == 0:
        os.abort()
    return x.clone(memory_format=torch.contiguous_format)

@torch.library.custom_op("suited::uncalled", mutates_args=())
def uncalled(x: Tensor) -> Tensor:
    return x + 1

flat.register_fake(lambda x, factor: torch.empty(x.shape, dtype=x.dtype))
right.register_fake(lambda x, y: (x + y).contiguous())
crash.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype))
"""

TESTS = """
import pytest, suited, torch

def test_flat(): suited.flat(torch.arange(5.0), 2.0)
def test_right(): suited.right(torch.ones(3), torch.ones(2, 3))
def test_crash(): suited.crash(torch.ones(3, 2, dtype=torch.float64))
def test_that_raises():
    with pytest.raises(RuntimeError):
        suited.right(torch.ones(3), torch.ones(2))
"""


@pytest.fixture
def suited(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    path = (str(pytester.path), str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("TORCHOP_NATIVE", "0")
    monkeypatch.setenv("COLUMNS", "300")
    pytester.makepyfile(suited=PACKAGE, test_suited=TESTS)
    return pytester


@pytest.mark.project  # slow, because it starts pytest and imports PyTorch
@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_suite_is_checked(suited: pytest.Pytester, workers: list[str]) -> None:
    options = ["--torchop-check=suited::*", "--torchop-check-only=memory", *workers]
    files = ["--junitxml=out.xml", "--torchop-report=out.json", "--torchop-baseline=known.json"]
    done = suited.runpytest_subprocess(*options, *files, timeout=400)
    # The run that writes the baseline still fails, so a misspelled path does not pass.
    done.assert_outcomes(passed=5, failed=2)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines(
        [
            "torchop: not called by any test: suited::uncalled",
            "torchop: wrote the failures to known.json. The next run with it accepts them, and *",
        ]
    )
    reports = json.loads((suited.path / "out.json").read_text())
    assert [report["op"] for report in reports] == [
        "suited::crash",
        "suited::flat",
        "suited::right",
    ]
    known = json.loads((suited.path / "known.json").read_text())
    assert list(known["suited::crash"]) == ["memory.empty"]
    assert "by SIGABRT" in known["suited::crash"]["memory.empty"]
    assert {"memory.transposed", "memory.gaps"} <= known["suited::flat"].keys()
    assert 'name="flat[memory]"' in (suited.path / "out.xml").read_text()
    done = suited.runpytest_subprocess(*options, *files, timeout=400)
    done.assert_outcomes(passed=5, xfailed=2)
    assert done.ret == pytest.ExitCode.OK


@pytest.mark.project  # slow, because it starts pytest and imports PyTorch
def test_finding_names_place_and_fix(suited: pytest.Pytester) -> None:
    known = {"suited::crash": {"memory.empty": "", "memory.gaps": ""}}
    (suited.path / "known.json").write_text(json.dumps(known))
    options = ["--torchop-check=suited::*", "--torchop-check=other::*", "-q"]
    options += ["--torchop-check-only=gaps", "--torchop-baseline=known.json"]
    done = suited.runpytest_subprocess(*options, timeout=400)
    done.assert_outcomes(passed=6, failed=2)
    done.stdout.fnmatch_lines(
        [
            "suited::flat: The result is wrong for a tensor that is not contiguous. (memory.gaps)",
            "  found: the tensor with gaps: *",
            "  where: *suited.py:* (flat)",
            "  fix:   Read x by its strides and storage offset, or call x.contiguous() first.",
            "    same_as_contiguous(Call(torch.ops.suited.flat.default, args), *",
            "--torchop-check('other::*'): no registered operator matches*",
            "torchop: passes now, so remove it from known.json: suited::crash: memory.gaps",
        ]
    )


DESCRIBED = """
import torch
from torch import Tensor

@torch.library.custom_op("described::product", mutates_args=())
def product(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).contiguous()

@torch.library.custom_op("described::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return (x * 0.5).contiguous()

product.register_fake(lambda x, y: x.new_empty(x.shape))  # ignores the dtype of y
halved.register_fake(lambda x: x.new_empty(*x.shape, 1))
"""
CALLS = """
import described, torch

def test_product(): described.product(torch.ones(2, 3), torch.ones(2, 3))
def test_halved(): described.halved(torch.ones(2, 3))
"""


@pytest.mark.project  # slow, because it starts pytest and imports PyTorch
def test_report_agrees_with_check(suited: pytest.Pytester) -> None:
    """The plugin checks dtypes that no test uses, like `check` with the same calls."""
    suited.makepyfile(described=DESCRIBED, test_suited=CALLS)
    checks = ["promotion", "accepted", "fake", "sharing"]
    options = [f"--torchop-check-only={check}" for check in checks]
    done = suited.runpytest_subprocess("--torchop-check=described::*", "-rs", *options, timeout=400)
    done.assert_outcomes(passed=4, failed=3, skipped=1)
    done.stdout.fnmatch_lines(
        [
            "test_suited.py .. * [[] ??%]",
            "torchop-check * [[]100%]",
            # The failure in another family names the failure that shows the cause.
            "described::halved: dtypes.accepted probably fails for the same reason as "
            "subsystems.fake. Correct subsystems.fake first.",
            "described::product: The fake kernel promotes dtypes *(dtypes.promotion)",
            "SKIPPED [[]1] *: described::halved[[]sharing]: sharing.one: no call only *",
        ],
        consecutive=False,
    )
    program = (
        "import torch, described\n"
        "from torchop.testing import check\n"
        "x = torch.ones(2, 3)\n"
        "for op, args in ((described.product, (x, x)), (described.halved, (x,))):\n"
        f"    report = check(op, args, only={checks}, raise_exception=False)\n"
        "    print(op._opoverload.name(), sorted(each.check for each in report.failures))\n"
    )
    suited.makepyfile(program=program)
    text = suited.runpython(suited.path / "program.py").stdout.str()
    assert "described::product ['dtypes.promotion']" in text
    assert "described::halved ['dtypes.accepted', 'subsystems.fake']" in text


def test_wrong_options_are_usage_errors(suited: pytest.Pytester) -> None:
    (suited.path / "known.json").write_text("[")
    misspelled = {
        "other::op": {"memory.gaps": "", "contracts.examples": ""},
        "suited::flat": {"transposd": ""},
    }
    (suited.path / "misspelled.json").write_text(json.dumps(misspelled))
    for option, message in (
        ("--torchop-check-only=memroy", "no check has this name. Did you mean memory?"),
        (
            "--torchop-baseline=misspelled.json",
            "the entry 'transposd' of suited::flat: no check has this full name. Did you mean "
            "memory.transposed?",
        ),
        ("--torchop-check-budget=0", "must be a number above 0"),
        ("--torchop-baseline=known.json", "--torchop-baseline known.json:"),
    ):
        done = suited.runpytest_inprocess("--torchop-check=suited::*", option)
        assert done.ret == pytest.ExitCode.USAGE_ERROR
        assert message in done.stderr.str()


def test_options_without_an_operator_to_check_are_usage_errors(suited: pytest.Pytester) -> None:
    for option in (
        "--torchop-check-only=memory",
        "--torchop-check-budget=1",
        "--torchop-baseline=known.json",
        "--torchop-report=out.json",
    ):
        done = suited.runpytest_inprocess(option)
        assert done.ret == pytest.ExitCode.USAGE_ERROR
        message = done.stderr.str()
        assert option.partition("=")[0] + " has no effect" in message
        assert "such as --torchop-check 'mylib::*'" in message
    # Options of the project apply to all runs, even to runs of other tests.
    suited.makeini("[pytest]\naddopts = --torchop-baseline=known.json --torchop-report=out.json")
    done = suited.runpytest_inprocess("-k", "flat")
    assert done.ret == pytest.ExitCode.OK
    done.stdout.fnmatch_lines(["*report of the operators: *out.json (empty, *"])


def test_calls_are_stored_with_values(namespace: str, tmp_path: Path) -> None:
    @torch.library.custom_op(f"{namespace}::add_", mutates_args={"x"})
    def add_(x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(y)

    calls = SuiteCalls([f"{namespace}::*"])
    large = torch.rand(600, 600) + 1
    calls.start()
    add_(torch.zeros(2, 2).mT, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    add_(torch.zeros(600, 600), large)
    with pytest.raises(RuntimeError):
        add_(torch.zeros(2), torch.zeros(3))
    calls.stop()
    calls.save(tmp_path / "calls")
    other = SuiteCalls([f"{namespace}::*"])
    other.update(tmp_path / "calls")
    (stored,) = other.calls.values()
    small, seeded = sorted(stored, key=lambda call: call.elements)
    (x, y), _ = small.example()
    assert x.tolist() == [[0, 0], [0, 0]]
    assert y.tolist() == [[1, 2], [3, 4]]
    assert x.stride() == (1, 2)
    made = seeded.example()[0][1]
    assert made.shape == large.shape
    assert 1 <= float(made.min()) < 1.1
    assert torch.equal(made, seeded.example()[0][1])


def test_gradients_of_any_call_are_checked(namespace: str) -> None:
    @torch.library.custom_op(f"{namespace}::mul", mutates_args=())
    def mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    mul.register_autograd(lambda ctx, grad: (grad, grad))
    calls = SuiteCalls([f"{namespace}::*"])
    calls.start()
    mul(torch.ones(2, requires_grad=True), torch.ones(2))
    mul(torch.ones(3), torch.ones(3))
    calls.stop()
    (stored,) = calls.calls.values()
    for (x, y), _ in examples_of(stored):
        assert x.requires_grad
        assert not y.requires_grad


@pytest.mark.project  # slow, because it compiles C++ and starts pytest
def test_planted_faults_are_found(tmp_path: Path) -> None:
    only = [f"--torchop-check-only={check}" for check in dict.fromkeys(CHECKS.values())]
    failed = found(tmp_path, build(tmp_path), *only, "--torchop-check-budget=60")
    for style in STYLES:
        for name, check in CHECKS.items():
            assert check in failed[f"{style}::{name}"], f"{style}::{name}"
