"""Functions in C as kernels of what compiled code in C++ calls."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchop
import torchop.export
from tests import combinations
from tests.export.conftest import run_in
from tests.export.test_cpp_definitions import SERVE, compile_cpp
from tests.forking import run_forked
from tests.support import assert_clean
from torchop._compat import planned_outputs
from torchop._inspect.cache_key import identify
from torchop.export.c_functions import functions_in
from torchop.export.programs import modules_of
from torchop.extend import OpName

tvm_ffi = pytest.importorskip("tvm_ffi")

FUNCTIONS = """
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

using tvm::ffi::Array;
using tvm::ffi::Optional;
using tvm::ffi::Tensor;
using tvm::ffi::TensorView;

static float& at(TensorView x, int64_t row, int64_t column) {
  return static_cast<float*>(x.data_ptr())[row * x.stride(0) + column * x.stride(1)];
}

static void check(TensorView x) {
  if (!(x.dtype() == DLDataType{kDLFloat, 32, 1}) || x.ndim() != 2)
    TVM_FFI_THROW(ValueError) << "takes matrices of float32";
}

void scale(TensorView x, double factor, TensorView out) {
  check(x);
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < x.size(1); ++j)
      at(out, i, j) = at(x, i, j) * static_cast<float>(factor);
}

void other_scale(TensorView x, double factor, TensorView out) { scale(x, -factor, out); }

void sums(TensorView x, Optional<TensorView> start, TensorView of_rows, TensorView of_columns) {
  check(x);
  float* rows = static_cast<float*>(of_rows.data_ptr());
  float* columns = static_cast<float*>(of_columns.data_ptr());
  for (int64_t i = 0; i < x.size(0); ++i)
    rows[i] = start.has_value() ? at(start.value(), 0, 0) : 0;
  for (int64_t j = 0; j < x.size(1); ++j)
    columns[j] = 0;
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < x.size(1); ++j)
      rows[i] += at(x, i, j), columns[j] += at(x, i, j);
}

void add(TensorView x, Array<int64_t> amounts, Optional<Array<double>> more, tvm::ffi::String how,
         bool twice, Optional<DLDataType> dtype) {
  check(x);
  double sum = 0;
  for (int64_t amount : amounts)
    sum += amount;
  if (more.has_value())
    for (double amount : more.value())
      sum += amount;
  sum *= (how == "take" ? -1 : 1) * (twice ? 2 : 1);
  if (dtype.has_value())
    sum += dtype.value().bits;
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < x.size(1); ++j)
      at(x, i, j) += static_cast<float>(sum);
}

void total(Array<Tensor> xs, Optional<Array<Optional<Tensor>>> more, TensorView out) {
  float sum = 0;
  for (const Tensor x : xs)
    sum += at(x, 0, 0);
  if (more.has_value())
    for (Optional<Tensor> x : more.value()) {
      if (!x.has_value()) {
        sum += 100;
        continue;
      }
      const Tensor tensor = x.value();
      sum += at(tensor, 0, 0);
    }
  *static_cast<float*>(out.data_ptr()) = sum;
}

void fill(TensorView x, Array<Tensor> others, tvm::ffi::String mode) {
  at(x, 0, 0) = static_cast<float>(mode.size());
  for (const Tensor other : others)
    at(other, 0, 0) = static_cast<float>(mode.size());
}

int64_t count(TensorView x, TensorView out) { return x.size(0); }
Array<int64_t> sizes(TensorView x, TensorView out) { return {x.size(0), x.size(1)}; }

TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale, scale)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(other_scale, other_scale)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sums, sums)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add, add)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(total, total)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fill, fill)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(count, count)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sizes, sizes)
"""
# Without the library of tvm-ffi, which only errors and lists need.
PLAIN = """
#include <tvm/ffi/c_api.h>

