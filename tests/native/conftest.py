"""Fixtures: an operator, and sources, compilers and caches for builds of the extension.

Uses private names.
"""

from __future__ import annotations

import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import torchop
from tests._support.common import adding
from tests.native.scenarios import Made, Makers, T
from torchop._native.extension import api, files, recipe

# A minimal extension, without PyTorch's headers, which take ten seconds to compile.
TINY = """\
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_call_path", nullptr, 0, nullptr};
PyMODINIT_FUNC PyInit__call_path() { return PyModule_Create(&definition); }
"""


@pytest.fixture
def op(namespace: str) -> torchop.CustomOp[..., Any]:
    return adding(namespace)


@pytest.fixture(params=["custom_op", "low_level", "stock_custom_op", "stock_low_level"])
def make(request: pytest.FixtureRequest, namespace: str) -> Iterator[Callable[[Any, str], Made]]:
    """A function that defines an operator from a kernel and a schema, and calls it once."""
    makers = Makers(namespace)

    def make(kernel: Any, schema: str, *warm_up: Any) -> Made:
        op = getattr(makers, request.param)(kernel, schema)
        op(T, *warm_up)
        return Made(op, f"{namespace}::op")

    yield make
    for undo in reversed(makers.undo):
        undo()


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder. Environment variables and prebuilt extensions are hidden."""
    for name in (
        "TORCHOP_NATIVE",
        "TORCHOP_NATIVE_DIR",
        "CXX",
        "XDG_CACHE_HOME",
    ):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCHOP_CACHE_DIR", str(folder))
    monkeypatch.setattr(files, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(files, "WHEEL_FOLDERS", (tmp_path / "packages",))
    # `delitem` alone fails if the module is not imported. Setting the entry first also makes
    # monkeypatch restore or remove the entry after the test.
    monkeypatch.setitem(sys.modules, files.MODULE, None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, files.MODULE)
    return folder


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sources of an extension that does nothing."""
    folder = tmp_path_factory.mktemp("csrc")
    (folder / "module.cpp").write_text(TINY)
    return folder


@pytest.fixture(scope="session")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return api.build(tmp_path_factory.mktemp("built"), source=source)


@pytest.fixture
def ours(source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make torchop compile `source` in place of its own C++ sources."""
    monkeypatch.setattr(recipe, "CSRC", source)
    return source


@pytest.fixture
def without_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)


@pytest.fixture
def needs_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the extension as for a Python version on which free threading has not been tested."""
    monkeypatch.setattr(recipe, "NEEDS_LOCK", True)


@pytest.fixture
def needs_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the extension as for a Python version on which free threading has been tested."""
    monkeypatch.setattr(recipe, "NEEDS_LOCK", False)


Compiler = Callable[[str], Path]
Environment = Callable[[str], dict[str, str]]


@pytest.fixture
def child_environment(tmp_path: Path) -> Environment:
    """Return a function that returns environment variables for a child process.

    They select an empty cache, and a fake compiler with the given shell commands.
    """

    def make(lines: str) -> dict[str, str]:
        compiler = tmp_path / "fake-c++"
        compiler.write_text(f"#!/bin/sh\n{lines}\n")
        compiler.chmod(0o755)
        return {
            "TORCHOP_NATIVE": "auto",
            "TORCHOP_CACHE_DIR": str(tmp_path / "cache"),
            "TORCHOP_NATIVE_DIR": "",
            "CXX": str(compiler),
        }

    return make


@pytest.fixture
def compiler(cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Return a function that sets CXX to a fake compiler with the given shell commands.

    In these commands, `$target` is the output file. The function returns the path of a log file to
    which each run of the compiler appends a line.
    """

    log, script, work = (tmp_path / name for name in ("compiler.log", "fake-c++", "work.sh"))
    script.write_text(
        f"#!/bin/sh\necho run >> {log}\n"
        'while [ "$1" != "-o" ]; do shift; done\n'
        f'target="$2"\n. {work}\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    work.write_text("exit 1\n")
    monkeypatch.setenv("CXX", str(script))

    def install(lines: str) -> Path:
        work.write_text(f"{lines}\n")
        log.write_text("")
        return log

    return install


@pytest.fixture
def copying_compiler(compiler: Compiler, built: Path) -> Path:
    """Use a slow fake compiler that copies an existing extension, and return the compiler's log."""
    return compiler(f'sleep 0.3; cp {built} "$target"')


@pytest.fixture
def target(cache_folder: Path, source: Path, compiler: Compiler) -> Path:
    return cache_folder / recipe.make_recipe(source).file_name


@pytest.fixture
def in_cache(target: Path, built: Path) -> Path:
    """Put the extension into the cache, as if it had been compiled there."""
    target.parent.mkdir(mode=0o700)
    shutil.copy(built, target)
    return target
