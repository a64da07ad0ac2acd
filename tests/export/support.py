"""A library with functions in C, and operators that have them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchop
import torchop.export

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


def build(folder: Path, name: str, source: str, *, linked: bool = True) -> Path:
    def config(option: str) -> list[str]:
        command = [sys.executable, "-m", "tvm_ffi.config", option]
        return shlex.split(subprocess.check_output(command, text=True))

    (folder / f"{name}.cc").write_text(source)
    libraries = [*config("--ldflags"), *config("--libs")] if linked else []
    command = ["g++", "-O0", "-shared", "-fPIC", *config("--cxxflags"), f"{name}.cc", *libraries]
    subprocess.run([*command, "-o", f"{name}.so"], cwd=folder, check=True)
    return folder / f"{name}.so"


def scaling(namespace: str, library: Path, function: str = "scale") -> Any:
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