extern "C" __attribute__((visibility("default"))) int __tvm_ffi_fill(
    void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  if (count != 3)
    return 7;
  const DLTensor* out = static_cast<const DLTensor*>(args[2].v_ptr);
  for (int64_t i = 0; i < out->shape[0]; ++i)
    static_cast<float*>(out->data)[i] = static_cast<float>(args[1].v_float64);
  return 0;
}
"""
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


def build(folder: Path, name: str, source: str, *, linked: bool = True) -> Path:
    def config(option: str) -> list[str]:
        command = [sys.executable, "-m", "tvm_ffi.config", option]
        return shlex.split(subprocess.check_output(command, text=True))

    (folder / f"{name}.cc").write_text(source)
    libraries = [*config("--ldflags"), *config("--libs")] if linked else []
    command = ["g++", "-O0", "-shared", "-fPIC", *config("--cxxflags"), f"{name}.cc", *libraries]
    subprocess.run([*command, "-o", f"{name}.so"], cwd=folder, check=True)
    return folder / f"{name}.so"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("functions"), "functions", FUNCTIONS)


@pytest.fixture
def scale(namespace: str, library: Path) -> Any:
    """A functional operator with a function, whose kernel in Python must not run."""
    return _scale(namespace, library)


def _scale(namespace: str, library: Path, function: str = "scale") -> Any:
    def kernel(x: Tensor, factor: float = 2.0) -> Tensor:
        raise AssertionError

    op = torchop.custom_op(f"{namespace}::scale", kernel, mutates_args=())
    op.register_fake(lambda x, factor: torch.empty_like(x))
    torchop.export.register_c_function(op, library, function)
    return op


def stand_in(op: Any) -> Callable[..., None]:
    """What code in C++ calls in place of an operator."""
    namespace, _, name = op.name.partition("::")
    function: Any = getattr(getattr(torch.ops, namespace), f"{name}__c_function")
    names = [a.name for a in function.default._schema.arguments if a.name.startswith("c_function_")]

    def call(*args: Any, outs: tuple[Tensor, ...] = ()) -> None:
        assert function(*args, **dict(zip(names, outs, strict=True))) is None

    return call


INPUTS = {
    "plain": torch.randn(3, 4),
    "transposed": torch.randn(4, 3).t(),
    "with gaps": torch.randn(6, 8)[::2, 1::2],
    "expanded": torch.randn(3, 1).expand(3, 4),
    "empty": torch.randn(0, 4),
    "negative view": torch.randn(3, 4, dtype=torch.cfloat).conj().imag,
}


@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
def test_a_function_gets_the_tensors_as_they_are(scale, x):
    out = torch.full(x.shape[::-1], 9.0).t()
    stand_in(scale)(x, 3.0, outs=(out,))
    torch.testing.assert_close(out, x * 3)
    stand_in(scale)(x, outs=(out,))
    torch.testing.assert_close(out, x * 2)


def test_a_function_writes_several_results_and_may_get_none(namespace, library):
    op = torchop.custom_op(
        f"{namespace}::sums",
        lambda x, start=None: (x.sum(1), x.sum(0)),
        schema="(Tensor x, Tensor? start=None) -> (Tensor, Tensor)",
        mutates_args=(),
    )
    torchop.export.register_c_function(op, library, "sums")
    x = torch.randn(3, 4)
    for start in (None, torch.full((1, 1), 5.0)):
        rows, columns = torch.empty(3), torch.empty(4)
        stand_in(op)(x, start, outs=(rows, columns))
        torch.testing.assert_close(rows, x.sum(1) + (0 if start is None else 5))
        torch.testing.assert_close(columns, x.sum(0))


def test_a_function_gets_numbers_text_lists_and_dtypes(namespace, library):
    op = torchop.custom_op(
        f"{namespace}::add",
        lambda *args: None,
        schema="(Tensor(a!) x, SymInt[] amounts, float[]? more=None, str how='give', "
        "bool twice=False, ScalarType? dtype=None) -> ()",
        mutates_args=("x",),
    )
    torchop.export.register_c_function(op, library, "add")
    for arguments, expected in (
        (([1, 2],), 3),
        (([],), 0),
        (([1, 2], [0.5, 0.25]), 3.75),
        (([1, 2], None, "take", True), -6),
        (([1, 2], None, "give", False, torch.float16), 19),
    ):
        x = torch.zeros(2, 2)
        stand_in(op)(x, *arguments)
        assert x.tolist() == [[expected, expected]] * 2


def test_a_function_gets_lists_of_tensors(namespace, library):
    op = torchop.custom_op(
        f"{namespace}::total",
        lambda *args: None,
        schema="(Tensor[] xs, Tensor?[]? more=None) -> Tensor",
        mutates_args=(),
    )
    torchop.export.register_c_function(op, library, "total")
    arrays = [np.full((1, 2), value, dtype=np.float32) for value in (1, 2, 4)]
    before = [sys.getrefcount(array) for array in arrays]
    for xs, more, expected in (
        ([0, 1], None, 3),
        ([], [2], 4),
        ([1, 1], [0, None, 2], 109),
    ):
        lists = [
            None
            if places is None
            else [p if p is None else torch.from_numpy(arrays[p]) for p in places]
            for places in (xs, more)
        ]
        out = torch.empty(())
        stand_in(op)(*lists, outs=(out,))
        assert out.item() == expected
    del lists
    assert [sys.getrefcount(array) for array in arrays] == before


def test_a_function_writes_into_lists_of_tensors(namespace, library):
    op = _fill(namespace, library)
    x, others = torch.zeros(2, 2), [torch.zeros(2, 2), torch.zeros(1, 2)]
    stand_in(op)(x, others, "four")
    assert [each[0, 0].item() for each in (x, *others)] == [4, 4, 4]


def _fill(namespace: str, library: Path) -> Any:
    """An operator with an argument `mode`, for which another one stands in compiled graphs."""

    def kernel(x: Tensor, others: list[Tensor], mode: str) -> None:
        raise AssertionError

    op = torchop.custom_op(f"{namespace}::fill", kernel, mutates_args=("x", "others"))
    torchop.export.register_c_function(op, library, "fill")
    return op


def test_what_stands_for_an_operator_in_graphs_has_its_function(namespace, library):
    _fill(namespace, library)
    x, space = torch.zeros(2, 2), getattr(torch.ops, namespace)
    space.fill__mutable__c_function(x, [], "four")
    assert x[0, 0].item() == 4
    # Where a list may hold None, that operator takes other arguments.
    listed = torchop.custom_op(
        f"{namespace}::listed",
        lambda xs: None,
        schema="(Tensor(a!)?[] xs) -> ()",
        mutates_args=("xs",),
    )
    torchop.export.register_c_function(listed, library, "fill")
    assert hasattr(space, "listed__mutable")
    assert not hasattr(space, "listed__mutable__c_function")


def test_text_with_a_null_character_is_refused(namespace, library):
    op = _fill(namespace, library)
    with pytest.raises(RuntimeError, match=rf"^{op.name}: no function takes a text with a null"):
        stand_in(op)(torch.zeros(2, 2), [], "fo\0ur")


def test_an_error_names_the_operator(scale):
    message = rf"^{scale.name}: ValueError: takes matrices of float32"
    for x in (torch.ones(2, 2, dtype=torch.double), torch.ones(2)):
        with pytest.raises(RuntimeError, match=message):
            stand_in(scale)(x, outs=(torch.empty(2, 2),))
    out = torch.empty(2, 2)
    stand_in(scale)(torch.ones(2, 2), outs=(out,))  # no error is left behind
    assert out.tolist() == [[2, 2], [2, 2]]


def test_an_error_names_the_overload(namespace, library):
    name = f"{namespace}::scale.by"
    op = torchop.custom_op(
        name, lambda x, by: x, schema="(Tensor x, float by) -> Tensor", mutates_args=()
    )
    torchop.export.register_c_function(op, library, "scale")
    call = getattr(torch.ops, namespace).scale__c_function.by
    with pytest.raises(RuntimeError, match=rf"^{name}: ValueError: takes matrices of float32"):
        call(torch.ones(2), 2.0, c_function_out0=torch.empty(2))


@pytest.mark.parametrize("function", ["count", "sizes"])
def test_a_value_that_no_caller_gets_is_refused(namespace, library, function):
    op = torchop.custom_op(
        f"{namespace}::f", lambda x: x, schema="(Tensor x) -> Tensor", mutates_args=()
    )
    torchop.export.register_c_function(op, library, function)
    with pytest.raises(RuntimeError, match=rf"^{op.name}: the function returns a value, which no"):
        stand_in(op)(torch.ones(2, 2), outs=(torch.empty(2, 2),))


def test_a_function_needs_no_library_of_tvm_ffi(namespace, tmp_path):
    plain = build(tmp_path, "plain", PLAIN, linked=False)
    ops = {}
    kinds = ("fill", ""), ("more", ", int n"), ("list", ", int[] n"), ("tensors", ", Tensor[] n")
    for name, more in kinds:
        ops[name] = torchop.custom_op(
            f"{namespace}::{name}",
            lambda x, value, *rest: x,
            schema=f"(Tensor x, float value{more}) -> Tensor",
            mutates_args=(),
        )
        torchop.export.register_c_function(ops[name], plain, "fill")
    x, out = torch.empty(2), torch.empty(2)
    stand_in(ops["fill"])(x, 3.0, outs=(out,))
    assert out.tolist() == [3, 3]
    with pytest.raises(RuntimeError, match=r"::more: the function failed with the code 7, and wi"):
        stand_in(ops["more"])(x, 3.0, 1, outs=(out,))
    with pytest.raises(RuntimeError, match=r"::list: its library has no tvm-ffi, which makes the"):
        stand_in(ops["list"])(x, 3.0, [1], outs=(out,))
    with pytest.raises(RuntimeError, match=r"::tensors: its library has no tvm-ffi, which makes "):
        stand_in(ops["tensors"])(x, 3.0, [x], outs=(out,))


def test_nothing_is_kept_of_a_call(scale):
    array = np.ones((2, 2), dtype=np.float32)
    before = sys.getrefcount(array)
    stand_in(scale)(torch.from_numpy(array), outs=(torch.empty(2, 2),))
    with pytest.raises(RuntimeError, match="takes matrices"):
        stand_in(scale)(torch.from_numpy(array)[0], outs=(torch.empty(2),))
    assert sys.getrefcount(array) == before


SCHEMAS = {
    "(Tensor x, int?[] ns) -> Tensor": "takes the argument 'ns'",
    "(Tensor x, Generator? g=None) -> Tensor": "takes the argument 'g'",
    "(Tensor x) -> Tensor[]": "Got .*Tensor\\[\\]",
    "(Tensor x) -> int": "In a family, that is the functional operator",
    "(Tensor(a!) x) -> Tensor": "returns fresh tensors alone, or writes",
    "(Tensor x) -> ()": "returns fresh tensors alone, or writes",
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_an_operator_that_no_function_fits_is_refused(namespace, library, schema):
    library_of_user = torchop.Library(namespace, "FRAGMENT")
    library_of_user.define(f"f{schema}")
    with pytest.raises(torchop.SchemaError, match=f"^{namespace}::f: .*{SCHEMAS[schema]}"):
        torchop.export.register_c_function(f"{namespace}::f", library, "scale")


def test_a_function_that_is_not_there_is_refused(namespace, library):
    op = _scale(namespace, library)
    message = rf"^{op.name}: .*functions.so has no function 'absent', because it exports no __tvm"
    with pytest.raises(torchop.ArgumentError, match=message):
        torchop.export.register_c_function(op, library, "absent")
    with pytest.raises(OSError, match=r"absent\.so"):
        torchop.export.register_c_function(op, "absent.so", "scale")
    with pytest.raises(RuntimeError, match="nonsense"):
        torchop.export.register_c_function(op, library, "scale", "nonsense")
    with pytest.raises(torchop.ArgumentError, match=r"runs on the device meta, because it has no"):
        torchop.export.register_c_function(op, library, "scale", "meta")
    with pytest.raises(RuntimeError), pytest.warns(UserWarning, match="mkldnn"):
        torchop.export.register_c_function(op, library, "scale", "mkldnn")
    name = OpName(namespace, "scale__c_function", "")
    assert functions_in([name], "mkldnn") == {}
    out = torch.empty(2, 2)
    stand_in(op)(torch.ones(2, 2), outs=(out,))  # the first registration is still there
    assert out.tolist() == [[2, 2], [2, 2]]


def test_a_function_takes_the_place_of_the_one_before(namespace, library):
    op, x, out = _scale(namespace, library), torch.ones(2, 2), torch.empty(2, 2)
    for function, expected in (("scale", 2), ("other_scale", -2), ("scale", 2)):
        torchop.export.register_c_function(op, library, function)
        for _ in range(2):  # the first call loads it
            stand_in(op)(x, outs=(out,))
            assert out.tolist() == [[expected] * 2] * 2


def test_a_function_goes_with_the_library_it_was_registered_through(namespace, library):
    op, x, out = _scale(namespace, library), torch.ones(2, 2), torch.empty(2, 2)
    call, forms = stand_in(op), planned_outputs.forms_in_graphs
    with torchop.Library(namespace, "FRAGMENT") as users:
        torchop.export.register_c_function(op, library, "other_scale", lib=users)
        torchop.export.register_c_function(op, library, "scale", "cuda", lib=users)
        call(x, outs=(out,))
        assert out[0, 0].item() == -2
        assert torchop.get_rule("c_function_cuda").has(op)
    call(x, outs=(out,))
    assert out[0, 0].item() == 2
    name = f"{op.name}__c_function"
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    assert not torchop.get_rule("c_function_cuda").has(op)
    other = torchop.custom_op(
        f"{namespace}::g", lambda x: x, schema="(Tensor x) -> Tensor", mutates_args=()
    )
    for _ in range(2):
        with torchop.Library(namespace, "FRAGMENT") as users:
            torchop.export.register_c_function(other, library, "scale", lib=users)
            assert len(forms(other.name)) == 1
        assert forms(other.name) == []
        assert not hasattr(getattr(torch.ops, namespace), "g__c_function")


def test_nobody_is_warned_of_a_kernel_that_replaces_another(scale):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stand_in(scale)(torch.ones(2, 2), outs=(torch.empty(2, 2),))


def test_a_function_goes_with_its_operator(namespace, library):
    first = _scale(namespace, library)
    call, out = stand_in(first), torch.empty(2, 2)
    call(torch.ones(2, 2), outs=(out,))
    assert len(planned_outputs.forms_in_graphs(first.name)) == 1
    with pytest.warns(torchop.RedefinitionWarning):
        second = torchop.custom_op(
            first.name, lambda x: x.clone(), schema="(Tensor x) -> Tensor", mutates_args=()
        )
    assert planned_outputs.forms_in_graphs(first.name) == []
    assert not torchop.get_rule("c_function_cpu").has(second)
    with pytest.raises((torchop.OperatorGoneError, AttributeError)):
        call(torch.ones(2, 2), outs=(out,))
    with pytest.warns(torchop.RedefinitionWarning):
        third = _scale(namespace, library, "other_scale")
    stand_in(third)(torch.ones(2, 2), outs=(out,))
    assert out.tolist() == [[-2, -2], [-2, -2]]


def test_the_keys_of_compiled_graphs_depend_on_functions(namespace, library):
    """Another process would find a graph that calls what it has not registered."""
    with torch.library._scoped_library(namespace, "FRAGMENT") as stock:
        stock.define("f(Tensor x) -> Tensor")
        ours = torchop.custom_op(
            f"{namespace}::g", lambda x: x, schema="(Tensor x) -> Tensor", mutates_args=()
        )
        for op in (f"{namespace}::f", ours.name):
            without = identify([op])
            torchop.export.register_c_function(op, library, "scale")
            for_cpu = identify([op])
            torchop.export.register_c_function(op, library, "scale", "cuda")
            assert len({str(key) for key, _ in (without, for_cpu, identify([op]))}) == 3


def test_inductor_is_imported_when_an_operator_of_others_ended(namespace, library):
    program = f"""
        import torch, torchop.export, tvm_ffi
        with torch.library._scoped_library({namespace!r}, "FRAGMENT") as stock:
            stock.define("f(Tensor x) -> Tensor")
            torchop.export.register_c_function("{namespace}::f", {str(library)!r}, "scale")
        import torch._inductor.lowering
    """
    assert_clean(run_forked(program))


def test_threads_load_a_function_once(namespace, library):
    op = _scale(namespace, library)
    call, outs = stand_in(op), [torch.empty(2, 2) for _ in range(4)]
    threads = [
        threading.Thread(target=call, args=(torch.ones(2, 2), factor), kwargs={"outs": (out,)})
        for factor, out in enumerate(outs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [out[0, 0].item() for out in outs] == [0, 1, 2, 3]


def test_a_package_names_the_module_that_registers_a_function(scale):
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scale(x).sin()

    program = torch.export.export(Model(), (torch.ones(2, 2),))
    name = scale.name
    assert json.loads(modules_of(program)) == {name: __name__, f"{name}__c_function": __name__}


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
