// choice.cpp: select one of several providers' kernels for each call, and cache the selections.
//
// Selections are made in Python. A selection depends on the open `torchop.priority` blocks, on
// `torch.use_deterministic_algorithms`, and on the metadata and values that a provider's function
// `supports` may read from the arguments. All of these are part of the cache key. If anything else
// changes, for example because a provider is added, a new call plan has a new Choice object.
#include "choice.h"

#include <structmember.h>

#include <vector>

#include <ATen/Context.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/graph_task.h>

#include "dispatch.h"
#include "python_node.h"
#include "seen_calls.h"
#include "types.h"

namespace torchop {

namespace {

// If the cache contains this many selections, it is cleared. Otherwise the cache could grow
// forever, because each new combination of settings adds a selection.
constexpr size_t max_selections = 64;

// The result of the Python function `select` for one combination of settings, which come from the
// open `torchop.priority` blocks. Owns all references.
struct Selection {
  PyObject* settings; // the combined settings of the open blocks; interned, so compare addresses
  bool is_deterministic;
  PyObject* object;   // the selection in Python; `object.answer(args, kwargs)` returns a kernel
  PyObject* function; // the kernel for all calls; nullptr if the kernel depends on the arguments
};

// The selections, and for selections that depend on the arguments, the kernels that were selected
// for calls. Guarded by the critical section in `call_choice`.
struct Cache {
  std::vector<Selection> selections;
  SeenCalls table; // the subject of each key is an index into `selections`
};

struct Choice {
  PyObject_HEAD

