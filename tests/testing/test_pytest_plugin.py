"""The pytest plugin. The tests run pytest in other processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
pytest_plugins = ["pytester"]

PACKAGE = """
import os, torch, torchop

@torchop.custom_op("plugged::good", mutates_args=())
def good(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@torchop.custom_op("plugged::flat", mutates_args=())
def flat(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0).set_(x.untyped_storage())[: x.numel()].sum()

@torchop.custom_op("plugged::crash", mutates_args=())
def crash(x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        os.abort()
    return x * 2

@torchop.custom_op("plugged::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x * 2

for op in (good, flat, crash):
    op.register_examples(lambda: [(torch.ones(4),), (torch.arange(6.0).view(2, 3),)])
"""

TESTS = """
import plugged
import pytest
import torch

@pytest.mark.torchop("plugged::*", exclude="plugged::crash", only=["gaps", "channels_last"],
                     expected={"plugged::flat": {"memory.gaps": "it takes the address"}})
def test_operators(torchop_check):
    torchop_check()

@pytest.mark.torchop("plugged::flat", only="gaps")
def test_unexpected(torchop_check):
    result = torchop_check()
    assert False, "not reached"

@pytest.mark.torchop("plugged::unknown", only="gaps",
                     examples={"plugged::unknown": [(torch.ones(3),)]})
def test_passed_examples(torchop_check):
    assert torchop_check().outcome == "passed"
    assert repr(torchop_check) == "torchop_check(plugged::unknown, memory.gaps)"

@pytest.mark.torchop("plugged::flat", only="gaps", expected={"memory": "all of it"})
def test_a_family(torchop_check):
    torchop_check()

@pytest.mark.torchop("plugged::good", only="gaps")
def test_that_does_not_call(torchop_check):
    pass

def test_without_a_mark(torchop_check):
    torchop_check()

def test_of_something_else():
    pass
"""

WRONG = {
    "no_argument": (
        '@pytest.mark.torchop("plugged::*")\ndef test_it(): pass',
        "has no argument torchop_check. Write: def test_operators(torchop_check)",
    ),
    "no_pattern": (
        "@pytest.mark.torchop()\ndef test_it(torchop_check): torchop_check()",
        "pytest.mark.torchop() got no pattern; name the operators",
    ),
    "no_match": (
        '@pytest.mark.torchop("pluged::*")\ndef test_it(torchop_check): torchop_check()',
        "no registered operator matches; the nearest namespaces are plugged. Import",
    ),
    "no_exclusion": (
        '@pytest.mark.torchop("plugged::*", exclude=["plugged::god"])\n'
        "def test_it(torchop_check): torchop_check()",
        "the nearest names are plugged::good, ",
    ),
    "no_option": (
        '@pytest.mark.torchop("plugged::*", onyl="memory")\n'
        "def test_it(torchop_check): torchop_check()",
        "pytest.mark.torchop has no argument 'onyl'. Its arguments are exclude, expected, only",
    ),
}


@pytest.fixture
def plugged(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Create a folder with a package of operators, and with metadata that installs the plugin."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"{name} = {value}" for name, value in points["pytest11"].items()]
    folder = pytester.mkdir("torchop_plugin-0.dist-info")
    (folder / "METADATA").write_text("Name: torchop-plugin\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines]))
    path = (str(pytester.path), str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("TORCHOP_NATIVE", "0")
    monkeypatch.setenv("COLUMNS", "300")
    pytester.makeini("[pytest]\nfilterwarnings = error\naddopts = --strict-markers\n")
    pytester.makepyfile(plugged=PACKAGE)
    return pytester


def test_plugin_does_not_import_torch_without_operators(plugged: pytest.Pytester) -> None:
    plugged.makepyfile(
        "import sys\ndef test_it(): assert 'pytest_torchop' in sys.modules\n"
        "def test_torch(): assert not {'torch', 'torchop'} & sys.modules.keys()"
    )
    done = plugged.runpytest_subprocess("--markers", timeout=200)
    done.stdout.fnmatch_lines(["@pytest.mark.torchop(*one test for each operator*"])
    plugged.runpytest_subprocess(timeout=200).assert_outcomes(passed=2)


@pytest.mark.project  # slow, because it starts pytest and imports PyTorch
def test_each_operator_and_check_is_a_test(plugged: pytest.Pytester) -> None:
    plugged.makepyfile(test_ops=TESTS)
    for name, (source, _) in WRONG.items():
        plugged.makepyfile(**{f"test_{name}": f"import plugged, pytest\n{source}\n"})
    done = plugged.runpytest_subprocess(
        "-rA",
        "-p",
        "no:xdist",
        "--continue-on-collection-errors",
        "--torchop-report=out/report.json",
        timeout=400,
    )
    done.assert_outcomes(passed=3, failed=3, skipped=2, xfailed=2, errors=len(WRONG) + 1)
    text = done.stdout.str()
    for _, message in WRONG.values():
        assert message in text
    done.stdout.fnmatch_lines(
        [
            "PASSED test_ops.py::test_operators[[]plugged::good-memory.gaps]",
            "PASSED test_ops.py::test_passed_examples[[]plugged::unknown-memory.gaps]",
            "PASSED test_ops.py::test_of_something_else",
            "SKIPPED [[]1] *: plugged::flat: memory.channels_last: no tensor has four or five *",
            "SKIPPED [[]1] *: plugged::good: memory.channels_last: no tensor has four or five *",
            "XFAIL test_ops.py::test_operators[[]plugged::flat-memory.gaps]*it takes the address*",
            "XFAIL test_ops.py::test_a_family[[]plugged::flat-memory.gaps]*all of it*",
            "FAILED test_ops.py::test_operators[[]plugged::unknown-examples]*has no examples.*",
            "FAILED test_ops.py::test_unexpected[[]plugged::flat-memory.gaps]*",
            "FAILED test_ops.py::test_that_does_not_call*did not run its check, memory.gaps*",
        ]
    )
    assert "plugged::flat: memory.gaps: the tensor with gaps" in text
    assert "test_without_a_mark uses torchop_check. Mark it with pytest.mark.torchop." in text
    assert "not reached" not in text.partition("short test summary")[2]
    assert "run_check(" not in text  # the traceback leaves out the plugin's frames

    reports = json.loads((plugged.path / "out" / "report.json").read_text())
    outcomes = {r["op"]: [(c["check"], c["outcome"]) for c in r["results"]] for r in reports}
    assert outcomes == {
        "plugged::flat": [
            ("memory.gaps", "expected failure"),
            ("memory.channels_last", "cannot be done"),
            ("memory.gaps", "failed"),
            ("memory.gaps", "expected failure"),
        ],
        "plugged::good": [
            ("memory.gaps", "passed"),
            ("memory.channels_last", "cannot be done"),
        ],
        "plugged::unknown": [
            ("examples", "failed"),
            ("memory.gaps", "passed"),
        ],
    }
    assert {r["op"]: r["schema"] for r in reports}["plugged::good"].startswith("plugged::good(")


@pytest.mark.project
def test_workers_report_results_and_crashes(plugged: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    plugged.makepyfile(
        "import plugged\n"
        "import pytest\n"
        "plugged.unknown.register_kernel('cpu', provider='fast')(lambda x: plugged.os.abort())\n"
        "@pytest.mark.torchop('plugged::crash', 'plugged::good', only=['gaps', 'contiguous'])\n"
        "@pytest.mark.torchop('plugged::unknown', only='contracts.kept[fast]',\n"
        "                     examples=[(plugged.torch.ones(3),)])\n"
        "def test_operators(torchop_check):\n"
        "    torchop_check()\n"
    )
    done = plugged.runpytest_subprocess("-n", "1", "--torchop-report=report.json", timeout=400)
    done.assert_outcomes(passed=3, failed=2)
    done.stdout.fnmatch_lines(["*report of the operators: *report.json*"])
    text = (plugged.path / "report.json").read_text()
    # The reference of `crash` aborts, and so does the provider of `unknown`.
    assert text.count("the call ended the process. Aborted") == 2
    done.stdout.fnmatch_lines(["plugged::crash: memory.gaps: *ended the process*"])
    done.stdout.fnmatch_lines(["*Call(torch.ops.plugged.crash.default, args)*"])
    assert "plugged::good(Tensor x) -> Tensor" in text


CRASHES = """
import plugged
import pytest

@pytest.mark.torchop("plugged::crash", only=["transposed", "contiguous"])
def test_operators(torchop_check):
    torchop_check()
"""


@pytest.mark.project  # slow, because it starts pytest and imports PyTorch
def test_crash_without_xdist_is_a_failure(plugged: pytest.Pytester) -> None:
    plugged.makepyfile(test_ops=CRASHES)
    done = plugged.runpytest_subprocess("-p", "no:xdist", timeout=400)
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["*memory.transposed*the call ended the process by SIGABRT*"])
