// choice.cpp: select one of several providers' kernels for each call, and cache the selections.
//
// Python code makes the selections. A selection depends on the open `torchop.priority` blocks, on
// `torch.use_deterministic_algorithms`, and on the metadata and values that a provider's function
// `supports` may read from the arguments. All of these are part of the cache key. Any other change,
// such as a new provider, creates a new call plan with a new Choice object, so its cache is empty.
#include "choice.h"

#include <structmember.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/graph_task.h>

#include "call_key.h"
#include "dispatch.h"
#include "python_node.h"
#include "types.h"

namespace torchop {

namespace {

// A cache that reaches one of these limits is cleared. Otherwise, it could grow without bound in
// programs that keep changing the settings or the shapes of arguments.
constexpr size_t max_selections = 64;
constexpr size_t max_keys = 4096;
constexpr size_t max_words = size_t{1} << 18; // 2 MiB for all keys

// The candidate kernels for calls with the same settings. The settings come from the open
// `torchop.priority` blocks, and the Python function `resolve` returns the candidates.
struct Selection {
  THPObjectPtr settings; // the combined settings of the open blocks; interned, so compare addresses
  bool is_deterministic;
  bool is_fixed;         // true if `function` is the kernel for all calls
  THPObjectPtr function; // otherwise, `function` takes the arguments and returns the kernel
};

// Guarded by the critical section in `call_choice`.
struct Cache {
  std::vector<Selection> selections;
  // The kernels that were selected for calls whose Selection is not fixed.
  std::unordered_map<CallKey, THPObjectPtr, CallKey::Hash> kernels;
  size_t words = 0; // in all keys of `kernels`
};

struct Choice {
  PyObject_HEAD

