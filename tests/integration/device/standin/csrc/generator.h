// generator.h: the random number generator of the device, which uses a CPU generator.
#pragma once

#include <vector>

#include <ATen/CPUGeneratorImpl.h>

#include "streams.h"

namespace standin {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(DeviceIndex device)
      : c10::GeneratorImpl({kStandin, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        numbers_(at::detail::createCPUGenerator()) {}

  // As on CUDA, the seed cannot be changed during a capture, but may be set to its current value.
  void set_current_seed(uint64_t seed) override {
    if (!is_capturing)
      return numbers_.set_current_seed(seed);
    TORCH_CHECK(
        seed == current_seed(),
        "standin: set_current_seed can be called during stream capture only if new seed is the "
        "same as the original seed.");
  }
  uint64_t current_seed() const override {
    return numbers_.current_seed();
  }
  uint64_t seed() override {
    return numbers_.seed();
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "standin: the generator has no offset");
  }
  uint64_t get_offset() const override {
    return 0;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(!is_capturing, "Cannot call Generator::set_state during graph capture of standin");
    numbers_.unsafeGetGeneratorImpl()->set_state(state);
  }
  // As on CUDA, the state cannot be read during a capture, because each replay advances the state.
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    TORCH_CHECK(!is_capturing, "Cannot call Generator::get_state during graph capture of standin");
    return numbers_.unsafeGetGeneratorImpl()->get_state();
  }

  const at::Generator& numbers() const {
    return numbers_;
  }

 private:
  Generator* clone_impl() const override {
    auto copy = std::make_unique<Generator>(device().index());
    copy->numbers_ = numbers_.clone();
    return copy.release();
  }

  at::Generator numbers_;
};

inline const at::Generator& default_generator(DeviceIndex device) {
  static auto* all = new std::vector<at::Generator>{
      at::make_generator<Generator>(DeviceIndex{0}), at::make_generator<Generator>(DeviceIndex{1})};
  return all->at(index_of(device));
}

} // namespace standin
