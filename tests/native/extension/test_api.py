"""Building the extension in the foreground, and other functions of `api`. Uses private names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torchop._native.extension import api
from torchop._native.extension.recipe import make_recipe
from torchop.native import NativeUnavailableError

pytestmark = pytest.mark.usefixtures("cache_folder")


def runs(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_build_writes_into_the_cache(source: Path, copying_compiler: Path, target: Path) -> None:
    file = api.build(source=source)
    assert file == target
    assert file.exists()
    assert api.build(source=source) == file
    assert runs(copying_compiler) == 1
    assert api.build(source=source, force=True) == file
    assert runs(copying_compiler) == 2


def test_build_writes_into_a_folder(source: Path, copying_compiler: Path, tmp_path: Path) -> None:
    file = api.build(tmp_path / "deep" / "out", source=source)
    assert list((tmp_path / "deep" / "out").iterdir()) == [file]
    api.build(file.parent, source=source)
    assert runs(copying_compiler) == 1
    api.build(file.parent, source=source, force=True)
    assert runs(copying_compiler) == 2


def test_a_link_to_nothing_is_no_build(
    source: Path, copying_compiler: Path, tmp_path: Path
) -> None:
    file = api.build(tmp_path / "out", source=source)
    file.unlink()
    file.symlink_to(tmp_path / "nowhere")
    assert api.build(file.parent, source=source).is_file()
    assert runs(copying_compiler) == 2


def test_failure_is_an_error(source: Path, compiler: Callable[[str], Path]) -> None:
    compiler("echo fatal; exit 1")
    with pytest.raises(NativeUnavailableError, match=r"failed with exit code 1:\nfatal"):
        api.build(source=source)


def test_folder_that_cannot_be_made(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NativeUnavailableError, match="file cannot be created: File exists"):
        api.build(tmp_path / "file", source=source)


def test_unsafe_cache_is_rejected(source: Path, in_cache: Path) -> None:
    in_cache.parent.chmod(0o777)
    with pytest.raises(NativeUnavailableError, match="writable by others"):
        api.build(source=source)


@pytest.mark.usefixtures("in_cache", "ours")
def test_process_has_one_extension(monkeypatch: pytest.MonkeyPatch, in_cache: Path) -> None:
    monkeypatch.setattr(api, "extension", api.Extension())
    assert api.status().state == "idle"
    assert api.status().mode == api.mode() == "auto"
    modules: list[object] = []
    api.extension.obtain(modules.append)
    assert len(modules) == 1
    assert api.status() == api.Status("auto", "ready", in_cache, None, None, make_recipe().key)
