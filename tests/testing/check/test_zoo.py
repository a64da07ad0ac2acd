"""The checks report every faulty operator of the zoo, and pass for every correct one.

Uses private names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests._support import combinations
from tests._support.common import assert_clean
from tests._support.forking import run_compiling
from tests.testing.zoo import RIGHT, WRONG, Specimen
from tests.testing.zoo.neighbours import close_descriptors
from torchop.testing import Result
from torchop.testing._check.checks.process import runs_in_threads
from torchop.testing._check.run import plan_checks, run_check
from torchop.testing._check.table import CHECKS

# PyTorch warns about the first CSR matrix of a process.
pytestmark = pytest.mark.filterwarnings("ignore:.*beta state")
# These checks apply to few operators, so run them for each correct operator that has them.
OF_FEW = {"providers.configs", "providers.batch_invariant"}
# Correct operators, each with a check that could easily fail for it by mistake. Always run these
# checks, because the sample below may leave them out.
DELICATE = [
    ("adds_in_int64", "dtypes.int64"),
    ("affine", "subsystems.gradcheck"),
    ("attention_in_blocks", "subsystems.autocast"),
    ("centered_by_mean", "contracts.written"),
    ("broadcast_product", "subsystems.gradcheck"),
    ("copied_into_pool", "contracts.leaks"),
    ("csr_scaled", "dtypes.numbers"),
    ("csr_scaled", "dtypes.double"),
    ("csr_scaled", "memory.uninitialized"),
    ("csr_scaled", "subsystems.autocast"),
    ("csr_scaled", "subsystems.fake_symbols"),
    ("csr_times_vector", "dtypes.accepted"),
    ("csr_times_vector", "subsystems.fake"),
    ("csr_times_vector", "subsystems.fake_devices"),
    ("csr_times_vector", "subsystems.compiled"),
    ("csr_times_vector", "subsystems.export_dynamic"),
    ("distances_of_points", "subsystems.gradcheck"),
    ("distinct", "dtypes.numbers"),
    ("flops_of_product", "subsystems.flops"),
    ("image_resized", "values.extremes"),
    ("logged_by_setting", "contracts.environment"),
    ("pairs_turned", "subsystems.gradcheck"),
    ("picks_rows", "subsystems.threads"),
    ("ragged_attention", "subsystems.autocast"),
    ("remainders", "dtypes.int64"),
    ("restores_threads", "contracts.process"),
    ("rounded_to_steps", "dtypes.half"),
    ("rows_of_table", "dtypes.indices"),
    ("smooth_step", "subsystems.gradcheck"),
    ("writes_slots", "contracts.written"),
    ("rows_looked_up", "memory.empty"),
    ("rows_looked_up", "memory.single"),
    ("scores_and_total", "subsystems.autocast"),
    ("sparse_row_sums", "subsystems.compiled"),
    ("sums_of_starts", "memory.empty"),
    ("sums_of_starts", "memory.single"),
    ("sums_of_starts", "memory.odd_strides"),
    ("takes_device_of_both", "subsystems.fake_devices"),
    ("total_of_rows", "subsystems.gradcheck"),
    ("without_autograd", "subsystems.autograd_registration"),
    ("default_of_schema", "subsystems.autograd_registration"),
]
BY_NAME = {specimen.name: specimen for specimen in (*WRONG, *RIGHT)}


def found(specimen: Specimen) -> Result:
    (check,) = plan_checks(
        specimen.op, specimen.examples(), reference=specimen.reference, only=specimen.check
    )
    return run_check(check)


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Result]]:
    """Collect the result for each faulty operator. A later test runs the programs in them."""
    yield {}
    close_descriptors()


@pytest.mark.parametrize("name", [specimen.name for specimen in WRONG])
def test_wrong_operator_is_detected(
    name: str, results: dict[str, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One operator deadlocks. Its check waits for a timeout, so shorten the timeout from 8 seconds
    # to 1.
    monkeypatch.setattr(runs_in_threads, "__defaults__", (1.0,))
    specimen = BY_NAME[name]
    result = results[name] = found(specimen)
    assert result.outcome == "failed", result.message
    assert result.check == specimen.check
    assert result.message
    assert name in result.program.splitlines()[0] + result.program.splitlines()[1]


def test_programs_fail_in_another_process(results: dict[str, Result], tmp_path: Path) -> None:
    # Leave out the operator that deadlocks, because its program would wait for the timeout.
    programs = {n: r.program for n, r in results.items() if n != "zoo::never_releases"}
    assert len(programs) > 60
    file = tmp_path / "programs.json"
    file.write_text(json.dumps(programs))
    outcomes = json.loads(assert_clean(run_compiling(_RUN_ALL, str(file))))
    for name, raised in outcomes.items():
        assert raised is not None, f"the program of {name} raises nothing"
        kind, message = raised
        # If the operator raised an exception, the message of the check names its class.
        assert kind in ("AssertionError", "OpCheckError") or kind in results[name].message, name
        assert message, name


_RUN_ALL = """
    import contextlib, io, json, logging, sys, warnings
    from torchop.testing.process_state import restored
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    outcomes = {}
    for name, program in json.load(open(sys.argv[1])).items():
        outcomes[name] = None
        # Data races and rare failures do not occur in every run on a busy machine.
        for _ in range(5):
            try:
                with restored():
                    exec(compile(program, name, "exec"), {"__name__": "program"})
            except Exception as error:
                outcomes[name] = type(error).__name__, str(error)
                break
    print(json.dumps(outcomes))