      vectorcallfunc call;
  PyObject* blocks;          // a ContextVar whose value is a tuple (combined settings, open blocks)
  PyObject* select;          // the Python function select(settings, is_deterministic) -> Selection
  bool asks_for_determinism; // true if a provider is nondeterministic, so the setting matters
  Cache cache;
};

Choice& choice_of(PyObject* self) {
  return *reinterpret_cast<Choice*>(self);
}

void release(Cache& cache) {
  for (const Selection& selection : cache.selections) {
    Py_DECREF(selection.settings);
    Py_DECREF(selection.object);
    Py_XDECREF(selection.function);
  }
  cache.table.each_function([](PyObject* function) { Py_DECREF(function); });
}

// Replaces the cache with an empty one before releasing the references, because releasing them may
// run Python code that calls this Choice.
void clear_cache(Choice& choice) {
  Cache before;
  std::swap(before, choice.cache);
  release(before);
}

constexpr size_t no_index = ~size_t{0};

size_t index_of(const Choice& choice, PyObject* settings, bool is_deterministic) {
  const std::vector<Selection>& selections = choice.cache.selections;
  for (size_t position = 0; position < selections.size(); ++position) {
    if (selections[position].settings == settings &&
        selections[position].is_deterministic == is_deterministic)
      return position;
  }
  return no_index;
}

// If the cache is full, clears it first. Returns the index of the new selection.
size_t add_selection(Choice& choice, PyObject* settings, bool is_deterministic) {
  THPObjectPtr object = checked(PyObject_CallFunctionObjArgs(
      choice.select, settings, is_deterministic ? Py_True : Py_False, nullptr));
  THPObjectPtr function = checked(PyObject_GetAttrString(object.get(), "function"));
  if (choice.cache.selections.size() >= max_selections)
    clear_cache(choice);
  // `select` runs Python code, so another thread may have added the same selection in the meantime.
  // Look it up again before adding it.
  if (const size_t position = index_of(choice, settings, is_deterministic); position != no_index)
    return position;
  choice.cache.selections.push_back(
      Selection{
          Py_NewRef(settings),
          is_deterministic,
          object.release(),
          function.get() == Py_None ? nullptr : function.release()});
  return choice.cache.selections.size() - 1;
}

// Calls Python to select the kernel for a call that is not in the cache, and caches the kernel.
// Returns a new reference.
__attribute__((noinline, cold)) PyObject* select_in_python(
    Choice& choice,
    PyObject* settings,
    bool is_deterministic,
    PyObject* const* args,
    size_t count,
    PyObject* keywords) {
  size_t position = index_of(choice, settings, is_deterministic);
  if (position == no_index)
    position = add_selection(choice, settings, is_deterministic);
  if (PyObject* function = choice.cache.selections[position].function; function != nullptr)
    return Py_NewRef(function);
  CallKey key; // compute it now, because `supports` may modify a list argument
  const bool is_known = key.read(args, count, keywords);
  THPObjectPtr object(Py_NewRef(choice.cache.selections[position].object));
  THPObjectPtr positional = checked(PyTuple_New(Py_ssize_t(count)));
  for (size_t index = 0; index < count; ++index)
    PyTuple_SET_ITEM(positional.get(), index, Py_NewRef(args[index]));
  THPObjectPtr named = checked(PyDict_New());
  for (Py_ssize_t index = 0; keywords != nullptr && index < PyTuple_GET_SIZE(keywords); ++index) {
    PyObject* name = PyTuple_GET_ITEM(keywords, index);
    if (PyDict_SetItem(named.get(), name, args[count + size_t(index)]) < 0)
      throw_python_error();
  }
  THPObjectPtr name = checked(PyUnicode_InternFromString("answer"));
  THPObjectPtr function = checked(
      PyObject_CallMethodObjArgs(object.get(), name.get(), positional.get(), named.get(), nullptr));
  // This Python code may have modified the cache, so look up the index again.
  position = index_of(choice, settings, is_deterministic);
  if (is_known && position != no_index) {
    key.set_subject(position);
    const uint64_t hash = key.hash();
    if (choice.cache.table.find(key, hash) == nullptr) {
      if (choice.cache.table.has_capacity(key))
        choice.cache.table.add(key, hash, function.get());
      else
        clear_cache(choice);
    }
  }
  return function.release();
}

// Returns the value of the ContextVar `blocks` (new reference), which describes the open
// `torchop.priority` blocks. A thread of the autograd engine starts with an empty context. In such
// a thread, reads the context of the thread that called `backward()`, which torch/autograd/graph.py
// stores in ThreadLocalPythonObjects.
C10_ALWAYS_INLINE PyObject* open_blocks(const Choice& choice) {
  PyObject* blocks;
  if (C10_UNLIKELY(PyContextVar_Get(choice.blocks, nullptr, &blocks) < 0))
    throw_python_error();
  const bool is_open = PyTuple_GET_SIZE(PyTuple_GET_ITEM(blocks, 1)) != 0;
  if (C10_LIKELY(is_open || torch::autograd::get_current_graph_task_id() == -1))
    return blocks;
  THPObjectPtr own(blocks);
  PyObject* context = get_obj_in_tls("context"); // may be None after a nested backward
  if (context == nullptr || !PyContext_CheckExact(context))
    return own.release();
  const int is_there = PySequence_Contains(context, choice.blocks);
  if (is_there < 0)
    throw_python_error();
  return is_there == 0 ? own.release()
                       : checked(PyObject_GetItem(context, choice.blocks)).release();
}

C10_ALWAYS_INLINE PyObject* find(
    Choice& choice, PyObject* const* args, size_t count, PyObject* keywords) {
  PyObject* blocks = open_blocks(choice);
  PyObject* settings = PyTuple_GET_ITEM(blocks, 0);
  const bool is_deterministic =
      choice.asks_for_determinism && at::globalContext().deterministicAlgorithms();
  // From here on, `settings` is borrowed. It stays alive because the context owns the tuple, and no
  // Python code runs before we take a reference below.
  Py_DECREF(blocks);
  const size_t position = index_of(choice, settings, is_deterministic);
  if (C10_LIKELY(position != no_index)) {
    PyObject* function = choice.cache.selections[position].function;
    if (function != nullptr)
      return Py_NewRef(function);
    CallKey key;
    if (C10_LIKELY(key.read(args, count, keywords))) {
      key.set_subject(position);
      if ((function = choice.cache.table.find(key, key.hash())) != nullptr)
        return Py_NewRef(function);
    }
  }
  THPObjectPtr owned(Py_NewRef(settings));
  return select_in_python(choice, settings, is_deterministic, args, count, keywords);
}

PyObject* call_choice(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  PyObject* function = nullptr;
  // This critical section guards the cache. Like the GIL, it may be released whenever Python code
  // runs, so `find` checks the cache again after each call to Python.
  Py_BEGIN_CRITICAL_SECTION(self);
  try {
    function = find(choice_of(self), args, PyVectorcall_NARGS(nargsf), keywords);
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  Py_END_CRITICAL_SECTION();
  if (function == nullptr)
    return nullptr;
  PyObject* result = call_kernel(function, args, nargsf, keywords);
  // `function` is not a THPObjectPtr, because the destructor would touch a Python object if the
  // thread is terminated during finalization.
  Py_DECREF(function);
  return result;
}

PyObject* make_choice(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static const char* names[] = {"blocks", "select", "asks_for_determinism", nullptr};
  PyObject *blocks, *select;
  int asks_for_determinism;
  if (!PyArg_ParseTupleAndKeywords(
          args,
          keywords,
          "O!Op",
          const_cast<char**>(names),
          &PyContextVar_Type,
          &blocks,
          &select,
          &asks_for_determinism))
    return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr)
    return nullptr;
  Choice& choice = choice_of(self);
  new (&choice.cache) Cache();
  choice.call = call_choice;
  choice.blocks = Py_NewRef(blocks);
  choice.select = Py_NewRef(select);
  choice.asks_for_determinism = asks_for_determinism != 0;
  return self;
}

int traverse_choice(PyObject* self, visitproc visit, void* arg) {
  const Choice& choice = choice_of(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(choice.blocks);
  Py_VISIT(choice.select);
  for (const Selection& selection : choice.cache.selections) {
    Py_VISIT(selection.settings);
    Py_VISIT(selection.object);
    Py_VISIT(selection.function);
  }
  int stop = 0;
  choice.cache.table.each_function([&](PyObject* function) {
    if (stop == 0)
      stop = visit(function, arg);
  });
  return stop;
}

// Like Plan, the type has no tp_clear, because the garbage collector must not clear these members
// while a call uses them.
void dealloc_choice(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Choice& choice = choice_of(self);
  release(choice.cache);
  choice.cache.~Cache();
  Py_DECREF(choice.blocks);
  Py_DECREF(choice.select);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* get_count(PyObject* self, void*) {
  return PyLong_FromSize_t(choice_of(self).cache.table.count());
}

PyMemberDef choice_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Choice, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef choice_attributes[] = {
    {"count", get_count, nullptr, "The number of cached calls.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

} // namespace

bool add_choice_type(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make_choice)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_choice)},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse_choice)},
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_members, choice_members},
      {Py_tp_getset, choice_attributes},
      {Py_tp_doc, const_cast<char*>("Selects a provider for each call, and calls its kernel.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {
      "torchop._native._call_path.Choice",
      sizeof(Choice),
      0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
      slots,
  };
  PyTypeObject* made;
  return add_type(module, spec, made);
}

} // namespace torchop
