"""Functions in C in programs: compiled code in C++ calls them, and packages carry them."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import combinations
from tests.export.conftest import run_in
from tests.export.support import FUNCTIONS, build, scaling
from tests.export.test_cpp_definitions import SERVE, compile_cpp
from torchop.export.programs import modules_of

pytest.importorskip("tvm_ffi")

# The module of a user, whose kernels in Python call the same functions.
MODULE = """
    import torch
    import torchop
    import torchop.export
    import tvm_ffi
    from torch import Tensor

    functions = tvm_ffi.load_module("./functions.so")

    @torchop.out_op("served_c::scale", like="x")
    def scale(x: Tensor, factor: float = 2.0, *, out: Tensor) -> None:
        functions.scale(x, factor, out)

    def allocate(x, start=None):
        return x.new_empty(x.shape[0]), x.new_empty(x.shape[1])

    @torchop.out_op("served_c::sums", allocate=allocate)
    def sums(x: Tensor, start: Tensor | None = None, *, rows: Tensor, columns: Tensor) -> None:
        functions.sums(x, start, rows, columns)

    add = torchop.custom_op(
        "served_c::add",
        functions.add,
        schema="(Tensor(a!) x, SymInt[] amounts, float[]? more=None, str how='give', "
        "bool twice=False, ScalarType? dtype=None) -> ()",
        mutates_args=("x",),
    )
    def total_in_python(xs, more):
        functions.total(xs, more, out := torch.empty(()))
        return out

    total = torchop.custom_op(
        "served_c::total",
        total_in_python,
        schema="(Tensor[] xs, Tensor?[]? more=None) -> Tensor",
        mutates_args=(),
    )
    total.register_fake(lambda xs, more: xs[0].new_empty(()))
    fill = torchop.custom_op(
        "served_c::fill",
        functions.fill,
        schema="(Tensor(a!) x, Tensor(b!)[] others, str mode) -> ()",
        mutates_args=("x", "others"),
    )
    for op in (scale.functional, sums.functional, add, total, fill):
        torchop.export.register_c_function(op, "functions.so", op.name.partition("::")[2])

    class Model(torch.nn.Module):
        def forward(self, x):
            column = x[:, None]
            y = scale(scale(column + torch.ones(2)), factor=0.5)
            rows, columns = sums(y)
            more, _ = sums(y.t(), column)
            add(y, [1, x.shape[0]], [0.5], "take", dtype=torch.float64)
            add(column, [7], twice=True)
            first, second = x.new_zeros(1, 2), x.new_zeros(1, 2)
            fill(first, [second, y], "mode")
            return y, rows[:, None] + columns, more, total([y, first], [None, x[:, None]]), second
"""
COMPARE = """
    import torch

    def compare(compiled, reference, x):
        y = x.clone()
        torch.testing.assert_close(tuple(compiled(x)), reference(y))
        torch.testing.assert_close(x, y)
"""
SHIP = """
    import torch
    import torchop.export
    from c_module import Model, scale
    from compare import compare

    rows = torch.export.Dim("rows")
    program = torch.export.export(Model(), (torch.randn(4),), dynamic_shapes=({0: rows},))
    configs = {
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "aot_inductor.precompile_headers": False,
    }
    path = torchop.export.aoti_package(
        program, "model.pt2", inductor_configs=configs, libraries=["functions.so"]
    )
    compare(torchop.export.load_package(path), Model(), torch.randn(7))
    x = torch.ones(3)
    torch.save((x.clone(), Model()(x), x), "expected.pt")
    try:
        torchop.export.cpp_definitions(path)
    except torchop.MissingKernelError as error:
        print(error)
"""
INCOMPLETE = """
    import os, shutil
    import torch, torchop.export
    from c_module import scale

    class Model(torch.nn.Module):
        def forward(self, x):
            return scale(x)

    shutil.copy("functions.so", "gone.so")
    torchop.export.register_c_function(scale.functional, "gone.so", "scale")
    program = torch.export.export(Model(), (torch.ones(2, 2),))
    os.remove("gone.so")
    try:
        torchop.export.aoti_package(program, "incomplete.pt2", libraries=["functions.so"])
    except OSError as error:
        print(error)
    print(os.path.exists("incomplete.pt2"))
