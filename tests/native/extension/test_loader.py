"""Whose fault it is when an extension does not load: the file's, or its own wish."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchop._native.extension import api, loader

REFUSING = """\
#include <Python.h>
PyMODINIT_FUNC PyInit__call_path() {
  PyErr_SetString(PyExc_ImportError, "not with this torch");
  return nullptr;
}
"""


@pytest.mark.usefixtures("cache_folder")
class TestLoad:
    def test_extension_becomes_a_module_of_ours(self, built: Path) -> None:
        module = loader.load(built)
        assert module.__name__ == "torchop._native._call_path"
        assert module.__file__ == str(built)
        assert sys.modules["torchop._native._call_path"] is module

    def test_it_is_initialized_once(self, built: Path) -> None:
        assert loader.load(built) is loader.load(built)

    def test_damaged_file_is_unusable(self, tmp_path: Path) -> None:
        file = tmp_path / "damaged.so"
        file.write_text("this is no ELF file, " * 10)
        with pytest.raises(loader.UnusableFileError, match="damaged"):
            loader.load(file)
        assert loader.MODULE not in sys.modules

    def test_file_that_is_cut_off_is_unusable(self, built: Path, tmp_path: Path) -> None:
        """Loading it would end the process, so this test would not merely fail."""
        file = tmp_path / "half.so"
        whole = built.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(loader.UnusableFileError, match=r"half.so is damaged: its end is"):
            loader.load(file)
        assert not loader.is_cut_off(built)

    def test_empty_file_is_unusable(self, tmp_path: Path) -> None:
        file = tmp_path / "empty.so"
        file.touch()
        with pytest.raises(loader.UnusableFileError, match=r"empty.so: file too short"):
            loader.load(file)

    def test_refusal_of_the_extension_itself_is_passed_on(self, tmp_path: Path) -> None:
        (tmp_path / "module.cpp").write_text(REFUSING)
        file = api.build(tmp_path / "out", source=tmp_path)
        with pytest.raises(ImportError, match="not with this torch") as caught:
            loader.load(file)
        assert not isinstance(caught.value, loader.UnusableFileError)
