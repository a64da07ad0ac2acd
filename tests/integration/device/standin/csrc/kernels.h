// kernels.h: helpers of the kernels: CPU views of device tensors, and copies.
#pragma once

#include <ATen/core/Tensor.h>

#include "memory.h"

namespace standin {

// Return a CPU tensor that shares the memory of a device tensor. `storage` is a CPU storage from
// `host_storage`, which does not own the memory.
at::Tensor host_view(const at::Tensor& tensor, c10::Storage storage);
c10::Storage host_storage(const c10::Storage& storage);

// The memory block of a tensor that a graph uses. The graph owns only the memory of its pool, so
// when it is replayed, the block may have been freed and its address may belong to a different
// block. `open` raises in this case.
class Place {
 public:
  explicit Place(const c10::Storage& storage)
      : address_(storage.data()), serial_(memory().serial_of(address_)) {}

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

// A CPU tensor that shares the memory of a tensor, and may be used while this object lives.
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

// Exists while a CPU kernel runs in place of a kernel of the device. The program has not requested
// the copies that are made meanwhile, so they are not traced, and the host does not wait for them.
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

// Copy between two devices, or between a device and the host.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

} // namespace standin
