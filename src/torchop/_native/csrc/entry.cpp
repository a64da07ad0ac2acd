// entry.cpp: from a call to the plan of the operator, or to the dispatcher.
#include "entry.h"

#include <cxxabi.h>
#include <structmember.h>

#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call.h"
#include "frames.h"
#include "resolution.h"
#include "thread.h"

namespace torchop {

PyTypeObject* entry_type = nullptr;
PyTypeObject* operator_type = nullptr;
PyObject* observer = nullptr;

namespace {

// Has a plan compiled, which a registration outdated; false with an exception if there is none any
// more.
__attribute__((noinline, cold)) bool refresh_plan(Entry& entry) {
  if (entry.refresh == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "torchop: the operator was collected");
    return false;
  }
  WithoutDynamo frames;
  return THPObjectPtr(PyObject_CallNoArgs(entry.refresh)).get() != nullptr;
}

// Says that an operator went away without a word, with the library that somebody reset. What calls
// the dispatcher would call freed memory.
__attribute__((noinline, cold)) void refuse_gone(const Entry& entry) {
  THPObjectPtr module(PyImport_ImportModule("torchop._errors"));
  THPObjectPtr kind(module ? PyObject_GetAttrString(module.get(), "OperatorGoneError") : nullptr);
  if (kind)
    PyErr_Format(
        kind.get(),
        "%U is gone: the library that defined it was reset. Look it up in torch.ops again.",
        entry.name);
}

__attribute__((noinline, cold)) PyObject* refuse_depth(const Entry& entry) {
  PyErr_Format(
      PyExc_RecursionError,
      "maximum recursion depth exceeded while calling %U: its kernel calls it again and again, and "
      "the stack of this thread is full",
      entry.name);
  return nullptr;
}

// Guards the observer, which may be replaced while it is called.
std::mutex observer_mutex;

bool is_usable(PyObject* plan) {
  return plan != nullptr && !torchop::is_outdated(*reinterpret_cast<const Plan*>(plan));
}

bool is_gone(const Entry& entry) {
  return entry.exists != nullptr && !entry.exists->load(std::memory_order_relaxed);
}

} // namespace

void exchange_observer(PyObject* given) {
  PyObject* before;
  {
    const std::lock_guard<std::mutex> lock(observer_mutex);
    before = std::exchange(observer, Py_XNewRef(given));
  }
  Py_XDECREF(before);
}

namespace {

// Tells of a call that the dispatcher is about to get. False with an exception if the operator went
// away meanwhile, because the observer runs Python.
__attribute__((noinline, cold)) bool observe(
    Entry& entry, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  WithoutDynamo frames;
  THPObjectPtr callee;
  {
    const std::lock_guard<std::mutex> lock(observer_mutex);
    callee = THPObjectPtr(Py_XNewRef(observer));
  }
  if (entry.refresh == nullptr || !callee)
    return true; // the entry was collected
  const Py_ssize_t positional = PyVectorcall_NARGS(nargsf);
  const Py_ssize_t count = positional + (keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords));
  std::vector<PyObject*> all{entry.refresh};
  all.insert(all.end(), args, args + count);
  THPObjectPtr result(
      PyObject_Vectorcall(callee.get(), all.data(), size_t(positional) + 1, keywords));
  if (!result)
    PyErr_WriteUnraisable(callee.get()); // the call itself is right
  if (!is_gone(entry))
    return true;
  refuse_gone(entry);
  return false;
}

// Nobody tells of the kernels of others, so a call that meets an unknown one has a new plan made.
// Where that does not help, it is tried again after ever more calls.
__attribute__((noinline, cold)) void doubt(Entry& entry, Reason reason) {
  const uint64_t count = entry.counters[size_t(reason)];
  const bool is_about_kernels = reason == Reason::Kernel || reason == Reason::Operator;
  if (is_about_kernels && (count & (count - 1)) == 0)
    release_plan(entry.plan.exchange(nullptr));
}

#ifdef Py_GIL_DISABLED

