"""`python -m torchop check` runs its checks in workers, which may crash. Uses private names."""

from __future__ import annotations

import importlib.util
import json

import pytest

from torchop.testing._extras import installing

OPERATORS = """
import os, sys, time, torch, torchop

@torchop.custom_op("NAMESPACE::good", mutates_args=())
def good(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@torchop.custom_op("NAMESPACE::flat", mutates_args=())
def flat(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0).set_(x.untyped_storage())[: x.numel()].sum()

@torchop.custom_op("NAMESPACE::crash", mutates_args=())
def crash(x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        print("about to end", file=sys.stderr, flush=True)
        os.abort()
    return x * 2

@torchop.custom_op("NAMESPACE::wait", mutates_args=())
def wait(x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        time.sleep(1000)
    return x * 2

@torchop.custom_op("NAMESPACE::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x * 2

for op in (good, flat, crash, wait):
    op.register_examples(lambda: [(torch.arange(6.0).view(2, 3),)])

EXAMPLES = {"NAMESPACE::unkn*": [(torch.ones(3),)]}
KNOWN = {
    "NAMESPACE::crash": {"transposed": "it aborts"},
    "NAMESPACE::flat": {"memory": "it takes the address"},
    "NAMESPACE::good": {"memory.offset": "nothing works"},
}
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    import importlib
    import sys

    from tests._support.common import Outcome

    pytest.importorskip("click")
    folder = tmp_path_factory.mktemp("checked")
    (folder / "checkedlib.py").write_text(OPERATORS.replace("NAMESPACE", "checkedlib"))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        outcome = Outcome(
            "check",
            "checkedlib::[!w]*",
            *("-k", "memory.contiguous", "-k", "transposed", "-k", "offset"),
            *("--seed", "7"),
            *("--json", str(folder / "out.json")),
        )
        outcome.reports = json.loads((folder / "out.json").read_text())
        yield outcome
    finally:
        sys.path.remove(str(folder))


def test_each_operator_is_checked(checked):
    outcomes = {
        report["op"]: {r["check"]: r["outcome"] for r in report["results"]}
        for report in checked.reports
    }
    names = ["memory.contiguous", "memory.transposed", "memory.offset"]
    assert outcomes == {
        "checkedlib::crash": dict(zip(names, ("passed", "failed", "passed"), strict=True)),
        "checkedlib::flat": dict(zip(names, ("passed", "passed", "failed"), strict=True)),
        "checkedlib::good": dict.fromkeys(names, "passed"),
    }
    assert {report["seed"] for report in checked.reports} == {7}


def test_summary_lists_failed_and_skipped_checks(checked):
    assert checked.code == 1
    assert "checkedlib::good: 3 passed (" in checked.out
    assert (
        "not checked: checkedlib::unknown has no examples; register some with register_examples, "
        "or pass --examples\n" in checked.out
    )
    assert "operators: 3 checked, 2 with failures, 1 not checked\n" in checked.out
    assert "(torch.ops.checkedlib.flat.default, args)" in checked.out


def test_crash_is_a_finding_with_a_reproducer(checked):
    (failure,) = [r for r in checked.reports[0]["results"] if r["outcome"] == "failed"]
    assert failure["message"].startswith(
        "the tensor transposed: the call ended the process. Aborted"
    )
    assert "in crash" in failure["message"]
    assert ".as_strided((2, 3), (1, 2), 0)" in failure["program"]
    assert "(torch.ops.checkedlib.crash.default, args)" in failure["program"]


def test_hanging_operator_is_a_finding(run, write, namespace):
    module = write("operators", OPERATORS)
    arguments = (f"{namespace}::wait", "--import", module, "-k", "transposed", "--timeout", "20")
    outcome = run("check", *arguments)
    assert outcome.code == 1
    assert "FAILED memory.transposed: " in outcome.out
    assert ": the call took over 20 seconds.\n" in outcome.out
    assert f"(torch.ops.{namespace}.wait.default, args" in outcome.out


def test_pattern_and_user_defined_examples(run, write, namespace):
    module = write("operators", OPERATORS)
    outcome = run(
        "check",
        f"{namespace}::unknown",
        *("--import", module, "--examples", f"{module}:EXAMPLES", "-k", "memory.offset"),
    )
    assert outcome.code == 0
    assert f"{namespace}::unknown: 1 passed" in outcome.out


def test_known_failures_pass_and_fail_once_fixed(run, write, namespace):
    module = write("operators", OPERATORS)
    arguments = ("--import", module, "-k", "memory.transposed", "-k", "memory.offset")
    arguments = (*arguments, "--expected", f"{module}:KNOWN")
    outcome = run("check", f"{namespace}::crash", f"{namespace}::flat", *arguments)
    assert outcome.code == 0, outcome.out
    assert outcome.out.count("1 passed, 1 expected failure (") == 2
    outcome = run("check", f"{namespace}::good", *arguments)
    assert outcome.code == 1
    assert (
        "FAILED memory.offset: it was expected to fail (nothing works), but passed." in outcome.out
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_package"], "no_such_package cannot be imported: ModuleNotFoundError"),
        (["no_such::*"], "no registered operator matches"),
        (
            ["mylib.py"],
            "'mylib.py' is not the name of a module. Pass the name to import",
        ),
        (["./src/mylib/ops.py"], "such as mylib.ops\n"),
        (["/home/me/mylib.py"], "such as mylib\n"),
        (["."], "'.' is not the name of a module"),
        ([""], "'' is not the name of a module"),
        (["aten::.*"], "not regular expressions: write 'aten::*'."),
        (["(aten|prims)::sin"], "not regular expressions: write 'mylib::*' or 'mylib::sca?e'."),
        (["json"], "json registers no operator that can be recognized as its own. Pass a pattern"),
    ],
)
def test_missing_operator_is_an_error(run, arguments, message):
    outcome = run("check", *arguments)
    assert outcome.code == 1
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_a_module_that_ends_the_program_is_an_error(run, write):
    module = write("ends", "import sys; sys.exit('no GPU')")
    outcome = run("check", "mylib::*", "--import", module)
    assert outcome.code == 1
    assert f"{module} cannot be imported: SystemExit: no GPU" in outcome.err


def test_a_module_that_skips_itself_is_an_error(run, write):
    module = write("skips", "import pytest; pytest.skip('no GPU', allow_module_level=True)")
    outcome = run("accelerate", "--report", module)
    assert outcome.code == 1
    assert f"{module} cannot be imported: Skipped: no GPU" in outcome.err


def test_unwritable_path_is_reported_first(run, tmp_path):
    outcome = run("check", "no_such_package", "--json", str(tmp_path / "none" / "out.json"))
    assert outcome.code == 2
    assert "cannot be written to" in outcome.err


def test_mistakes_are_reported_before_the_checks(run, write, namespace):
    module = write("operators", OPERATORS)
    outcome = run("check", f"{namespace}::*", "--import", module, "-k", "memroy")
    assert outcome.code == 1
    assert "the families are contracts, memory, " in outcome.err
    outcome = run("check", f"{namespace}::*", "--import", module, "--examples", f"{module}:NONE")
    assert outcome.code == 1
    assert f"--examples {module}:NONE: AttributeError" in outcome.err


WITH_REFERENCES = """
import torch, torchop

