// bypass.cpp: override torchop's Python kernels at Autograd and ADInplaceOrView with C++ kernels.
//
// Calls go through the dispatcher if, for example, a profiler or a mode is active, or an argument
// is a tensor subclass. torchop's Python kernels at these two keys usually only bump versions and
// redispatch. But to call a Python kernel, the dispatcher must convert all arguments to Python
// objects and back. So we override each of these kernels with a C++ kernel, called a bypass. It
// does the same work if it can, and otherwise calls the Python kernel. This makes a call with a
// profiler twice as fast. The bypass runs without the GIL.
#include "bypass.h"

#include <memory>
#include <typeinfo>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/utils/object_ptr.h>

#include "disabled.h"
#include "dispatch.h"

namespace torchop {

namespace {

using Arguments = c10::ArrayRef<c10::IValue>;

template <class Visitor>
void each_tensor_of(const c10::IValue& value, Visitor&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined())
      visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef())
      each_tensor_of(item, visit);
  }
}

// Returns whether an argument is a tensor that is passed as an opaque Python object. Such a tensor
// needs the Python kernel too, because autograd also records its gradient.
bool is_tensor_object(const c10::IValue& value) {
  if (!value.isPyObject())
    return false;
  const PyGILState_STATE state = PyGILState_Ensure(); // because the check may run Python code
  const bool is_tensor = THPVariable_Check(value.toPyObjectHolder()->getPyObject());
  PyGILState_Release(state);
  return is_tensor;
}

bool requires_grad(const at::Tensor& tensor) {
  const torch::autograd::AutogradMeta* meta = autograd_meta_of(*tensor.unsafeGetTensorImpl());
  if (meta == nullptr)
    return false;
  // A view may inherit requires_grad from its base, so call `requires_grad()` too.
  return meta->requires_grad_ || meta->grad_fn_ || (meta->is_view_ && tensor.requires_grad());
}

// Returns whether the call may need torchop's Python kernel at Autograd, because an argument
// requires grad or may have a tangent.
bool may_need_autograd(Arguments arguments) {
  // Inside a dual level (forward-mode AD), any tensor may have a tangent. Do not read the tangents
  // to find out, because reading one creates a view, which subclasses and modes would see.
  if (torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr)
    return true;
  bool needed = false;
  if (c10::GradMode::is_enabled()) {
    for (const c10::IValue& value : arguments) {
      each_tensor_of(value, [&](const at::Tensor& tensor) { needed |= requires_grad(tensor); });
      needed |= is_tensor_object(value);
    }
  }
  return needed;
}

template <class Visitor>
void each_written(const c10::OperatorHandle& op, Arguments arguments, Visitor&& visit) {
  for (size_t index = 0; index < arguments.size(); ++index) {
    const c10::AliasInfo* alias = op.schema().arguments()[index].alias_info();
    if (alias != nullptr && alias->isWrite())
      each_tensor_of(arguments[index], visit);
  }
}

// Bumps the versions of the mutated tensors and returns true. If one of them is an inference
// tensor, bumps none and returns false, because the Python kernel must check whether the write is
// allowed. Keep in sync with `count_versions` in call.cpp and in _rules/mutation/kernels.py, which
// must bump the same tensors.
bool count_versions(const c10::OperatorHandle& op, Arguments arguments) {
  // If this returns false, the Python kernel bumps all versions, so bump either all or none here.
  bool all_count = true;
  each_written(
      op, arguments, [&](const at::Tensor& tensor) { all_count &= !tensor.is_inference(); });
  if (all_count)
    each_written(op, arguments, [](const at::Tensor& tensor) {
      tensor.unsafeGetTensorImpl()->bump_version();
    });
  return all_count;
}

