"""check --certificate and --badge, and certificate verify."""

from __future__ import annotations

import json
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from tests.support import Outcome
from torchop.cli.certificate import digest, identity_of

OPERATORS = """
import torch, torchop

@torchop.custom_op("NAMESPACE::good", mutates_args=())
def good(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@torchop.custom_op("NAMESPACE::flat", mutates_args=())
def flat(x: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return memory[: x.numel()].reshape(x.shape).clone()

for op in (good, flat):
    op.register_examples(lambda: [(torch.randn(2, 3),)])
"""
SIGNED = "Ada Lovelace <ada@example.org>"


UNTRIED = {"cannot be done": 1, "not run": 1}


@pytest.fixture(scope="module")
def namespace():
    """That of the operators, which are checked once for all tests."""
    return "certified"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, namespace):
    """Where the module of the operators is, the certificate of both, and its badge."""
    folder = tmp_path_factory.mktemp("certified")
    module = f"operators_of_{namespace}"
    (folder / f"{module}.py").write_text(OPERATORS.replace("NAMESPACE", namespace))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", list(sys.argv))
        patch.syspath_prepend(folder)
        outcome = Outcome(
            *("check", f"{namespace}::*", "--import", module, "-k", "memory.given"),
            *("-k", "memory.transposed", "--certificate", "certificate.json"),
            *("--signed-off-by", SIGNED, "--badge", "badge.svg", "--seed", "3"),
        )
        assert outcome.code == 1  # one of them is wrong
        yield folder
    sys.modules.pop(module, None)  # which a command may have imported here


@pytest.fixture
def certified(folder, tmp_path):
    """The path of a certificate that a test may change, and its content."""
    file = Path(shutil.copy(folder / "certificate.json", tmp_path))
    return file, json.loads(file.read_text())


def edited(file, change, *, forge=True):
    """Changes a certificate, with a digest that fits again."""
    content = json.loads(file.read_text())
    change(content)
    if forge:
        content["digest"] = digest(content)
    file.write_text(json.dumps(content))


def test_it_says_what_was_checked_on_what(certified, namespace):
    _, content = certified
    assert content["signed_off_by"] == SIGNED
    assert content["environment"].keys() == {"devices", "platform", "python", "torch", "torchop"}
    assert content["request"]["only"] == ["memory.given", "memory.transposed"]
    flat, good = content["operators"]
    assert flat["op"] == f"{namespace}::flat"
    assert good["schema"] == f"{namespace}::good(Tensor x) -> Tensor"
    assert good["sources"] != flat["sources"]
    assert good["examples"] == flat["examples"]  # by chance, from the same seed
    assert good["kernels"] == ["every device"]
    assert [(c["check"], c["outcome"], c["seed"]) for c in flat["checks"]] == [
        ("memory.given", "passed", 3),
        ("memory.transposed", "failed", 3),
    ]
    assert flat["checks"][1]["reason"].startswith("the tensor transposed: ")
    assert content["totals"] == {"passed": 3, "failed": 1}
    assert content["digest"].startswith("sha256:")


def test_another_run_says_the_same(certified, run):
    file, _ = certified
    outcome = run("certificate", "verify", str(file))
    assert outcome.code == 0, outcome.out + outcome.err
    assert f"signed off by {SIGNED}: the same\n" in outcome.out


def test_another_environment_is_told_and_no_difference(certified, run):
    file, _ = certified
    edited(file, lambda content: content["environment"].update(torch="1.0"))
    outcome = run("certificate", "verify", str(file))
    assert outcome.code == 0
    assert "torch: 1.0 before, " in outcome.out


def test_what_another_machine_could_not_do_may_pass(certified, run):
    file, _ = certified

    def change(content):
        content["operators"][1]["checks"][1]["outcome"] = "cannot be done"
        content["totals"] = {"passed": 2, "failed": 1, "cannot be done": 1}

    edited(file, change)
    outcome = run("certificate", "verify", str(file))
    assert outcome.code == 0, outcome.out + outcome.err
    edited(file, lambda content: content["operators"][0]["checks"][1].update(outcome="not run"))
    edited(file, lambda content: content.update(totals={"passed": 2} | UNTRIED))
    outcome = run("certificate", "verify", str(file))
    assert outcome.code == 1
    assert "memory.transposed was 'not run', but is 'failed' now" in outcome.out


def test_what_differs_is_told(certified, run, namespace):
    """Also in a file that was forged, whose digest fits."""
    file, _ = certified

    def change(content):
        flat, good = content["operators"]
        flat["checks"][1]["outcome"] = "passed"
        content["totals"] = {"passed": 4}
        good["sources"] = good["examples"] = "sha256:0"
        good["schema"] = "another"

    edited(file, change)
    outcome = run("certificate", "verify", str(file))
    assert outcome.code == 1
    assert (
        f"{namespace}::flat: memory.transposed was 'passed', but is 'failed' now: the tensor"
        in outcome.out
    )
    assert f"{namespace}::good: the source of its functions changed\n" in outcome.out
    assert f"{namespace}::good: its examples changed\n" in outcome.out
    assert f"{namespace}::good: its schema changed: another before, " in outcome.out
    assert ": 4 differences\n" in outcome.out


def test_an_operator_that_is_gone_is_told(certified, run, namespace):
    file, _ = certified
    edited(file, lambda content: content["operators"][0].update(op=f"{namespace}::gone"))
    outcome = run("certificate", "verify", str(file))
    assert outcome.code == 1
    assert f"{namespace}::gone" in outcome.out + outcome.err


