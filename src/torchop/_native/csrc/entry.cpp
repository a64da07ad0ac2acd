#include "entry.h"

#include <cxxabi.h>

#include <utility>

#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include "call.h"
#include "current_plan.h"
#include "errors.h"
#include "frames.h"
#include "operator.h"
#include "resolution.h"
#include "thread.h"
#include "types.h"

namespace torchop {

PyTypeObject* entry_type = nullptr;

bool refresh_plan(Entry& entry) {
  if (entry.refresh == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "torchop: the operator was collected");
    return false;
  }
  WithoutDynamo frames;
  return THPObjectPtr(PyObject_CallNoArgs(entry.refresh)).get() != nullptr;
}

PyObject* gone_error() {
  THPObjectPtr module(PyImport_ImportModule("torchop._errors"));
  return module ? PyObject_GetAttrString(module.get(), "OperatorGoneError") : nullptr;
}

void raise_deregistered(Entry& entry) {
  THPObjectPtr kind(gone_error());
  if (!kind)
    return;
  // If the operator was deregistered through torchop, `refresh` raises an error with the reason.
  // Otherwise, a torch.library.Library was destroyed, and the reason is unknown.
  if (!refresh_plan(entry) && PyErr_ExceptionMatches(kind.get()))
    return;
  PyErr_Clear();
  PyErr_Format(
      kind.get(),
      "%S was deregistered: the library that defined it was reset. Look it up in torch.ops again.",
      entry.name);
}

void explain_refusal(PyObject* callee, PyObject* keywords) {
  if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
    return;
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  THPObjectPtr explained(PyObject_CallMethod(
      callee, "_explain_refusal", "OO", error, keywords == nullptr ? Py_None : keywords));
  PyErr_Restore(type, error, traceback); // discards an exception from the method
  if (explained && explained.get() != Py_None)
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(explained.get())), explained.get());
}

