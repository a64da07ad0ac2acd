// dispatch.h: find out from an operator's dispatch table which kernels the dispatcher would run for
// a call. PyTorch does not notify us when the table changes, so we read it in each call instead of
// caching the result.
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

// The classes torch.Tensor and torch.nn.Parameter. PyTorch's variables are not in this library, so
// reading them in each call would need one more memory access.
extern PyTypeObject* const tensor_type;
extern PyTypeObject* const parameter_type;

struct TensorSummary {
  DispatchKeySet keys;
  bool requires_grad = false;
  bool tangent = false;
};

// Returns false for all other subclasses of Tensor, since they might override `__torch_function__`
// or `__torch_dispatch__`.
inline bool is_plain_tensor(PyObject* value) {
  return Py_TYPE(value) == tensor_type || Py_TYPE(value) == parameter_type;
}

// Unlike isinstance, this does not read `__class__`, so it never runs Python code.
inline bool is_tensor(PyObject* value) {
  return is_plain_tensor(value) || PyType_IsSubtype(Py_TYPE(value), tensor_type);
}

inline at::TensorImpl* impl_of(PyObject* tensor) {
  return THPVariable_Unpack(tensor).unsafeGetTensorImpl();
}

// Returns nullptr if the tensor has no autograd metadata. The cast is safe because AutogradMeta is
// PyTorch's only implementation of AutogradMetaInterface.
inline const torch::autograd::AutogradMeta* autograd_meta_of(const at::TensorImpl& impl) {
  return static_cast<const torch::autograd::AutogradMeta*>(member_of(AutogradMetaOf{}, impl).get());
}

// Adds the properties of a plain tensor to `seen`. If `below_autograd` is true, the Autograd keys
// are excluded, so there is no need to read requires_grad and tangents, which do not affect the
// call.
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
  // A view may inherit requires_grad and the tangent from its base.
  if (C10_UNLIKELY(meta->is_view_)) {
    seen.requires_grad |= impl->requires_grad();
    seen.tangent |= THPVariable_Unpack(tensor)._fw_grad(0).defined();
  }
}

bool is_python_kernel(const c10::KernelFunction& kernel);

// Returns the function of a Python kernel (borrowed), or nullptr for other kernels. A bypass is a
// C++ kernel that overrides a Python kernel (see bypass.h), so for a bypass, returns the overridden
// function.
PyObject* python_function(const c10::KernelFunction& kernel);

// Replaces the function of a Python kernel, and releases the reference to the old function. This is
// safe because calls read the function only while they hold the GIL. No-op for other kernels.
void replace_python_function(const c10::KernelFunction& kernel, PyObject* function);

// Returns whether `kernel` has a functor that no other KernelFunction references.
bool is_only_reference(const c10::KernelFunction& kernel);

// Returns basicAutogradNotImplementedFallback, the kernel that PyTorch runs at the Autograd keys if
// an operator has no kernel there. Empty if this build of PyTorch uses a fallthrough kernel
// instead.
const c10::KernelFunction& autograd_fallback_kernel();

// Infers the memory layout of PyTorch's class PythonKernelHolder, which no header declares, from
// the kernels of two operators. Each operator has a single kernel, `function`, which is registered
// for CPU. For `with_keys`, it is registered with `with_keyset=True`. If the layout is not as
// expected, returns false, and the extension must not make native calls.
bool probe_kernels(
    const c10::OperatorHandle& plain, const c10::OperatorHandle& with_keys, PyObject* function);

// Returns whether a kernel is a Python function that receives only the arguments of the call. In
// contrast, kernels registered with `with_keyset=True` also receive the dispatch keys, and fallback
// kernels also receive the operator.
bool takes_just_arguments(const c10::KernelFunction& kernel);