def test_a_file_that_was_edited_is_refused(certified, run):
    file, _ = certified
    edited(file, lambda content: content["totals"].update(failed=0), forge=False)
    outcome = run("certificate", "verify", str(file))
    assert outcome.code == 1
    assert "was edited after it was written, because its digest is sha256:" in outcome.err


def test_the_order_in_which_it_is_written_is_no_edit(certified, run):
    file, content = certified
    file.write_text(json.dumps(dict(reversed(content.items())), indent=8))
    assert run("certificate", "verify", str(file)).code == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:100], "is not JSON, or was cut"),
        (lambda text: "", "is not JSON, or was cut"),
        (lambda text: "[" * 100_000, "is not JSON, or was cut"),
        (lambda text: "[]", "is not a certificate of `torchop check --certificate`"),
        (lambda text: "{}", "is not a certificate of `torchop check --certificate`"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "has format 2, but this version"),
    ],
)
def test_what_is_no_certificate_is_refused(certified, run, change, message):
    file, _ = certified
    file.write_text(change(file.read_text()))
    outcome = run("certificate", "verify", str(file))
    assert outcome.code == 1
    assert message in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("operators"), "'operators' is missing, or not of type list"),
        (lambda content: content["operators"][0].pop("op"), "'op' is missing, or not of type str"),
        (lambda content: content["operators"].append(3), "'op' is missing, or not of type str"),
        (
            lambda c: c["operators"][0]["checks"][0].update(check=1),
            "'check' is missing, or not of type str",
        ),
        (lambda content: content["request"].pop("seed"), "'seed' is missing, or not of type int"),
        (
            lambda content: content["request"].update(modules=3),
            "'modules' is missing, or not of type list",
        ),
        (
            lambda c: c["request"].update(budget="x"),
            "'budget' is missing, or not of type int | float",
        ),
        (lambda content: content["request"].update(modules=[3]), "3 cannot be imported"),
        (
            lambda content: content["request"].update(modules=["../x"]),
            "is not the name of a module",
        ),
        (lambda content: content.update(operators=[]), "its totals are {'failed': 1, 'passed': 3}"),
        (lambda content: content["operators"].pop(), "but its checks come to {'passed': 1, 'fail"),
        (lambda content: content["totals"].update(failed=0), "its totals are {'failed': 0, 'pass"),
        (lambda content: content["request"].update(timeout=float("nan")), "nan is not a number of"),
        (lambda content: content["request"].update(budget=-1), "-1 is not a number of seconds abo"),
        (lambda content: content.update(signed_off_by={}), "'signed_off_by' is missing, or not of"),
        (lambda content: content.update(signed_off_by="Ada\n: the same"), "expects a name and an "),
    ],
)
def test_forged_files_end_with_a_message(certified, run, change, message):
    file, _ = certified
    edited(file, change)
    outcome = run("certificate", "verify", str(file))
    assert outcome.code in (1, 2)
    assert message in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err


def test_a_forged_file_says_nothing_of_its_own(certified, run):
    file, _ = certified
    edited(file, lambda c: c["environment"].update(torch="\ud800\x1b[2J\nall: the same"))
    outcome = run("certificate", "verify", str(file))
    assert outcome.code == 0
    assert "torch: \\ud800\\x1b[2J\\nall: the same before, " in outcome.out


def test_a_file_that_is_not_there(run, tmp_path):
    outcome = run("certificate", "verify", str(tmp_path / "none.json"))
    assert outcome.code == 1
    assert "none.json cannot be read: No such file or directory" in outcome.err


def test_badges(folder, run, namespace, tmp_path):
    image = ElementTree.parse(folder / "badge.svg").getroot()
    assert image.get("aria-label") == "torchop check: 3 passed, 1 failed"
    arguments = ("check", f"{namespace}::good", "--import", f"operators_of_{namespace}")
    badge = tmp_path / "badge.json"
    run(*arguments, "-k", "memory.given", "--badge", str(badge))
    assert json.loads(badge.read_text()) == {
        "schemaVersion": 1,
        "label": "torchop check",
        "message": "1 passed",
        "color": "#2e7d32",
    }
    run(*arguments, "-k", "memory.given", "--badge", str(badge), "--budget", "1e-9")
    assert json.loads(badge.read_text())["message"] == "0 passed, 1 not run"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--badge", "badge.png"), "--badge writes .svg, or .json for shields.io; got badge.png"),
        (
            ("--signed-off-by", "Ada"),
            "as git writes them, such as 'Ada Lovelace <ada@example.org>'",
        ),
        (
            ("--signed-off-by", "A\nB <a@b>", "--certificate", "c"),
            "expects a name and an address, as git",
        ),
        (("--signed-off-by", SIGNED), "--signed-off-by is a line of the file that --certificate"),
    ],
)
def test_mistakes_are_told_before_anything_is_checked(
    run, write, namespace, monkeypatch, tmp_path, arguments, message
):
    module = write("operators", OPERATORS)
    monkeypatch.chdir(tmp_path)
    outcome = run("check", f"{namespace}::good", "--import", module, *arguments)
    assert outcome.code == 2
    assert message in " ".join(outcome.err.split())


def test_examples_with_a_generator_have_one_digest() -> None:
    def examples(seed):
        mean = torch.ones(2, 3)
        return [((mean, 1.0), {"generator": torch.Generator().manual_seed(seed)})]

    digests = [identity_of("aten::normal.Tensor_float", lambda s=s: examples(s)) for s in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]