namespace {

__attribute__((noinline, cold)) PyObject* raise_stack_overflow(const Entry& entry) {
  PyErr_Format(
      PyExc_RecursionError,
      "maximum recursion depth exceeded while calling %S: its kernel calls it again and again, and "
      "the stack of this thread is full",
      entry.name);
  return nullptr;
}

// Raises an error if a call passes a tensor where the schema declares a number, and returns false.
// The dispatcher would convert the tensor, silently dropping its gradient and the fraction of a
// float, and would fail in a compiled function. If another overload of the packet accepts the
// tensor, returns true.
__attribute__((noinline, cold)) bool refuse_tensor(
    Entry& entry, bool is_packet, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  if (entry.refresh == nullptr)
    return true; // cleared by the garbage collector
  WithoutDynamo frames;
  THPObjectPtr check(
      PyObject_GetAttrString(entry.refresh, is_packet ? "check_packet_call" : "check_call"));
  THPObjectPtr result(
      check ? PyObject_Vectorcall(check.get(), args, PyVectorcall_NARGS(nargsf), keywords)
            : nullptr);
  return result.get() != nullptr;
}

// Calls the Python method `log_fallback` before a call falls back to the dispatcher. If the method
// deregisters the operator, returns false with an OperatorGoneError set.
__attribute__((noinline, cold)) bool log_fallback(
    Entry& entry, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  if (entry.refresh == nullptr)
    return true; // cleared by the garbage collector
  WithoutDynamo frames;
  THPObjectPtr log(PyObject_GetAttrString(entry.refresh, "log_fallback"));
  THPObjectPtr result(
      log ? PyObject_Vectorcall(log.get(), args, PyVectorcall_NARGS(nargsf), keywords) : nullptr);
  if (!result)
    PyErr_WriteUnraisable(entry.refresh); // an error in logging must not make the call fail
  if (!is_deregistered(entry))
    return true;
  raise_deregistered(entry);
  return false;
}

// If a call found a kernel in the dispatch table that is not in the plan, clears the plan, so that
// the next call compiles a new one. PyTorch does not notify us when another package registers a
// kernel, so we only find out during a call. The new plan may not support the kernel either, so to
// avoid compiling a plan in every call, clears the plan only after 1, 2, 4, 8, ... such calls.
__attribute__((noinline, cold)) void recompile_for_unknown_kernel(Entry& entry, Reason reason) {
  const uint64_t count = entry.counters[size_t(reason)];
  const bool is_about_kernels = reason == Reason::Kernel || reason == Reason::Operator;
  if (is_about_kernels && (count & (count - 1)) == 0)
    release_plan(entry.plan.exchange(nullptr));
}

__attribute__((noinline, cold)) void raise_deregistered_from_error(Entry& entry) {
  PyObject *type, *cause, *traceback, *error;
  PyErr_Fetch(&type, &cause, &traceback);
  PyErr_NormalizeException(&type, &cause, &traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  raise_deregistered(entry);
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  PyException_SetCause(error, cause);
  PyErr_Restore(type, error, traceback);
}

// `noinline`, because the attribute `flatten` of `call_entry` would inline this function.
__attribute__((noinline)) PyObject* dispatch_call(
    Entry& entry, PyObject* dispatch, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  THPObjectPtr callee;
  if (dispatch == nullptr) {
    Py_BEGIN_CRITICAL_SECTION(reinterpret_cast<PyObject*>(&entry));
    // Own a reference, because another thread may replace `entry.dispatch` during the call.
    callee = THPObjectPtr(Py_NewRef(entry.dispatch));
    Py_END_CRITICAL_SECTION();
    dispatch = callee.get();
  }
  PyObject* result = nullptr;
  if (C10_LIKELY(!is_deregistered(entry)))
    result = PyObject_Vectorcall(dispatch, args, nargsf, keywords);
  if (C10_LIKELY(result != nullptr || !is_deregistered(entry)))
    return result;
  // The operator was deregistered during the call, so the dispatcher may have failed with an
  // internal assert. Raise a better error instead.
  if (PyErr_Occurred() == nullptr)
    raise_deregistered(entry);
  else if (PyErr_Occurred() == PyExc_RuntimeError)
    raise_deregistered_from_error(entry);
  return nullptr;
}

} // namespace

// The attribute `flatten` inlines all calls in this function. The calls that a kernel makes evict
// our return addresses from the CPU's return stack buffer, so without inlining, each return from a
// C++ function after the kernel would be mispredicted. Functions for rare cases are `noinline`.
//
// The first exception handler needs `no_sanitize("null")`. A forced unwind has no exception object,
// so UBSan would report that the handler binds a reference to null.
__attribute__((__flatten__, no_sanitize("null"))) PyObject* call_entry(
    Entry& entry,
    PyObject* dispatch,
    PyObject* next,
    PyObject* const* args,
    size_t nargsf,
    PyObject* keywords) {
  Thread& here = this_thread();
  if (C10_UNLIKELY(is_stack_low(here)))
    return raise_stack_overflow(entry);
  CurrentPlan plan(entry);
  if (!plan)
    return nullptr;
  Reason reason = Reason::Native;
  PyObject* result = nullptr;
  // No C++ exception may leave this function, because the caller is C code. HANDLE_TH_ERRORS would
  // also construct a PyWarningHandler, which takes longer than the rest of this function and is not
  // needed, because no code here issues C++ warnings.
  try {
    // True in a call to an OpOverloadPacket, which PyTorch always runs in the C++ dispatcher.
    const bool enters_cpp = dispatch != nullptr && dispatch != entry.dispatch;
    result = try_call(*plan, args, nargsf, keywords, enters_cpp, reason);
#ifdef __GLIBCXX__
  } catch (const abi::__forced_unwind&) {
    // A daemon thread tried to acquire the GIL after the interpreter was finalized, so CPython
    // called pthread_exit, which unwinds the thread's stack. We must not touch any Python object
    // anymore, and must rethrow the exception, or the process would be aborted.
    plan.abandon();
    throw;
#endif
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  const bool may_not_fit = reason == Reason::Binding || reason == Reason::ArgumentType;
  if (may_not_fit && next != nullptr &&
      is_skipped_overload((*plan).parameters, args, PyVectorcall_NARGS(nargsf), keywords))
    return PyObject_Vectorcall(next, args, nargsf, keywords);
  entry.counters.count(reason, here);
  if (C10_LIKELY(reason == Reason::Native))
    return result;
  if (C10_UNLIKELY(logs_fallbacks) && entry.counters[size_t(reason)] == 1 &&
      !log_fallback(entry, args, nargsf, keywords))
    return nullptr;
  // Do not reject tensors for numbers in operators of other packages or of torchop's low level
  // (`torchop.Library`), because calls to them must behave as they do without torchop.
  if ((*plan).is_foreign)
    recompile_for_unknown_kernel(entry, reason);
  else if (
      passes_tensor_for_number((*plan).parameters, args, PyVectorcall_NARGS(nargsf), keywords) &&
      !refuse_tensor(
          entry, dispatch != nullptr && dispatch != entry.dispatch, args, nargsf, keywords))
    return nullptr;
  return dispatch_call(entry, dispatch, args, nargsf, keywords);
}

// ------------------------------------------------------------------------------------------------
// Entry

namespace {

Entry& entry_of(PyObject* self) {
  return *reinterpret_cast<Entry*>(self);
}

PyObject* make_entry(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *name, *refresh;
  if (!PyArg_ParseTuple(args, "OO", &name, &refresh))
    return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr)
    return nullptr;
  Entry& entry = entry_of(self);
  new (&entry.plan) PlanPointer(nullptr);
  new (&entry.lifetime) LifetimePointer();
  new (&entry.counters) Counters();
  entry.name = Py_NewRef(name);
  entry.refresh = Py_NewRef(refresh);
  return self;
}

int traverse_entry(PyObject* self, visitproc visit, void* arg) {
  Entry& entry = entry_of(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(entry.plan.load(std::memory_order_relaxed));
  Py_VISIT(entry.refresh);
  Py_VISIT(entry.dispatch);
  return 0;
}

int clear_entry(PyObject* self) {
  Entry& entry = entry_of(self);
  release_plan(entry.plan.exchange(nullptr));
  Py_CLEAR(entry.refresh);
  Py_CLEAR(entry.dispatch);
  return 0;
}

void dealloc_entry(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear_entry(self);
  Py_CLEAR(entry_of(self).name);
  entry_of(self).lifetime.~shared_ptr();
  entry_of(self).counters.~Counters();
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* get_name(PyObject* self, void*) {
  return Py_NewRef(entry_of(self).name);
}

PyObject* get_plan(PyObject* self, void*) {
  THPObjectPtr plan(Py_XNewRef(entry_of(self).plan.load()));
  return is_usable(plan.get()) ? plan.release() : Py_NewRef(Py_None);
}

PyObject* get_dispatch(PyObject* self, void*) {
  PyObject* dispatch;
  Py_BEGIN_CRITICAL_SECTION(self);
  dispatch = Py_XNewRef(entry_of(self).dispatch);
  Py_END_CRITICAL_SECTION();
  return dispatch != nullptr ? dispatch : Py_NewRef(Py_None);
}

int set_dispatch(PyObject* self, PyObject* value, void*) {
  HANDLE_TH_ERRORS
  // Store the Lifetime while the operator that `value` calls is still registered. Later, another
  // operator may have the same name.
  if (entry_of(self).lifetime == nullptr) {
    THPObjectPtr name = checked(PyObject_Str(entry_of(self).name));
    const char* text = PyUnicode_AsUTF8(name.get());
    if (text == nullptr)
      return -1;
    if (const auto op = c10::Dispatcher::singleton().findOp(torch::jit::parseName(text)))
      entry_of(self).lifetime = lifetime_of(*op);
  }
  PyObject* before;
  Py_BEGIN_CRITICAL_SECTION(self);
  before = std::exchange(entry_of(self).dispatch, Py_XNewRef(value));
  Py_END_CRITICAL_SECTION();
  Py_XDECREF(before);
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

int set_plan(PyObject* self, PyObject* value, void*) {
  if (value == nullptr || (value != Py_None && Py_TYPE(value) != plan_type)) {
    PyErr_SetString(PyExc_TypeError, "plan expects a Plan or None");
    return -1;
  }
  PyObject* plan = value == Py_None ? nullptr : Py_NewRef(value);
  release_plan(entry_of(self).plan.exchange(plan));
  return 0;
}

PyObject* get_counters(PyObject* self, void*) {
  const Counters& counters = entry_of(self).counters;
  PyObject* result = PyTuple_New(Py_ssize_t(counters.size()));
  for (size_t index = 0; result && index < counters.size(); ++index)
    PyTuple_SET_ITEM(result, index, PyLong_FromUnsignedLongLong(counters[index]));
  return result;
}

PyObject* explain(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  HANDLE_TH_ERRORS
  Entry& entry = entry_of(self);
  CurrentPlan plan(entry);
  if (!plan)
    return nullptr;
  Values values((*plan).parameters);
  Decision decision = decide(*plan, values, args, size_t(count), keywords);
  const Gradient& gradient = (*plan).gradient;
  if (decision.records_gradient && needs_dispatcher(gradient, values))
    decision.reason = Reason::Capture;
  return Py_BuildValue(
      "(i(OOO)Ons)",
      int(decision.reason),
      decision.route.through_autograd ? Py_True : Py_False,
      decision.route.through_version_counter ? Py_True : Py_False,
      decision.records_gradient || decision.runs_in_fallback ? Py_True : Py_False,
      decision.kernel ? decision.kernel->function : Py_None,
      Py_ssize_t(values.rejected_parameter()),
      c10::toString(decision.route.keys.highestPriorityTypeId()));
  END_HANDLE_TH_ERRORS
}

PyGetSetDef entry_attributes[] = {
    {"name", get_name, nullptr, "The name of the operator.", nullptr},
    {"plan", get_plan, set_plan, "The current plan; None after a registration.", nullptr},
    {"dispatch", get_dispatch, set_dispatch, "The function that calls the dispatcher.", nullptr},
    {"counters", get_counters, nullptr, "The number of calls by reason.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef entry_methods[] = {
    {"explain",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(explain)),
     METH_FASTCALL | METH_KEYWORDS,
     "Return how a call with these arguments would run."},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace

bool add_entry_type(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make_entry)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_entry)},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse_entry)},
      {Py_tp_clear, reinterpret_cast<void*>(clear_entry)},
      {Py_tp_getset, entry_attributes},
      {Py_tp_methods, entry_methods},
      {Py_tp_doc, const_cast<char*>("Receives an operator's calls.")},
      {0, nullptr},
  };
  return add_type(module, "torchop._native._call_path.Entry", sizeof(Entry), slots, entry_type);
}

} // namespace torchop
