// fallback.cpp: runs operators without a kernel for the device on the CPU.
//
// PyTorch's own fallback (at::native::cpu_fallback) copies the arguments to the CPU, so the strides
// of results change. For operators of PyTorch, this fallback instead makes CPU tensors for the
// device's memory and passes them to the CPU kernel. Custom operators use PyTorch's fallback,
// because a custom kernel may keep its arguments, and the host cannot read the device's memory
// after the call. Their kernels may also record gradients, which must flow through the copies.
#include "fallback.h"

#include <optional>

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include "generator.h"
#include "kernels.h"
#include "streams.h"

namespace standin {

namespace {

using torch::jit::Stack;

template <class Visitor>
void each_tensor(c10::ArrayRef<c10::IValue> values, Visitor&& visit) {
  for (const c10::IValue& value : values) {
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

// Return a copy of the value in which each tensor is replaced by `change(tensor)`.
template <class Change>
c10::IValue with_tensors(const c10::IValue& value, Change&& change) {
  if (value.isTensor())
    return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> items;
    for (const at::Tensor& item : value.toTensorVector())
      items.push_back(change(item));
    return items;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> items;
    for (const std::optional<at::Tensor>& item : value.toOptionalTensorVector())
      items.push_back(item.has_value() ? std::optional(change(*item)) : std::nullopt);
    return items;
  }
  return value;
}

template <class Change>
void change_last(Stack& stack, size_t count, Change&& change) {
  for (auto value = stack.end() - ptrdiff_t(count); value != stack.end(); ++value)
    *value = change(*value);
}

// Return whether the operator accepts tensors of several devices, as copies and indexing do.
bool mixes_devices(const std::string& name) {
  for (const char* word : {"index", "copy", "_to_"}) {
    if (name.find(word) != std::string::npos)
      return true;
  }
  return false;
}

// Return the device of a call's tensors, ignoring 0-dim tensors on the CPU. Raise if the tensors
// are on two devices, as kernels of a real device do. The CPU kernels here would not notice.
std::optional<Device> common_device(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  std::optional<Device> common;
  each_tensor(arguments, [&](const at::Tensor& tensor) {
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

// Return whether the host must wait for values of tensors in a call of the operator.
bool reads_values(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
}

size_t bytes_of(const at::Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

// Makes CPU tensors that share the memory of a call's device tensors.
class HostTensors {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kStandin)
      return tensor;
    at::Tensor view = host_view(tensor, memory_of(tensor).host);
    pairs_.emplace_back(tensor, view);
    return view;
  }

  // After the CPU kernel has run, move storages that it resized back to the device, and set sizes
  // and strides of device tensors that the kernel changed.
  void write_back() {
    for (Shared& shared : memories_) {
      if (shared.host.data() != shared.device.data())
        move(shared);
    }
    for (auto& [tensor, host] : pairs_) {
      if (tensor.sizes() != host.sizes() || tensor.strides() != host.strides())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
            host.sizes(), host.strides(), host.storage_offset());
    }
  }

  // Return a device tensor for a CPU tensor that the CPU kernel returned.
  at::Tensor on_device(const at::Tensor& result, Device device) const {
    if (!result.defined() || !result.is_cpu() || result.layout() != at::kStrided)
      return result;
    for (const auto& [tensor, host] : pairs_) {
      if (host.is_same(result))
        return tensor;
    }
    for (const Shared& shared : memories_) {
      if (shared.host.is_alias_of(result.storage()))
        return viewed(result, shared.device);
    }
    at::Tensor made = at::empty_strided(
        result.sizes(), result.strides(), at::TensorOptions().dtype(result.dtype()).device(device));
    if (made.numel() != 0) {
      const Opened opened(made.const_data_ptr());
      std::memcpy(made.mutable_data_ptr(), result.const_data_ptr(), bytes_of(result));
    }
    return made;
  }

  std::vector<Place> places() const {
    std::vector<Place> places;
    for (const Shared& shared : memories_)
      places.emplace_back(shared.device);
    return places;
  }

 private:
  // A storage of the device, and a CPU storage that shares its memory.
  struct Shared {
    c10::Storage device, host;
    std::optional<Opened> opened;
  };

  Shared& memory_of(const at::Tensor& tensor) {
    const c10::Storage& storage = tensor.storage();
    for (Shared& shared : memories_) {
      if (shared.device.is_alias_of(storage))
        return shared;
    }
    Shared shared{storage, host_storage(storage), std::nullopt};
    shared.opened.emplace(storage.data());
    memories_.push_back(std::move(shared));
    return memories_.back();
  }

  static void move(Shared& shared) {
    const size_t bytes = shared.host.nbytes();
    shared.opened.reset();
    shared.device.set_data_ptr_noswap(device_allocator.allocate(bytes));
    shared.device.set_nbytes(bytes);
    void* there = const_cast<void*>(shared.device.data());
    shared.opened.emplace(there);
    if (bytes != 0)
      std::memcpy(there, shared.host.data(), bytes);
    shared.host.set_data_ptr_noswap({there, c10::Device(c10::kCPU)});
  }

  static at::Tensor viewed(const at::Tensor& result, const c10::Storage& storage) {
    at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(
        result.sizes(), result.strides(), result.storage_offset());
    view._set_conj(result.is_conj());
    view._set_neg(result.is_neg());
    return view;
  }

  std::vector<Shared> memories_;
  // Each pair is a device tensor and its CPU view.
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

// Return an argument for the CPU kernel, with the CPU's device, generator and tensors.
c10::IValue host_argument(const c10::IValue& value, HostTensors& tensors) {
  if (value.isDevice() && value.toDevice().type() == kStandin)
    return c10::Device(c10::kCPU);
  if (value.isGenerator() && value.toGenerator().device().type() == kStandin)
    return static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl())->numbers();
  return with_tensors(value, [&](const at::Tensor& tensor) { return tensors.of(tensor); });
}

// Return a function with which a replay of a graph repeats a call. `arguments` are those of the CPU
// kernel.
Work work_of(
    const c10::OperatorHandle& op,
    Stack arguments,
    c10::ArrayRef<c10::IValue> results,
    std::vector<Place> places) {
  struct Result {
    Place place;
    void* address;
    size_t bytes;
  };
  std::vector<Result> kept;
  each_tensor(results, [&](const at::Tensor& tensor) {
    void* address = const_cast<void*>(tensor.defined() ? tensor.const_data_ptr() : nullptr);
    kept.push_back(
        {tensor.defined() ? Place(tensor.storage()) : Place(c10::Storage()),
         address,
         address == nullptr ? 0 : bytes_of(tensor)});
  });
  return [op, arguments = std::move(arguments), kept, places = std::move(places)] {
    const StandsIn stands_in;
    std::vector<Opened> opened;
    for (const Place& place : places)
      opened.push_back(place.open());
    Stack stack = arguments;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    size_t index = 0;
    each_tensor(stack, [&](const at::Tensor& tensor) {
      const Result& result = kept.at(index++);
      const Opened target = result.place.open();
      if (result.bytes != 0 && tensor.const_data_ptr() != result.address)
        std::memcpy(result.address, tensor.const_data_ptr(), result.bytes);
    });
  };
}

// Return the operator to run on the CPU. Convolutions on PrivateUse1 call the `_overrideable`
// operators, which have no CPU kernels, so run the usual operators instead. For the backward, add
// the argument for the sizes of the bias, which `convolution_backward_overrideable` does not have.
c10::OperatorHandle operator_of_host(const c10::OperatorHandle& op, Stack* stack) {
  const std::string& name = op.operator_name().name;
  const bool is_backward = name == "aten::convolution_backward_overrideable";
  if (!is_backward && name != "aten::convolution_overrideable")
    return op;
  if (is_backward) {
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    const int64_t channels = arguments[0].toTensor().size(1); // the channels of the output
    const auto after_weight = stack->end() - ptrdiff_t(arguments.size()) + 3;
    stack->insert(after_weight, c10::List<int64_t>({channels}));
  }
  return c10::Dispatcher::singleton().findSchemaOrThrow(
      is_backward ? "aten::convolution_backward" : "aten::convolution", "");
}

void run_on_host(const c10::OperatorHandle& called, Stack* stack) {
  const c10::OperatorHandle op = operator_of_host(called, stack);
  const size_t count = op.schema().arguments().size();
  const std::string& name = op.operator_name().name;
  const bool is_of_others = name.rfind("aten::", 0) != 0;
  std::optional<Device> device = common_device(name, torch::jit::last(*stack, count));
  if (device.has_value() && device->type() != kStandin)
    device.reset();
  for (const c10::IValue& value : torch::jit::last(*stack, count)) {
    if (!device.has_value() && value.isDevice() && value.toDevice().type() == kStandin)
      device = value.toDevice();
  }
  const c10::OptionalDeviceGuard guard(device);
  if (!StandsIn::is_on() && (is_of_others || reads_values(op)))
    note_host_wait(name);
  trace().note(c10::str(op.operator_name(), " on ", current_place()));
  const StandsIn stands_in;
  if (is_of_others)
    return at::native::cpu_fallback(op, stack);
  HostTensors tensors;
  change_last(*stack, count, [&](const auto& value) { return host_argument(value, tensors); });
  const bool is_captured = capture().includes(current_stream());
  Stack arguments;
  if (is_captured)
    arguments.assign(stack->end() - ptrdiff_t(count), stack->end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  tensors.write_back();
  const size_t returned = op.schema().returns().size();
  const auto on_device = [&](const at::Tensor& result) {
    return tensors.on_device(result, Device(kStandin, current_device));
  };
  change_last(*stack, returned, [&](const auto& value) { return with_tensors(value, on_device); });
  if (is_captured)
    capture().note(
        current_stream(),
        work_of(op, std::move(arguments), torch::jit::last(*stack, returned), tensors.places()));
}

} // namespace

// PyTorch itself registers kernels for these operators, which only raise. Override them, because a
// fallback is not called for operators that have a kernel.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name : {"convolution_overrideable", "convolution_backward_overrideable"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

void add_kernels() {
  static auto* registrations = new std::vector<c10::RegistrationHandleRAII>();
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    const bool is_of_pytorch = name.getNamespace() == "aten" || name.getNamespace() == "prim";
    if (is_of_pytorch && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      registrations->push_back(dispatcher.registerImpl(
          name,
          c10::DispatchKey::PrivateUse1,
          c10::KernelFunction::makeFromBoxedFunction<&run_on_host>(),
          std::nullopt,
          nullptr,
          "registered by standin"));
  }
}

bool set_fallback(bool is_on) {
  static auto* registration = new std::optional<c10::RegistrationHandleRAII>();
  const bool was_on = registration->has_value();
  if (is_on && !was_on)
    registration->emplace(
        c10::Dispatcher::singleton().registerFallback(
            c10::DispatchKey::PrivateUse1,
            c10::KernelFunction::makeFromBoxedFunction<&run_on_host>(),
            "registered by standin"));
  else if (!is_on)
    registration->reset();
  return was_on;
}

} // namespace standin
