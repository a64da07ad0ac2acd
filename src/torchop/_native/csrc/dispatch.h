// dispatch.h: predict the dispatcher's choice of kernels for a call from its own tables.
//
// Nothing is cached between calls. A snapshot of the table would contain overrides made before it
// was taken, and would need a notification of every later change. The table itself cannot be stale.
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

// The properties of all tensor arguments of a call that affect dispatch.
struct TensorSummary {
  DispatchKeySet keys;
  bool requires_grad = false;
  bool tangent = false;
};

// Returns whether a value is exactly a Tensor or Parameter. Subclasses may override
// `__torch_function__` or `__torch_dispatch__`.
inline bool is_plain_tensor(PyObject* value) {
  return Py_TYPE(value) == tensor_type || Py_TYPE(value) == parameter_type;
}

// Returns whether a value is a tensor of any class. Unlike isinstance, does not read `__class__`,
// which may run Python.
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

// Merges a plain tensor into a summary. Below autograd, requires_grad and tangents do not affect
// the call, and reading them is most of the cost.
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
  if (C10_UNLIKELY(meta->is_view_)) { // a view may inherit both from its base
    seen.requires_grad |= impl->requires_grad();
    seen.tangent |= THPVariable_Unpack(tensor)._fw_grad(0).defined();
  }
}

// Returns whether a kernel is a Python function (a `PythonKernelHolder`).
bool is_python_kernel(const c10::KernelFunction& kernel);

// Returns the Python function of a kernel (borrowed), including a kernel that a bypass replaced
// (see bypass.h). Returns nullptr for other kernels.
PyObject* python_function(const c10::KernelFunction& kernel);

// Returns PyTorch's boxed kernel for autograd keys without a registration,
// basicAutogradNotImplementedFallback. Empty if PyTorch uses a fallthrough there.
const c10::KernelFunction& autograd_fallback_kernel();

// Probes the memory layout of PyTorch's class PythonKernelHolder, which no header declares. `plain`
// and `with_keys` must be operators whose only kernel is `function` at CPU, registered without and
// with `with_keyset=True`. Returns false for an unknown layout; native calls must then stay off.
bool learn_kernels(
    const c10::OperatorHandle& plain, const c10::OperatorHandle& with_keys, PyObject* function);

// Returns whether a Python kernel receives only the arguments, without `with_keyset=True`, and is
// not a fallback, which also receives the operator.
bool takes_just_arguments(const c10::KernelFunction& kernel);

// Returns the operator's table. Valid while the operator is registered. Reading it is not
// synchronized with registrations, see lifetime.h.
const c10::impl::OperatorEntry& table_of(const c10::OperatorHandle& op);

// The dispatcher kernels of the operator that a native call skips, because it does their work
// itself. All are Python functions, borrowed from the plan; nullptr if there is none.
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
  PyObject* kernel = nullptr; // the Python kernel at the end of the route; borrowed from the table
};

// Returns whether PyTorch skips `__torch_function__` in the next check only, as
// torch._C._skip_one_hop_torch_function does since PyTorch 2.13.
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

// Returns why the thread's state sends calls to the dispatcher, or Reason::Native.
inline Reason thread_reason(const c10::impl::LocalDispatchKeySet& local) {
  // Every thread includes BackendSelect and ADInplaceOrView. Other included keys belong to modes,
  // functorch, torch.jit.trace or the Python dispatcher, which must intercept the call.
  const DispatchKeySet usual({DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView});
  if (C10_UNLIKELY((local.included_.raw_repr() & ~usual.raw_repr()) != 0))
    return Reason::Mode;
  // Without Dense, nearly every operator fails, so the dispatcher must raise the error.
  if (C10_UNLIKELY(local.excluded_.has_any(DispatchKeySet(DispatchKey::Dense))))
    return Reason::Mode;
  // While a TorchDispatchMode handles a call, PyTorch excludes the keys of functorch and
  // PythonTLSSnapshot. The Python kernels of torchop restore these keys; a native call would not.
  if (C10_UNLIKELY(local.excluded_.has(DispatchKey::PythonTLSSnapshot)))
    return Reason::Mode;
  // Like the dispatcher. at::hasCallbacks() would take a lock, which costs 40 ns.
  if (C10_UNLIKELY(at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value()))
    return Reason::Profiler;
  if (C10_UNLIKELY(at::impl::torch_function_mode_enabled()))
    return Reason::FunctionMode;
  // The first check for `__torch_function__` resets this flag. That must happen in the dispatcher,
  // not in an operator that the kernel calls.
  if (C10_UNLIKELY(skips_torch_functions()))
    return Reason::FunctionMode;
  return Reason::Native;
}

// Returns whether a tensor has only the dispatch keys of a dense tensor of a supported backend.
bool has_plain_keys(const at::TensorImpl& impl);

// Returns why these tensors send a call to the dispatcher, or Reason::Native. Native calls need
// dense tensors of one supported backend without tangents.
Reason tensors_reason(const TensorSummary& seen);

// Returns the dispatch keys of the supported backends, such as CPU, CUDA and PrivateUse1.
std::vector<DispatchKey> plain_backend_keys();

// Walks the table from the highest key to the kernel that computes, skipping the kernels in `own`
// as they would redispatch. `Route::reason` is not Native if the walk meets any other kernel. Runs
// no kernels.
Route find_route(const c10::impl::OperatorEntry& entry, const OwnKernels& own, DispatchKeySet keys);

} // namespace torchop
