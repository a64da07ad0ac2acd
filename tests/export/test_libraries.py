"""Packages that contain C++ kernels run without Python. Uses private names."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import torchop
import torchop.export
from tests._support import combinations
from tests.export.conftest import MODULE, run_in
from torchop._compat import on_demand

SERVE = Path(__file__).parents[2] / "examples" / "serving" / "serve_alone.cpp"
KERNELS = """
#include <ATen/ATen.h>
#include <torch/library.h>

static at::Tensor triple(const at::Tensor& x, double factor) { return x * factor; }
static void add_one(at::Tensor x) { x.add_(1); }

TORCH_LIBRARY_IMPL(served, CPU, m) {
  m.impl("triple", &triple);
  m.impl("add_one.inplace", &add_one);
}
"""
# A C function that the package calls directly instead of through the dispatcher, as described in
# the documentation.
SHIM = """
#include <torch/csrc/inductor/aoti_torch/utils.h>

static int calls = 0;
extern "C" int calls_of_shim() { return calls; }
extern "C" AOTITorchError aoti_torch_cpu_triple(
    AtenTensorHandle x, double factor, AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    using namespace torch::aot_inductor;
    ++calls;
    *result = new_tensor_handle(triple(*tensor_handle_to_tensor_pointer(x), factor));
  });
}
"""
SHIP_WITH_SHIM = """
    import ctypes, pathlib
    import torch, torchop.export
    import served_module

    torch.ops.load_library("./libkernels.so")
    class Model(torch.nn.Module):
        def forward(self, x):
            return served_module.ninefold(x)

    program = torch.export.export(Model(), (torch.ones(2),))
    declaration = (
        "AOTITorchError aoti_torch_cpu_triple(AtenTensorHandle, double, AtenTensorHandle*)"
    )
    configs = {
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "aot_inductor.precompile_headers": False,
        "aot_inductor.custom_ops_to_c_shims": {torch.ops.served.triple.default: [declaration]},
        "aot_inductor.custom_op_libs": ["kernels"],
    }
    path = torchop.export.aoti_package(program, "shim.pt2", inductor_configs=configs)
    print(torchop.export.load_package(path)(torch.ones(3)).tolist())
    print(ctypes.CDLL("./libkernels.so").calls_of_shim())
"""
SCHEMA = "(Tensor x) -> Tensor"
# A program that packages a model with its kernels and schemas, and loads the package in a new
# process.
CARRY = """
    import torch, torchop.export
    import served_module

    program = torch.export.export(served_module.Model(), (torch.ones(2),))
    configs = {
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "aot_inductor.precompile_headers": False,
    }
    path = torchop.export.aoti_package(
        program, "carrying.pt2", inductor_configs=configs, libraries=["kernels.so"]
    )
    print(torchop.export.load_package(path)(torch.ones(2)).tolist())
"""
LOAD = """
    import sys, torch

    model = torch._inductor.aoti_load_package("carrying.pt2")
    print(model(torch.ones(2)).tolist(), sorted({"torchop", "served_module"} & set(sys.modules)))
    import torchop.export
    print(torchop.export.load_package("carrying.pt2")(torch.ones(2)).tolist())
    try:
        import served_module
    except RuntimeError as error:
        print(error)
