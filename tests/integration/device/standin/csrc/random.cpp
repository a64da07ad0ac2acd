// random.cpp: kernels of the operators that fill a tensor with random numbers.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "generator.h"
#include "kernels.h"

namespace standin {

namespace {

using MaybeGenerator = std::optional<at::Generator>;

const at::Generator& numbers_for(const at::Tensor& self, const MaybeGenerator& given) {
  const at::Generator& generator =
      given.has_value() && given->defined() ? *given : default_generator(self.device().index());
  TORCH_CHECK(
      generator.device().type() == kStandin,
      "Expected a 'standin' device type for generator but found '",
      generator.device().type(),
      "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->numbers();
}

// Call `fill(tensor, generator)` with a CPU tensor, and copy the numbers to `self`.
template <class Fill>
at::Tensor& draw(at::Tensor& self, const MaybeGenerator& given, Fill&& fill) {
  const at::AutoDispatchBelowAutograd below;
  const StandsIn stands_in;
  const at::Generator numbers = numbers_for(self, given);
  const OnHost target(self);
  const auto work = [=, target = target.tensor()] {
    at::Tensor drawn = at::empty(target.sizes(), target.options());
    fill(drawn, numbers);
    target.copy_(drawn);
  };
  work();
  if (is_capturing) {
    const Place place(self.storage());
    capture().note(current_place_of(self.device().index()), [=] {
      const Opened opened = place.open();
      work();
    });
  }
  return self;
}

at::Tensor& uniform_(at::Tensor& self, double from, double to, MaybeGenerator generator) {
  return draw(self, generator, [=](at::Tensor& t, auto& g) { t.uniform_(from, to, g); });
}

at::Tensor& normal_(at::Tensor& self, double mean, double deviation, MaybeGenerator generator) {
  return draw(self, generator, [=](at::Tensor& t, auto& g) { t.normal_(mean, deviation, g); });
}

at::Tensor& bernoulli_(at::Tensor& self, double p, MaybeGenerator generator) {
  return draw(self, generator, [=](at::Tensor& t, auto& g) { t.bernoulli_(p, g); });
}

at::Tensor& random_(at::Tensor& self, MaybeGenerator generator) {
  return draw(self, generator, [=](at::Tensor& t, auto& g) { t.random_(g); });
}

at::Tensor& random_to(at::Tensor& self, int64_t to, MaybeGenerator generator) {
  return draw(self, generator, [=](at::Tensor& t, auto& g) { t.random_(to, g); });
}

at::Tensor& random_from(
    at::Tensor& self, int64_t from, std::optional<int64_t> to, MaybeGenerator generator) {
  return draw(self, generator, [=](at::Tensor& t, auto& g) { t.random_(from, to, g); });
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("uniform_", uniform_);
  library.impl("normal_", normal_);
  library.impl("bernoulli_.float", bernoulli_);
  library.impl("random_", random_);
  library.impl("random_.to", random_to);
  library.impl("random_.from", random_from);
}

} // namespace

} // namespace standin
