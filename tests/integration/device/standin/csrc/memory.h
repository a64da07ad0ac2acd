// memory.h: the memory of the devices, which is protected memory of the host.
//
// The pages of a block are inaccessible (PROT_NONE) unless an `Opened` object refers to the block.
// So the process crashes if a CPU kernel accesses a tensor of these devices, as with a real device.
// If the memory were accessible, tests would not notice such a mistake.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <optional>

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "streams.h"

namespace standin {

// Benchmarks turn the protection off, because protecting pages takes microseconds.
inline bool protects_memory() {
  static const bool protects = [] {
    const char* value = std::getenv("STANDIN_PROTECT");
    return value == nullptr || std::strcmp(value, "0") != 0;
  }();
  return protects;
}

// The number of a block in the order of allocation. It identifies the block, unlike the address,
// which a later block may reuse.
using Serial = uint64_t;

class Memory {
 public:
  // Allocate a block. If `size` is 0, return nullptr, as PyTorch's other allocators do.
  void* take(size_t size, DeviceIndex device) {
    if (size == 0)
      return nullptr;
    const size_t page = sysconf(_SC_PAGESIZE);
    const size_t reserved = protects_memory() ? (size + page - 1) / page * page : size;
    const uint64_t pool = capture().pool_of(current_place_of(device));
    std::lock_guard<std::mutex> lock(mutex_);
    Device& owner = devices_.at(device);
    void* start = nullptr;
    if (owner.taken_since_limit + reserved <= owner.limit)
      start = protects_memory()
          ? mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
          : std::malloc(reserved);
    if (start == nullptr || start == MAP_FAILED) {
      owner.stats.num_ooms += 1;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "standin out of memory. Tried to allocate ", size, " bytes.");
    }
    blocks_[static_cast<char*>(start)] = {reserved, 0, ++taken_, device, pool, false};
    owner.taken_since_limit += reserved;
    count(owner, +1, reserved);
    for (auto& stat : owner.stats.reserved_bytes)
      stat.increase(reserved);
    return start;
  }

  void give_back(void* start) {
    if (start == nullptr)
      return;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto block = blocks_.find(static_cast<char*>(start));
    Device& owner = devices_.at(block->second.device);
    count(owner, -1, block->second.size);
    if (block->second.serial > taken_before_limit_)
      owner.taken_since_limit -= block->second.size;
    if (block->second.pool != 0)
      block->second.is_free = true; // keep the memory, because replays write to it
    else
      unmap(block);
  }

  // Free the unused blocks of a pool after its last graph was destroyed.
  void release_pool(uint64_t pool) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto block = blocks_.begin(); block != blocks_.end();) {
      const auto next = std::next(block);
      if (block->second.pool == pool) {
        block->second.pool = 0;
        if (block->second.is_free)
          unmap(block);
      }
      block = next;
    }
  }

  c10::CachingDeviceAllocator::DeviceStats stats(DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return devices_.at(device).stats;
  }

  template <class Change>
  void change_stats(DeviceIndex device, Change&& change) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = devices_.at(device).stats;
    for (auto* group : {&stats.allocation, &stats.allocated_bytes, &stats.reserved_bytes})
      for (auto& stat : *group)
        change(stat);
  }

  // Allow each device to allocate `room` more bytes, or remove the limits.
  //
  // Only blocks that are allocated from now on count. A thread of the autograd engine may free
  // tensors of an earlier backward at any time, and must not thereby make room for new blocks.
  void limit(std::optional<size_t> room) {
    std::lock_guard<std::mutex> lock(mutex_);
    taken_before_limit_ = taken_;
    for (Device& device : devices_) {
      device.limit = room.value_or(unlimited);
      device.taken_since_limit = 0;
    }
  }

  // Return the serial number of the block at this address, or 0 if there is none.
  Serial serial_of(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto block = find(address);
    return block == blocks_.end() ? 0 : block->second.serial;
  }

  // Make the block at this address accessible and return its start, or nullptr if there is none.
  char* open(const void* address) {
    if (!protects_memory())
      return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto block = find(address);
    if (block == blocks_.end())
      return nullptr;
    if (block->second.opened++ == 0)
      mprotect(block->first, block->second.size, PROT_READ | PROT_WRITE);
    return block->first;
  }

  void close(char* start) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block& block = blocks_.at(start);
    if (--block.opened == 0)
      mprotect(start, block.size, PROT_NONE);
  }

 private:
  static constexpr size_t unlimited = std::numeric_limits<size_t>::max();

  struct Block {
    size_t size;
    int opened; // how many `Opened` objects refer to the block
    Serial serial;
    DeviceIndex device;
    uint64_t pool; // the pool of the capture that allocated the block, or 0
    bool is_free;  // freed by the program, but still in the pool
  };
  using Blocks = std::map<char*, Block>;

  struct Device {
    size_t limit = unlimited;
    size_t taken_since_limit = 0; // the bytes of the blocks taken since the last call of `limit`
    c10::CachingDeviceAllocator::DeviceStats stats;
  };

  static void count(Device& device, int number, size_t bytes) {
    for (auto& stat : device.stats.allocation)
      number > 0 ? stat.increase(1) : stat.decrease(1);
    for (auto& stat : device.stats.allocated_bytes)
      number > 0 ? stat.increase(bytes) : stat.decrease(bytes);
  }

  Blocks::iterator find(const void* address) {
    char* place = static_cast<char*>(const_cast<void*>(address));
    const auto after = blocks_.upper_bound(place);
    if (address == nullptr || after == blocks_.begin())
      return blocks_.end();
    const auto block = std::prev(after);
    return place < block->first + block->second.size ? block : blocks_.end();
  }

  void unmap(Blocks::iterator block) {
    for (auto& stat : devices_.at(block->second.device).stats.reserved_bytes)
      stat.decrease(block->second.size);
    if (protects_memory())
      munmap(block->first, block->second.size);
    else
      std::free(block->first);
    blocks_.erase(block);
  }

  std::mutex mutex_;
  Blocks blocks_;
  Serial taken_ = 0;
  Serial taken_before_limit_ = 0;
  std::array<Device, device_count> devices_;
};

// Never destroyed, because tensors may still be freed while the process exits.
inline Memory& memory() {
  static auto* only = new Memory();
  return *only;
}

// While an object of this class lives, the memory block at an address is accessible.
class Opened {
 public:
  explicit Opened(const void* address) : start_(memory().open(address)) {}
  Opened(Opened&& other) noexcept : start_(std::exchange(other.start_, nullptr)) {}
  ~Opened() {
    if (start_ != nullptr)
      memory().close(start_);
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

 private:
  char* start_;
};

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* start = memory().take(size, current_device);
    return {start, start, &free, c10::Device(kStandin, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    const Opened target(to), source(from);
    default_copy_data(to, from, count);
  }

  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {} // nothing is cached
  void recordStream(const c10::DataPtr&, Stream user) override {
    trace().note("keep memory for " + name_of(user));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    return memory().stats(index_of(device));
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    memory().change_stats(index_of(device), [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex device) override {
    memory().change_stats(index_of(device), [](auto& stat) { stat.reset_peak(); });
  }

 private:
  static void free(void* start) {
    memory().give_back(start);
  }
};

inline DeviceAllocator device_allocator;

// Allocates pinned host memory, which is simulated by ordinary memory whose address is in a list.
class PinnedAllocator final : public at::HostAllocator {
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

  // Nothing is cached or counted.
  bool record_event(void*, void*, Stream) override {
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

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
