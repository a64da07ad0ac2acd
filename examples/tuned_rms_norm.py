"""Define an RMS norm that runs a C++ loop for few rows, and PyTorch operators for many rows.

The C++ loop has no overhead, but adds the numbers one by one. The PyTorch operators use vector
instructions, but calling five of them takes ten microseconds. Which kernel is faster for a given
number of rows depends on the machine, so the operator is tuned by measuring. Requires g++.
"""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import torchop

SOURCE = """
#include <cmath>
#include <cstdint>

extern "C" void rms_norm(const float* x, const float* weight, float* out, int64_t rows,
                         int64_t columns, double eps) {
  for (int64_t row = 0; row < rows; ++row, x += columns, out += columns) {
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i) sum += x[i] * x[i];
    const float scale = 1 / std::sqrt(sum / columns + eps);
    for (int64_t i = 0; i < columns; ++i) out[i] = x[i] * scale * weight[i];
  }
}
"""

with tempfile.TemporaryDirectory() as folder:
    source, library = Path(folder, "rms_norm.cpp"), Path(folder, "rms_norm.so")
    source.write_text(SOURCE)
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
    normalize = ctypes.CDLL(str(library)).rms_norm
normalize.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_double]
normalize.restype = None


@torchop.custom_op("tuned_rms_norm::rms_norm", mutates_args=(), priority=["tuned"])
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def can_run(x, weight, eps):
    is_float = x.dtype == weight.dtype == torch.float32
    return is_float and x.ndim > 0 and x.is_contiguous() and weight.shape == x.shape[-1:]


@rms_norm.register_kernel("cpu", provider="cpp", supports=can_run)
def _(x, weight, eps):
    weight, out, columns = weight.contiguous(), torch.empty_like(x), x.shape[-1]
    pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    normalize(*pointers, x.numel() // max(columns, 1), columns, eps)
    return out


# Tune separately for calls with up to 1, 4, 16, 64 and 256 rows, with an example for each of these
# buckets. `python -m torchop bench` also uses the examples to compare the kernels.
rms_norm.set_tuning(buckets={"x": {0: [1, 4, 16, 64, 256]}})
rms_norm.register_examples(
    lambda: [(torch.randn(rows, 1024), torch.randn(1024)) for rows in (1, 4, 16, 64, 256)]
)

if __name__ == "__main__":
    # Store the measurements in a temporary folder, and not in the user's cache.
    with tempfile.TemporaryDirectory() as folder:
        print(torchop.testing.tune(rms_norm, budget=1.0, table=Path(folder, "tuned.json")))
    for rows in (1, 4, 16, 64, 256):
        x, weight = torch.randn(rows, 1024), torch.randn(1024)
        expected = torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)
        torch.testing.assert_close(rms_norm(x, weight), expected)
        print(f"{rows} rows: {torchop.explain(rms_norm, x, weight).provider}")
