"""Turn a C++ function that is loaded with tvm-ffi into an operator.

tvm-ffi passes tensors as DLPack structures. The C++ code does not need PyTorch's headers, so the
same build works with every release of PyTorch. FlashInfer and TileLang load their kernels in this
way. Requires `pip install apache-tvm-ffi`, and g++.
"""

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import tvm_ffi
from torch import Tensor

import torchop

SOURCE = """
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

using tvm::ffi::TensorView;

bool is_plain(TensorView x) {
  return x.dtype() == DLDataType{kDLFloat, 32, 1} && x.device().device_type == kDLCPU &&
         x.IsContiguous();
}

void scale(TensorView x, double factor, TensorView out) {
  if (!is_plain(x) || !is_plain(out) || x.numel() != out.numel())
    TVM_FFI_THROW(ValueError) << "scale takes contiguous float32 tensors of one size on the CPU";
  const float* in = static_cast<const float*>(x.data_ptr());
  float* result = static_cast<float*>(out.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) result[i] = in[i] * static_cast<float>(factor);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale, scale)
"""


def config(option: str) -> list[str]:
    return shlex.split(
        subprocess.check_output([sys.executable, "-m", "tvm_ffi.config", option], text=True)
    )


with tempfile.TemporaryDirectory() as folder:
    source, library = Path(folder, "scale.cc"), Path(folder, "scale.so")
    source.write_text(SOURCE)
    flags = [*config("--cxxflags"), "-O2", "-shared", "-fPIC", str(source)]
    linked = [*config("--ldflags"), *config("--libs"), "-o", str(library)]
    subprocess.run(["g++", *flags, *linked], check=True)
    module = tvm_ffi.load_module(library)

# The loaded function is the kernel. It has no annotations, so pass a schema.
scale_into = torchop.custom_op(
    "examples::scale_into",
    module.scale,
    schema="(Tensor x, float factor, Tensor(a!) out) -> ()",
    mutates_args=("out",),
    device_types="cpu",
)


# `out_op` defines a functional operator and an `out=` overload with the same kernel.
@torchop.out_op("examples::ffi_scale", like="x", device_types="cpu")
def scale(x: Tensor, factor: float, *, out: Tensor) -> None:
    module.scale(x, factor, out)


scale.register_autograd(
    lambda ctx, grad: (scale(grad.contiguous(), ctx.factor), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)

x, out = torch.ones(3, requires_grad=True), torch.empty(3)
scale_into(x.detach(), 2.0, out)
print(out)
torch.compile(lambda x: scale(x, 3.0).sum(), fullgraph=True, backend="aot_eager")(x).backward()
print(x.grad)
torchop.opcheck(scale.functional, (x, 2.0))
try:
    scale(x.double(), 2.0)
except ValueError as error:
    print(error)
