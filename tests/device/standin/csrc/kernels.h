// kernels.h: what the kernels of the device share: the host's view of a tensor, and copies.
#pragma once

#include <ATen/core/Tensor.h>

#include "memory.h"

namespace standin {

// The same memory as a tensor on the CPU, which can be used as long as this lives.
class OnHost {
 public:
  explicit OnHost(const at::Tensor& tensor);

  const at::Tensor& tensor() const {
    return tensor_;
  }

 private:
  Opened opened_;
  at::Tensor tensor_;
};

// While a kernel for the CPU stands in for one of the device, its copies are no copies of the
// program, and the host does not wait for them.
class StandsIn {
 public:
  StandsIn() : before_(std::exchange(is_on_, true)) {}
  ~StandsIn() {
    is_on_ = before_;
  }
  StandsIn(const StandsIn&) = delete;
  StandsIn& operator=(const StandsIn&) = delete;

  static bool is_on() {
    return is_on_;
  }

 private:
  static inline thread_local bool is_on_ = false;
  bool before_;
};

// Copies between two devices, or a device and the host.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

} // namespace standin
