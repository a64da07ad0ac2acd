#include "lifetime.h"

#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/csrc/utils/object_ptr.h>

#include "dispatch.h"
#include "entry.h"
#include "errors.h"
#include "free_threads.h"
#include "members.h"

namespace torchop {

namespace {

// Casts away the const that `member_of` adds. This is safe because the objects are not const.
template <class Member>
Member& writable(const Member& member) {
  return const_cast<Member&>(member);
}

// All Lifetime objects, keyed by the addresses of the operators' definitions in the dispatcher.
// Guarded by the dispatcher's lock. Never destroyed, because operators may still be deregistered
// during process exit.
auto& lifetimes = *new std::unordered_map<const void*, LifetimePointer>();

std::mutex& dispatcher_mutex() {
  return member_of(DispatcherGuard{}, c10::Dispatcher::singleton())->mutex;
}

const void* place_of(const c10::OperatorHandle& op) {
  return &*member_of(OperatorDefinition{}, op);
}

// The caller must hold the dispatcher's lock.
void end_lifetime(const c10::OperatorHandle& op) {
  if (auto found = lifetimes.extract(place_of(op)); !found.empty())
    found.mapped()->store(false);
}

// Marks an operator as deregistered, no matter which package deregisters it.
class Listener final : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    end_lifetime(op); // PyTorch holds the dispatcher's lock
  }
};

// Register the listener when the extension is loaded, so that it exists before the first Lifetime.
[[maybe_unused]] const auto* const listening = new c10::RegistrationHandleRAII(
    c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>()));

// Maps dispatch keys to lists of kernels. The first kernel in each list is in the dispatch table.
auto& kernels_of(const c10::OperatorHandle& op) {
  return writable(member_of(RegisteredKernels{}, table_of(op)));
}

// Removes an operator from the dispatcher's lookup table and from TorchScript's table of operators,
// so that PyTorch can deregister it without changing its OperatorEntry: incrementing the counts
// keeps the schema alive, and a copy of each kernel at the front of its list keeps the dispatch
// table unchanged.
void hide(const c10::OperatorHandle& op) {
  torch::jit::deregisterOperator(op.schema());
  auto& dispatcher = c10::Dispatcher::singleton();
  const std::lock_guard<std::mutex> lock(dispatcher_mutex());
  auto& definition = *member_of(OperatorDefinition{}, op);
  ++definition.def_count;
  ++definition.def_and_impl_count;
  for (auto& [_, kernels] : kernels_of(op))
    kernels.emplace_front(kernels.front().kernel, nullptr, "deregistered");
  writable(member_of(LookupTable{}, dispatcher)).write([&](auto& table) {
    table.erase(op.operator_name());
  });
  end_lifetime(op);
}

// Returns whether another library has registered a hidden operator's kernels or schema.
bool is_shared(const c10::OperatorHandle& op) {
  bool found = member_of(OperatorDefinition{}, op)->def_count > 1;
  for (const auto& [_, kernels] : kernels_of(op))
    found |= kernels.size() > 1;
  return found;
}

// Reverts `hide`. If another library's kernels are still registered, PyTorch keeps the
// OperatorEntry, and the next operator of this name must use it.
void reveal(const c10::OperatorHandle& op) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const std::lock_guard<std::mutex> lock(dispatcher_mutex());
  auto& definition = *member_of(OperatorDefinition{}, op);
  std::vector<DispatchKey> keys;
  for (auto& [key, kernels] : kernels_of(op)) {
    kernels.pop_front();
    keys.push_back(key);
  }
  for (const DispatchKey key : keys) {
    if (kernels_of(op).at(key).empty())
      kernels_of(op).erase(key);
  }
  for (const DispatchKey key : keys)
    definition.op.updateFallback(dispatcher, key); // recomputes the dispatch table
  if (--definition.def_count == 0)
    definition.op.deregisterSchema();
  --definition.def_and_impl_count;
  writable(member_of(LookupTable{}, dispatcher)).write([&](auto& table) {
    table.emplace(op.operator_name(), op);
  });
}

PyObject* raise_gone(PyObject* name, PyObject*, PyObject*) {
  if (THPObjectPtr kind(gone_error()); kind)
    PyErr_Format(kind.get(), "%U was deregistered. Look it up in torch.ops again.", name);
  return nullptr;
}

PyMethodDef raising_method{
    "raise_gone",
    reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(raise_gone)),
    METH_VARARGS | METH_KEYWORDS,
    "Raise OperatorGoneError."};

