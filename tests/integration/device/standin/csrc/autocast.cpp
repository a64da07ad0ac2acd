// autocast.cpp: autocast for the device: which operators of PyTorch get lower precision.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace standin {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

// The macro names it `m`.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
}

} // namespace standin
