// choice.cpp: which of the kernels of an operator runs a call, from a table of calls that were
// seen.
//
// Python decides, once for each key: what the open blocks of torchop.priority come to, whether only
// deterministic kernels are allowed, and what a function may read of the arguments. Whatever else
// changes a decision makes a new plan, which has a new table.
#include "choice.h"

#include <structmember.h>

#include <cstring>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/graph_task.h>

#include "arguments.h"
#include "dispatch.h"
#include "kinds.h"
#include "python_node.h"

namespace torchop {

namespace {

// A table is bounded: with one more, it begins again. So it never grows with calls of ever new
// sizes, and the ones that are common come back at once.
constexpr size_t most_keys = 4096;
constexpr size_t most_words = size_t{1} << 18; // of all keys: 2 MiB
constexpr size_t most_words_of_key = 4096;
constexpr size_t most_selections = 64;

// What is read of the arguments of a call, as numbers: two calls have the same only if no function
// can tell their arguments apart by shapes, strides, dtypes, devices and plain values.
class Key {
 public:
  // The first number says what the rest is about, and is set by whoever looks the key up.
  Key() : words_{0} {}

  // False where an argument is such that it is not known what a function could read of it.
  bool read(PyObject* const* args, size_t count, PyObject* keywords) {
    add(count);
    for (size_t index = 0; index < count; ++index) {
      if (!add_value(args[index]))
        return false;
    }
    const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t index = 0; index < named; ++index) {
      if (!add_value(PyTuple_GET_ITEM(keywords, index)) || !add_value(args[count + size_t(index)]))
        return false;
    }
    return words_.size() <= most_words_of_key;
  }

  void set_subject(uint64_t subject) {
    words_[0] = subject;
  }

  uint64_t hash() const {
    uint64_t hash = 0;
    for (const uint64_t word : words_) {
      hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 32;
    }
    return hash;
  }

  const uint64_t* begin() const {
    return words_.data();
  }
  size_t size() const {
    return words_.size();
  }

 private:
  // What the numbers that follow are, in the lowest byte of a word.
  enum class Tag : uint8_t {
    None,
    True,
    False,
    Int,
    Float,
    Complex,
    Str,
    Dtype,
    Device,
    Layout,
    MemoryFormat,
    List,
    Tensor,
  };

  void add(uint64_t word) {
    words_.push_back(word);
  }

  bool add_tag(Tag tag, uint64_t more = 0) {
    add(uint64_t(tag) | more << 8);
    return true;
  }

  void add_bytes(const void* bytes, size_t size) {
    const size_t start = words_.size();
    words_.resize(start + (size + sizeof(uint64_t) - 1) / sizeof(uint64_t)); // with zeros
    if (size != 0)
      std::memcpy(words_.data() + start, bytes, size);
  }

  bool add_number(Tag tag, double number) {
    add_tag(tag);
    add_bytes(&number, sizeof(number)); // not its value: 0.0 equals -0.0, and nan nothing
    return true;
  }

  static uint64_t packed(c10::Device device) {
    return uint64_t(uint8_t(device.type())) | uint64_t(uint8_t(device.index())) << 8;
  }