class Bypass final : public c10::OperatorKernel {
 public:
  Bypass(c10::KernelFunction kernel, PyObject* function, DispatchKey key)
      : kernel_(std::move(kernel)), function_(function), key_(key) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
    const Arguments arguments = torch::jit::last(*stack, op.schema().arguments().size());
    // Inside `with torchop.native.disabled():`, run the same kernels as without the extension.
    if (is_disabled()) {
      kernel_.callBoxed(op, keys, stack);
    } else if (key_ == DispatchKey::ADInplaceOrView) {
      if (count_versions(op, arguments))
        op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
      else
        kernel_.callBoxed(op, keys, stack);
    } else if (may_need_autograd(arguments)) {
      kernel_.callBoxed(op, keys, stack);
    } else {
      at::AutoDispatchBelowAutograd below;
      op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
    }
  }

  PyObject* function() const {
    return function_;
  }

 private:
  c10::KernelFunction kernel_; // owns `function_`
  PyObject* function_;
  DispatchKey key_;
};

// Suppresses PyTorch's warning about overriding a kernel. PyTorch issues this warning only once per
// process, and even a suppressed warning counts. `set_warnAlways` lifts this limit in the meantime,
// so that users who override a kernel later still see the warning.
class WithoutWarning {
 public:
  WithoutWarning() : always_(c10::WarningUtils::get_warnAlways()), guard_(&silent_) {
    c10::WarningUtils::set_warnAlways(true);
  }
  ~WithoutWarning() {
    c10::WarningUtils::set_warnAlways(always_);
  }
  WithoutWarning(const WithoutWarning&) = delete;
  WithoutWarning& operator=(const WithoutWarning&) = delete;

 private:
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };

  Silent silent_;
  bool always_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

// The registration of a bypass with the dispatcher. Never freed, because running calls may still
// use the functor (see lifetime.h).
struct Registration {
  c10::KernelFunction functor;
  std::optional<c10::RegistrationHandleRAII> handle; // empty once the bypass is removed
};

constexpr const char* capsule_name = "torchop._native._call_path.bypass";

// Python code calls this explicitly, because free-threaded Python may run the capsule's destructor
// much later.
PyObject* remove(PyObject* capsule, PyObject*) {
  auto* registration = static_cast<Registration*>(PyCapsule_GetPointer(capsule, capsule_name));
  registration->handle.reset();
  Py_RETURN_NONE;
}

PyMethodDef removing{
    "remove",
    remove,
    METH_NOARGS,
    "Remove the bypass. The dispatcher then calls the Python kernel."};

void free_registration(PyObject* capsule) {
  Py_DECREF(remove(capsule, nullptr));
}

} // namespace

PyObject* bypass(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *name, *overload, *key_name;
  PyObject* function;
  if (!PyArg_ParseTuple(args, "sssO", &name, &overload, &key_name, &function))
    return nullptr;
  auto& dispatcher = c10::Dispatcher::singleton();
  auto op = dispatcher.findSchema({name, overload});
  const DispatchKey key = c10::parseDispatchKey(key_name);
  const bool is_autograd = key == DispatchKey::Autograd;
  if (!op.has_value() || !(is_autograd || key == DispatchKey::ADInplaceOrView))
    Py_RETURN_NONE;
  const c10::KernelFunction kernel =
      table_of(*op).lookup(DispatchKeySet(is_autograd ? DispatchKey::AutogradCPU : key));
  if (!is_python_kernel(kernel) || python_function(kernel) != function)
    Py_RETURN_NONE; // another kernel is registered, possibly a bypass
  auto registration = std::make_unique<Registration>(
      c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Bypass>(kernel, function, key)));
  {
    const WithoutWarning guard;
    registration->handle.emplace(dispatcher.registerImpl(
        op->operator_name(),
        key,
        registration->functor,
        std::nullopt,
        nullptr,
        "registered by torchop"));
  }
  THPObjectPtr capsule(PyCapsule_New(registration.get(), capsule_name, free_registration));
  if (!capsule)
    return nullptr;
  registration.release();
  return PyCFunction_New(&removing, capsule.get());
  END_HANDLE_TH_ERRORS
}

PyObject* bypassed_function(const c10::OperatorKernel& functor) {
  return typeid(functor) == typeid(Bypass) ? static_cast<const Bypass&>(functor).function()
                                           : nullptr;
}

} // namespace torchop
