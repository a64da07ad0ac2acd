"""The cache is private, or it is not used."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from torchop._errors import NativeUnavailableError
from torchop._native.extension import files

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="modes say nothing here")
REMEDY = "Set TORCHOP_CACHE_DIR to a folder that only you can write to"


def test_environment_names_the_folder(cache_folder: Path) -> None:
    assert files.folder() == cache_folder


def test_default_is_in_the_caches_of_the_user(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHOP_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(files.sys, "platform", "linux")
    assert files.folder() == Path("/home/somebody/.cache/torchop")
    monkeypatch.setattr(files.sys, "platform", "darwin")
    assert files.folder() == Path("/home/somebody/Library/Caches/torchop")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert files.folder() == Path("/caches/torchop")


def test_no_home(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TORCHOP_CACHE_DIR")
    monkeypatch.setattr(files.Path, "home", no_home)
    with pytest.raises(NativeUnavailableError, match=f"there is no home folder.*{REMEDY}"):
        files.folder()


def test_folder_is_made_for_the_user_alone(cache_folder: Path) -> None:
    umask = os.umask(0)
    try:
        assert files.make_folder() == cache_folder
    finally:
        os.umask(umask)
    assert stat.S_IMODE(cache_folder.stat().st_mode) == 0o700
    assert files.make_folder() == cache_folder  # it may be there already


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_folder_that_others_can_write_to_is_refused(cache_folder: Path, mode: int) -> None:
    cache_folder.mkdir()
    cache_folder.chmod(mode)
    with pytest.raises(NativeUnavailableError, match=rf"by others \(mode 0{mode:o}\).*{REMEDY}"):
        files.make_folder()


def test_folder_of_another_user_is_refused(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_folder.mkdir()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(NativeUnavailableError, match=f"another user.*{owner}.*{REMEDY}"):
        files.make_folder()


def test_symbolic_link_is_refused(cache_folder: Path) -> None:
    (cache_folder.parent / "elsewhere").mkdir(mode=0o700)
    cache_folder.symlink_to("elsewhere")
    with pytest.raises(NativeUnavailableError, match="a symbolic link"):
        files.make_folder()


def test_file_in_the_way(cache_folder: Path) -> None:
    cache_folder.write_text("")
    with pytest.raises(NativeUnavailableError, match=f"cannot be made: File exists. {REMEDY}"):
        files.make_folder()


def test_file_in_the_way_of_a_parent(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder.write_text("")
    monkeypatch.setenv("TORCHOP_CACHE_DIR", str(cache_folder / "below"))
    with pytest.raises(NativeUnavailableError, match=f"cannot be made: .*{REMEDY}"):
        files.make_folder()


def test_read_only_folder(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder.mkdir(mode=0o500)
    if os.geteuid() == 0:  # who may write everywhere, but on a drive that is mounted read-only
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(NativeUnavailableError, match=f"is read-only. {REMEDY}"):
        files.make_folder()


def test_file_that_others_can_write_to_is_refused(cache_folder: Path) -> None:
    file = files.make_folder() / "file"
    file.write_text("")
    file.chmod(0o644)
    files.check_private(file)
    file.chmod(0o664)
    with pytest.raises(NativeUnavailableError, match="writable by others"):
        files.check_private(file)
