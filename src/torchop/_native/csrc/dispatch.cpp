// dispatch.cpp: reading the dispatcher's tables.
#include "dispatch.h"

#include <cstring>
#include <typeinfo>

#include "bypass.h"

namespace torchop {

PyTypeObject* tensor_type = nullptr;
PyTypeObject* parameter_type = nullptr;

namespace {

const c10::OperatorKernel* functor_of(const c10::KernelFunction& kernel) {
  return member_of(Functor{}, member_of(Boxed{}, kernel)).get();
}

// PyTorch keeps a Python kernel in an object of a class that no header declares. An object of that
// class is recognized by its virtual table, and holds the function at a fixed place.
const void* holder_vtable = nullptr;
size_t holder_offset = 0;

// Behind the function, which takes two words, and the key: whether the kernel takes the keys of the
// call, and whether it takes the operator.
size_t keys_flag_offset = 0;

// Without a gradient to record it just goes on to the next key.
c10::KernelFunction autograd_fallback;
const void* autograd_fallback_function = nullptr;

const void* boxed_function(const c10::KernelFunction& kernel) {
  return reinterpret_cast<const void*>(member_of(Function{}, member_of(Boxed{}, kernel)));
}

const void* vtable_of(const c10::OperatorKernel* functor) {
  const void* vtable;
  std::memcpy(&vtable, static_cast<const void*>(functor), sizeof(vtable));
  return vtable;
}

unsigned char byte_at(const c10::OperatorKernel* functor, size_t offset) {
  return reinterpret_cast<const unsigned char*>(functor)[offset];
}

// Whether a Python kernel takes its keys, or the operator, beside the arguments.
bool takes_keys_or_operator(const c10::OperatorKernel* functor) {
  uint16_t flags;
  std::memcpy(&flags, reinterpret_cast<const char*>(functor) + keys_flag_offset, sizeof(flags));
  return flags != 0;
}

PyObject* word_at(const c10::OperatorKernel* functor, size_t offset) {
  PyObject* word;
  std::memcpy(&word, reinterpret_cast<const char*>(functor) + offset, sizeof(word));
  return word;
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
  return word_at(functor, holder_offset);
}

namespace {

// How PyTorch keeps Python kernels, from an operator whose only kernel is `function`, at CPU.
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
  // Behind the virtual table and the reference counts; the object is larger than this.
  constexpr size_t last = 4 * sizeof(void*);
  for (size_t offset = sizeof(void*); offset <= last; offset += sizeof(void*)) {
    if (word_at(functor, offset) == function) {
      holder_vtable = vtable_of(functor);
      holder_offset = offset;
      return true;
    }
  }
  return false;
}

// Where PyTorch keeps what a Python kernel takes beside the arguments.
bool probe_flags(const c10::OperatorHandle& plain, const c10::OperatorHandle& with_keys) {
  const DispatchKeySet cpu(DispatchKey::CPU);
  const c10::KernelFunction& without = table_of(plain).lookup(cpu);
  const c10::KernelFunction& with = table_of(with_keys).lookup(cpu);
  const size_t offset = holder_offset + 2 * sizeof(void*) + sizeof(DispatchKey);
  const auto has_flags = [&](const c10::KernelFunction& kernel, int takes_keys) {
    const c10::OperatorKernel* functor = functor_of(kernel);
    DispatchKey key;
    std::memcpy(&key, reinterpret_cast<const char*>(functor) + offset - sizeof(key), sizeof(key));
    return key == DispatchKey::CPU && byte_at(functor, offset) == takes_keys &&
        byte_at(functor, offset + 1) == 0;
  };
  keys_flag_offset = has_flags(without, 0) && has_flags(with, 1) ? offset : 0;
  return keys_flag_offset != 0;
}

} // namespace

bool learn_kernels(
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

// Whether dense tensors of a backend mean to the dispatcher what those of the CPU do: it only looks
// into the table, at keys for autograd and data that are the backend's own.
bool is_plain(c10::BackendComponent backend) {
  switch (backend) {
    case c10::BackendComponent::MetaBit: // there is no data: the fake kernel answers
    case c10::BackendComponent::XLABit:  // these two note what is called, and compute it later
    case c10::BackendComponent::LazyBit:
    case c10::BackendComponent::PrivateUse2Bit: // no device has these, so what they mean is up to
    case c10::BackendComponent::PrivateUse3Bit: // whoever makes such tensors
      return false;
    default:
      return c10::getAutogradRelatedKeySetFromBackend(backend).has_all(
          DispatchKeySet(DispatchKey::AutogradFunctionality));
  }
}

// Calls `visit(backend)` for each of them.
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

// A dense tensor has the functionality keys of its backend, of autograd and of autocast, and
// nothing else: not Python, Sparse, Quantized, NestedTensor, Conjugate, Negative, ZeroTensor,
// functorch's.
const uint64_t plain_keys = [] {
  DispatchKeySet keys(DispatchKey::Dense);
  each_plain_backend([&](auto backend) {
    keys = keys | c10::getAutogradRelatedKeySetFromBackend(backend) |
        c10::getAutocastRelatedKeySetFromBackend(backend);
  });
  return keys.raw_repr() | backends; // of which there must be one, as is asked later
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
  // The dispatcher drops the keys at which an operator has nothing by this mask. Where it keeps one
  // mask for each backend, they are found and dropped one by one.
  const c10::DispatchKeyExtractor& extractor = entry.dispatchKeyExtractor();
  if (C10_LIKELY(!member_of(PerBackend{}, extractor)))
    keys = keys & member_of(NonFallthrough{}, extractor);
  try {
    while (true) {
      const c10::KernelFunction& kernel = entry.lookup(keys);
      if (C10_UNLIKELY(kernel.isFallthrough())) {
        const DispatchKey key = keys.highestPriorityTypeId();
        if (key == DispatchKey::Undefined)
          return route; // nothing is left to fall through to
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
      } else if (function == own.version_counter) { // the call counts versions instead
        route.through_version_counter = true;
        keys = keys & c10::after_ADInplaceOrView_keyset;
      } else if (function == own.backend_select) {
        keys = keys.remove(DispatchKey::BackendSelect);
      } else {
        const bool is_autocast = keys.has_any(c10::autocast_dispatch_keyset) &&
            c10::autocast_dispatch_keyset.has(keys.highestPriorityTypeId());
        route.reason = is_autocast ? Reason::Autocast : Reason::Native;
        // The function may be a kernel elsewhere, too, and be called with the arguments alone
        // there.
        if (C10_UNLIKELY(!is_autocast && takes_keys_or_operator(functor_of(kernel))))
          route.reason = Reason::Kernel;
        route.kernel = function;
        return route;
      }
    }
  } catch (const c10::Error&) {
    return route; // no kernel: the dispatcher has the words for it
  }
}

} // namespace torchop
