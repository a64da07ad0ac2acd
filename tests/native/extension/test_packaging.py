"""The sources of the extension are in what users install; what they compile to is not."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from torchop._native.extension.recipe import CSRC

wheel = pytest.importorskip("hatchling.builders.wheel")
sdist = pytest.importorskip("hatchling.builders.sdist")
ROOT = Path(__file__).parents[3]
SOURCES = {file.name for file in CSRC.iterdir() if file.suffix in (".cpp", ".h")}


def test_wheel_has_the_sources(tmp_path: Path) -> None:
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(built).namelist()
    assert {Path(name).name for name in names if "/_native/csrc/" in name} == SOURCES
    assert "torchop/cli/native.py" in names
    assert not [name for name in names if name.endswith(".so")]


def test_source_distribution_has_the_sources(tmp_path: Path) -> None:
    (built,) = sdist.SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    with tarfile.open(built) as archive:
        names = archive.getnames()
    assert {Path(name).name for name in names if "/_native/csrc/" in name} == SOURCES
