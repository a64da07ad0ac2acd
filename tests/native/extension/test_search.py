"""Where an extension is looked for, and in which order."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from torchop._native.extension import search
from torchop._native.extension.recipe import recipe


def test_order_is_environment_package_cache(
    in_cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE_DIR", str(tmp_path / "chosen"))
    for folder in ("chosen", "prebuilt"):
        (tmp_path / folder).mkdir()
        shutil.copy(in_cache, tmp_path / folder)
    places = search.places(recipe(source))
    assert [place.name for place in places] == ["TORCHOP_NATIVE_DIR", "package", "cache"]
    assert [place.folder for place in places] == [
        tmp_path / "chosen",
        tmp_path / "prebuilt",
        in_cache.parent,
    ]
    assert all(place.file == place.folder / in_cache.name for place in places if place.folder)


def test_file_of_another_key_is_not_found(in_cache: Path, source: Path) -> None:
    in_cache.rename(in_cache.with_name(in_cache.name.replace("torch", "torch9.")))
    assert [place.file for place in search.places(recipe(source))] == [None, None]


def test_empty_cache_is_no_problem_and_is_not_made(cache_folder: Path, source: Path) -> None:
    _, cache = search.places(recipe(source))
    assert cache == search.Place("cache", cache_folder, None, None)
    assert not cache_folder.exists()


@pytest.mark.parametrize("unsafe", ["folder", "file"])
def test_file_in_an_unsafe_cache_is_not_loaded(in_cache: Path, source: Path, unsafe: str) -> None:
    (in_cache.parent if unsafe == "folder" else in_cache).chmod(0o777)
    _, cache = search.places(recipe(source))
    assert cache.file is None
    assert cache.problem is not None
    assert "writable by others (mode 0777)" in cache.problem


def test_link_in_the_cache_is_not_followed(in_cache: Path, source: Path, built: Path) -> None:
    in_cache.unlink()
    in_cache.symlink_to(built)
    _, cache = search.places(recipe(source))
    assert cache.file is None
    assert cache.problem is not None
    assert "a symbolic link" in cache.problem
