// autocast.cpp: registers the operators of PyTorch that autocast runs in lower precision.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace standin {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

// PyTorch's KERNEL_PRIVATEUSEONE macro expects that the library is called `m`.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
}

} // namespace standin
