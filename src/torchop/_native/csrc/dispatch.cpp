#include "dispatch.h"

#include <cstring>
#include <typeinfo>

#include <torch/csrc/utils/object_ptr.h>

#include "bypass.h"

namespace torchop {

PyTypeObject* const tensor_type = reinterpret_cast<PyTypeObject*>(THPVariableClass);
PyTypeObject* const parameter_type = reinterpret_cast<PyTypeObject*>(ParameterClass);

namespace {

const c10::OperatorKernel* functor_of(const c10::KernelFunction& kernel) {
  return member_of(Functor{}, member_of(Boxed{}, kernel)).get();
}

// Kernels that were registered from Python are of the class PythonKernelHolder
// (torch/csrc/utils/python_dispatch.cpp). No header declares this class, so `probe_kernels` finds
// the address of its vtable and the offset of the Python function.
const void* holder_vtable = nullptr;
size_t holder_offset = 0;

// The offset of the two bytes `with_keyset_` and `with_op_` in PythonKernelHolder. They come after
// the function (a SafePyObject of two words) and the dispatch key.
size_t keys_flag_offset = 0;

// PyTorch's autograd fallback, basicAutogradNotImplementedFallback. It only redispatches if no
// input requires grad.
c10::KernelFunction autograd_fallback;
const void* autograd_fallback_function = nullptr;

const void* boxed_function(const c10::KernelFunction& kernel) {
  return reinterpret_cast<const void*>(member_of(Function{}, member_of(Boxed{}, kernel)));
}

// Reads a member of a functor whose class no header declares.
template <class Member>
Member read_at(const c10::OperatorKernel* functor, size_t offset) {
  Member member;
  std::memcpy(&member, reinterpret_cast<const char*>(functor) + offset, sizeof(member));
  return member;
}

const void* vtable_of(const c10::OperatorKernel* functor) {
  return read_at<const void*>(functor, 0);
}

bool takes_keys_or_operator(const c10::OperatorKernel* functor) {
  return read_at<uint16_t>(functor, keys_flag_offset) != 0;
}

} // namespace

bool is_python_kernel(const c10::KernelFunction& kernel) {
  const c10::OperatorKernel* functor = functor_of(kernel);
  return functor != nullptr && vtable_of(functor) == holder_vtable;
}

PyObject* python_function(const c10::KernelFunction& kernel) {
  const c10::OperatorKernel* functor = functor_of(kernel);
  if (functor == nullptr)
    return nullptr;
  if (C10_UNLIKELY(vtable_of(functor) != holder_vtable))
    return bypassed_function(*functor);
  return read_at<PyObject*>(functor, holder_offset);
}

void replace_python_function(const c10::KernelFunction& kernel, PyObject* function) {
  if (!is_python_kernel(kernel))
    return;
  const c10::OperatorKernel* functor = functor_of(kernel);
  THPObjectPtr before(read_at<PyObject*>(functor, holder_offset));
  Py_INCREF(function);
  std::memcpy(
      reinterpret_cast<char*>(const_cast<c10::OperatorKernel*>(functor)) + holder_offset,
      static_cast<const void*>(&function),
      sizeof(function));
}

bool is_only_reference(const c10::KernelFunction& kernel) {
  return functor_of(kernel) != nullptr &&
      member_of(Functor{}, member_of(Boxed{}, kernel)).use_count() == 1;
}

namespace {

// Finds the vtable of PythonKernelHolder and the offset of its function. To do so, searches the CPU
// kernel of `op` for a pointer to `function`.
bool probe_layout(const c10::OperatorHandle& op, PyObject* function) {
  holder_vtable = autograd_fallback_function = nullptr;
  const c10::KernelFunction& kernel = table_of(op).lookup(DispatchKeySet(DispatchKey::CPU));
  const c10::OperatorKernel* functor = functor_of(kernel);
  if (functor == nullptr || std::strstr(typeid(*functor).name(), "PythonKernelHolder") == nullptr)
    return false;
  const c10::KernelFunction& fallback =
      table_of(op).lookup(DispatchKeySet(DispatchKey::AutogradCPU));
  if (functor_of(fallback) == nullptr && !fallback.isFallthrough()) {
    autograd_fallback = fallback;
    autograd_fallback_function = boxed_function(fallback);
  }
  // The function comes after the vtable pointer and the reference counts. All reads are in bounds,
  // because the object is larger than the range that we search.
  constexpr size_t last = 4 * sizeof(void*);
  for (size_t offset = sizeof(void*); offset <= last; offset += sizeof(void*)) {
    if (read_at<PyObject*>(functor, offset) == function) {
      holder_vtable = vtable_of(functor);
      holder_offset = offset;
      return true;
    }
  }
  return false;
}

bool probe_flags(const c10::OperatorHandle& plain, const c10::OperatorHandle& with_keys) {
  const DispatchKeySet cpu(DispatchKey::CPU);
  const c10::KernelFunction& without = table_of(plain).lookup(cpu);
  const c10::KernelFunction& with = table_of(with_keys).lookup(cpu);
  const size_t offset = holder_offset + 2 * sizeof(void*) + sizeof(DispatchKey);
  const auto has_flags = [&](const c10::KernelFunction& kernel, int takes_keys) {
    const c10::OperatorKernel* functor = functor_of(kernel);
    return read_at<DispatchKey>(functor, offset - sizeof(DispatchKey)) == DispatchKey::CPU &&
        read_at<unsigned char>(functor, offset) == takes_keys &&
        read_at<unsigned char>(functor, offset + 1) == 0;
  };
  keys_flag_offset = has_flags(without, 0) && has_flags(with, 1) ? offset : 0;
  return keys_flag_offset != 0;
}

} // namespace

bool probe_kernels(
    const c10::OperatorHandle& plain, const c10::OperatorHandle& with_keys, PyObject* function) {
  return probe_layout(plain, function) && probe_flags(plain, with_keys);
}

const c10::KernelFunction& autograd_fallback_kernel() {
  return autograd_fallback;
}

bool takes_just_arguments(const c10::KernelFunction& kernel) {
  return is_python_kernel(kernel) && !takes_keys_or_operator(functor_of(kernel));
}

const c10::impl::OperatorEntry& table_of(const c10::OperatorHandle& op) {
  return member_of(OperatorDefinition{}, op)->op;
}

namespace {

constexpr uint64_t backends = (uint64_t{1} << c10::num_backends) - 1;

// Returns whether dense tensors of a backend have only the backend's Dense and Autograd keys, as
// CPU tensors do. Only these backends are supported.
bool is_plain(c10::BackendComponent backend) {
  switch (backend) {
    case c10::BackendComponent::MetaBit: // calls with meta tensors run the fake kernel
    case c10::BackendComponent::XLABit:  // XLA and Lazy record calls and run them later
    case c10::BackendComponent::LazyBit:
    case c10::BackendComponent::PrivateUse2Bit: // PyTorch itself does not use these two
    case c10::BackendComponent::PrivateUse3Bit:
      return false;
    default:
      return c10::getAutogradRelatedKeySetFromBackend(backend).has_all(
          DispatchKeySet(DispatchKey::AutogradFunctionality));
  }
}

template <class Visitor>
void each_plain_backend(Visitor&& visit) {
  for (uint8_t number = 1; number <= c10::num_backends; ++number) {
    const auto backend = static_cast<c10::BackendComponent>(number);
    if (is_plain(backend))
      visit(backend);
  }
}

const uint64_t plain_backends = [] {
  DispatchKeySet keys;
  each_plain_backend([&](auto backend) { keys = keys | DispatchKeySet(backend); });
  return keys.raw_repr();
}();

// All keys that a tensor in a native call may have. They do not include Python, Sparse, Quantized,
// NestedTensor, Conjugate, Negative, ZeroTensor and the functorch keys.
const uint64_t plain_keys = [] {
  DispatchKeySet keys(DispatchKey::Dense);
  each_plain_backend([&](auto backend) {
    keys = keys | c10::getAutogradRelatedKeySetFromBackend(backend) |
        c10::getAutocastRelatedKeySetFromBackend(backend);
  });
  return keys.raw_repr() | backends; // the backend is checked separately, with `plain_backends`
}();

} // namespace

bool has_plain_keys(const at::TensorImpl& impl) {
  const DispatchKeySet keys = impl.key_set();
  const uint64_t found = keys.raw_repr();
  return (found & ~plain_keys) == 0 && (found & backends & ~plain_backends) == 0 &&
      keys.has_all(DispatchKeySet(DispatchKey::Dense));
}

Reason tensors_reason(const TensorSummary& seen) {
  if (C10_UNLIKELY(seen.tangent))
    return Reason::Tangent;
  const uint64_t keys = seen.keys.raw_repr();
  if (C10_UNLIKELY((keys & ~plain_keys) != 0))
    return Reason::Keys;
  const uint64_t found = keys & backends;
  if (C10_UNLIKELY(found == 0 || (found & (found - 1)) != 0))
    return Reason::Backends;
  if (C10_UNLIKELY(
          (found & ~plain_backends) != 0 || !seen.keys.has_all(DispatchKeySet(DispatchKey::Dense))))
    return Reason::Keys;
  return Reason::Native;
}

std::vector<DispatchKey> plain_backend_keys() {
  std::vector<DispatchKey> keys;
  each_plain_backend([&](auto backend) {
    keys.push_back(c10::toRuntimePerBackendFunctionalityKey(DispatchKey::Dense, backend));
  });
  return keys;
}

Route find_route(
    const c10::impl::OperatorEntry& entry, const OwnKernels& own, DispatchKeySet keys) {
  Route route;
  // Remove the keys with a fallthrough kernel, as DispatchKeyExtractor does. For a few operators,
  // the mask of these keys depends on the backend. In that case, skip the fallthrough kernels in
  // the loop instead.
  const c10::DispatchKeyExtractor& extractor = entry.dispatchKeyExtractor();
  if (C10_LIKELY(!member_of(PerBackend{}, extractor)))
    keys = keys & member_of(NonFallthrough{}, extractor);
  try {
    while (true) {
      route.keys = keys;
      const c10::KernelFunction& kernel = entry.lookup(keys);
      if (C10_UNLIKELY(kernel.isFallthrough())) {
        const DispatchKey key = keys.highestPriorityTypeId();
        if (key == DispatchKey::Undefined)
          return route; // no kernel
        keys = keys.remove(key);
        continue;
      }
      PyObject* function = python_function(kernel);
      if (function == nullptr) {
        if (autograd_fallback_function == nullptr ||
            boxed_function(kernel) != autograd_fallback_function)
          return route;
        route.through_fallback = true;
        keys = keys & c10::after_autograd_keyset;
      } else if (function == own.autograd) {
        route.through_autograd = true;
        keys = keys & c10::after_autograd_keyset;
      } else if (function == own.version_counter) { // replaced by `count_versions` in call.cpp
        route.through_version_counter = true;
        keys = keys & c10::after_ADInplaceOrView_keyset;
      } else if (function == own.backend_select) {
        keys = keys.remove(DispatchKey::BackendSelect);
      } else {
        const bool is_autocast = keys.has_any(c10::autocast_dispatch_keyset) &&
            c10::autocast_dispatch_keyset.has(keys.highestPriorityTypeId());
        route.reason = is_autocast ? Reason::Autocast : Reason::Native;
        // Check again that the kernel takes only the arguments, because the same function may have
        // been registered with `with_keyset=True` at this key.
        if (C10_UNLIKELY(!is_autocast && takes_keys_or_operator(functor_of(kernel))))
          route.reason = Reason::Kernel;
        route.kernel = function;
        return route;
      }
    }
  } catch (const c10::Error&) {
    return route; // there is no kernel for these keys, so the dispatcher will raise the error
  }
}

} // namespace torchop