// Holds on to the plan that a call follows, and marks the operator as being called; false with an
// exception if there is no plan any more.
class CurrentPlan {
 public:
  CurrentPlan(Entry& entry, Thread& here) : entry_(entry), thread_(here) {
    if (C10_UNLIKELY(here.count == here.room && !make_room(here))) {
      PyErr_NoMemory();
      return;
    }
    while (C10_UNLIKELY(!is_usable(follow()))) {
      end();
      if (!refresh_plan(entry))
        return;
    }
    if (C10_UNLIKELY(is_gone(entry))) {
      end();
      refuse_gone(entry);
    }
  }
  ~CurrentPlan() {
    if (plan_ == nullptr)
      return;
    end();
    if (C10_UNLIKELY(plans_to_free.load(std::memory_order_relaxed) != 0) && is_whole_)
      free_plans();
  }
  CurrentPlan(const CurrentPlan&) = delete;
  CurrentPlan& operator=(const CurrentPlan&) = delete;

  void forget() {
    is_whole_ = false;
  }

  explicit operator bool() const {
    return plan_ != nullptr;
  }
  const Plan& operator*() const {
    return *reinterpret_cast<const Plan*>(plan_);
  }

 private:
  // Announces the plan, and looks whether it still was the plan then: whoever replaced it before
  // may not have seen this.
  PyObject* follow() {
    const size_t call = thread_.count++;
    thread_.running[call] = reinterpret_cast<PyObject*>(&entry_);
    do {
      plan_ = entry_.plan.load(std::memory_order_acquire);
      thread_.plans[call].store(plan_);
    } while (C10_UNLIKELY(plan_ != entry_.plan.load()));
    return plan_;
  }

  void end() {
    const size_t last = thread_.count - 1;
    if (C10_LIKELY(
            thread_.count != 0 && thread_.running[last] == reinterpret_cast<PyObject*>(&entry_) &&
            thread_.plans[last].load(std::memory_order_relaxed) == plan_)) {
      thread_.plans[last].store(nullptr, std::memory_order_release);
      thread_.count = last;
    } else {
      end_earlier_call(thread_, reinterpret_cast<PyObject*>(&entry_), plan_);
    }
    plan_ = nullptr;
  }

  Entry& entry_;
  Thread& thread_;
  PyObject* plan_ = nullptr;
  bool is_whole_ = true;
};

#else

// Holds on to the plan that a call follows; false with an exception if there is none any more.
class CurrentPlan {
 public:
  // No Python runs between the look at the entry and the end: in another thread it might end the
  // operator, whose table the plan points to.
  CurrentPlan(Entry& entry, Thread&) {
    while (C10_UNLIKELY(!is_usable(entry.plan.load(std::memory_order_relaxed)))) {
      if (!refresh_plan(entry))
        return;
    }
    if (C10_UNLIKELY(is_gone(entry)))
      refuse_gone(entry);
    else
      plan_ = new_reference(entry.plan);
  }
  // A THPObjectPtr would ask first, out of line, whether there still is an interpreter.
  ~CurrentPlan() {
    Py_XDECREF(plan_);
  }
  CurrentPlan(const CurrentPlan&) = delete;
  CurrentPlan& operator=(const CurrentPlan&) = delete;

  void forget() {
    plan_ = nullptr;
  }

  explicit operator bool() const {
    return plan_ != nullptr;
  }
  const Plan& operator*() const {
    return *reinterpret_cast<const Plan*>(plan_);
  }

 private:
  PyObject* plan_ = nullptr;
};

#endif

} // namespace