      vectorcallfunc call;
  PyObject* blocks;  // a ContextVar whose value is a tuple (combined settings, open blocks)
  PyObject* resolve; // the Python function resolve(settings, is_deterministic)
  Cache cache;
};

Choice& choice_of(PyObject* self) {
  return *reinterpret_cast<Choice*>(self);
}

// Swaps in an empty cache before releasing the references in the old one, because releasing them
// may run Python code that calls this Choice.
void clear_cache(Choice& choice) {
  const Cache before = std::exchange(choice.cache, Cache());
}

const Selection* find_selection(const Choice& choice, PyObject* settings, bool is_deterministic) {
  for (const Selection& selection : choice.cache.selections) {
    if (selection.settings.get() == settings && selection.is_deterministic == is_deterministic)
      return &selection;
  }
  return nullptr;
}

// Uses the address of the settings in the key. It is unique because the cache owns the settings,
// whereas the Selection itself may move in memory.
CallKey key_for(const Selection& selection) {
  return CallKey(
      reinterpret_cast<uintptr_t>(selection.settings.get()) | selection.is_deterministic);
}

// If the cache is full, clears it first.
const Selection* add_selection(Choice& choice, PyObject* settings, bool is_deterministic) {
  THPObjectPtr resolved = checked(PyObject_CallFunctionObjArgs(
      choice.resolve, settings, is_deterministic ? Py_True : Py_False, nullptr));
  PyObject* function;
  int is_fixed;
  if (!PyArg_ParseTuple(resolved.get(), "Op", &function, &is_fixed))
    throw_python_error();
  if (choice.cache.selections.size() >= max_selections)
    clear_cache(choice);
  // `resolve` runs Python code, so another thread may have added the same selection in the
  // meantime. Check again before adding it.
  if (const Selection* added = find_selection(choice, settings, is_deterministic))
    return added;
  choice.cache.selections.push_back(
      Selection{
          THPObjectPtr(Py_NewRef(settings)),
          is_deterministic,
          is_fixed != 0,
          THPObjectPtr(Py_NewRef(function))});
  return &choice.cache.selections.back();
}

// Selects the kernel for a call that is not in the cache by calling Python, and caches the kernel.
// Returns a new reference.
__attribute__((noinline, cold)) PyObject* select_in_python(
    Choice& choice,
    PyObject* settings,
    bool is_deterministic,
    PyObject* const* args,
    size_t count,
    PyObject* keywords) {
  const Selection* selection = find_selection(choice, settings, is_deterministic);
  if (selection == nullptr)
    selection = add_selection(choice, settings, is_deterministic);
  THPObjectPtr function(Py_NewRef(selection->function.get()));
  if (selection->is_fixed)
    return function.release();
  CallKey key = key_for(*selection);
  // Read the key before the call, because `supports` may modify a list argument.
  const bool is_known = key.read(args, count, keywords);
  THPObjectPtr kernel = checked(PyObject_Vectorcall(function.get(), args, count, keywords));
  if (!is_known)
    return kernel.release();
  if (choice.cache.kernels.size() >= max_keys || choice.cache.words + key.size() > max_words)
    clear_cache(choice);
  // The Python code may have cleared the cache. Then nothing keeps the settings alive and their
  // address may be reused, so the key must not be stored.
  if (find_selection(choice, settings, is_deterministic) != nullptr) {
    const auto [place, is_new] = choice.cache.kernels.try_emplace(key);
    if (is_new) {
      place->second = Py_NewRef(kernel.get());
      choice.cache.words += key.size();
    }
  }
  return kernel.release();
}

// Returns the value of the ContextVar `blocks` (new reference), which describes the open
// `torchop.priority` blocks. Threads of the autograd engine start with an empty context, so in such
// a thread, reads the context of the thread that called `backward()` instead, which
// torch/autograd/graph.py stores in ThreadLocalPythonObjects.
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
  const bool is_deterministic = at::globalContext().deterministicAlgorithms();
  // From here on, `settings` is borrowed. The context keeps it alive by owning the tuple, and no
  // Python code runs before we take a reference below.
  Py_DECREF(blocks);
  if (const Selection* selection = find_selection(choice, settings, is_deterministic)) {
    if (selection->is_fixed)
      return Py_NewRef(selection->function.get());
    CallKey key = key_for(*selection);
    if (C10_LIKELY(key.read(args, count, keywords))) {
      const auto known = choice.cache.kernels.find(key);
      if (C10_LIKELY(known != choice.cache.kernels.end()))
        return Py_NewRef(known->second.get());
    }
  }
  THPObjectPtr owned(Py_NewRef(settings));
  return select_in_python(choice, settings, is_deterministic, args, count, keywords);
}

PyObject* call_choice(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  PyObject* function = nullptr;
  // This critical section guards the cache. Like the GIL, it may be released whenever Python code
  // runs, so `find` checks the cache again after each call into Python.
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
  // `function` is not a THPObjectPtr, because the destructor would touch a Python object even if
  // the thread is being terminated during finalization.
  Py_DECREF(function);
  return result;
}

PyObject* make_choice(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *blocks, *resolve;
  if (!PyArg_ParseTuple(args, "O!O", &PyContextVar_Type, &blocks, &resolve))
    return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr)
    return nullptr;
  Choice& choice = choice_of(self);
  new (&choice.cache) Cache();
  choice.call = call_choice;
  choice.blocks = Py_NewRef(blocks);
  choice.resolve = Py_NewRef(resolve);
  return self;
}

int traverse_choice(PyObject* self, visitproc visit, void* arg) {
  const Choice& choice = choice_of(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(choice.blocks);
  Py_VISIT(choice.resolve);
  for (const Selection& selection : choice.cache.selections) {
    Py_VISIT(selection.settings.get());
    Py_VISIT(selection.function.get());
  }
  for (const auto& [key, kernel] : choice.cache.kernels)
    Py_VISIT(kernel.get());
  return 0;
}

// Like Plan, the type has no tp_clear, so that the garbage collector cannot clear these members
// while a call uses them.
void dealloc_choice(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Choice& choice = choice_of(self);
  choice.cache.~Cache();
  Py_DECREF(choice.blocks);
  Py_DECREF(choice.resolve);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef choice_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Choice, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

} // namespace

bool add_choice_type(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make_choice)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_choice)},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse_choice)},
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_members, choice_members},
      {Py_tp_doc, const_cast<char*>("Selects a provider for each call, and calls its kernel.")},
      {0, nullptr},
  };
  PyTypeObject* made;
  return add_type(
      module,
      "torchop._native._call_path.Choice",
      sizeof(Choice),
      slots,
      made,
      Py_TPFLAGS_HAVE_VECTORCALL);
}

} // namespace torchop
