"""The two commands of the README: the demo and the tests, as a newcomer and CI would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import load_tool

ROOT = Path(__file__).parents[1]
README, CI = (ROOT.joinpath(name).read_text(encoding="utf-8") for name in ("README.md", ".ci/run"))
COMMANDS = ["make demo", "make test"]

newcomer = load_tool("newcomer")


def test_the_readme_shows_the_demo_and_the_tests() -> None:
    assert newcomer.commands(README) == COMMANDS


def test_they_stand_on_the_first_screen() -> None:
    assert README.index("## Try it") < README.index("## Quick start")
    assert README[: README.index("## Quick start")].count("\n") < 40


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readme_says_what_a_command_needs_and_how_long_it_takes(command: str) -> None:
    section = README[README.index("## Try it") : README.index("## Quick start")]
    text = section.rpartition("```")[2]
    assert f"`{command}`" in text
    for needed in ("Python 3.10", "C++ compiler", "no GPU", "2 GB"):
        assert needed in text
    assert text.count("minute") >= 2


def test_continuous_integration_runs_the_test_command_of_the_readme() -> None:
    assert newcomer.commands(README)[1] in CI.splitlines()


@pytest.mark.parametrize(
    "lost",
    [
        "# torchop\n",
        "## Try it\n\nNo commands.\n",
        "## Try it\n\nNone.\n\n## Other\n\n```console\nmake test\n```\n",
        "## Other\n\n```console\nmake test\n```\n",
    ],
)
def test_a_lost_command_is_noticed(lost: str) -> None:
    assert newcomer.commands(lost) == []


def dry_run(command: str, tmp_path: Path) -> list[str]:
    """What make would do in a fresh clone."""
    done = subprocess.run(
        [*command.split(), "--dry-run", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if not line.startswith("make")]


def test_the_demo_says_first_what_is_native_and_what_one_will_see(tmp_path: Path) -> None:
    first, *others = dry_run("make demo", tmp_path)
    assert first == "cat examples/_demo/introduction.txt"
    said = (ROOT / "examples" / "_demo" / "introduction.txt").read_text(encoding="utf-8")
    for words in ("The calls are native", "about 20 s", "Five lines", "a table"):
        assert words in said
    assert others[-1].endswith("bin/python examples/crop_demo.py")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_installs_first_and_says_so(command: str, tmp_path: Path) -> None:
    lines = dry_run(command, tmp_path)
    (place,) = [number for number, line in enumerate(lines) if "tools/install.py" in line]
    assert "about a minute and 2 GB" in lines[place - 1]
    assert "bin/python" in lines[place + 2]


def test_the_tests_compile_where_it_can_be_seen(tmp_path: Path) -> None:
    compiling, tests = dry_run("make test", tmp_path)[-2:]
    assert "torchop.native.wait()" in compiling
    assert "-m pytest" in tests


def test_the_first_program_is_that_of_the_quick_start() -> None:
    assert newcomer.first_program(README).startswith("import numpy as np\nimport torch\n")
    assert newcomer.first_program("## Try it\n\n```python\n```\n## Quick start\n") == ""


# --------------------------------------------------------------------------------------------------
# Watching a command

PROGRAM = """
import sys, time
print("first", flush=True)
for frame in "\u280b\u2819":
    print(f"\\r{frame} \\x1b[1mworking\\x1b[0m", end="", flush=True)
    time.sleep(0.7)
print("\\rsecond", sys.stdout.isatty())
sys.exit(3)
"""


def test_what_is_on_the_screen_is_told_with_its_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = newcomer.watch([sys.executable, "-c", PROGRAM], tmp_path, dict(os.environ))
    assert watched.code == 3
    assert 1 <= watched.silence <= watched.seconds
    assert watched.before_silence == "working"
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split()[1:] for line in lines] == [["first"], ["working"], ["second", "True"]]
    seconds = [float(line.split()[0]) for line in lines]
    assert seconds == sorted(seconds)
    assert seconds[-1] >= 1.4


def test_the_newcomer_has_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHOP_CACHE_DIR", "VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS", "CI"):
        monkeypatch.setenv(name, "/ours")
    environment = newcomer._environment(tmp_path)
    assert "/ours" not in environment.values()
    assert environment["XDG_CACHE_HOME"] == str(tmp_path / "cache")