// A forced unwind has no object, and the sanitizer would not let its handler refer to that.
__attribute__((no_sanitize("null"))) PyObject* call_entry(
    Entry& entry,
    PyObject* dispatch,
    PyObject* next,
    PyObject* const* args,
    size_t nargsf,
    PyObject* keywords) {
  Thread& here = this_thread();
  if (C10_UNLIKELY(is_stack_low(here)))
    return refuse_depth(entry);
  CurrentPlan plan(entry, here);
  if (!plan)
    return nullptr;
#ifndef Py_GIL_DISABLED
  if (C10_UNLIKELY(here.count == here.room) && !make_room(here))
    return PyErr_NoMemory();
  Mark mark(here, reinterpret_cast<PyObject*>(&entry));
#endif
  Reason reason = Reason::Native;
  PyObject* result = nullptr;
  // No C++ exception may leave: the interpreter calls this as a C function. PyTorch's macro would
  // also collect warnings, which nothing here gives, and costs more for that than the rest.
  try {
    // What an overload called before may dispatch in Python; its packet's function does not.
    const bool enters_cpp = dispatch != nullptr && dispatch != entry.dispatch;
    result = try_call(*plan, args, nargsf, keywords, enters_cpp, reason);
#ifdef __GLIBCXX__
  } catch (const abi::__forced_unwind&) {
    // The thread ends here, as a daemon's does that wants to go on when Python has gone: whoever
    // stops this ends the process. It has no right to touch an object any more.
    plan.forget();
    throw;
#endif
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  const bool may_not_fit = reason == Reason::Binding || reason == Reason::ArgumentType;
  if (may_not_fit && next != nullptr &&
      is_passed_by((*plan).parameters, args, PyVectorcall_NARGS(nargsf), keywords))
    return PyObject_Vectorcall(next, args, nargsf, keywords);
  entry.counters.count(reason, here);
  if (C10_LIKELY(reason == Reason::Native))
    return result;
  if (C10_UNLIKELY(observer != nullptr) && entry.counters[size_t(reason)] == 1 &&
      !observe(entry, args, nargsf, keywords))
    return nullptr;
  if ((*plan).is_foreign)
    doubt(entry, reason);
  if (!has_lock && is_gone(entry)) { // since the call began
    refuse_gone(entry);
    return nullptr;
  }
  if (dispatch != nullptr)
    return PyObject_Vectorcall(dispatch, args, nargsf, keywords);
  THPObjectPtr callee;
  Py_BEGIN_CRITICAL_SECTION(reinterpret_cast<PyObject*>(&entry));
  callee = THPObjectPtr(Py_NewRef(entry.dispatch));
  Py_END_CRITICAL_SECTION();
  return PyObject_Vectorcall(callee.get(), args, nargsf, keywords);
}

// ------------------------------------------------------------------------------------------------
// Entry

namespace {

Entry& entry_of(PyObject* self) {
  return *reinterpret_cast<Entry*>(self);
}

PyObject* make_entry(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static const char* names[] = {"name", "refresh", nullptr};
  PyObject *name, *refresh;
  if (!PyArg_ParseTupleAndKeywords(
          args, keywords, "UO", const_cast<char**>(names), &name, &refresh))
    return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr)
    return nullptr;
  Entry& entry = entry_of(self);
  new (&entry.plan) PlanPointer(nullptr);
  new (&entry.exists) Existence();
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
  entry_of(self).exists.~shared_ptr();
  entry_of(self).counters.~Counters();
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* get_name(PyObject* self, void*) {
  return Py_NewRef(entry_of(self).name);
}

PyObject* get_plan(PyObject* self, void*) {
  PyObject* plan = new_reference(entry_of(self).plan);
  return plan != nullptr ? plan : Py_NewRef(Py_None);
}

PyObject* get_dispatch(PyObject* self, void*) {
  PyObject* dispatch;
  Py_BEGIN_CRITICAL_SECTION(self);
  dispatch = Py_XNewRef(entry_of(self).dispatch);
  Py_END_CRITICAL_SECTION();
  return dispatch != nullptr ? dispatch : Py_NewRef(Py_None);
}

int set_dispatch(PyObject* self, PyObject* value, void*) {
  PyObject* before;
  Py_BEGIN_CRITICAL_SECTION(self);
  before = std::exchange(entry_of(self).dispatch, Py_XNewRef(value));
  Py_END_CRITICAL_SECTION();
  Py_XDECREF(before);
  return 0;
}

int set_plan(PyObject* self, PyObject* value, void*) {
  if (value == nullptr || (value != Py_None && Py_TYPE(value) != plan_type)) {
    PyErr_SetString(PyExc_TypeError, "plan expects a Plan or None");
    return -1;
  }
  PyObject* plan = value == Py_None ? nullptr : Py_NewRef(value);
  if (plan != nullptr && entry_of(self).exists == nullptr)
    entry_of(self).exists = reinterpret_cast<Plan*>(plan)->exists;
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

// explain(*args, **kwargs): the reason; whether autograd, the version counter and the recording of
// a gradient, or the note that there is none, are on the way; the kernel; and the parameter that a
// reason about one argument is about
PyObject* explain(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  HANDLE_TH_ERRORS
  Entry& entry = entry_of(self);
  CurrentPlan plan(entry, this_thread());
  if (!plan)
    return nullptr;
  Values values((*plan).parameters);
  Decision decision = decide(*plan, values, args, size_t(count), keywords);
  const Gradient& gradient = (*plan).gradient;
  if (decision.records_gradient && gradient.record_body == nullptr &&
      is_for_dispatcher(gradient, values))
    decision.reason = Reason::Capture;
  return Py_BuildValue(
      "(i(OOO)On)",
      int(decision.reason),
      decision.route.through_autograd ? Py_True : Py_False,
      decision.route.through_version_counter ? Py_True : Py_False,
      decision.records_gradient || decision.notes_gradient ? Py_True : Py_False,
      decision.kernel ? decision.kernel->function : Py_None,
      Py_ssize_t(values.refused()));
  END_HANDLE_TH_ERRORS
}

PyGetSetDef entry_attributes[] = {
    {"name", get_name, nullptr, "The name of the operator, without its overload.", nullptr},
    {"plan", get_plan, set_plan, "The plan that calls follow; None after a registration.", nullptr},
    {"dispatch", get_dispatch, set_dispatch, "What calls the dispatcher.", nullptr},
    {"counters",
     get_counters,
     nullptr,
     "Calls by the reason that sent them to the dispatcher.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef entry_methods[] = {
    {"explain",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(explain)),
     METH_FASTCALL | METH_KEYWORDS,
     "How a call with these arguments would go."},
    {nullptr, nullptr, 0, nullptr},
};

// ------------------------------------------------------------------------------------------------
// Operator: what torch.ops calls
//
// A packet calls the first of its overloads whose schema the arguments fit, in the order in which
// they were defined. That is the first here whose plan takes the arguments as they are, if PyTorch
// would pass all overloads before it by.

struct Operator {
  PyObject_HEAD

      vectorcallfunc call;
  PyObject* owner; // the object of torch.ops that it was made for: just where that is
  PyObject* entry;
  PyObject* dispatch; // the C++ function whose place this object took
  PyObject* next;     // for a packet, the Operator of the next overload; nullptr if there is none
};

Operator& operator_of(PyObject* self) {
  return *reinterpret_cast<Operator*>(self);
}

// How many there are for each object. Nothing destroys it: the last of them may go when Python
// does.
auto& owners = *new std::unordered_map<PyObject*, size_t>();
auto& owners_mutex = *new std::mutex();

void remember_owner(PyObject* owner) {
  const std::lock_guard<std::mutex> lock(owners_mutex);
  ++owners[owner];
}

void forget_owner(PyObject* owner) {
  const std::lock_guard<std::mutex> lock(owners_mutex);
  const auto found = owners.find(owner);
  if (--found->second == 0)
    owners.erase(found);
}

PyObject* call_operator(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  Operator& op = operator_of(self);
  return call_entry(entry_of(op.entry), op.dispatch, op.next, args, nargsf, keywords);
}

PyObject* make_operator(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"owner", "entry", "dispatch", "next", nullptr};
  PyObject *owner, *entry, *dispatch, *next = nullptr;
  if (!PyArg_ParseTupleAndKeywords(
          args,
          keywords,
          "OO!O|O",
          const_cast<char**>(names),
          &owner,
          entry_type,
          &entry,
          &dispatch,
          &next))
    return nullptr;
  if (next == Py_None)
    next = nullptr;
  if (next != nullptr && Py_TYPE(next) != operator_type) {
    PyErr_SetString(PyExc_TypeError, "next expects an Operator or None");
    return nullptr;
  }
  remember_owner(owner);
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) {
    forget_owner(owner);
    return nullptr;
  }
  Operator& op = operator_of(self);
  op.owner = owner;
  op.call = call_operator;
  op.entry = Py_NewRef(entry);
  op.dispatch = Py_NewRef(dispatch);
  op.next = Py_XNewRef(next);
  return self;
  END_HANDLE_TH_ERRORS
}

int traverse_operator(PyObject* self, visitproc visit, void* arg) {
  Operator& op = operator_of(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(op.entry);
  Py_VISIT(op.dispatch);
  Py_VISIT(op.next);
  return 0;
}

// There is no tp_clear: it is called through its members, and those can be cleared themselves.
void dealloc_operator(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  forget_owner(operator_of(self).owner);
  Py_XDECREF(operator_of(self).entry);
  Py_XDECREF(operator_of(self).dispatch);
  Py_XDECREF(operator_of(self).next);
  type->tp_free(self);
  Py_DECREF(type);
}

// PyTorch hashes an operator by its function, and reads the function's name and module.
Py_hash_t hash_operator(PyObject* self) {
  return PyObject_Hash(operator_of(self).dispatch);
}

PyObject* operator_attribute(PyObject* self, PyObject* name) {
  // The type has a module of its own, in which nobody looks for the operator.
  if (PyUnicode_CompareWithASCIIString(name, "__module__") == 0)
    return PyObject_GetAttr(operator_of(self).dispatch, name);
  PyObject* found = PyObject_GenericGetAttr(self, name);
  if (found != nullptr || !PyErr_ExceptionMatches(PyExc_AttributeError))
    return found;
  PyErr_Clear();
  return PyObject_GetAttr(operator_of(self).dispatch, name);
}

PyMemberDef operator_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Operator, call), READONLY, nullptr},
    {"dispatch", T_OBJECT_EX, offsetof(Operator, dispatch), READONLY, nullptr},
    {"entry", T_OBJECT_EX, offsetof(Operator, entry), READONLY, nullptr},
    {"next", T_OBJECT, offsetof(Operator, next), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyTypeObject* add_type(PyObject* module, const char* name, PyType_Spec& spec) {
  PyObject* type = PyType_FromSpec(&spec);
  if (type != nullptr && PyModule_AddObjectRef(module, name, type) < 0)
    Py_CLEAR(type);
  return reinterpret_cast<PyTypeObject*>(type);
}

} // namespace

