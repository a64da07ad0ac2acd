"""Packages that `python -m torchop new` makes: built, installed, and their own tests run."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.forking import run_module
from tests.support import Outcome, assert_clean
from torchop.testing._extras import installing

pytest.importorskip("jinja2", reason="jinja2 is not installed")

KINDS = {
    "made_ctypes": [],
    "made_torch": ["--native", "torch"],
    "made_hf": ["--hf-kernels"],
}


def source(name: str) -> str:
    return f"{name}_source"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sources of a package of each kind.

    The sources have other names than the packages, or pytest would take them for the packages.
    """
    folder = tmp_path_factory.mktemp("made")
    for name, options in KINDS.items():
        outcome = Outcome("new", name, *options, "--out", str(folder / source(name)))
        assert outcome.code == 0, outcome.err
        assert outcome.out.strip() == str(folder / source(name))
        assert "pip install -e" in outcome.err
    return folder


def run(*command: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.project
def test_they_build_and_install_and_pass_their_own_tests(made: Path) -> None:
    installed = made / "installed"
    pip = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    pip += ["--disable-pip-version-check", "--target", str(installed)]
    run(*pip, *(f"./{source(name)}" for name in KINDS), folder=made)
    for name, library in {"made_ctypes": True, "made_torch": True, "made_hf": False}.items():
        assert (installed / name / "_native.so").exists() is library
    paths = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    tests = [str(made / source(name) / "tests") for name in KINDS]
    options = ["-q", "--import-mode=importlib", f"--rootdir={made}", "-p", "no:cacheprovider"]
    warnings = ["-W", "error", "-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]
    # Of the checks, two quick ones that a kernel may fail.
    options += ["-k", "computes or contracts.leaks or subsystems.fake", "-rA"]
    done = run_module("pytest", *options, *warnings, *tests, folder=made, PYTHONPATH=paths)
    output = done.stdout
    assert done.returncode == 0, output + done.stderr
    operators = ["silu_mul", "cbrt", "softcap"]
    for name, count in {"made_ctypes": 3, "made_torch": 3, "made_hf": 2}.items():
        for operator in operators[:count]:
            for check in ("contracts.leaks", "subsystems.fake"):
                assert f"test_operators[{name}::{operator}-{check}]" in output
    listed = assert_clean(run_module("made_ctypes", folder=made, PYTHONPATH=paths))
    assert "made_ctypes::softcap(Tensor x, float cap=30.) -> Tensor; kernels for cpu" in listed


@pytest.mark.project
def test_what_is_written_is_formatted_and_well_formed(made: Path) -> None:
    for command in (["format", "--check"], ["check", "--select", "E,F,B"]):
        run(
            "-m",
            "ruff",
            *command,
            "--isolated",
            "--line-length=100",
            *map(source, KINDS),
            folder=made,
        )
    tomllib = pytest.importorskip("tomllib", reason="it came with Python 3.11")
    for name in KINDS:
        project = tomllib.loads((made / source(name) / "pyproject.toml").read_text())
        assert project["project"]["name"] == name
        text = (made / source(name) / ".github" / "workflows" / "test.yml").read_text()
        assert "python-version: ${{ matrix.python }}\n" in text
        assert "{%" not in "".join(file.read_text() for file in (made / source(name)).rglob("*.py"))
    build = tomllib.loads((made / source("made_hf") / "build.toml").read_text())
    assert (build["general"]["name"], build["torch-noarch"]) == ("made-hf", {})
    operators = (made / source("made_hf") / "torch-ext" / "made_hf" / "triton_ops.py").read_text()
    assert 'add_op_namespace_prefix("silu_mul")' in operators


@pytest.mark.project
def test_two_versions_for_the_hub_live_in_one_process(made: Path, tmp_path: Path) -> None:
    # As kernel-builder writes them, and as the package kernels imports them.
    for version in ("made_hf_1a2b", "made_hf_3c4d"):
        folder = tmp_path / version
        shutil.copytree(made / source("made_hf") / "torch-ext" / "made_hf", folder)
        ops = (folder / "_ops.py").read_text()
        (folder / "_ops.py").write_text(ops.replace("made_hf", version))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(tmp_path)])
        first, second = map(importlib.import_module, ("made_hf_1a2b", "made_hf_3c4d"))
    x = torch.tensor([-8.0, 27.0])
    for package in (first, second):
        torch.testing.assert_close(package.cbrt(x), torch.tensor([-2.0, 3.0]))
        assert package.silu_mul.name == f"{package.__name__}::silu_mul"


WRONG = {
    "folder that is there": (["made", "--out", "{folder}"], "exists already"),
    "name with a dash": (["my-kernels"], "not a name for a package, such as my_kernels"),
    "capital letters": (["MyKernels"], "not a name for a package, such as mykernels"),
    "no letters": (["1+1"], "not a name for a package, such as mykernels"),
    "a package that is installed": (["torch"], "there is a module torch already"),
    "a package whose module has another name": (["pyyaml"], "an installed package pyyaml already"),
    "a module of Python": (["json"], "would hide or replace when it is installed"),
    "PyTorch's own": (["aten"], "aten"),
    "keyword": (["class"], "'class"),
    "long name": (["a-" * 10_000], "a-a-"),
    "C++ for Hugging Face": (["made", "--hf-kernels", "--native", "torch"], "--native none"),
    "name that the Hub refuses": (["made_", "--hf-kernels"], "ends with a letter or a digit"),
    "file in the way": (["made", "--out", "{file}/below/made"], "cannot be made: Not a directory"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_refused_and_writes_nothing(tmp_path: Path, wrong: str) -> None:
    arguments, message = WRONG[wrong]
    file = tmp_path / "file"
    file.touch()
    places = {"folder": tmp_path, "file": file}
    outcome = Outcome("new", *(argument.format(**places) for argument in arguments))
    assert outcome.code in (1, 2)
    assert message in outcome.err
    assert len(outcome.err) < 1000
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_of_that_name_is_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "made_before").mkdir()
    outcome = Outcome("new", "made_before", "--out", str(tmp_path / "out"))
    assert outcome.code == 0, outcome.err


def test_without_jinja2_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = Outcome("new", "made")
    assert (outcome.code, f"needs jinja2: {installing('cli')}" in outcome.err) == (1, True)
