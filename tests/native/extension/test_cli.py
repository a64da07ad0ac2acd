"""The command line. Uses private names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchop
from tests._support.common import Outcome
from torchop import __main__
from torchop._compat import compile_caches
from torchop._native.extension import files, recipe
from torchop.testing._extras import installing

pytest.importorskip("click.testing")
Compiler = Callable[[str], Path]

pytestmark = pytest.mark.usefixtures("cache_folder", "ours")


def row(table: str, name: str) -> str:
    (found,) = [line for line in table.splitlines() if line.startswith(f"{name} ")]
    return " ".join(found.split()[1:])


def test_build_writes_the_path_and_the_seconds(copying_compiler: Path, target: Path) -> None:
    outcome = Outcome("build")
    assert (outcome.code, outcome.out) == (0, f"{target}\n")
    notice, seconds = outcome.err.splitlines()
    assert notice.startswith("torchop: compiling")
    assert seconds.endswith(" seconds")
    assert float(seconds.split()[0]) >= 0.3


def test_build_out(copying_compiler: Path, tmp_path: Path, target: Path) -> None:
    out = tmp_path / "out"
    assert Outcome("build", "--out", str(out)).out == f"{out / target.name}\n"


def test_build_force(copying_compiler: Path, in_cache: Path) -> None:
    before = in_cache.stat().st_ino
    assert Outcome("build").code == 0
    assert in_cache.stat().st_ino == before
    assert Outcome("build", "--force").code == 0
    assert in_cache.stat().st_ino != before


def test_build_force_replaces_a_file_that_does_not_load(
    copying_compiler: Path, in_cache: Path
) -> None:
    in_cache.write_text("damaged")
    outcome = Outcome("build")
    assert outcome.code == 1
    assert "cannot be loaded" in outcome.err
    assert "`python -m torchop build --force` compiles it again." in outcome.err
    assert Outcome("build", "--force").code == 0


def test_build_that_fails(compiler: Compiler) -> None:
    compiler("echo fatal; exit 1")
    outcome = Outcome("build")
    assert (outcome.code, outcome.out) == (1, "")
    assert "Error: the native call path cannot be built: the compiler" in outcome.err
    assert outcome.err.endswith("failed with exit code 1:\nfatal\n")


def test_build_reports_a_file_that_does_not_load(compiler: Compiler) -> None:
    compiler('echo no extension > "$target"')
    outcome = Outcome("build")
    assert outcome.code == 1
    assert "exists, but cannot be loaded: " in outcome.err


def test_doctor_of_a_working_installation(in_cache: Path, compiler: Compiler) -> None:
    compiler("")
    outcome = Outcome("doctor")
    assert outcome.code == 0, outcome.out
    assert row(outcome.out, "torch") == torch.__version__
    assert row(outcome.out, "compiler").endswith("fake-c++")
    assert row(outcome.out, "TORCHOP_NATIVE") == "auto"
    assert row(outcome.out, "gradients") == "recorded natively"
    assert in_cache.name == f"_call_path-{row(outcome.out, 'key')}.so"
    assert row(outcome.out, "package").endswith("prebuilt: not found")
    assert row(outcome.out, "cache") == f"{in_cache.parent}: found, and can be loaded"
    assert outcome.out.endswith("The native call path works.\n")


def test_doctor_of_a_pytorch_with_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "node_fields", lambda: frozenset({"more"}))
    expected = (
        f"left to the dispatcher: the autograd nodes of PyTorch {torch.__version__} have the new "
        "field more, no field cdata, "
    )
    assert row(Outcome("doctor").out, "gradients").startswith(expected)


def test_doctor_of_a_pytorch_whose_caches_have_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert row(Outcome("doctor").out, "compile") == "caches notice a changed rule"
    monkeypatch.setattr(torch._inductor.codegen.common, "custom_backend_passes", {})
    monkeypatch.setattr(compile_caches, "TracingContext", lambda fake_mode: object())
    advice = json.loads(Outcome("doctor", "--json").out)["found"]["compile caches"].splitlines()
    assert advice == [
        "graphs do not notice a changed rule: set torch.compiler.config.cache_key_tag = "
        "torchop.cache_key_tag()",
        "programs that Dynamo precompiled do not notice a changed rule: precompile them again "
        "after a change",
    ]


VERDICTS = {
    "idle": "is not compiled yet. In a program that calls operators 1,000 times, ",
    "failed": "cannot be used, for the reason above. Operators work without it",
    "off": "is turned off by TORCHOP_NATIVE=0.",
}


@pytest.mark.parametrize(
    ("setting", "value", "state"),
    [
        ("TORCHOP_NATIVE", "auto", "idle"),
        # Like "auto", this value makes torchop compile the extension when it is needed.
        ("TORCHOP_NATIVE", "require", "idle"),
        ("TORCHOP_NATIVE", "prebuilt", "failed"),
        ("TORCHOP_NATIVE", "0", "off"),
        # TORCHOP_NATIVE_DIR must contain the extension, but this folder does not exist.
        ("TORCHOP_NATIVE_DIR", "/absent", "failed"),
        ("CXX", "/absent/c++", "failed"),
    ],
)
def test_doctor_where_nothing_is_compiled(
    setting: str,
    value: str,
    state: str,
    cache_folder: Path,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = compiler("exit 1")
    monkeypatch.setenv(setting, value)
    outcome = Outcome("doctor", "--json")
    report = json.loads(outcome.out)
    assert report["state"] == state
    assert report["verdict"].startswith(f"The native call path {VERDICTS[state]}")
    assert report["found"]["cache"] == f"{cache_folder}: not found"
    assert outcome.code == (0 if state == "idle" else 1)
    assert log.read_text() == ""
    assert not cache_folder.exists()


@pytest.mark.usefixtures("compiler")
def test_doctor_of_a_read_only_cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access  # root can write to every folder, so simulate one that is read-only
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    outcome = Outcome("doctor")
    assert outcome.code == 1
    expected = f"{cache_folder}: does not exist, and {cache_folder.parent} is read-only. Set"
    assert row(outcome.out, "cache").startswith(expected)


@pytest.mark.usefixtures("needs_lock", "without_lock", "compiler")
def test_doctor_of_a_python_without_the_gil(
    in_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome("doctor")
    assert files.MODULE not in sys.modules  # loading the extension would enable the GIL
    assert outcome.code == 1
    problem = "native calls need the GIL, and this Python runs without it"
    assert row(outcome.out, "cache") == f"{in_cache.parent}: cannot be loaded: {problem}"
    assert f"The native call path is not used, because {problem}. Operators work" in outcome.out
    monkeypatch.setenv("TORCHOP_NATIVE", "require")
    assert row(Outcome("doctor").out, "cache") == f"{in_cache.parent}: found, and can be loaded"


def test_doctor_json_matches_the_table(in_cache: Path, compiler: Compiler) -> None:
    compiler("")
    table, outcome = Outcome("doctor"), Outcome("doctor", "--json")
    report = json.loads(outcome.out)
    assert (outcome.code, list(report)) == (0, ["state", "verdict", "found"])
    assert report["state"] == "ready"
    assert table.out.endswith(f"\n{report['verdict']}\n")
    shown = [" ".join(line.split()) for line in table.out.splitlines()[1:-2]]
    assert shown == [f"{what} {text}" for what, text in report["found"].items()]
    assert list(report["found"]) == [
        *("torch", "Python", "platform", "compiler", "TORCHOP_NATIVE", "key"),
        *("gradients", "package", "cache", "compile caches"),
    ]


@pytest.mark.parametrize("native", ["auto", "prebuilt"])
def test_doctor_shows_the_keys_of_other_files(
    in_cache: Path, native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", native)
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen" / "_call_path-torch1-abi1.so").touch()
    monkeypatch.setenv("TORCHOP_NATIVE_DIR", str(tmp_path / "chosen"))
    outcome = Outcome("doctor")
    assert outcome.code == 0
    assert row(outcome.out, "TORCHOP_NATIVE_DIR").endswith("not found; the folder has torch1-abi1")
    assert row(outcome.out, "TORCHOP_NATIVE") == native


def test_doctor_shows_why_a_file_does_not_load(in_cache: Path) -> None:
    in_cache.write_text("damaged")
    outcome = Outcome("doctor")
    assert outcome.code == 1
    assert "cannot be loaded: " in row(outcome.out, "cache")


def test_doctor_of_an_unsafe_cache(in_cache: Path) -> None:
    in_cache.parent.chmod(0o777)
    outcome = Outcome("doctor")
    assert outcome.code == 1
    assert "writable by others" in row(outcome.out, "cache")


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_packages_the_error_names_them(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(torchop, "cli")
    for name in [name for name in sys.modules if name.startswith("torchop.cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        f"torchop: the command line needs {missing}: {installing('cli')}\n"
    )
    # `--version` must work even if `missing` is not installed.
    monkeypatch.setattr(sys, "argv", ["torchop", "--version"])
    __main__.main()
    assert capsys.readouterr().out == f"torchop, version {torchop.__version__}\n"


def test_python_m_torchop() -> None:
    command = [sys.executable, "-m", "torchop", "--version"]
    said = subprocess.check_output(command, text=True)
    assert said == f"torchop, version {torchop.__version__}\n"