  bool add_value(PyObject* value) {
    if (is_tensor(value))
      return add_tensor(*impl_of(value));
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value) || THPSize_Check(value)) {
      const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
      add_tag(Tag::List, uint64_t(size));
      for (Py_ssize_t index = 0; index < size; ++index) {
        PyObject* item = PySequence_Fast_GET_ITEM(value, index);
        if (!(is_tensor(item) ? add_tensor(*impl_of(item)) : add_plain(item)))
          return false;
      }
      return true;
    }
    return add_plain(value);
  }

  bool add_tensor(const at::TensorImpl& impl) {
    // Such a tensor has sizes and strides that are numbers, and reading them runs no Python.
    if (C10_UNLIKELY(!has_plain_keys(impl) || impl.has_symbolic_sizes_strides()))
      return false;
    const c10::IntArrayRef sizes = impl.sizes(), strides = impl.strides();
    const auto dtype = uint64_t(c10::typeMetaToScalarType(impl.dtype()));
    add_tag(Tag::Tensor, dtype | packed(impl.device()) << 8 | uint64_t(sizes.size()) << 24);
    for (const int64_t size : sizes)
      add(uint64_t(size));
    for (const int64_t stride : strides)
      add(uint64_t(stride));
    return true;
  }

  bool add_plain(PyObject* value) {
    if (value == Py_None)
      return add_tag(Tag::None);
    if (PyBool_Check(value))
      return add_tag(value == Py_True ? Tag::True : Tag::False);
    if (PyLong_CheckExact(value)) {
      int overflow = 0;
      const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
      add_tag(Tag::Int);
      add(uint64_t(number));
      return overflow == 0;
    }
    if (PyFloat_CheckExact(value))
      return add_number(Tag::Float, PyFloat_AS_DOUBLE(value));
    if (PyUnicode_CheckExact(value)) {
      const auto kind = size_t(PyUnicode_KIND(value)), length = size_t(PyUnicode_GET_LENGTH(value));
      add_tag(Tag::Str, kind | length << 8);
      add_bytes(PyUnicode_DATA(value), kind * length);
      return true;
    }
    return add_unusual(value);
  }

  __attribute__((noinline)) bool add_unusual(PyObject* value) {
    if (PyComplex_CheckExact(value)) {
      add_number(Tag::Complex, PyComplex_RealAsDouble(value));
      return add_number(Tag::Complex, PyComplex_ImagAsDouble(value));
    }
    if (THPDtype_Check(value))
      return add_tag(Tag::Dtype, uint64_t(reinterpret_cast<THPDtype*>(value)->scalar_type));
    if (THPDevice_Check(value))
      return add_tag(Tag::Device, packed(reinterpret_cast<THPDevice*>(value)->device));
    if (THPLayout_Check(value))
      return add_tag(Tag::Layout, uint64_t(reinterpret_cast<THPLayout*>(value)->layout));
    if (THPMemoryFormat_Check(value)) {
      const auto format = reinterpret_cast<THPMemoryFormat*>(value)->memory_format;
      return add_tag(Tag::MemoryFormat, uint64_t(format));
    }
    return false;
  }

  c10::SmallVector<uint64_t, 40> words_;
};

// The functions of the calls that were seen, by key. An open hash table, whose keys lie in one
// array.
class Table {
 public:
  PyObject* find(const Key& key, uint64_t hash) const { // borrowed
    for (size_t place = hash & mask(); !slots_.empty(); place = (place + 1) & mask()) {
      const Slot& slot = slots_[place];
      if (slot.function == nullptr)
        return nullptr;
      if (slot.hash == hash && slot.size == key.size() &&
          std::memcmp(&words_[slot.start], key.begin(), key.size() * sizeof(uint64_t)) == 0)
        return slot.function;
    }
    return nullptr;
  }

  // Adds a key that is not there. The caller has made sure that there is room.
  void add(const Key& key, uint64_t hash, PyObject* function) {
    if (2 * (count_ + 1) > slots_.size())
      grow();
    const Slot slot{hash, uint32_t(words_.size()), uint32_t(key.size()), Py_NewRef(function)};
    words_.insert(words_.end(), key.begin(), key.begin() + key.size());
    put(slot);
    ++count_;
  }

  bool has_room(const Key& key) const {
    return count_ < most_keys && words_.size() + key.size() <= most_words;
  }

  size_t count() const {
    return count_;
  }

  template <class Visitor>
  void each_function(Visitor&& visit) const {
    for (const Slot& slot : slots_) {
      if (slot.function != nullptr)
        visit(slot.function);
    }
  }

 private:
  struct Slot {
    uint64_t hash = 0;
    uint32_t start = 0, size = 0; // of the key, among the words
    PyObject* function = nullptr; // nullptr for a free place
  };

  size_t mask() const {
    return slots_.size() - 1; // their number is a power of two
  }

  void put(const Slot& slot) {
    size_t place = slot.hash & mask();
    while (slots_[place].function != nullptr)
      place = (place + 1) & mask();
    slots_[place] = slot;
  }

  void grow() {
    std::vector<Slot> before(std::max<size_t>(16, 2 * slots_.size()));
    before.swap(slots_);
    for (const Slot& slot : before) {
      if (slot.function != nullptr)
        put(slot);
    }
  }

  std::vector<Slot> slots_;
  std::vector<uint64_t> words_;
  size_t count_ = 0;
};

