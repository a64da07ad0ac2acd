"""AOTInductor packages and other exported files work in other processes, and in C++."""

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
from tests.export.conftest import run_in

SERVE = Path(__file__).parents[2] / "examples" / "serving" / "serve.cpp"
SITE_PACKAGES = Path(torch.__file__).parents[1]


def test_the_error_for_a_missing_operator_names_the_module(shipped: Path) -> None:
    # This process has not imported the module that defines the operators.
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


def test_pytorch_reports_a_file_that_is_no_package(tmp_path: Path) -> None:
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
def test_cpp_program_with_embedded_python_runs_the_package(shipped: Path) -> None:
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


# --------------------------------------------------------------------------------------------------
# PyTorch's other file formats, which are listed in the table of `docs/how-to/export.md`

LOAD = """
    import pickle
    import sys
    import torch
    import torch.package
    from torch._dynamo.utils import counters

    x = torch.ones(2)

    def load_graph():
        with open("graph.pkl", "rb") as file:
            return pickle.load(file)

    try:
        load_graph()
    except AttributeError as error:
        print(error)

    model = torch.package.PackageImporter("extern.zip").load_pickle("model", "model.pkl")
    print(model(x).tolist(), "served_module" in sys.modules)
    print(load_graph()(x).tolist())

    import served_module
    import torchop

    print(torch.compile(served_module.ninefold)(x).tolist(), dict(counters["inductor"]))
    tag = torchop.cache_key_tag()
    served_module.triple.register_fake(lambda x, factor: x.new_empty(x.shape))
    print(torchop.cache_key_tag() != tag)

    model = torch.package.PackageImporter("intern.zip").load_pickle("model", "model.pkl")
    print(model(x).tolist())
    try:
        served_module.triple(x)
    except RuntimeError as error:
        print(type(error).__name__, error)
"""


def test_exported_files_work_in_another_process(shipped: Path) -> None:
    lines = run_in(shipped, LOAD).splitlines()
    missing, extern, graph, compiled, changed, intern, replaced = lines
    assert "'served' object has no attribute 'triple'" in missing
    assert extern == "[4.0, 4.0] True"
    assert graph == "[4.0, 4.0]"
    assert compiled.startswith("[9.0, 9.0]")
    assert "'fxgraph_cache_hit': 1" in compiled
    assert "fxgraph_cache_miss" not in compiled
    assert changed == "True"  # a new tag of the operator changes the cache key
    assert intern == "[4.0, 4.0]"
    assert replaced.startswith("OperatorGoneError This is a handle of the served::triple")
    assert "<torch_package_" in replaced


def test_a_package_calls_with_omitted_dtypes_and_rejects_results_of_other_dtypes(
    namespace: str, tmp_path: Path
) -> None:
    """Test both with one package, because compiling a package takes long."""
    is_wrong = False

    @torchop.custom_op(f"{namespace}::cast", mutates_args=())
    def cast(
        x: torch.Tensor, dtype: torch.dtype = torch.float64, *, other: torch.dtype = torch.float16
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x.to(dtype, copy=True), x.to(torch.int8 if is_wrong else other, copy=True)

    cast.register_fake(
        lambda x, dtype, *, other: (
            torch.empty_like(x, dtype=dtype),
            torch.empty_like(x, dtype=other),
        )
    )

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return cast(x)

    program = torch.export.export(Model(), (torch.ones(3),))
    with pytest.warns(UserWarning, match="calls Python kernels"):
        path = torchop.export.aoti_package(program, tmp_path / "model.pt2")
    model = torchop.export.load_package(path)
    assert [result.dtype for result in model(torch.ones(3))] == [torch.float64, torch.float16]
    is_wrong = True
    with pytest.raises(RuntimeError, match=f"{namespace}::cast: the kernel returned"):
        model(torch.ones(3))