@torchop.custom_op("NAMESPACE::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2

half.register_examples(lambda: [(torch.ones(3),)])
RIGHT = {"NAMESPACE::*": lambda x: x * 0.5}
WRONG = {"NAMESPACE::*": lambda x: x * 0.25}
"""


def test_references_are_compared_with_the_operators(run, write, namespace):
    module = write("operators", WITH_REFERENCES)
    arguments = ("check", f"{namespace}::half", "--import", module, "-k", "memory.given")
    assert run(*arguments, "--reference", f"{module}:RIGHT").code == 0
    outcome = run(*arguments, "--reference", f"{module}:WRONG")
    assert outcome.code == 1
    assert "FAILED memory.given" in outcome.out
    outcome = run(*arguments, "--reference", f"{module}:NONE")
    assert outcome.code == 1
    assert f"--reference {module}:NONE: AttributeError" in outcome.err


def test_missing_packages_are_named(run, write, namespace, monkeypatch):
    module = write("operators", WITH_REFERENCES)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "xdist" else find_spec(name)
    )
    outcome = run("check", f"{namespace}::half", "--import", module)
    assert outcome.code == 1
    assert f"check needs xdist: {installing('check')}" in outcome.err


def test_reason_for_a_worker_without_tests_is_reported(run, write, namespace, tmp_path):
    """Use a module that can be imported only once, so its import fails in the worker."""
    once = f"import pathlib\npathlib.Path({str(tmp_path / 'seen')!r}).touch(exist_ok=False)\n"
    module = write("operators", once + WITH_REFERENCES)
    outcome = run("check", f"{namespace}::half", "--import", module, "-k", "memory.given")
    assert outcome.code == 1
    assert f"{module} cannot be imported: FileExistsError" in outcome.err


def test_overloads_are_checked_where_they_are_named(run, write, namespace):
    source = (
        WITH_REFERENCES
        + """
@torchop.custom_op("NAMESPACE::half.out_of_two", mutates_args=())
def overload(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x / 2
"""
    )
    module = write("operators", source)
    arguments = ("--import", module, "-k", "memory.given")
    outcome = run("check", f"{namespace}::half*", *arguments)
    assert outcome.code == 0, outcome.out
    assert "operators: 1 checked, 0 with failures, 1 not checked" in outcome.out
