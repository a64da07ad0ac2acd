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


def test_empty_lists_reach_the_kernel(namespace: str, tmp_path: Path) -> None:
    passed: list[object] = []

    @torchop.custom_op(f"{namespace}::collect", mutates_args=())
    def collect(
        x: torch.Tensor,
        ints: list[int],
        tensors: list[torch.Tensor],
        floats: list[float],
        *,
        sizes: list[int],
        defaults: list[int] = (),  # type: ignore[assignment]
    ) -> torch.Tensor:
        passed[:] = ints, tensors, floats, sizes, defaults
        return x + 1

    collect.register_fake(lambda x, *_, **__: torch.empty_like(x))

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return collect(x, [], [], [], sizes=[], defaults=[])

    program = torch.export.export(Model(), (torch.ones(3),))
    # Compile without `torchop.export`, because PyTorch's own function must work too.
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    torch._inductor.aoti_load_package(path)(torch.ones(3))
    assert passed == [[]] * 5


def test_an_empty_optional_list_is_rejected(namespace: str, tmp_path: Path) -> None:
    @torchop.custom_op(f"{namespace}::pad", mutates_args=())
    def pad(x: torch.Tensor, sizes: list[int] | None, scales: list[float] | None) -> torch.Tensor:
        return x + (1 if sizes is None else 2)

    pad.register_fake(lambda x, sizes, scales: torch.empty_like(x))

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return pad(x, [], [])

    program = torch.export.export(Model(), (torch.ones(3),))
    with pytest.raises(ValueError, match="the empty list that the program passes for 'sizes'"):
        torchop.export.aoti_package(program, tmp_path / "model.pt2")


def test_a_result_of_another_size_is_an_error(namespace: str, tmp_path: Path) -> None:
    returned: list[torch.Tensor] = []

    @torchop.custom_op(f"{namespace}::resize", mutates_args=())
    def resize(x: torch.Tensor) -> torch.Tensor:
        return returned.pop()

    resize.register_fake(lambda x: torch.empty(2, 3))

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return resize(x) * 2

    program = torch.export.export(Model(), (torch.ones(3),))
    # Unlike `torchop.export.aoti_package`, this does not run the kernel before it compiles.
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    package = torch._inductor.aoti_load_package(path)
    for wrong in (torch.ones(2, 2), torch.ones(3, 2).t(), torch.ones(6), torch.ones(0, 3)):
        returned.append(wrong)
        with pytest.raises(RuntimeError, match=f"{namespace}::resize: the kernel returned a"):
            package(torch.ones(3))
    returned.append(torch.ones(2, 3))
    assert torch.equal(package(torch.ones(3)), torch.full((2, 3), 2.0))