// What is left of the kernels by an order, and by whether only deterministic ones are allowed.
struct Selection {
  PyObject* settings; // what the open blocks come to: the same blocks have the same object
  bool is_deterministic;
  PyObject* object;   // its `answer` tells the function of a call
  PyObject* function; // of all calls; nullptr where it depends on the arguments
};

struct Known {
  std::vector<Selection> selections;
  Table table; // the subject of a key is the place of its selection
};

struct Choice {
  PyObject_HEAD

      vectorcallfunc call;
  PyObject* blocks; // the ContextVar of the open blocks; what they come to is the first of a tuple
  PyObject* select; // select(settings, is_deterministic) makes a selection
  bool asks_for_determinism; // whether it matters
  Known known;
};

Choice& choice_of(PyObject* self) {
  return *reinterpret_cast<Choice*>(self);
}

void drop(Known& known) {
  for (const Selection& selection : known.selections) {
    Py_DECREF(selection.settings);
    Py_DECREF(selection.object);
    Py_XDECREF(selection.function);
  }
  known.table.each_function([](PyObject* function) { Py_DECREF(function); });
}

// Begins again. What goes may run Python, which may call the operator: the tables are whole by
// then.
void forget(Choice& choice) {
  Known before;
  std::swap(before, choice.known);
  drop(before);
}

constexpr size_t nowhere = ~size_t{0};

size_t place_of(const Choice& choice, PyObject* settings, bool is_deterministic) {
  const std::vector<Selection>& selections = choice.known.selections;
  for (size_t place = 0; place < selections.size(); ++place) {
    if (selections[place].settings == settings &&
        selections[place].is_deterministic == is_deterministic)
      return place;
  }
  return nowhere;
}

// Has Python make a selection, and keeps it. Returns its place, or throws.
size_t add_selection(Choice& choice, PyObject* settings, bool is_deterministic) {
  THPObjectPtr object = checked(PyObject_CallFunctionObjArgs(
      choice.select, settings, is_deterministic ? Py_True : Py_False, nullptr));
  THPObjectPtr function = checked(PyObject_GetAttrString(object.get(), "function"));
  if (choice.known.selections.size() >= most_selections)
    forget(choice);
  // Python ran, so another thread may have come first.
  if (const size_t place = place_of(choice, settings, is_deterministic); place != nowhere)
    return place;
  choice.known.selections.push_back(
      Selection{
          Py_NewRef(settings),
          is_deterministic,
          object.release(),
          function.get() == Py_None ? nullptr : function.release()});
  return choice.known.selections.size() - 1;
}

// Asks Python about a call of which no table knows. Returns a new reference, or throws.
__attribute__((noinline, cold)) PyObject* ask(
    Choice& choice,
    PyObject* settings,
    bool is_deterministic,
    PyObject* const* args,
    size_t count,
    PyObject* keywords) {
  size_t place = place_of(choice, settings, is_deterministic);
  if (place == nowhere)
    place = add_selection(choice, settings, is_deterministic);
  if (PyObject* function = choice.known.selections[place].function; function != nullptr)
    return Py_NewRef(function);
  Key key; // of now, because whoever is asked may write into a list
  const bool is_known = key.read(args, count, keywords);
  THPObjectPtr object(Py_NewRef(choice.known.selections[place].object));
  THPObjectPtr positional = checked(PyTuple_New(Py_ssize_t(count)));
  for (size_t index = 0; index < count; ++index)
    PyTuple_SET_ITEM(positional.get(), index, Py_NewRef(args[index]));
  THPObjectPtr named = checked(PyDict_New());
  for (Py_ssize_t index = 0; keywords != nullptr && index < PyTuple_GET_SIZE(keywords); ++index) {
    PyObject* name = PyTuple_GET_ITEM(keywords, index);
    if (PyDict_SetItem(named.get(), name, args[count + size_t(index)]) < 0)
      throw python_error();
  }
  THPObjectPtr name = checked(PyUnicode_InternFromString("answer"));
  THPObjectPtr answer = checked(
      PyObject_CallMethodObjArgs(object.get(), name.get(), positional.get(), named.get(), nullptr));
  PyObject* function;
  int is_lasting;
  if (!PyArg_ParseTuple(answer.get(), "Op", &function, &is_lasting))
    throw python_error();
  // Python ran: everything may have begun again since, and another thread may have asked the same.
  place = place_of(choice, settings, is_deterministic);
  if (is_known && is_lasting != 0 && place != nowhere &&
      choice.known.selections[place].object == object.get()) {
    key.set_subject(place);
    const uint64_t hash = key.hash();
    if (choice.known.table.find(key, hash) == nullptr) {
      if (choice.known.table.has_room(key))
        choice.known.table.add(key, hash, function);
      else
        forget(choice);
    }
  }
  return Py_NewRef(function);
}