// Returns a function that raises OperatorGoneError. It replaces the Python functions in the kernels
// of a deregistered operator, in case a running call reaches another of these kernels.
THPObjectPtr raising_kernel(const c10::OperatorHandle& op) {
  const std::string text = toString(op.operator_name());
  THPObjectPtr name = checked(PyUnicode_FromStringAndSize(text.data(), Py_ssize_t(text.size())));
  THPObjectPtr kernel = checked(PyCFunction_New(&raising_method, name.get()));
  PyObject_GC_UnTrack(kernel.get()); // it is in no cycle and never freed
  return kernel;
}

// An operator before its deregistration, with copies of all kernels that are registered for it.
struct KeptOperator {
  c10::OperatorHandle op; // valid afterwards only if `is_defined` is true
  bool is_defined;        // true if the operator itself is deregistered, and not only kernels
  std::vector<c10::KernelFunction> kernels;
  THPObjectPtr raising; // replaces the kernels' functions, unless it is nullptr
};

using KeptOperators = std::vector<KeptOperator>;

void keep(PyObject* names, bool are_defined, bool frees_functions, KeptOperators& kept) {
  THPObjectPtr items = checked(PySequence_Tuple(names));
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(items.get()); ++index) {
    const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(items.get(), index));
    if (name == nullptr)
      throw_python_error();
    const auto op = c10::Dispatcher::singleton().findOp(torch::jit::parseName(name));
    if (!op.has_value() || (are_defined && !op->hasSchema()))
      continue;
    KeptOperator& item = kept.emplace_back(KeptOperator{*op, are_defined, {}, {}});
    if (has_gil && frees_functions)
      item.raising = raising_kernel(*op);
    for (const auto& [_, kernels] : kernels_of(*op)) {
      for (const auto& kernel : kernels)
        item.kernels.push_back(kernel.kernel);
    }
    if (are_defined)
      hide(*op);
  }
}

// Leaks the deregistered kernels, after releasing their Python functions.
void finish_deregistration(KeptOperator& kept) {
  const bool is_hidden = kept.is_defined && !is_shared(kept.op);
  if (is_hidden)
    // The dispatch table keeps the kernels. Clear only the lists of registered kernels, so that
    // `Dispatcher::getRegistrationsForDispatchKey` no longer finds the operator.
    kernels_of(kept.op).clear();
  else if (kept.is_defined)
    reveal(kept.op);
  for (const c10::KernelFunction& kernel : kept.kernels) {
    if (!is_hidden && !is_only_reference(kernel))
      continue; // the kernel is still registered
    if (kept.raising)
      replace_python_function(kernel, kept.raising.get());
    (void)new c10::KernelFunction(kernel);
  }
}

constexpr const char* kept_capsule = "torchop._native._call_path.keep_memory";

PyObject* finish_deregistrations(PyObject* capsule, PyObject*) {
  HANDLE_TH_ERRORS
  auto* kept = static_cast<KeptOperators*>(PyCapsule_GetPointer(capsule, kept_capsule));
  KeptOperators operators = std::exchange(*kept, {});
  for (KeptOperator& each : operators)
    finish_deregistration(each);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef finishing{
    "finish",
    finish_deregistrations,
    METH_NOARGS,
    "Leak the deregistered kernels, after releasing their Python functions."};

void free_memory(PyObject* capsule) {
  Py_XDECREF(finish_deregistrations(capsule, nullptr));
  delete static_cast<KeptOperators*>(PyCapsule_GetPointer(capsule, kept_capsule));
}

} // namespace

LifetimePointer lifetime_of(const c10::OperatorHandle& op) {
  const std::lock_guard<std::mutex> lock(dispatcher_mutex());
  LifetimePointer& lifetime = lifetimes[place_of(op)];
  if (lifetime == nullptr)
    lifetime = std::make_shared<Lifetime>(true);
  return lifetime;
}

PyObject* keep_memory(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *defined, *implemented;
  int frees_functions;
  if (!PyArg_ParseTuple(args, "OOp", &defined, &implemented, &frees_functions))
    return nullptr;
  auto kept = std::make_unique<KeptOperators>();
  THPObjectPtr capsule = checked(PyCapsule_New(kept.get(), kept_capsule, free_memory));
  KeptOperators& operators = *kept.release();
  keep(implemented, false, frees_functions != 0, operators);
  keep(defined, true, frees_functions != 0, operators);
  return PyCFunction_New(&finishing, capsule.get());
  END_HANDLE_TH_ERRORS
}

} // namespace torchop
