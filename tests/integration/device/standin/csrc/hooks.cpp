// hooks.cpp: implements and registers the hooks through which PyTorch uses a device type.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#if __has_include(<ATen/core/GraphImplInterface.h>) // since 2.13
#include <ATen/core/GraphImplInterface.h>
#endif

#include <c10/core/DeviceGuard.h>

#include "generator.h"
#include "graph.h"
#include "memory.h"
#include "streams.h"

namespace standin {

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }

  DeviceIndex deviceCount() const override {
    return device_count;
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    current_device = index_of(device);
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(current_device, index_of(device));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(index_of(device));
  }

  bool isPinnedPtr(const void* address) const override {
    return PinnedAllocator::owns(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr moved = device_allocator.allocate(size);
    device_allocator.copy_data(moved.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(moved));
    storage.set_nbytes(size);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(kStandin, &device_allocator);
REGISTER_HOST_ALLOCATOR(kStandin, &pinned_allocator)

[[maybe_unused]] const bool are_hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

#if __has_include(<ATen/core/GraphImplInterface.h>)
// Implements `torch.accelerator.Graph`.
struct GraphImpl final : at::GraphImplInterface {
  explicit GraphImpl(const at::GraphImplArgs&) {}

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode) override {
    graph_.begin(pool.first);
  }
  void capture_end() override {
    graph_.end();
  }
  void instantiate() override {}
  void replay() override {
    graph_.replay();
  }
  void reset() override {
    graph_.reset();
  }
  c10::MempoolId_t pool() const override {
    return {graph_.pool(), 0};
  }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  Graph graph_;
};
#endif

} // namespace

} // namespace standin

#if __has_include(<ATen/core/GraphImplInterface.h>)
namespace at {
// PyTorch looks up the implementation by the name of the device type in capitals.
REGISTER_GRAPH_IMPL(STANDIN, standin::GraphImpl)
} // namespace at
#endif