"""
LOAD = """
    import sys
    import torch

    model = torch._inductor.aoti_load_package("model.pt2")
    x, expected, written = torch.load("expected.pt")
    torch.testing.assert_close(tuple(model(x)), expected)
    torch.testing.assert_close(x, written)
    print(*{"c_module", "torchop", "tvm_ffi"} & set(sys.modules))
    try:
        model(torch.ones(3, dtype=torch.double))
    except RuntimeError as error:
        print(error)
"""


def test_a_package_names_the_module_that_registers_a_function(scale):
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scale(x).sin()

    program = torch.export.export(Model(), (torch.ones(2, 2),))
    name = scale.name
    module = scaling.__module__
    assert json.loads(modules_of(program)) == {name: module, f"{name}__c_function": module}


@pytest.fixture(scope="module")
def shipped(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, str]:
    """A folder with a package that carries its functions, and what the process printed."""
    if not request.config.getoption(combinations.OPTION):
        pytest.skip(f"g++ takes half a minute, so only {combinations.OPTION} runs it")
    folder = tmp_path_factory.mktemp("shipped_c")
    build(folder, "functions", FUNCTIONS)
    (folder / "c_module.py").write_text(textwrap.dedent(MODULE))
    (folder / "compare.py").write_text(textwrap.dedent(COMPARE))
    return folder, run_in(folder, SHIP)


JIT = """
    import torch
    from torch._inductor.utils import run_and_get_code
    from c_module import Model, scale
    from compare import compare

    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(
            Model(), fullgraph=True, dynamic=dynamic, options={"cpp_wrapper": True}
        )
        _, (code,) = run_and_get_code(compiled, torch.randn(4))
        print(code.count("__c_function\\""), code.count("served_c::"), "custom_op_wrapper(" in code)
        for _ in range(2):
            compare(compiled, Model(), torch.randn(4))
    compare(compiled, Model(), torch.randn(7))
    try:
        compiled(torch.randn(4, dtype=torch.double))
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.needs_torch("2.12", "lowerings of users in Inductor")
def test_code_in_cpp_calls_functions_in_place_of_operators(shipped):
    folder, _ = shipped
    fixed, dynamic, error, *_ = run_in(folder, JIT).splitlines()
    functions, operators, calls_python = fixed.split()
    assert fixed == dynamic
    assert int(functions) == int(operators) >= 4  # before 2.13, lists go another way
    assert calls_python == "False"
    assert "scale__c_function" in error  # PyTorch logs the rest


@pytest.mark.needs_torch("2.12", "lowerings of users in Inductor")
def test_no_package_is_left_without_a_library_that_it_has_to_carry(shipped):
    folder, _ = shipped
    error, left = run_in(folder, INCOMPLETE).splitlines()[-2:]
    assert "gone.so" in error
    assert left == "False"


@pytest.mark.needs_torch("2.12", "lowerings of users in Inductor")
def test_a_package_carries_its_functions(shipped):
    folder, output = shipped
    assert "served_c::add__c_function: the package calls it on cpu, for which it has no" in output
    assert f"(see {folder}/functions.so)" in output
    (folder / "functions.so").rename(folder / "moved.so")
    loaded, error, *_ = run_in(folder, LOAD).splitlines()
    assert loaded == ""
    assert error == "served_c::add: ValueError: takes matrices of float32"


@pytest.mark.needs_torch("2.12", "lowerings of users in Inductor")
def test_a_program_without_python_calls_a_function(shipped):
    folder, _ = shipped
    compile_cpp(folder, str(SERVE), "-o", "serve_alone")
    command = ["./serve_alone", "model.pt2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:6] == ["4.0000", *["61.5000"] * 5]
