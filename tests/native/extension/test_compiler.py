"""Which compiler is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchop._errors import NativeUnavailableError
from torchop._native.extension import compiler


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def install(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o700)


def test_usual_names_are_tried_in_order(path: Path) -> None:
    install(path, "clang++")
    assert compiler.find() == [str(path / "clang++")]
    install(path, "g++")
    assert compiler.find() == [str(path / "g++")]
    install(path, "c++")
    assert compiler.find() == [str(path / "c++")]


def test_cxx_comes_first_and_may_have_several_words(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(path, "c++", "ccache")
    monkeypatch.setenv("CXX", "ccache g++-12")
    assert compiler.find() == [str(path / "ccache"), "g++-12"]


def test_cxx_that_is_not_there_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(path, "c++")
    monkeypatch.setenv("CXX", "icpx")
    with pytest.raises(NativeUnavailableError, match="'icpx', which the environment variable CXX"):
        compiler.find()


def test_no_compiler(path: Path) -> None:
    with pytest.raises(NativeUnavailableError, match=r"none of c\+\+, g\+\+, clang\+\+ is in the"):
        compiler.find()
