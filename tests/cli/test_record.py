from __future__ import annotations

import importlib
import os
import sys
import tempfile
import zipfile

import pytest

from tests._support.common import needs_native
from torchop import Recorded

PROGRAM = """
import sys
import torch
import PACKAGE

assert __name__ == "__main__"
assert sys.modules["__main__"].PACKAGE is PACKAGE
print("arguments", sys.argv[1:])
print("path", sys.path[0])
for _ in range(3):
    PACKAGE.called(torch.ones(2, 3), 4)
sys.stdout.flush()
"""


@pytest.fixture
def program(write, package, tmp_path):
    def program(more=""):
        name = write("program", PROGRAM.replace("PACKAGE", package) + more)
        return str(tmp_path / f"{name}.py")

    return program


@needs_native
def test_the_report_is_printed_at_the_end(run, program, namespace, tmp_path):
    outcome = run("record", program(), "-o", "--pattern", "x y")
    assert outcome.code == 0
    assert outcome.out.startswith(f"arguments ['-o', '--pattern', 'x y']\npath {tmp_path}\n")
    accelerated, calls, native, before, after = outcome.row(f"{namespace}::called")
    assert (accelerated, calls, native) == ("yes", "3", "3")
    assert 0 < float(after) < float(before)
    path = outcome.err.rpartition("the recording is ")[2].strip()
    assert not os.path.exists(os.path.dirname(path))  # the recording is deleted after the report


@needs_native
def test_the_recording_is_saved_before_anything_is_measured(
    run, program, namespace, tmp_path, monkeypatch
):
    # Import the module by its name, because the attribute `torchop.cli.accelerate` is the command.
    report = importlib.import_module("torchop.cli.accelerate")

    def measure(recorded):
        (path,) = tmp_path.glob("torchop-*/calls.json")
        assert Recorded.load(path).calls(f"{namespace}::called") == 3
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "measure", measure)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outcome = run("record", "--pattern", f"{namespace}::*", program())
    assert outcome.code == 1
    (path,) = tmp_path.glob("torchop-*/calls.json")  # the recording still exists
    assert f"torchop: measuring; meanwhile, the recording is in {path}\n" in outcome.err


def test_the_calls_are_saved(run, program, namespace, tmp_path):
    out = tmp_path / "calls.json"
    outcome = run("record", "-o", str(out), program("import os; os.chdir('/')"))
    assert outcome.code == 0
    assert outcome.out.splitlines() == ["arguments []", f"path {tmp_path}"]
    assert outcome.err == f"torchop: wrote {out} (calls: 3, operators: 1)\n"
    [(call, count)] = Recorded.load(out)[f"{namespace}::called"]
    assert (call.args[0].shape, call.args[1], count) == ((2, 3), 4, 3)


def test_a_script_has_an_absolute_path_and_the_arguments_as_given(
    run, write, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    name = write(
        "program", "import os, sys; os.chdir('/'); print(__file__, sys.argv, __spec__, __package__)"
    )
    outcome = run("record", "-o", "calls.json", f"{name}.py", "a")
    assert outcome.out == f"{tmp_path / name}.py ['{name}.py', 'a'] None None\n"


def test_folder_and_zip_file_can_import_their_modules(run, tmp_path, monkeypatch, namespace):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    beside = f"beside_{namespace}"
    (folder / "__main__.py").write_text(f"""
import os, sys
os.chdir("/")
import {beside}
assert sys.modules["__main__"].__dict__ is globals()
print(__name__, __spec__.name, __file__, sys.path[0], sys.argv)
""")
    (folder / f"{beside}.py").write_text("")
    with zipfile.ZipFile("app.pyz", "w") as app:
        for file in folder.iterdir():
            app.write(file, file.name)
    for name in ("folder", "app.pyz"):
        os.chdir(tmp_path)
        path = tmp_path / name
        outcome = run("record", "-o", "calls.json", name, "a")
        assert outcome.out == f"__main__ __main__ {path}/__main__.py {path} ['{name}', 'a']\n"
        del sys.modules[beside]


def test_patterns_choose_operators(run, program, namespace, tmp_path):
    out = tmp_path / "calls.json"
    path = program()
    run("record", "-o", str(out), "--pattern", "aten::mul*", "--pattern", f"{namespace}::o*", path)
    assert [*Recorded.load(out)] == ["aten::mul.Tensor"]


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(3)", 3), ("sys.exit()", 0), ("sys.exit('stop')", 1), ("raise SystemExit(9)", 9)],
)
def test_exit_code_of_the_program_is_returned(run, program, tmp_path, namespace, ending, code):
    out = tmp_path / "calls.json"
    outcome = run("record", "-o", str(out), program(ending))
    assert outcome.code == code
    assert Recorded.load(out).calls(f"{namespace}::called") == 3


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        ("raise KeyError('text')", 1, "KeyError: 'text'"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("import click; raise click.ClickException('x')", 1, "click.exceptions.ClickException: x"),
    ],
)
def test_an_exception_of_the_program_ends_it_as_python_does(
    run, program, tmp_path, namespace, capsys, ending, code, last
):
    out = tmp_path / "calls.json"
    path = program(ending)
    outcome = run("record", "-o", str(out), path)
    assert outcome.code == code
    assert Recorded.load(out).calls(f"{namespace}::called") == 3
    lines = outcome.err.splitlines()
    start = lines.index("Traceback (most recent call last):")
    assert lines[start + 1].startswith(f'  File "{path}", line ')
    assert lines[-1] == last


def test_a_recording_that_cannot_be_written_is_reported(run, program, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    ending = f"import os; os.rmdir({str(folder)!r})"
    outcome = run("record", "-o", str(folder / "calls.json"), program(ending))
    assert outcome.code == 1
    assert "Error: the recording cannot be written: " in outcome.err
    folder.mkdir()
    failing = program(f"{ending}; sys.exit(7)")
    assert run("record", "-o", str(folder / "calls.json"), failing).code == 7


def test_a_program_that_cannot_start_is_reported(run, write, tmp_path):
    out = str(tmp_path / "calls.json")
    script = str(tmp_path / f"{write('program', '1 +')}.py")
    for program, message in (
        ([script], "SyntaxError: invalid syntax\n"),
        (["-m", "no_such_module_at_all"], "ImportError: No module named no_such_module_at_all\n"),
    ):
        outcome = run("record", "-o", out, *program)
        assert outcome.code == 1
        assert outcome.err.endswith(message)


def test_a_module_is_run(run, program, namespace, tmp_path):
    name = os.path.basename(program("print('file', sys.argv[0])")).removesuffix(".py")
    out = tmp_path / "calls.json"
    outcome = run("record", "-o", str(out), "-m", name, "-x")
    assert outcome.code == 0
    assert outcome.out.splitlines()[0] == "arguments ['-x']"
    assert outcome.out.splitlines()[-1] == f"file {tmp_path / name}.py"
    assert Recorded.load(out).calls(f"{namespace}::called") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "there is no file nowhere.py"),
        (["-o", "/nowhere/calls.json", "PROGRAM"], "/nowhere/calls.json cannot be written to"),
        (["--pattern", "mylib", "PROGRAM"], "no operator name can match that"),
        ([], "Missing argument 'PROGRAM'"),
    ],
)
def test_errors_are_reported_before_the_program_runs(run, program, arguments, message):
    path = program()
    outcome = run(
        "record", *[path if argument == "PROGRAM" else argument for argument in arguments]
    )
    assert outcome.code == 2
    assert message in " ".join(outcome.err.split())
    assert outcome.out == ""