bool has_operator(PyObject* owner) {
  // Without the interpreter's lock, calls would wait here for one another, so ask the dictionary.
  return !has_lock || owners.find(owner) != owners.end();
}

int add_entry_types(PyObject* module) {
  static PyType_Slot entry_slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make_entry)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_entry)},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse_entry)},
      {Py_tp_clear, reinterpret_cast<void*>(clear_entry)},
      {Py_tp_getset, entry_attributes},
      {Py_tp_methods, entry_methods},
      {Py_tp_doc, const_cast<char*>("Where calls of an operator come in.")},
      {0, nullptr},
  };
  static PyType_Spec entry_spec = {
      "torchop._native._call_path.Entry",
      sizeof(Entry),
      0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
      entry_slots,
  };
  static PyType_Slot operator_slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make_operator)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_operator)},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse_operator)},
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_hash, reinterpret_cast<void*>(hash_operator)},
      {Py_tp_getattro, reinterpret_cast<void*>(operator_attribute)},
      {Py_tp_members, operator_members},
      {Py_tp_doc, const_cast<char*>("Stands where an object of torch.ops keeps its C++ function.")},
      {0, nullptr},
  };
  static PyType_Spec operator_spec = {
      "torchop._native._call_path.Operator",
      sizeof(Operator),
      0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
      operator_slots,
  };
  entry_type = add_type(module, "Entry", entry_spec);
  if (entry_type == nullptr)
    return -1;
  operator_type = add_type(module, "Operator", operator_spec);
  return operator_type == nullptr ? -1 : 0;
}

} // namespace torchop