"""


@pytest.mark.parametrize("name", [specimen.name for specimen in RIGHT])
def test_right_operator_passes(name: str, request: pytest.FixtureRequest) -> None:
    """Run a sample of the checks, without those that compile programs.

    Each operator runs every eleventh check, and each check runs for every eleventh operator.
    `python -m tests.testing.zoo` runs all checks.
    """
    specimen = BY_NAME[name]
    checks = plan_checks(specimen.op, specimen.examples(), reference=specimen.reference)
    cheap = [check for check in checks if not check.kind.is_costly]
    assert len(cheap) > 50
    # Most checks of layouts do not apply to sparse tensors, so run more checks for these operators.
    of = 4 if "sparse" in name or "csr" in name else 11
    its_share = combinations.share(CHECKS, RIGHT.index(specimen), of, request.config)
    cheap = [c for c in cheap if c.kind in its_share or c.kind.name in OF_FEW]
    results = [run_check(check) for check in cheap]
    assert [f"{r.check}: {r.message}" for r in results if r.outcome == "failed"] == []
    assert sum(result.outcome == "passed" for result in results) >= len(cheap) // 7
    for result in results:
        assert result.outcome == "passed" or result.message, result.check


@pytest.mark.parametrize(("name", "check"), DELICATE, ids=map("-".join, DELICATE))
def test_right_operator_passes_a_delicate_check(name: str, check: str) -> None:
    specimen = BY_NAME[f"zoo::{name}"]
    (planned,) = plan_checks(specimen.op, specimen.examples(), only=check)
    result = run_check(planned)
    assert result.outcome in ("passed", "cannot be done"), result.message


def test_first_outcomes_are_of_the_checked_provider() -> None:
    """The calls in new processes must run the provider's kernel, not the reference kernel."""
    specimen = BY_NAME["zoo::provided_loose"]
    (planned,) = plan_checks(specimen.op, specimen.examples(), only="contracts.state[fast]")
    result = run_check(planned)
    assert result.outcome == "passed", result.message


def test_inapplicable_check_names_the_unsupported_layout() -> None:
    """If the check does not apply, the reason is the sparse layout, not a missing fake kernel."""
    for name, check in (("csr_times_vector", "export_dynamic"), ("sparse_row_sums", "compiled")):
        specimen = BY_NAME[f"zoo::{name}"]
        (planned,) = plan_checks(specimen.op, specimen.examples(), only=check)
        result = run_check(planned)
        assert result.outcome == "passed" or "torch.sparse_c" in result.message, result.message


def test_unsupported_example_does_not_skip_the_others() -> None:
    """Fake kernels and compilers do not support one example, which contains a CSR tensor."""
    specimen = BY_NAME["zoo::rows_of_both"]
    names = ("fake", "subsystems.subclasses", "export_dynamic", "compiled")
    for check in plan_checks(specimen.op, specimen.examples(), only=names):
        result = run_check(check)
        assert result.outcome == "passed", f"{result.check}: {result.message}"


def test_vmap_rule_that_returns_none_as_dimension_is_reported() -> None:
    result = found(BY_NAME["zoo::vmap_rule_that_shares_residuals"])
    assert "the vmap rule returns None as the batch" in result.message
    assert "in torchop.residuals((output, out_dims), slope)" in result.message


def test_zoo_is_large() -> None:
    assert len(WRONG) >= 60
    assert len(RIGHT) >= 20
    assert len({specimen.name for specimen in (*WRONG, *RIGHT)}) == len(WRONG) + len(RIGHT)


def test_every_family_has_specimens() -> None:
    families: dict[str, list[Any]] = {}
    for specimen in WRONG:
        families.setdefault(str(specimen.check).partition(".")[0], []).append(specimen)
    assert {name: len(found) >= 4 for name, found in families.items()} == dict.fromkeys(
        ("memory", "dtypes", "values", "sharing", "contracts", "subsystems", "providers"), True
    )
