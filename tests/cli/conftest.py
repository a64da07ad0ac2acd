from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests._support.common import Outcome


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> type[Outcome]:
    """Return a class that runs commands in this process.

    The working directory, `sys.path` and `sys.argv` are restored afterwards.
    """
    pytest.importorskip("click.testing")
    monkeypatch.chdir(Path.cwd())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    return Outcome


@pytest.fixture
def write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: str
) -> Iterator[Callable[[str, str], str]]:
    """Return a function that writes a module, given its name and its source.

    In the source, NAMESPACE stands for the namespace of the test.
    """
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name: str, source: str) -> str:
        name = f"{name}_of_{namespace}"
        path = tmp_path / f"{name}.py"
        path.write_text(source.replace("NAMESPACE", namespace))
        importlib.invalidate_caches()
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


PACKAGE = """
import torch

@torch.library.custom_op("NAMESPACE::called", mutates_args=())
def called(x: torch.Tensor, k: int = 2) -> torch.Tensor:
    return x * k

@torch.library.custom_op("NAMESPACE::other", mutates_args=())
def other(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@torch.library.custom_op("NAMESPACE::pick", mutates_args=())
def pick(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x[index]

written = []

@torch.library.custom_op("NAMESPACE::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)
    written.append(x)
"""


@pytest.fixture
def package(write: Callable[[str, str], str]) -> str:
    return write("package", PACKAGE)
