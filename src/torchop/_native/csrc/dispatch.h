// dispatch.h: what PyTorch's dispatcher would do with a call, read from its own tables.
//
// Nothing is remembered between calls. A snapshot of the table would bake in what was overridden
// before it was taken, and has to be told of every later change; the table itself cannot be stale.
#pragma once

#include <Python.h>

#include <atomic>
#include <memory>
#include <vector>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "members.h"
#include "reasons.h"

namespace torchop {

using c10::DispatchKey;
using c10::DispatchKeySet;

extern PyTypeObject* tensor_type;
extern PyTypeObject* parameter_type;

// What the tensors of a call say together.
struct TensorSummary {
  DispatchKeySet keys;
  bool requires_grad = false;
  bool tangent = false;
};

inline bool is_plain_tensor(PyObject* value) {
  return Py_TYPE(value) == tensor_type || Py_TYPE(value) == parameter_type;
}

// Whether a value is a tensor of any class. PyTorch asks in Python, where an object may answer that
// it is one.
inline bool is_tensor(PyObject* value) {
  return is_plain_tensor(value) || PyType_IsSubtype(Py_TYPE(value), tensor_type);
}

inline at::TensorImpl* impl_of(PyObject* tensor) {
  return THPVariable_Unpack(tensor).unsafeGetTensorImpl();
}

// What autograd knows of a tensor; nullptr if nothing. Whatever has this interface in PyTorch has
// this class.
inline const torch::autograd::AutogradMeta* autograd_meta_of(const at::TensorImpl& impl) {
  return static_cast<const torch::autograd::AutogradMeta*>(member_of(AutogradMetaOf{}, impl).get());
}

// Adds a plain tensor to what was seen. Below autograd, neither gradients nor tangents decide about
// a call, and most of the cost is to look for them.
template <bool below_autograd>
inline void add_tensor_to(PyObject* tensor, TensorSummary& seen) {
  at::TensorImpl* impl = impl_of(tensor);
  seen.keys = seen.keys | impl->key_set();
  if constexpr (below_autograd)
    return;
  const torch::autograd::AutogradMeta* meta = autograd_meta_of(*impl);
  if (meta == nullptr)
    return;
  seen.requires_grad |= meta->requires_grad_ || meta->grad_fn_;
  seen.tangent |= meta->fw_grad_ != nullptr;
  if (C10_UNLIKELY(meta->is_view_)) { // it may have both from the tensor that it is a view of
    seen.requires_grad |= impl->requires_grad();
    seen.tangent |= THPVariable_Unpack(tensor)._fw_grad(0).defined();
  }
}

// Whether a kernel was registered from Python.
bool is_python_kernel(const c10::KernelFunction& kernel);

// The Python function behind a kernel that was registered from Python, also where it is passed by
// when it has nothing to do; nullptr for any other.
PyObject* python_function(const c10::KernelFunction& kernel);

// What stands at the autograd keys of an operator that nobody registered anything for there. It is
// what `follow` means by `through_fallback`.
const c10::KernelFunction& autograd_fallback_kernel();

// Learns how PyTorch keeps Python kernels, from two operators whose only kernel is `function`, at
// CPU; that of the second takes the keys of the call first. Returns false if it cannot be told, and
// then nothing runs natively.
bool learn_kernels(
    const c10::OperatorHandle& plain, const c10::OperatorHandle& with_keys, PyObject* function);

// Whether a Python kernel takes the arguments of the call and nothing else: neither its keys nor,
// as a fallback does, the operator.
bool takes_just_arguments(const c10::KernelFunction& kernel);

// The table of an operator. It lives as long as the operator does.
const c10::impl::OperatorEntry& table_of(const c10::OperatorHandle& op);

// The kernels of ours that a call would meet, in the order of dispatch.
struct OwnKernels {
  PyObject* autograd = nullptr; // borrowed, as all of these
  PyObject* version_counter = nullptr;
  PyObject* backend_select = nullptr;
};

// What the dispatcher would run for a call.
struct Route {
  Reason reason = Reason::Kernel;
  bool through_autograd = false; // through our kernel there
  bool through_fallback = false; // through PyTorch's, which is no kernel of the operator's
  bool through_version_counter = false;
  PyObject* kernel = nullptr; // the Python function that computes; borrowed from the table
};

// Whether this call is to look for no subclasses, as can be asked since 2.13.
template <class State = at::impl::PythonTorchFunctionTLS>
bool skips_torch_functions() {
  if constexpr (requires { State::peek_skip_next(); })
    return State::peek_skip_next();
  else
    return false;
}

// Whether TorchScript traces what this thread calls.
inline bool is_traced() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(DispatchKey::Tracer);
}

// Conditions of the thread, which no table knows.
inline Reason thread_reason(const c10::impl::LocalDispatchKeySet& local) {
  // BackendSelect and ADInplaceOrView are on for every thread; anything else is somebody who wants
  // to see the call: a mode, functorch, torch.jit.trace, the dispatcher in Python.
  const DispatchKeySet usual({DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView});
  if (C10_UNLIKELY((local.included_.raw_repr() & ~usual.raw_repr()) != 0))
    return Reason::Mode;
  // Without the kernels for data, hardly anything works, and what fails first is not ours to say.
  if (C10_UNLIKELY(local.excluded_.has_any(DispatchKeySet(DispatchKey::Dense))))
    return Reason::Mode;
  // A TorchDispatchMode handles the call, which excludes the keys of torch.func and torch.export:
  // the kernel in Python includes them again.
  if (C10_UNLIKELY(local.excluded_.has(DispatchKey::PythonTLSSnapshot)))
    return Reason::Mode;
  // As the dispatcher asks. `at::hasCallbacks` takes a lock, and 40 ns for it.
  if (C10_UNLIKELY(at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value()))
    return Reason::Profiler;
  if (C10_UNLIKELY(at::impl::torch_function_mode_enabled()))
    return Reason::FunctionMode;
  // Whoever looks first takes that back; it must not be the kernel.
  if (C10_UNLIKELY(skips_torch_functions()))
    return Reason::FunctionMode;
  return Reason::Native;
}

// Whether a tensor is dense, on a device whose tensors native calls take, and nothing else.
bool has_plain_keys(const at::TensorImpl& impl);

// Conditions of the tensors: dense and plain, and all of one backend.
Reason tensors_reason(const TensorSummary& seen);

// The keys of the backends whose tensors a native call takes, such as CPU and PrivateUse1.
std::vector<DispatchKey> plain_backend_keys();

// Follows the table from key to key, as the dispatcher and our own kernels would.
Route find_route(const c10::impl::OperatorEntry& entry, const OwnKernels& own, DispatchKeySet keys);

} // namespace torchop
