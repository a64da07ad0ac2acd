"""Files of compiled extensions: a cache that is private, where they are found, and loading."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from torchop._errors import NativeUnavailableError
from torchop._native.extension import api, files, worker
from torchop._native.extension.recipe import make_recipe

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="nothing is compiled on Windows")
REMEDY = "Set TORCHOP_CACHE_DIR to a folder that only you can write to"


def test_environment_names_the_folder(cache_folder: Path) -> None:
    assert files.cache_folder() == cache_folder


def test_default_is_in_the_caches_of_the_user(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHOP_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(files.sys, "platform", "linux")
    assert files.cache_folder() == Path("/home/somebody/.cache/torchop")
    monkeypatch.setattr(files.sys, "platform", "darwin")
    assert files.cache_folder() == Path("/home/somebody/Library/Caches/torchop")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert files.cache_folder() == Path("/caches/torchop")


def test_no_home(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TORCHOP_CACHE_DIR")
    monkeypatch.setattr(files.Path, "home", no_home)
    with pytest.raises(NativeUnavailableError, match=f"there is no home folder.*{REMEDY}"):
        files.cache_folder()


def test_folder_is_made_for_the_user_alone(cache_folder: Path) -> None:
    umask = os.umask(0)
    try:
        assert files.make_cache_folder() == cache_folder
    finally:
        os.umask(umask)
    assert stat.S_IMODE(cache_folder.stat().st_mode) == 0o700
    assert files.make_cache_folder() == cache_folder  # it may be there already


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_folder_that_others_can_write_to_is_refused(cache_folder: Path, mode: int) -> None:
    cache_folder.mkdir()
    cache_folder.chmod(mode)
    with pytest.raises(NativeUnavailableError, match=rf"by others \(mode 0{mode:o}\).*{REMEDY}"):
        files.make_cache_folder()


def test_folder_of_another_user_is_refused(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_folder.mkdir()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(NativeUnavailableError, match=f"another user.*{owner}.*{REMEDY}"):
        files.make_cache_folder()


def test_symbolic_link_is_refused(cache_folder: Path) -> None:
    (cache_folder.parent / "elsewhere").mkdir(mode=0o700)
    cache_folder.symlink_to("elsewhere")
    with pytest.raises(NativeUnavailableError, match="a symbolic link"):
        files.make_cache_folder()


def test_file_in_the_way(cache_folder: Path) -> None:
    cache_folder.write_text("")
    with pytest.raises(NativeUnavailableError, match=f"cannot be made: File exists. {REMEDY}"):
        files.make_cache_folder()


def test_file_in_the_way_of_a_parent(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder.write_text("")
    monkeypatch.setenv("TORCHOP_CACHE_DIR", str(cache_folder / "below"))
    with pytest.raises(NativeUnavailableError, match=f"cannot be made: .*{REMEDY}"):
        files.make_cache_folder()


def test_read_only_folder(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder.mkdir(mode=0o500)
    if os.geteuid() == 0:  # who may write everywhere, but on a drive that is mounted read-only
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(NativeUnavailableError, match=f"is read-only. {REMEDY}"):
        files.make_cache_folder()


def test_file_that_others_can_write_to_is_refused(cache_folder: Path) -> None:
    file = files.make_cache_folder() / "file"
    file.write_text("")
    file.chmod(0o644)
    files.check_private(file)
    file.chmod(0o664)
    with pytest.raises(NativeUnavailableError, match="writable by others"):
        files.check_private(file)


# --------------------------------------------------------------------------------------------------
# Where an extension is looked for, and in which order


def test_order_is_environment_package_cache(
    in_cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE_DIR", str(tmp_path / "chosen"))
    for folder in ("chosen", "prebuilt"):
        (tmp_path / folder).mkdir()
        shutil.copy(in_cache, tmp_path / folder)
    places = files.places(make_recipe(source))
    assert [place.name for place in places] == ["TORCHOP_NATIVE_DIR", "package", "cache"]
    assert [place.folder for place in places] == [
        tmp_path / "chosen",
        tmp_path / "prebuilt",
        in_cache.parent,
    ]
    assert all(place.file == place.folder / in_cache.name for place in places if place.folder)


def test_file_of_another_key_is_not_found(in_cache: Path, source: Path) -> None:
    in_cache.rename(in_cache.with_name(in_cache.name.replace("torch", "torch9.")))
    assert [place.file for place in files.places(make_recipe(source))] == [None, None]


def test_empty_cache_is_no_problem_and_is_not_made(cache_folder: Path, source: Path) -> None:
    _, cache = files.places(make_recipe(source))
    assert cache == files.Place("cache", cache_folder, None, None)
    assert not cache_folder.exists()


@pytest.mark.parametrize("unsafe", ["folder", "file"])
def test_file_in_an_unsafe_cache_is_not_loaded(in_cache: Path, source: Path, unsafe: str) -> None:
    (in_cache.parent if unsafe == "folder" else in_cache).chmod(0o777)
    _, cache = files.places(make_recipe(source))
    assert cache.file is None
    assert cache.problem is not None
    assert "writable by others (mode 0777)" in cache.problem


def test_link_in_the_cache_is_not_followed(in_cache: Path, source: Path, built: Path) -> None:
    in_cache.unlink()
    in_cache.symlink_to(built)
    _, cache = files.places(make_recipe(source))
    assert cache.file is None
    assert cache.problem is not None
    assert "a symbolic link" in cache.problem


# --------------------------------------------------------------------------------------------------
# Loading: whose fault it is when it fails, the file's or the extension's own wish

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
        module = files.load(built)
        assert module.__name__ == "torchop._native._call_path"
        assert module.__file__ == str(built)
        assert sys.modules["torchop._native._call_path"] is module

    def test_it_is_initialized_once(self, built: Path) -> None:
        assert files.load(built) is files.load(built)

    def test_damaged_file_is_unusable(self, tmp_path: Path) -> None:
        file = tmp_path / "damaged.so"
        file.write_text("this is no ELF file, " * 10)
        with pytest.raises(files.UnusableFileError, match="damaged"):
            files.load(file)
        assert files.MODULE not in sys.modules

    def test_file_that_is_cut_off_is_unusable(self, built: Path, tmp_path: Path) -> None:
        """Loading it would end the process, so this test would not merely fail."""
        file = tmp_path / "half.so"
        whole = built.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(files.UnusableFileError, match=r"half.so is damaged: its end is"):
            files.load(file)
        shutil.copy(built, file)
        assert files.load(file).__file__ == str(file)

    def test_file_that_is_not_what_was_compiled_is_unusable(
        self, built: Path, tmp_path: Path
    ) -> None:
        file = tmp_path / built.name
        shutil.copy(built, file)
        shutil.copy(worker.digest_file(built), worker.digest_file(file))
        contents = bytearray(built.read_bytes())
        contents[len(contents) // 2] ^= 1
        file.write_bytes(contents)
        with pytest.raises(files.UnusableFileError, match="damaged: it is not what the compiler"):
            files.load(file)
        file.write_bytes(built.read_bytes())
        assert files.load(file).__file__ == str(file)

    def test_empty_file_is_unusable(self, tmp_path: Path) -> None:
        file = tmp_path / "empty.so"
        file.touch()
        with pytest.raises(files.UnusableFileError, match=r"empty.so: file too short"):
            files.load(file)

    def test_refusal_of_the_extension_itself_is_passed_on(self, tmp_path: Path) -> None:
        (tmp_path / "module.cpp").write_text(REFUSING)
        file = api.build(tmp_path / "out", source=tmp_path)
        with pytest.raises(ImportError, match="not with this torch") as caught:
            files.load(file)
        assert not isinstance(caught.value, files.UnusableFileError)
