"""Packages of AOTInductor: loaded in other processes, and served from C++."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch

import torchop
import torchop.export

SERVE = Path(__file__).parents[2] / "examples" / "serving" / "serve.cpp"
SITE_PACKAGES = Path(torch.__file__).parents[1]

MODULE = """
    import torch
    import torchop

    @torchop.custom_op("served::triple", mutates_args=())
    def triple(x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
        return x * factor

    triple.register_fake(lambda x, factor: torch.empty_like(x))

    @torchop.custom_op("served::add_one.inplace", mutates_args=("x",))
    def add_one(x: torch.Tensor) -> None:
        x.add_(1)

    class Model(torch.nn.Module):
        def forward(self, x):
            y = triple(x) + 1
            add_one(y)
            return y
"""

PACKAGE = """
    import sys
    import torch
    import torchop.export
    from served_module import Model

    batch = torch.export.Dim("batch")
    program = torch.export.export(Model(), (torch.ones(2),), dynamic_shapes=({0: batch},))
    configs = {
        "aot_inductor.compile_wrapper_opt_level": "O0",  # compiled sooner
        "aot_inductor.metadata": {"version": "7"},
    }
    path = torchop.export.aoti_package(program, sys.argv[1], inductor_configs=configs)
    model = torchop.export.load_package(path)
    print(model(torch.ones(3)).tolist(), model.get_metadata()["version"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module that defines operators, and a package whose program calls them."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "served_module.py").write_text(textwrap.dedent(MODULE))
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PACKAGE), "model.pt2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[5.0, 5.0, 5.0] 7"
    return folder


def test_a_process_that_lacks_the_operator_is_told_the_module(folder: Path) -> None:
    # This process has not imported the module.
    with pytest.raises(torchop.OperatorNotFoundError) as caught:
        torchop.export.load_package(folder / "model.pt2")
    assert "uses the operator served::add_one.inplace, which is not registered" in str(caught.value)
    assert "Import the module 'served_module', which defines it" in str(caught.value)


def test_a_damaged_list_of_modules_is_told(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.pt2"
    with zipfile.ZipFile(folder / "model.pt2") as source, zipfile.ZipFile(path, "w") as target:
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
        pytest.warns(UserWarning, match="torchop_operators in the file is damaged"),
        pytest.raises(torchop.OperatorNotFoundError, match="Import what defines it, before"),
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


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_ENABLE_SHARED") or shutil.which("g++") is None,
    reason="needs g++, and a Python that is a shared library",
)
def test_a_program_in_cpp_serves_it_with_python_inside(folder: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    headers = [torch_folder / "include", sysconfig.get_paths()["include"]]
    libraries = [torch_folder / "lib", sysconfig.get_config_var("LIBDIR")]
    names = ["torch", "torch_cpu", "c10", f"python{sysconfig.get_config_var('LDVERSION')}"]
    command = ["g++", "-std=c++20", str(SERVE), "-o", "serve"]
    command += [f"-I{path}" for path in headers]
    command += [f"-I{torch_folder}/include/torch/csrc/api/include"]
    command += [flag for path in libraries for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    command += [f"-l{name}" for name in names]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    source = Path(torchop.__file__).parents[1]
    paths = os.pathsep.join([str(folder), str(source), str(SITE_PACKAGES)])
    done = subprocess.run(
        ["./serve", "model.pt2", "served_module"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5", "5", "5", "[", "CPUFloatType{3}", "]"]
