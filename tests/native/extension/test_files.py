"""Files of compiled extensions: a private cache, the search order, and loading.

Uses private names.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from torchop._native.extension import api, files
from torchop._native.extension.recipe import make_recipe
from torchop.native import NativeUnavailableError

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


@pytest.mark.parametrize("home", ["", ".", "home"])
def test_relative_home_is_ignored(
    home: str, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative cache path would depend on the working directory, where others may plant files."""
    monkeypatch.delenv("TORCHOP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    monkeypatch.setenv("HOME", home)
    monkeypatch.chdir(tmp_path)
    if home:
        with pytest.raises(NativeUnavailableError, match=f"there is no home folder.*{REMEDY}"):
            files.cache_folder()
    else:
        assert tmp_path not in files.cache_folder().parents
    assert not list(tmp_path.iterdir())


def test_folder_is_made_for_the_user_alone(cache_folder: Path) -> None:
    umask = os.umask(0)
    try:
        assert files.make_cache_folder() == cache_folder
    finally:
        os.umask(umask)
    assert stat.S_IMODE(cache_folder.stat().st_mode) == 0o700
    assert files.make_cache_folder() == cache_folder


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


def test_folders_above_are_made_for_the_user_alone(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHOP_CACHE_DIR", str(cache_folder / "below" / "deep"))
    umask = os.umask(0)
    try:
        folder = files.make_cache_folder()
    finally:
        os.umask(umask)
    for made in (cache_folder, cache_folder / "below", folder):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.parametrize(("mode", "is_safe"), [(0o777, False), (0o770, False), (0o1777, True)])
def test_folder_above_that_others_can_rename_is_refused(
    in_cache: Path, source: Path, mode: int, is_safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If others could rename a parent folder, they could replace the cache after it was checked."""
    monkeypatch.setattr(files, "_is_users_own_group", lambda number: False)
    cache = in_cache.parent
    below = cache.parent / "above" / "between"
    below.mkdir(parents=True)
    cache = cache.rename(below / "cache")
    monkeypatch.setenv("TORCHOP_CACHE_DIR", str(cache))
    below.parent.chmod(mode)
    place = files.places(make_recipe(source))[-1]
    if is_safe:
        assert place.file == cache / in_cache.name
        assert files.make_cache_folder() == cache
    else:
        expected = (
            rf"{below.parent}, above the cache, is writable by others \(mode 0{mode:o}, not st"
        )
        assert place.file is None
        assert re.search(f"{expected}.*{REMEDY}", place.problem or "")
        with pytest.raises(NativeUnavailableError, match=expected):
            files.make_cache_folder()
        with pytest.raises(NativeUnavailableError, match=expected):
            api.build(source=source)
    below.parent.chmod(0o700)


def test_folder_above_may_be_of_the_users_own_group(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grp, pwd = pytest.importorskip("grp"), pytest.importorskip("pwd")
    user = pwd.getpwuid(os.geteuid()).pw_name
    groups = {
        1: (user, []),
        2: (user, [user]),
        3: (user, [user, "another"]),
        4: ("staff", []),
    }

    def getgrgid(number: int) -> object:
        name, members = groups[number]
        return grp.struct_group((name, "x", number, members))

    monkeypatch.setattr(grp, "getgrgid", getgrgid)
    monkeypatch.setattr(files, "_is_users_own_group", files._is_users_own_group.__wrapped__)
    own = [number for number in range(1, 6) if files._is_users_own_group(number)]
    assert own == [1, 2]


def test_folder_above_of_another_user_is_refused(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = cache_folder.parent
    lstat = Path.lstat

    def of_another(path: Path) -> os.stat_result:
        status = list(lstat(path))
        if path == above:
            status[stat.ST_UID] = os.geteuid() + 1
        return os.stat_result(status)

    monkeypatch.setattr(Path, "lstat", of_another)
    with pytest.raises(
        NativeUnavailableError, match=f"{above}, above the cache, belongs to another"
    ):
        files.make_cache_folder()
    assert not cache_folder.exists()


def test_file_in_place_of_the_folder_is_an_error(cache_folder: Path) -> None:
    cache_folder.write_text("")
    with pytest.raises(NativeUnavailableError, match=f"cannot be created: File exists. {REMEDY}"):
        files.make_cache_folder()


def test_read_only_folder(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder.mkdir(mode=0o500)
    if os.geteuid() == 0:  # root can write to every folder, so simulate one that is read-only
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(NativeUnavailableError, match=f"is read-only. {REMEDY}"):
        files.make_cache_folder()


# --------------------------------------------------------------------------------------------------
# The search order


def test_order_is_environment_package_wheel_cache(
    in_cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE_DIR", str(tmp_path / "chosen"))
    for folder in ("chosen", "prebuilt"):
        (tmp_path / folder).mkdir()
        shutil.copy(in_cache, tmp_path / folder)
    wheel = files.WHEEL_FOLDERS[0] / "torchop_native"
    wheel.mkdir(parents=True)
    shutil.copy(in_cache, wheel)
    places = files.places(make_recipe(source))
    names = ["TORCHOP_NATIVE_DIR", "package", "torchop-native", "cache"]
    assert [place.name for place in places] == names
    assert [place.folder for place in places] == [
        tmp_path / "chosen",
        tmp_path / "prebuilt",
        wheel,
        in_cache.parent,
    ]
    assert all(place.file == place.folder / in_cache.name for place in places if place.folder)


def test_empty_cache_is_no_problem_and_is_not_made(cache_folder: Path, source: Path) -> None:
    _, cache = files.places(make_recipe(source))
    assert cache == files.Place("cache", cache_folder, None, None)
    assert not cache_folder.exists()


# --------------------------------------------------------------------------------------------------
# Loading: a broken file, and an extension that raises ImportError

REFUSING = """\
#include <Python.h>
PyMODINIT_FUNC PyInit__call_path() {
  PyErr_SetString(PyExc_ImportError, "not with this torch");
  return nullptr;
}
"""


@pytest.mark.usefixtures("cache_folder")
class TestLoad:
    def test_extension_becomes_a_torchop_module(self, built: Path) -> None:
        module = files.load(built)
        assert module.__name__ == "torchop._native._call_path"
        assert module.__file__ == str(built)
        assert sys.modules["torchop._native._call_path"] is module

    def test_extension_is_initialized_once(self, built: Path) -> None:
        assert files.load(built) is files.load(built)

    def test_damaged_file_is_unusable(self, tmp_path: Path) -> None:
        file = tmp_path / "damaged.so"
        file.write_text("this is no ELF file, " * 10)
        with pytest.raises(files.UnusableFileError, match=r"damaged.so: "):
            files.load(file)
        assert files.MODULE not in sys.modules

    def test_failed_load_is_not_reused_for_the_next_file(self, built: Path, tmp_path: Path) -> None:
        file, source = tmp_path / "nothing.so", tmp_path / "nothing.c"
        source.write_text("int nothing;\n")
        subprocess.run(["cc", "-shared", "-fPIC", source, "-o", file], check=True)
        with pytest.raises(files.UnusableFileError, match="does not define module"):
            files.load(file)
        assert files.load(built).__file__ == str(built)

    def test_two_files_in_turn_are_not_mixed_up(
        self, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        modules = []
        for name in ("one.so", "two.so"):
            shutil.copy(built, tmp_path / name)
            monkeypatch.delitem(sys.modules, files.MODULE, raising=False)
            modules.append(files.load(tmp_path / name))
        assert [module.__file__ for module in modules] == [
            str(tmp_path / "one.so"),
            str(tmp_path / "two.so"),
        ]
        assert modules[0] is not modules[1]

    def test_empty_file_is_unusable(self, tmp_path: Path) -> None:
        file = tmp_path / "empty.so"
        file.touch()
        with pytest.raises(files.UnusableFileError, match=r"empty.so: file too short"):
            files.load(file)

    def test_import_error_of_the_extension_is_raised(self, tmp_path: Path) -> None:
        (tmp_path / "module.cpp").write_text(REFUSING)
        file = api.build(tmp_path / "out", source=tmp_path)
        with pytest.raises(ImportError, match="not with this torch") as caught:
            files.load(file)
        assert not isinstance(caught.value, files.UnusableFileError)