// Returns the dispatch table of an operator. PyTorch frees the table if code other than torchop
// resets the operator's library, so check `is_deregistered` (entry.h) first. Registrations in other
// threads may modify the table at any time (see lifetime.h).
const c10::impl::OperatorEntry& table_of(const c10::OperatorHandle& op);

// torchop's own kernels in an operator's dispatch table. Native calls skip these kernels and do the
// same work in C++. Each is a Python function borrowed from the call plan, or nullptr.
struct OwnKernels {
  PyObject* autograd = nullptr;
  PyObject* version_counter = nullptr;
  PyObject* backend_select = nullptr;
};

struct Route {
  Reason reason = Reason::Kernel;
  bool through_autograd = false;        // the call would run OwnKernels::autograd
  bool through_fallback = false;        // the call would run PyTorch's autograd fallback instead
  bool through_version_counter = false; // the call would run OwnKernels::version_counter
  PyObject* kernel = nullptr;           // the Python kernel that computes the result; borrowed
  DispatchKeySet keys;                  // the keys at which the dispatcher would look up the kernel
};

// Returns whether the next check for `__torch_function__` will be skipped, because
// torch._C._skip_one_hop_torch_function (added in PyTorch 2.13) was called.
template <class State = at::impl::PythonTorchFunctionTLS>
bool skips_torch_functions() {
  if constexpr (requires { State::peek_skip_next(); })
    return State::peek_skip_next();
  else
    return false;
}

inline bool is_traced() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(DispatchKey::Tracer);
}

inline Reason thread_reason(const c10::impl::LocalDispatchKeySet& local) {
  // BackendSelect and ADInplaceOrView are included by default. Any other included key comes from a
  // mode, functorch, torch.jit.trace or the Python dispatcher, which must see the call.
  const DispatchKeySet usual({DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView});
  if (C10_UNLIKELY((local.included_.raw_repr() & ~usual.raw_repr()) != 0))
    return Reason::Mode;
  // If Dense is excluded, most calls have no kernel, so fall back to raise the dispatcher's error.
  if (C10_UNLIKELY(local.excluded_.has_any(DispatchKeySet(DispatchKey::Dense))))
    return Reason::Mode;
  // While a TorchDispatchMode handles a call, PyTorch excludes PythonTLSSnapshot and the functorch
  // keys. torchop's Python kernels restore these keys, but a native call would not, so use the
  // dispatcher.
  if (C10_UNLIKELY(local.excluded_.has(DispatchKey::PythonTLSSnapshot)))
    return Reason::Mode;
  // Check for profilers in the same way as the dispatcher. at::hasCallbacks() takes a lock and 40
  // ns.
  if (C10_UNLIKELY(at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value()))
    return Reason::Profiler;
  if (C10_UNLIKELY(at::impl::torch_function_mode_enabled()))
    return Reason::FunctionMode;
  // This flag makes PyTorch skip the next check for `__torch_function__`. Native calls make no such
  // check, so the flag would stay set and affect an operator that the kernel calls. The dispatcher
  // makes the check and resets the flag, so use the dispatcher.
  if (C10_UNLIKELY(skips_torch_functions()))
    return Reason::FunctionMode;
  return Reason::Native;
}

// Returns whether a tensor is dense, is on a supported backend, and has no other dispatch keys
// (such as Sparse or Conjugate).
bool has_plain_keys(const at::TensorImpl& impl);

// Returns the reason why a call with these tensors cannot be native, or Reason::Native if it can.
// All tensors must be dense, without tangents, and on the same supported backend.
Reason tensors_reason(const TensorSummary& seen);

std::vector<DispatchKey> plain_backend_keys();

// Finds the kernel that would compute the result, without running any kernel. Looks up the same
// kernels as the dispatcher, but skips the kernels in `own` and PyTorch's autograd fallback,
// because these only redispatch. `Route::reason` is Native if a native call can run the kernel.
Route find_route(const c10::impl::OperatorEntry& entry, const OwnKernels& own, DispatchKeySet keys);

} // namespace torchop