"""


def _package(folder: Path, device: str, *operators: str) -> Path:
    """Write a file with only those parts of a package that list its operators. Return its path."""
    path = folder / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        nodes = [{"node": {"target": operator}} for operator in operators]
        archive.writestr("model/data/m.wrapper.json", json.dumps({"nodes": nodes}))
        metadata = json.dumps({"AOTI_DEVICE_KEY": device})
        archive.writestr("model/data/m.wrapper_metadata.json", metadata)
        archive.writestr("model/data/m.wrapper.so", "")
    return path


def _register_in_cpp(namespace: str, operator: str, key: str) -> None:
    """Register a kernel in such a way that the dispatcher reports it as registered in C++."""
    library = torch._C._dispatch_library("IMPL", namespace, key, "kernels.cpp", 8)
    library.impl(operator, key, lambda x, *rest: x.clone())
    _LIBRARIES.append(library)  # keep the library, because freeing it removes the kernel


_LIBRARIES: list[object] = []


@pytest.mark.parametrize("key", ["CPU", "CUDA"])
def test_kernels_in_python_are_named_where_the_package_is_made(
    namespace, tmp_path, monkeypatch, key
):
    torchop.custom_op(f"{namespace}::f", lambda x: x, schema=SCHEMA, mutates_args=())
    _register_in_cpp(namespace, "f", key)
    path = _package(tmp_path, "cpu", f"{namespace}::f", "aten::sin")
    monkeypatch.setattr(on_demand, "compile_aoti_package", lambda *arguments: str(path))
    program = torch.export.export(torch.nn.Identity(), (torch.ones(1),))
    message = rf"on cpu, the package calls Python kernels.*: {namespace}::f \(see .*py:\d+\)\. T"
    in_python = key == "CUDA"
    with pytest.warns(UserWarning, match=message) if in_python else contextlib.nullcontext():
        assert torchop.export.aoti_package(program) == str(path)


def test_package_contains_libraries_and_their_loader(namespace, tmp_path, monkeypatch):
    def f(x: Tensor, rate: float = 1e-5, mode: str = 'a"b\\', sizes: list[int] = (1, 2)) -> Tensor:
        return x

    op = torchop.custom_op(f"{namespace}::f", f, mutates_args=())
    torchop.custom_op(f"{namespace}::unused", lambda x: x, schema=SCHEMA, mutates_args=())
    _register_in_cpp(namespace, "f", "CPU")
    path = _package(tmp_path, "cpu", f"{namespace}::f", "aten::add.Tensor")
    for name in ("one.so", "two.so"):
        (tmp_path / name).write_text(name)
    loaded, carriers = [], []

    def compile_package(program, path_of_user, configs, *, linked):
        carriers.append(linked)
        return str(path)

    def build(source: str, path_of_library: str) -> None:
        Path(path_of_library).write_text(source)

    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(on_demand, "compile_aoti_package", compile_package)
    monkeypatch.setattr(on_demand, "build_library", build)
    program = torch.export.export(torch.nn.Identity(), (torch.ones(1),))
    libraries = [tmp_path / "one.so", str(tmp_path / "two.so")]
    assert torchop.export.aoti_package(program, libraries=libraries) == str(path)
    assert loaded == list(map(str, libraries))
    carrier = os.path.basename(carriers[0])
    with zipfile.ZipFile(path) as archive:
        source = archive.read(f"model/data/{carrier}").decode()
        assert archive.read(f"model/data/{carrier}.0") == b"one.so"
        assert archive.read(f"model/data/{carrier}.1") == b"two.so"
    # The generated code does nothing if the process has defined all operators already. Registering
    # the kernels again would fail.
    assert (
        f'if (!(is_missing("aten::add", "Tensor") || is_missing("{namespace}::f", "")))' in source
    )
    assert source.index("dlopen") < source.index("m.def(")
    # If an operator is missing, the code defines the operators that the package calls.
    assert f"TORCH_LIBRARY_FRAGMENT({namespace}, m) {{" in source
    assert f'if (is_missing("{namespace}::f", ""))' in source
    (line,) = (line for line in source.splitlines() if "m.def(" in line)
    # Parse the C++ string literal as JSON, which uses the same escapes.
    schema = json.loads(line.partition("(")[2].removesuffix(");"))
    assert torch._C.parse_schema(f"{namespace}::{schema}") == op.overload._schema
    # The package defines its operators itself, so loading must not require a module.
    monkeypatch.setattr(on_demand, "load_aoti_package", lambda path: path)
    ended = _package(tmp_path, "cpu", "absent::f")
    with zipfile.ZipFile(ended, "a") as archive:
        archive.writestr(f"model/data/{carrier}", "")
    assert torchop.export.load_package(ended) == str(ended)


def test_libraries_must_be_a_list_of_existing_files(tmp_path):
    program = torch.export.export(torch.nn.Identity(), (torch.ones(1),))
    message = r"^aoti_package: libraries is a list of paths, got 'a\.so'\. Write \['a\.so'\]\.$"
    with pytest.raises(torchop.ArgumentError, match=message):
        torchop.export.aoti_package(program, libraries="a.so")
    with pytest.raises(OSError, match=r"absent\.so"):
        torchop.export.aoti_package(program, libraries=[tmp_path / "absent.so"])


def test_libraries_are_rejected_outside_of_linux(monkeypatch):
    program = torch.export.export(torch.nn.Identity(), (torch.ones(1),))
    monkeypatch.setattr(sys, "platform", "darwin")
    message = "^aoti_package: libraries=... is only supported on Linux, and this is darwin"
    with pytest.raises(NotImplementedError, match=message):
        torchop.export.aoti_package(program, libraries=["a.so"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_package_that_cannot_run_is_removed(namespace, tmp_path, monkeypatch, device):
    torchop.custom_op(f"{namespace}::f", lambda x: x, schema=SCHEMA, mutates_args=())
    _register_in_cpp(namespace, "f", {"cpu": "CUDA", "cuda": "CPU"}[device])
    path = _package(tmp_path, device, f"{namespace}::f")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(on_demand, "compile_aoti_package", lambda *_, linked: str(path))
    monkeypatch.setattr(on_demand, "build_library", lambda *_: None)
    program = torch.export.export(torch.nn.Identity(), (torch.ones(1),))
    with pytest.raises(torchop.MissingKernelError) as caught:
        torchop.export.aoti_package(program, libraries=["kernels.so"])
    message = str(caught.value)
    assert message.startswith(
        f"{namespace}::f: the package calls it on {device}, but it has no C++ kernel there"
    )
    assert "test_libraries.py:" in message
    assert f"TORCH_LIBRARY_IMPL({namespace}, ...)" in message
    assert not path.exists()


def test_an_operator_that_is_not_registered_is_named(tmp_path, monkeypatch):
    path = str(_package(tmp_path, "cpu", "absent::f"))
    monkeypatch.setattr(on_demand, "compile_aoti_package", lambda *arguments: path)
    program = torch.export.export(torch.nn.Identity(), (torch.ones(1),))
    with pytest.raises(torchop.OperatorNotFoundError, match="absent::f"):
        torchop.export.aoti_package(program)


def compile_cpp(folder: Path, *arguments: str) -> None:
    pytorch = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O0", f"-I{pytorch}/include"]
    flags += [f"-I{pytorch}/include/torch/csrc/api/include", f"-L{pytorch}/lib"]
    flags += [f"-Wl,-rpath,{pytorch}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(["g++", *arguments, *flags], cwd=folder, check=True, timeout=300)


@pytest.fixture
def unless_all_run(request) -> None:
    if not request.config.getoption(combinations.OPTION):
        pytest.skip(f"g++ takes half a minute, so only {combinations.OPTION} runs it")


@pytest.mark.usefixtures("unless_all_run")
def test_code_in_cpp_calls_an_operator_without_python(namespace):
    op = torchop.custom_op(
        f"{namespace}::scale",
        lambda x, factor: x * factor,
        schema="(Tensor x, float factor) -> Tensor",
        mutates_args=(),
    )
    op.register_fake(like="x")
    compiled = torch.compile(lambda x: op(x, 3.0), options={"cpp_wrapper": True})
    result, (code,) = run_and_get_code(compiled, torch.ones(2))
    assert result.tolist() == [3, 3]
    assert f'aoti_torch_call_dispatcher("{namespace}::scale"' in code
    assert "custom_op_wrapper" not in code.partition("inductor_entry_impl")[2]


@pytest.mark.usefixtures("unless_all_run")
def test_a_package_calls_a_kernel_in_cpp_as_a_function(tmp_path):
    (tmp_path / "served_module.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "kernels.cpp").write_text(KERNELS + SHIM)
    # Give the library a soname. The package depends on this name, so the loader recognizes that the
    # library is loaded already.
    name = "-Wl,-soname,libkernels.so"
    compile_cpp(tmp_path, "-shared", "-fPIC", name, "kernels.cpp", "-o", "libkernels.so")
    output = run_in(tmp_path, SHIP_WITH_SHIM, LIBRARY_PATH=str(tmp_path))
    assert output.splitlines() == ["[9.0, 9.0, 9.0]", "2"]


@pytest.mark.usefixtures("unless_all_run")
def test_package_with_its_own_kernels_runs_without_the_module(tmp_path):
    (tmp_path / "served_module.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "kernels.cpp").write_text(KERNELS)
    compile_cpp(tmp_path, "-shared", "-fPIC", "kernels.cpp", "-o", "kernels.so")
    assert run_in(tmp_path, CARRY).splitlines() == ["[4.0, 4.0]"]
    (tmp_path / "kernels.so").unlink()
    alone, with_torchop, too_late = run_in(tmp_path, LOAD).splitlines()
    assert alone == "[4.0, 4.0] []"
    assert with_torchop == "[4.0, 4.0]"
    assert "it exists already, registered at carrying.pt2:" in too_late
    assert "load a package that carries it after this definition" in too_late
    compile_cpp(tmp_path, str(SERVE), "-o", "serve_alone")
    linked = subprocess.run(["ldd", "serve_alone"], cwd=tmp_path, capture_output=True, text=True)
    assert "libtorch_cpu" in linked.stdout
    assert "libpython" not in linked.stdout
    command = ["./serve_alone", "carrying.pt2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
