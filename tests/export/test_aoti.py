"""Packages of AOTInductor: loaded in other processes, and served from C++."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

import torchop
import torchop.export

SERVE = Path(__file__).parents[2] / "examples" / "serving" / "serve.cpp"
SITE_PACKAGES = Path(torch.__file__).parents[1]


def test_the_error_for_a_missing_operator_names_the_module(shipped: Path) -> None:
    # This process has not imported the module.
    with pytest.raises(torchop.OperatorNotFoundError) as caught:
        torchop.export.load_package(shipped / "model.pt2")
    assert "uses the operator served::add_one.inplace, which is not registered" in str(caught.value)
    assert "Import the module 'served_module', which defines it" in str(caught.value)


def test_a_damaged_list_of_modules_is_reported(shipped: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.pt2"
    with zipfile.ZipFile(shipped / "model.pt2") as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            contents = source.read(name)
            if name.endswith(".wrapper_metadata.json"):
                metadata = json.loads(contents)
                assert json.loads(metadata["torchop_operators"]) == {
                    "served::add_one.inplace": "served_module",
                    "served::triple": "served_module",
                }
                contents = json.dumps({**metadata, "torchop_operators": "{"}).encode()
            target.writestr(name, contents)
    with (
        pytest.warns(UserWarning, match="entry torchop_operators of the file is damaged"),
        pytest.raises(torchop.OperatorNotFoundError, match="Import the module that defines it"),
    ):
        torchop.export.load_package(path)


def test_what_is_no_package_is_explained_by_pytorch(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(b"no archive")
    with pytest.raises(Exception) as ours:
        torchop.export.load_package(path)
    with pytest.raises(Exception) as stock:
        torch._inductor.aoti_load_package(str(path))
    assert ours.type is stock.type


@pytest.mark.project
@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_ENABLE_SHARED") or shutil.which("g++") is None,
    reason="needs g++, and a Python that is a shared library",
)
def test_a_program_in_cpp_serves_it_with_python_inside(shipped: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    headers = [torch_folder / "include", sysconfig.get_paths()["include"]]
    libraries = [torch_folder / "lib", sysconfig.get_config_var("LIBDIR")]
    names = ["torch", "torch_cpu", "c10", f"python{sysconfig.get_config_var('LDVERSION')}"]
    command = ["g++", "-std=c++20", str(SERVE), "-o", "serve"]
    command += [f"-I{path}" for path in headers]
    command += [f"-I{torch_folder}/include/torch/csrc/api/include"]
    command += [flag for path in libraries for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    command += [f"-l{name}" for name in names]
    subprocess.run(command, cwd=shipped, check=True, timeout=300)
    source = Path(torchop.__file__).parents[1]
    paths = os.pathsep.join([str(shipped), str(source), str(SITE_PACKAGES)])
    done = subprocess.run(
        ["./serve", "model.pt2", "served_module"],
        cwd=shipped,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["4", "4", "4", "[", "CPUFloatType{3}", "]"]