// What blocks are open, as a new reference; or throws. A thread that runs a backward has those of
// where it began: PyTorch carries the context there.
C10_ALWAYS_INLINE PyObject* open_blocks(const Choice& choice) {
  PyObject* blocks;
  if (C10_UNLIKELY(PyContextVar_Get(choice.blocks, nullptr, &blocks) < 0))
    throw python_error();
  const bool is_open = PyTuple_GET_SIZE(PyTuple_GET_ITEM(blocks, 1)) != 0;
  if (C10_LIKELY(is_open || torch::autograd::get_current_graph_task_id() == -1))
    return blocks;
  THPObjectPtr own(blocks);
  static const std::string& key = *new std::string("context");
  using Carried = at::impl::ThreadLocalPythonObjects;
  PyObject* context = Carried::contains(key) ? Carried::get(key)->ptr(getPyInterpreter()) : Py_None;
  if (!PyContext_CheckExact(context)) // None after another backward inside of this one
    return own.release();
  const int is_there = PySequence_Contains(context, choice.blocks);
  if (is_there < 0)
    throw python_error();
  return is_there == 0 ? own.release()
                       : checked(PyObject_GetItem(context, choice.blocks)).release();
}

// The function for a call, as a new reference; or throws.
C10_ALWAYS_INLINE PyObject* find(
    Choice& choice, PyObject* const* args, size_t count, PyObject* keywords) {
  PyObject* blocks = open_blocks(choice);
  PyObject* settings = PyTuple_GET_ITEM(blocks, 0);
  const bool is_deterministic =
      choice.asks_for_determinism && at::globalContext().deterministicAlgorithms();
  // The context holds on to the blocks, and nothing runs that could change it.
  Py_DECREF(blocks);
  const size_t place = place_of(choice, settings, is_deterministic);
  if (C10_LIKELY(place != nowhere)) {
    PyObject* function = choice.known.selections[place].function;
    if (function != nullptr)
      return Py_NewRef(function);
    Key key;
    if (C10_LIKELY(key.read(args, count, keywords))) {
      key.set_subject(place);
      if ((function = choice.known.table.find(key, key.hash())) != nullptr)
        return Py_NewRef(function);
    }
  }
  THPObjectPtr kept(Py_NewRef(settings));
  return ask(choice, settings, is_deterministic, args, count, keywords);
}

PyObject* call_choice(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  PyObject* function = nullptr;
  // Whenever Python runs, another thread may come in between, as with the interpreter's lock.
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
  // Not in a destructor: a thread that ends in the kernel because Python has gone passes this by.
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
  new (&choice.known) Known();
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
  for (const Selection& selection : choice.known.selections) {
    Py_VISIT(selection.settings);
    Py_VISIT(selection.object);
    Py_VISIT(selection.function);
  }
  int stop = 0;
  choice.known.table.each_function([&](PyObject* function) {
    if (stop == 0)
      stop = visit(function, arg);
  });
  return stop;
}

// There is no tp_clear, as for the plan that it is in.
void dealloc_choice(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Choice& choice = choice_of(self);
  drop(choice.known);
  choice.known.~Known();
  Py_DECREF(choice.blocks);
  Py_DECREF(choice.select);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* get_count(PyObject* self, void*) {
  return PyLong_FromSize_t(choice_of(self).known.table.count());
}

PyMemberDef choice_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Choice, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef choice_attributes[] = {
    {"count", get_count, nullptr, "How many keys the table has.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

} // namespace

int add_choice_type(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make_choice)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_choice)},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse_choice)},
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_members, choice_members},
      {Py_tp_getset, choice_attributes},
      {Py_tp_doc, const_cast<char*>("Calls the kernel that a call is for.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {
      "torchop._native._call_path.Choice",
      sizeof(Choice),
      0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
      slots,
  };
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr)
    return -1;
  return PyModule_AddObject(module, "Choice", type);
}

} // namespace torchop
