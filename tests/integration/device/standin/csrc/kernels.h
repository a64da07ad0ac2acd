// kernels.h: what the kernels of the device share: the host's view of a tensor, and copies.
#pragma once

#include <ATen/core/Tensor.h>

#include "memory.h"

namespace standin {

// A tensor of the CPU in the memory of another one, which it does not keep; `storage` is the
// host's for the memory that the tensor is a view of.
at::Tensor host_view(const at::Tensor& tensor, c10::Storage storage);
c10::Storage host_storage(const c10::Storage& storage);

// Where a tensor lies. A graph keeps no memory but that of its pool, so it has to be the same block
// when the graph is replayed.
class Place {
 public:
  explicit Place(const c10::Storage& storage)
      : address_(storage.data()), serial_(memory().serial_of(address_)) {}

  // Opens it for a replay.
  Opened open() const {
    TORCH_CHECK(
        memory().serial_of(address_) == serial_,
        "standin: a graph is replayed with memory that was given back after it was captured");
    return Opened(address_);
  }

 private:
  const void* address_;
  Serial serial_;
};

// The same memory as a tensor on the CPU, which can be used as long as this lives.
class OnHost {
 public:
  explicit OnHost(const at::Tensor& tensor)
      : opened_(tensor.storage().data()),
        tensor_(
            tensor.is_cpu() ? tensor.alias() : host_view(tensor, host_storage(tensor.storage()))) {}

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
