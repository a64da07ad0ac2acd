// torchop/export/c_functions.cpp: functions of other libraries as kernels of operators.
//
// A function has the calling convention of tvm-ffi: one array with a tagged value for each argument
// of the operator, and an error that stays in the thread until the caller fetches it. Its library,
// which brings tvm-ffi along, is searched when the kernel is registered, so this code is linked
// with neither. One kernel serves all operators, because the schema says what the values of a call
// are.

#include <tvm/ffi/extra/c_env_api.h> // first, because the DLPack of ATen may be older
#include <ATen/DLConvertor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/library.h>

namespace {

// What has to live as long as a call, and where its tensors are: numbers may be on the CPU.
struct Call {
  std::vector<std::shared_ptr<void>> kept;
  c10::Device device = c10::kCPU;

  DLManagedTensor* pack(const at::Tensor& tensor) {
    if (device.is_cpu())
      device = tensor.device();
    return at::toDLPack(tensor);
  }
};

class Function final : public c10::OperatorKernel {
 public:
  Function(void* library, const char* symbol) {
    find(library, symbol, function_);
    find(library, "TVMFFIErrorMoveFromRaised", take_error_);
    find(library, "TVMFFIObjectDecRef", release_);
    find(library, "TVMFFIFunctionGetGlobal", get_global_);
    find(library, "TVMFFIFunctionCall", call_object_);
    find(library, "TVMFFIEnvSetStream", set_stream_);
    find(library, "TVMFFITensorFromDLPack", make_tensor_);
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const auto& arguments = op.schema().arguments();
    try {
      Call call;
      std::vector<TVMFFIAny> values;
      for (const c10::Argument& argument : arguments) {
        const auto& given = torch::jit::peek(*stack, values.size(), arguments.size());
        values.push_back(value(given, *argument.real_type(), call));
      }
      const c10::DeviceGuard guard(call.device);
      call.kept.push_back(in_stream(call.device));
      TVMFFIAny result{};
      check(function_(nullptr, values.data(), static_cast<int32_t>(values.size()), &result));
      if (result.type_index >= kTVMFFIStaticObjectBegin && release_)
        release_(result.v_ptr);
      require(
          result.type_index == kTVMFFINone,
          "the function returns a value, which no caller gets. Write it into the outputs, which "
          "are ",
          "the last arguments.");
    } catch (const std::exception& error) {
      std::string name = c10::toString(op.operator_name());
      const std::string_view ending = "__c_function";
      name.erase(name.rfind(ending), ending.size());
      const auto* of_pytorch = dynamic_cast<const c10::Error*>(&error);
      throw std::runtime_error(
          name + ": " + (of_pytorch ? of_pytorch->what_without_backtrace() : error.what()));
    }
    torch::jit::drop(*stack, arguments.size());
  }

 private:
  template <typename T>
  static void find(void* library, const char* name, T& function) {
    function = reinterpret_cast<T>(dlsym(library, name));
  }

  // TORCH_CHECK would put the place in this file before the message.
  template <typename... Texts>
  static void require(bool is_fine, const Texts&... texts) {
    if (!is_fine)
      throw std::runtime_error(c10::str(texts...));
  }

