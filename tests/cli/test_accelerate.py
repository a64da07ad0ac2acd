"""`python -m torchop accelerate`."""

from __future__ import annotations

import json

import pytest
import torch

import torchop
from tests.support import needs_native
from torchop import CallRecord, TensorRecord

pytestmark = needs_native

X = TensorRecord(torch.float32, (3,), "cpu", False)


@pytest.fixture
def save(tmp_path, namespace):
    """Writes a recording of calls, given by the names of operators."""

    def save(file="calls.json", **calls):
        recorded = torchop.record("*")
        for name, (call, count) in calls.items():
            recorded._add(f"{namespace}::{name}", call, count)
        recorded.save(tmp_path / file)
        return str(tmp_path / file)

    return save


def test_calls_of_the_import_are_measured(run, write, namespace):
    from .conftest import PACKAGE

    package = write("package", f"{PACKAGE}\ncalled(torch.ones(3), 5)\n")
    outcome = run("accelerate", "--report", package, f"{namespace}::*")
    assert outcome.code == 0
    accelerated, calls, before, after = outcome.row(f"{namespace}::called")
    assert (accelerated, calls) == ("yes", "1")
    assert 0 < float(after) < float(before)
    assert outcome.row(f"{namespace}::other") == ["yes"]


def test_recorded_calls_are_measured(run, package, save, namespace):
    first = save(called=(CallRecord((X, 5), {}), 1000))
    second = save("second.json", called=(CallRecord((X, 3), {}), 500))
    outcome = run("accelerate", "--report", package, "--recorded", first, "--recorded", second)
    accelerated, calls, before, after = outcome.row(f"{namespace}::called")
    assert (accelerated, calls) == ("yes", "1500")
    assert outcome.row(f"{namespace}::other") == ["yes"]
    saved = outcome.out.splitlines()[-1]
    assert saved.startswith("In the calls that were recorded, this saves ")
    number, unit = saved.removesuffix(".").split()[-2:]
    assert unit == "ms"
    assert float(number) == pytest.approx(1.5 * (float(before) - float(after)), abs=0.03)


def test_recorded_operators_that_were_there_take_part(run, package, save, namespace):
    torch.library.define(f"{namespace}::known", "(Tensor x) -> Tensor")
    torch.library.impl(f"{namespace}::known", "cpu", lambda x: x * 2)
    file = save(known=(CallRecord((X,), {}), 7), gone=(CallRecord((X,), {}), 3))
    outcome = run("accelerate", "--report", package, "--recorded", file)
    assert outcome.row(f"{namespace}::known")[:2] == ["yes", "7"]
    assert " ".join(outcome.row(f"{namespace}::gone")) == (
        "no 3 it is not registered here; import what registers it, with --report"
    )
    chosen = run("accelerate", "--report", package, "--recorded", file, f"{namespace}::known")
    assert f"{namespace}::gone" not in chosen.out
    assert f"{namespace}::other" not in chosen.out


def test_several_modules_are_imported(run, package, write, namespace):
    second = write(
        "second", 'import torch; torch.library.define("NAMESPACE::more", "(Tensor x) -> Tensor")'
    )
    outcome = run("accelerate", "--report", package, "--report", second)
    assert outcome.row(f"{namespace}::called") == ["yes"]
    assert outcome.row(f"{namespace}::more")[0] == "no"


def test_a_file_that_is_no_recording_is_refused(run, package, tmp_path):
    path = tmp_path / "calls.json"
    path.write_text(json.dumps({"torchop recording": 1}))
    outcome = run("accelerate", "--report", package, "--recorded", str(path))
    assert outcome.code == 1
    assert f"{path}: the file: expected the keys calls, torchop recording, got" in outcome.err
    missing = run("accelerate", "--report", package, "--recorded", str(tmp_path / "none"))
    assert missing.code == 1
    assert "No such file" in missing.err


def test_what_cannot_be_imported_is_told(run):
    outcome = run("accelerate", "--report", "json", "--report", "no_such_module_at_all")
    assert outcome.code == 1
    assert "no_such_module_at_all cannot be imported: No module named" in outcome.err


def test_what_a_module_raises_is_seen(run, write):
    with pytest.raises(ValueError, match="of the module"):
        run("accelerate", "--report", write("failing", "raise ValueError('of the module')"))


def test_a_module_that_registers_nothing_is_told(run):
    outcome = run("accelerate", "--report", "json", "nobody::*")
    assert outcome.out == "json registers no operator that matches nobody::*\n"


def test_what_is_no_pattern_is_refused(run):
    outcome = run("accelerate", "--report", "json", "nobody")
    assert outcome.code == 1
    assert "no name of an operator matches that" in outcome.err
