// memory.h: the memory of the device. It is the host's, and only copies may read or write it.
//
// The pages of a block are closed (PROT_NONE) except while an `Opened` names it. So a kernel of
// PyTorch for the CPU that gets a tensor of this device ends the process, as it would on a real
// one; an emulation in ordinary memory would let it pass.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include <c10/core/Allocator.h>

#include "streams.h"

namespace standin {

// Opening and closing pages takes microseconds, which benchmarks do without.
inline bool protects_memory() {
  static const bool protects = [] {
    const char* value = std::getenv("STANDIN_PROTECT");
    return value == nullptr || std::strcmp(value, "0") != 0;
  }();
  return protects;
}

class Memory {
 public:
  // No bytes have no address, as in PyTorch's other allocators.
  void* take(size_t size) {
    if (size == 0)
      return nullptr;
    if (!protects_memory())
      return std::malloc(size);
    const size_t page = sysconf(_SC_PAGESIZE);
    size = (size + page - 1) / page * page;
    void* start = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, start != MAP_FAILED, "standin: out of memory");
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[static_cast<char*>(start)] = {size, 0};
    return start;
  }

  void give_back(void* start) {
    if (start == nullptr)
      return;
    if (!protects_memory())
      return std::free(start);
    std::lock_guard<std::mutex> lock(mutex_);
    const auto block = blocks_.find(static_cast<char*>(start));
    munmap(start, block->second.size);
    blocks_.erase(block);
  }

  size_t bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t total = 0;
    for (const auto& [start, block] : blocks_)
      total += block.size;
    return total;
  }

  // Opens the block that an address lies in; nullptr if it is none of ours.
  char* open(const void* address) {
    if (address == nullptr || !protects_memory())
      return nullptr;
    char* place = static_cast<char*>(const_cast<void*>(address));
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = blocks_.upper_bound(place);
    if (after == blocks_.begin())
      return nullptr;
    auto& [start, block] = *std::prev(after);
    if (place >= start + block.size)
      return nullptr;
    if (block.opened++ == 0)
      mprotect(start, block.size, PROT_READ | PROT_WRITE);
    return start;
  }

  void close(char* start) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block& block = blocks_.at(start);
    if (--block.opened == 0)
      mprotect(start, block.size, PROT_NONE);
  }

 private:
  struct Block {
    size_t size;
    int opened; // by how many, at once
  };

  std::mutex mutex_;
  std::map<char*, Block> blocks_;
};

// Tensors may be freed while the process ends, so it is never destroyed.
inline Memory& memory() {
  static auto* only = new Memory();
  return *only;
}

// The block that an address lies in can be read and written as long as this lives.
class Opened {
 public:
  explicit Opened(const void* address) : start_(memory().open(address)) {}
  ~Opened() {
    if (start_ != nullptr)
      memory().close(start_);
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

 private:
  char* start_;
};

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* start = memory().take(size);
    return {start, start, &free, c10::Device(kStandin, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    const Opened target(to), source(from);
    default_copy_data(to, from, count);
  }

 private:
  static void free(void* start) {
    memory().give_back(start);
  }
};

inline DeviceAllocator device_allocator;

// Memory of the host that a copy to the device need not wait for: just a list of its addresses.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    void* start = std::malloc(size);
    std::lock_guard<std::mutex> lock(mutex());
    blocks()[static_cast<char*>(start)] = size;
    return {start, start, &free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

  static bool owns(const void* address) {
    char* place = static_cast<char*>(const_cast<void*>(address));
    std::lock_guard<std::mutex> lock(mutex());
    const auto after = blocks().upper_bound(place);
    return after != blocks().begin() && place < std::prev(after)->first + std::prev(after)->second;
  }

 private:
  static std::mutex& mutex() {
    static auto* only = new std::mutex();
    return *only;
  }
  static std::map<char*, size_t>& blocks() {
    static auto* only = new std::map<char*, size_t>();
    return *only;
  }
  static void free(void* start) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      blocks().erase(static_cast<char*>(start));
    }
    std::free(start);
  }
};

inline PinnedAllocator pinned_allocator;

} // namespace standin