  TVMFFIAny value(const c10::IValue& given, const c10::Type& type, Call& call) const {
    TVMFFIAny value{};
    if (given.isNone() || (given.isTensor() && !given.toTensor().defined()))
      return value;
    if (auto optional = type.castRaw<c10::OptionalType>())
      return this->value(given, *optional->getElementType(), call);
    if (given.isTensor()) {
      DLManagedTensor* tensor = call.pack(given.toTensor());
      call.kept.emplace_back(tensor, [](DLManagedTensor* tensor) { tensor->deleter(tensor); });
      value.type_index = kTVMFFIDLTensorPtr;
      value.v_ptr = &tensor->dl_tensor;
    } else if (type.kind() == c10::TypeKind::ScalarTypeType) {
      value.type_index = kTVMFFIDataType;
      value.v_dtype = at::getDLDataType(at::empty({0}, given.toScalarType()));
    } else if (given.isBool()) {
      value.type_index = kTVMFFIBool;
      value.v_int64 = given.toBool();
    } else if (given.isInt() || given.isSymInt()) {
      value.type_index = kTVMFFIInt;
      value.v_int64 = given.toSymInt().guard_int(__FILE__, __LINE__);
    } else if (given.isDouble()) {
      value.type_index = kTVMFFIFloat;
      value.v_float64 = given.toDouble();
    } else if (given.isString()) {
      const bool is_whole = given.toStringRef().find('\0') == std::string::npos;
      require(is_whole, "no function takes a text with a null character, which ends it in C.");
      value.type_index = kTVMFFIRawStr;
      value.v_c_str = given.toStringRef().c_str();
    } else if (given.isDevice()) {
      value.type_index = kTVMFFIDevice;
      value.v_device = at::torchDeviceToDLDevice(given.toDevice());
    } else {
      require(given.isList(), "no function takes a ", given.tagKind(), ".");
      const c10::Type& each = *type.castRaw<c10::ListType>()->getElementType();
      std::vector<TVMFFIAny> elements;
      require(get_global_, "its library has no tvm-ffi, which makes the lists of a function.");
      for (const c10::IValue& element : given.toListRef()) {
        const bool is_tensor = element.isTensor() && element.toTensor().defined();
        elements.push_back(
            is_tensor ? object(element.toTensor(), call) : this->value(element, each, call));
      }
      value = array(elements);
      call.kept.emplace_back(value.v_ptr, release_);
    }
    return value;
  }

  // An array holds what counts its owners, which a bare tensor does not.
  TVMFFIAny object(const at::Tensor& tensor, Call& call) const {
    TVMFFIAny made{};
    check(make_tensor_(call.pack(tensor), 0, 0, &made.v_ptr));
    call.kept.emplace_back(made.v_ptr, release_);
    made.type_index = kTVMFFITensor;
    return made;
  }

  TVMFFIAny array(std::vector<TVMFFIAny>& elements) const {
    const TVMFFIByteArray name{"ffi.Array", 9};
    void* make = nullptr;
    check(get_global_(&name, &make));
    const std::shared_ptr<void> kept(make, release_);
    TVMFFIAny made{};
    check(call_object_(make, elements.data(), static_cast<int32_t>(elements.size()), &made));
    return made;
  }

  // Functions launch on the stream of PyTorch until the result is gone.
  std::shared_ptr<void> in_stream(c10::Device device) const {
    if (device.is_cpu())
      return nullptr;
    require(set_stream_, "its library has no tvm-ffi, which tells a function the stream.");
    auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    const DLDevice at = at::torchDeviceToDLDevice(device);
    void* before = nullptr;
    check(set_stream_(at.device_type, at.device_id, stream.native_handle(), &before));
    return {nullptr, [set = set_stream_, at, before](void*) {
              set(at.device_type, at.device_id, before, nullptr);
            }};
  }

  void check(int failed) const {
    if (failed == 0)
      return;
    void* error = nullptr;
    if (take_error_)
      take_error_(&error);
    require(error, "the function failed with the code ", failed, ", and without a message.");
    const std::shared_ptr<void> kept(error, release_);
    const TVMFFIErrorCell& cell = *TVMFFIErrorGetCellPtr(error);
    const std::string kind(cell.kind.data, cell.kind.size);
    require(false, kind, ": ", std::string(cell.message.data, cell.message.size));
  }

  TVMFFISafeCallType function_;
  // What a function in plain C may do without is null.
  decltype(&TVMFFIErrorMoveFromRaised) take_error_;
  decltype(&TVMFFIObjectDecRef) release_;
  decltype(&TVMFFIFunctionGetGlobal) get_global_;
  decltype(&TVMFFIFunctionCall) call_object_;
  decltype(&TVMFFIEnvSetStream) set_stream_;
  decltype(&TVMFFITensorFromDLPack) make_tensor_;
};

// Replacing the kernel that loads this library is meant, so nobody is warned of it.
struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

} // namespace

// Makes a function the kernel of an operator, until the result is passed to the other function.
extern "C" torch::Library* torchop_register(
    void* library, const char* symbol, const char* space, const char* name, const char* device) {
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto kernel =
      torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Function>(library, symbol));
  auto registered = std::make_unique<torch::Library>(
      torch::Library::IMPL, space, std::nullopt, "c_functions.cpp", __LINE__);
  registered->impl(name, torch::dispatch(c10::Device(device).type(), std::move(kernel)));
  return registered.release();
}

extern "C" void torchop_take_back(torch::Library* registered) {
  delete registered;
}
