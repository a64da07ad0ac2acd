"""The wheel torchop-native can be installed and used without a compiler. Uses private names."""

from __future__ import annotations

import shutil
import subprocess
import sys
from email.parser import Parser
from pathlib import Path

import pytest
import torch

import torchop
from tests._support.common import Outcome, assert_clean, needs_native, run_program
from torchop._native.extension import api, files
from torchop.testing._extras import installing

pytest.importorskip("wheel", reason="the package wheel is not installed")

USE = """
    import torch
    import torchop

    @torchop.custom_op("prebuilt::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert double(torch.ones(2)).tolist() == [2, 2]
    print(torchop.__file__)
    print(torchop.native.status().path)
    print(torchop.native.counters(double))
"""


@needs_native
def test_wheel_is_used_without_a_compiler(tmp_path: Path) -> None:
    outcome = Outcome("build", "--wheel", "--out", str(tmp_path / "dist"))
    assert outcome.code == 0, outcome.err
    (wheel,) = (tmp_path / "dist").iterdir()
    assert outcome.out.strip() == str(wheel)
    local = torch.__version__.replace("+", ".")
    assert wheel.name.startswith(f"torchop_native-{torchop.__version__}+torch{local}-cp3")

    packages = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--disable-pip-version-check", "--target", str(packages), str(wheel)]
    subprocess.run(pip, check=True, timeout=120)
    (information,) = packages.glob("*.dist-info")
    metadata = Parser().parsestr((information / "METADATA").read_text())
    assert metadata.get_all("Requires-Dist") == [
        f"torch==={torch.__version__}",
        f"torchop=={torchop.__version__}",
    ]
    shutil.copytree(
        Path(torchop.__file__).parent,
        packages / "torchop",
        ignore=shutil.ignore_patterns("__pycache__", "prebuilt"),
    )
    environment = {
        "PYTHONPATH": str(packages),
        "PATH": str(tmp_path / "nothing"),
        "TORCHOP_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHOP_NATIVE": "require",
        "CXX": "",
    }
    module, path, counters = assert_clean(run_program(USE, **environment)).splitlines()
    assert module == str(packages / "torchop" / "__init__.py")
    assert Path(path).parent == packages / "torchop_native"
    assert counters == "{'native': 1}"
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    built = tmp_path / "_call_path-key.so"
    monkeypatch.setattr(api, "build", lambda out, force: built)
    monkeypatch.setattr(files, "load", lambda file: None)
    outcome = Outcome("build", "--wheel", "--out", str(tmp_path / "file" / "dist"))
    assert outcome.code == 1
    assert f"cannot be written to {tmp_path / 'file' / 'dist'}: Not a directory" in outcome.err


def test_without_wheel_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = Outcome("build", "--wheel")
    assert (outcome.code, f"needs wheel: {installing('cli')}" in outcome.err) == (1, True)
