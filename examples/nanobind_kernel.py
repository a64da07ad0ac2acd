"""Turn a C++ function that is bound with nanobind into an operator.

The C++ code does not need PyTorch's headers, because the parameters are of type `nb::ndarray`. This
type also checks the dtype, dimensions, device and layout. Requires `pip install nanobind`, and g++.
"""

import importlib.util
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import nanobind
import torch
from torch import Tensor

import torchop

SOURCE = """
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace nb = nanobind;
using Input = nb::ndarray<const float, nb::ndim<1>, nb::device::cpu, nb::c_contig>;
using Output = nb::ndarray<float, nb::ndim<1>, nb::device::cpu, nb::c_contig>;

NB_MODULE(scale_kernel, m) {
  m.def(
      "scale",
      [](Input x, double factor, Output out) {
        if (x.shape(0) != out.shape(0)) throw nb::value_error("x and out differ in size");
        for (size_t i = 0; i < x.shape(0); ++i) out(i) = x(i) * static_cast<float>(factor);
      },
      // noconvert: otherwise nanobind would write into a copy of a tensor that does not fit.
      nb::arg("x").noconvert(), nb::arg("factor"), nb::arg("out").noconvert());
}
"""

with tempfile.TemporaryDirectory() as folder:
    source, library = Path(folder, "scale.cc"), Path(folder, "scale_kernel.so")
    source.write_text(SOURCE)
    package = Path(nanobind.include_dir()).parent
    headers = [
        nanobind.include_dir(),
        package / "ext" / "robin_map" / "include",
        sysconfig.get_paths()["include"],
    ]
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", str(source)]
    command += [str(package / "src" / "nb_combined.cpp"), "-o", str(library)]
    subprocess.run([*command, *(f"-I{folder}" for folder in headers)], check=True)
    spec = importlib.util.spec_from_file_location("scale_kernel", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

# The bound function itself is the kernel. It has no annotations, so pass a schema.
scale_into = torchop.custom_op(
    "examples::nb_scale_into",
    module.scale,
    schema="(Tensor x, float factor, Tensor(a!) out) -> ()",
    mutates_args=("out",),
    device_types="cpu",
)


# `out_op` defines a functional operator and an `out=` overload with the same kernel.
@torchop.out_op("examples::nb_scale", like="x", device_types="cpu")
def scale(x: Tensor, factor: float, *, out: Tensor) -> None:
    module.scale(x, factor, out)


x, out = torch.ones(3), torch.empty(3)
scale_into(x, 2.0, out)
print(out)
print(scale(x, 3.0))
try:
    scale(x.double(), 2.0)
except TypeError as error:
    print(str(error).splitlines()[0])
