// fallback.cpp: all other operators, which run on the CPU: a device may have that, or not.
#include "fallback.h"

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/StringUtil.h>

#include "kernels.h"
#include "streams.h"

namespace standin {

namespace {

template <class Visitor>
void each_tensor(const torch::jit::Stack& stack, size_t count, Visitor&& visit) {
  for (const c10::IValue& value : torch::jit::last(stack, count)) {
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor())
          visit(item.toTensor());
      }
    }
  }
}

// Operators that take tensors of several devices: indices may be on the host, and copies go there.
bool mixes_devices(const std::string& name) {
  for (const char* word : {"index", "copy", "_to_"}) {
    if (name.find(word) != std::string::npos)
      return true;
  }
  return false;
}

// The device that the tensors of a call are on, all but scalars of the host. The kernels of a real
// device refuse two; those of the CPU, which get copies, would not notice.
std::optional<Device> common_device(
    const std::string& name, const torch::jit::Stack& stack, size_t count) {
  std::optional<Device> common;
  each_tensor(stack, count, [&](const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0))
      return;
    TORCH_CHECK(
        !common.has_value() || *common == tensor.device() || mixes_devices(name),
        "Expected all tensors to be on the same device, but found at least two devices, ",
        *common,
        " and ",
        tensor.device(),
        "! (",
        name,
        ")");
    if (!common.has_value() || tensor.device().type() == kStandin)
      common = tensor.device();
  });
  return common;
}

// Whether the host has to read values before it can go on.
bool reads_values(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const std::string& name = op.operator_name().name;
  std::optional<Device> device = common_device(name, *stack, count);
  if (device.has_value() && device->type() != kStandin)
    device.reset();
  const c10::OptionalDeviceGuard guard(device);
  if (!StandsIn::is_on() && reads_values(op))
    note_host_wait(name);
  trace().note(c10::str(op.operator_name(), " on ", current_place()));
  const StandsIn stands_in;
  at::native::cpu_fallback(op, stack);
}

} // namespace

void set_fallback(bool is_on) {
  static auto* registration = new std::optional<c10::RegistrationHandleRAII>();
  if (is_on && !registration->has_value())
    registration->emplace(
        c10::Dispatcher::singleton().registerFallback(
            c10::DispatchKey::PrivateUse1,
            c10::KernelFunction::makeFromBoxedFunction<&run_on_host>(),
            "registered by standin"));
  else if (!is_on)
    registration->reset();
}

} // namespace standin
