// dispatch.h: predict from the dispatcher's tables which kernels it would run for a call.
//
// Each call reads the tables again, because PyTorch does not notify anyone when they change, so
// nothing can be cached.
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

// The properties of a call's tensor arguments that affect dispatch, for all tensors together.
struct TensorSummary {
  DispatchKeySet keys;
  bool requires_grad = false;
  bool tangent = false;
};

// Returns whether a value is exactly of type Tensor or Parameter. Subclasses are excluded, because
// they may override `__torch_function__` or `__torch_dispatch__`.
inline bool is_plain_tensor(PyObject* value) {
  return Py_TYPE(value) == tensor_type || Py_TYPE(value) == parameter_type;
}

// Returns whether a value is a Tensor or an instance of a subclass. Unlike isinstance, this
// function does not read `__class__`, so it runs no Python code.
inline bool is_tensor(PyObject* value) {
  return is_plain_tensor(value) || PyType_IsSubtype(Py_TYPE(value), tensor_type);
}

inline at::TensorImpl* impl_of(PyObject* tensor) {
  return THPVariable_Unpack(tensor).unsafeGetTensorImpl();
}

// Returns the autograd metadata of a tensor, or nullptr. AutogradMeta is the only class in PyTorch
// that implements AutogradMetaInterface, so the cast is safe.
inline const torch::autograd::AutogradMeta* autograd_meta_of(const at::TensorImpl& impl) {
  return static_cast<const torch::autograd::AutogradMeta*>(member_of(AutogradMetaOf{}, impl).get());
}

// Adds a plain tensor to a summary. With `below_autograd`, does not read requires_grad and
// tangents: they have no effect there, but reading them would be most of the work.
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
  if (C10_UNLIKELY(meta->is_view_)) { // may inherit requires_grad and the tangent from its base
    seen.requires_grad |= impl->requires_grad();
    seen.tangent |= THPVariable_Unpack(tensor)._fw_grad(0).defined();
  }
}

// Returns whether a kernel is a Python function (a `PythonKernelHolder`).
bool is_python_kernel(const c10::KernelFunction& kernel);

// Returns a Python kernel's function (borrowed), even if a bypass overrides the kernel (see
// bypass.h). Returns nullptr for other kernels.
PyObject* python_function(const c10::KernelFunction& kernel);

// Returns basicAutogradNotImplementedFallback, PyTorch's kernel at Autograd for operators without
// one. Empty if this build of PyTorch has a fallthrough there.
const c10::KernelFunction& autograd_fallback_kernel();

// Finds the memory layout of PyTorch's class PythonKernelHolder, which no header declares. `plain`
// and `with_keys` are operators with `function` as their only kernel, at CPU, registered without
// and with `with_keyset=True`. Returns false if the layout is unknown; if so, the extension must
// not make native calls.
bool probe_kernels(
    const c10::OperatorHandle& plain, const c10::OperatorHandle& with_keys, PyObject* function);

// Returns whether a kernel is a Python function that receives the arguments only. Kernels that were
// registered with `with_keyset=True` also receive dispatch keys, and fallbacks the operator.
bool takes_just_arguments(const c10::KernelFunction& kernel);

// Returns the dispatch table of an operator, valid while the operator is registered. Registrations
// in other threads modify it; see lifetime.h.
const c10::impl::OperatorEntry& table_of(const c10::OperatorHandle& op);

// The dispatcher kernels that a native call skips, because it does their work itself. They are
// Python functions, borrowed from the call plan, or nullptr.
struct OwnKernels {
  PyObject* autograd = nullptr;
  PyObject* version_counter = nullptr;
  PyObject* backend_select = nullptr;
};

// The result of `find_route`.
struct Route {
  Reason reason = Reason::Kernel;
  bool through_autograd = false; // reached OwnKernels::autograd
  bool through_fallback = false; // reached PyTorch's autograd fallback instead
  bool through_version_counter = false;
  PyObject* kernel = nullptr; // the Python kernel that computes; borrowed from the table
};

// Returns whether PyTorch skips the next check for `__torch_function__`
// (torch._C._skip_one_hop_torch_function, since PyTorch 2.13).
template <class State = at::impl::PythonTorchFunctionTLS>
bool skips_torch_functions() {
  if constexpr (requires { State::peek_skip_next(); })
    return State::peek_skip_next();
  else
    return false;
}

// Returns whether torch.jit.trace is recording this thread.
inline bool is_traced() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(DispatchKey::Tracer);
}

// Returns why no call of this thread can be native, or Reason::Native.
inline Reason thread_reason(const c10::impl::LocalDispatchKeySet& local) {
  // BackendSelect and ADInplaceOrView are included by default. Any other included key belongs to a
  // mode, functorch, torch.jit.trace or the Python dispatcher, and its owner must intercept the
  // call.
  const DispatchKeySet usual({DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView});
  if (C10_UNLIKELY((local.included_.raw_repr() & ~usual.raw_repr()) != 0))
    return Reason::Mode;
  // If Dense is excluded, most calls fail, and the dispatcher must raise the error.
  if (C10_UNLIKELY(local.excluded_.has_any(DispatchKeySet(DispatchKey::Dense))))
    return Reason::Mode;
  // While a TorchDispatchMode handles a call, PyTorch excludes PythonTLSSnapshot and the functorch
  // keys. torchop's Python kernels restore these keys, but native calls would not.
  if (C10_UNLIKELY(local.excluded_.has(DispatchKey::PythonTLSSnapshot)))
    return Reason::Mode;
  // The same check as in the dispatcher. at::hasCallbacks() acquires a lock, which takes 40 ns.
  if (C10_UNLIKELY(at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value()))
    return Reason::Profiler;
  if (C10_UNLIKELY(at::impl::torch_function_mode_enabled()))
    return Reason::FunctionMode;
  // The next check for `__torch_function__` resets this flag. The dispatcher must make that check
  // for this call. Otherwise an operator that the kernel calls would reset the flag.
  if (C10_UNLIKELY(skips_torch_functions()))
    return Reason::FunctionMode;
  return Reason::Native;
}

// Returns whether a tensor is dense, on a supported backend, and has no other dispatch keys.
bool has_plain_keys(const at::TensorImpl& impl);

// Returns why a call with these tensors cannot be native, or Reason::Native. Native calls require
// dense tensors without tangents, all on one supported backend.
Reason tensors_reason(const TensorSummary& seen);

// Returns the dispatch keys of the supported backends, such as CPU, CUDA and PrivateUse1.
std::vector<DispatchKey> plain_backend_keys();

// Finds the first kernel, from the highest key down, that is neither in `own` nor PyTorch's
// autograd fallback, because these only redispatch. `Route::reason` is Native if the found kernel
// is a Python kernel. Runs no kernels.
Route find_route(const c10::impl::OperatorEntry& entry, const OwnKernels& own, DispatchKeySet keys);

} // namespace torchop
