// plan.cpp: the Python type Plan. _call_path.pyi explains the arguments of the constructor.
#include "plan.h"

#include "types.h"

namespace torchop {

PyTypeObject* plan_type = nullptr;

namespace {

// Returns a number that changes whenever the dict is modified. Python 3.12 deprecated these version
// tags, so returns 0 there and in later versions.
uint64_t version_of(PyObject* dictionary) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dictionary)->ma_version_tag;
#else
  return 0;
#endif
}

// Returns whether a dict or set still has the same entry as when the plan was compiled. All keys
// are strings or None, so looking them up runs no Python code.
bool is_current(const Plan::Source& source) {
  if (!PyDict_CheckExact(source.container))
    return (PySet_GET_SIZE(source.container) != 0 &&
            PySet_Contains(source.container, source.key) == 1) == (source.value == Py_True);
  const uint64_t version = version_of(source.container);
  if (C10_LIKELY(version != 0 && version == source.version))
    return true;
  if (PyDict_GetItemWithError(source.container, source.key) != source.value)
    return false;
  if (version != 0)
    source.version = version;
  return true;
}

} // namespace

Plan::~Plan() {
  delete fallback_operator.load();
  delete residuals.first_guard.load();
  Py_XDECREF(owned_objects);
}

bool is_outdated(const Plan& plan) {
  for (const Plan::Source& source : plan.sources) {
    if (C10_UNLIKELY(!is_current(source)))
      return true;
  }
  return false;
}

namespace {

PyObject* none_to_null(PyObject* object) {
  return object == Py_None ? nullptr : object;
}

// Parses a tuple (name, type, is_mutated) or (name, type, is_mutated, default). Sets `is_known` to
// false if native calls do not support the type.
bool read_parameter(PyObject* item, Parameter& parameter, int& is_mutated, bool& is_known) {
  const char* type;
  if (!PyArg_ParseTuple(
          item, "Usp|O", &parameter.name, &type, &is_mutated, &parameter.default_value))
    return false;
  is_known = parse_kind(type, parameter.kind);
  return true;
}

bool read_parameters(PyObject* items, PyObject* keyword_names, Plan& plan) {
  Parameters& parameters = plan.parameters;
  const Py_ssize_t count = PyTuple_GET_SIZE(items);
  const Py_ssize_t keyword_only = PyTuple_GET_SIZE(keyword_names);
  parameters.positional = size_t(count - keyword_only);
  parameters.keyword_names = keyword_only == 0 ? nullptr : keyword_names;
  bool has_lists = false;
  for (Py_ssize_t index = 0; index < count; ++index) {
    Parameter& parameter = parameters.all.emplace_back();
    int is_mutated;
    bool is_known;
    if (!read_parameter(PyTuple_GET_ITEM(items, index), parameter, is_mutated, is_known))
      return false;
    if (!is_known && plan.unknown_parameter < 0)
      plan.unknown_parameter = index;
    const bool is_just_tensor =
        parameter.kind.holds_tensors() && !parameter.kind.is_list && !parameter.kind.is_optional;
    if (is_just_tensor && parameters.leading_tensors == size_t(index))
      ++parameters.leading_tensors;
    has_lists |= parameter.kind.is_list;
    parameters.has_tensor_lists |= parameter.kind.is_list && parameter.kind.holds_tensors();
    if (is_mutated != 0)
      plan.mutated.push_back(size_t(index));
  }
  // A call can pass the caller's array of arguments on to the kernel, unless the operator has
  // keyword-only parameters or lists. The kernel receives a copy of each list, so calls with lists
  // need a new array.
  if (keyword_only == 0 && !has_lists)
    parameters.pass_through_count = parameters.positional;
  return true;
}

void read_defaults(const c10::FunctionSchema& schema, bool are_dropped, Parameters& parameters) {
  for (size_t index = 0; index < parameters.size(); ++index) {
    Parameter& parameter = parameters.all[index];
    if (parameter.default_value == nullptr)
      continue;
    const auto& schema_default = schema.arguments()[index].default_value();
    parameter.is_device_string = parameter.kind.base == Base::Device &&
        schema_default.has_value() && schema_default->isString();
    parameters.has_device_string_defaults |= are_dropped && parameter.is_device_string;
    parameters.drops_defaults |= are_dropped;
  }
}

bool lists_may_hold_none(const Parameters& parameters) {
  bool found = false;
  for (const Parameter& parameter : parameters.all)
    found |= parameter.kind.holds_tensors() && parameter.kind.items_are_optional;
  return found;
}

bool read_sources(PyObject* sources, Plan& plan) {
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(sources); ++index) {
    Plan::Source source;
    if (!PyArg_ParseTuple(
            PyTuple_GET_ITEM(sources, index), "OOO", &source.container, &source.key, &source.value))
      return false;
    const bool is_simple = source.key == Py_None || PyUnicode_CheckExact(source.key);
    if (!is_simple ||
        !(PyDict_CheckExact(source.container) || PySet_CheckExact(source.container))) {
      PyErr_SetString(PyExc_TypeError, "a source is a dict or a set, and a str or None");
      return false;
    }
    plan.sources.push_back(source);
  }
  return true;
}

bool read_layouts(PyObject* items, Plan& plan) {
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(items); ++index) {
    Py_ssize_t parameter;
    int channels_last;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(items, index), "np", &parameter, &channels_last))
      return false;
    plan.layouts.push_back({size_t(parameter), channels_last != 0});
  }
  return true;
}

bool read_returns(PyObject* kinds, PyObject* parameters, bool are_fresh, Returns& returns) {
  returns.count = size_t(PyTuple_GET_SIZE(kinds));
  returns.are_fresh = are_fresh;
  for (size_t index = 0; index < returns.count; ++index) {
    const char* kind = PyUnicode_AsUTF8(PyTuple_GET_ITEM(kinds, index));
    if (kind == nullptr)
      return false;
    const bool is_optional = std::string_view(kind) == "Optional[Tensor]";
    const bool is_list = std::string_view(kind) == "List[Tensor]";
    const bool is_int = std::string_view(kind) == "int";
    returns.are_checked &= is_optional || is_list || is_int || std::string_view(kind) == "Tensor";
    returns.has_lists_or_ints |= is_list || is_int;
    returns.are_optional.push_back(is_optional);
    returns.are_lists.push_back(is_list);
    returns.are_ints.push_back(is_int);
  }
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(parameters); ++index)
    returns.parameters.push_back(PyLong_AsSize_t(PyTuple_GET_ITEM(parameters, index)));
  return !PyErr_Occurred();
}

bool read_residuals(PyObject* given, Residuals& residuals) {
  return PyArg_ParseTuple(
             given,
             "OO!OOOnOOO",
             &residuals.type,
             &PyDict_Type,
             &residuals.recording,
             &residuals.recording_state,
             &residuals.residuals_class,
             &residuals.make_request,
             &residuals.count,
             &residuals.setup,
             &residuals.guard,
             &residuals.mark) != 0;
}

PyObject* make_plan(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  HANDLE_TH_ERRORS
  static const char* names[] = {
      "name",
      "overload",
      "parameters",
      "keyword_names",
      "kernels",
      "own_kernels",
      "returns",
      "returned_parameters",
      "are_fresh",
      "gradient",
      "finish",
      "sources",
      "is_foreign",
      "as_dispatched",
      "convert",
      "residuals",
      "layouts",
      nullptr};
  const char *name, *overload;
  PyObject *parameters, *keyword_names, *kernels, *returns, *returned, *gradient, *finish;
  PyObject *autograd, *version_counter, *backend_select;
  PyObject *sources = nullptr, *convert = Py_None, *residuals = Py_None, *layouts = nullptr;
  int are_fresh, is_foreign = 0, as_dispatched = 0;
  if (!PyArg_ParseTupleAndKeywords(
          args,
          keywords,
          "ssO!O!O!(OOO)O!O!pOO|O!ppOOO!",
          const_cast<char**>(names),
          &name,
          &overload,
          &PyTuple_Type,
          &parameters,
          &PyTuple_Type,
          &keyword_names,
          &PyTuple_Type,
          &kernels,
          &autograd,
          &version_counter,
          &backend_select,
          &PyTuple_Type,
          &returns,
          &PyTuple_Type,
          &returned,
          &are_fresh,
          &gradient,
          &finish,
          &PyTuple_Type,
          &sources,
          &is_foreign,
          &as_dispatched,
          &convert,
          &residuals,
          &PyTuple_Type,
          &layouts))
    return nullptr;
  THPObjectPtr self(type->tp_alloc(type, 0));
  if (!self)
    return nullptr;
  // Construct the plan before anything can fail, because tp_alloc only fills the memory with zeros
  // and dealloc_plan always calls the destructor.
  Plan& plan = *new (&plan_of(self.get())) Plan();
  plan.finish = finish;
  plan.convert = none_to_null(convert);
  plan.is_foreign = is_foreign != 0;
  plan.owned_objects = PyTuple_Pack(
      11,
      parameters,
      keyword_names,
      kernels,
      autograd,
      version_counter,
      backend_select,
      gradient,
      finish,
      convert,
      residuals,
      sources == nullptr ? Py_None : sources);
  if (plan.owned_objects == nullptr)
    return nullptr;
  if (!read_parameters(parameters, keyword_names, plan) ||
      !read_returns(returns, returned, are_fresh != 0, plan.returns) ||
      (sources != nullptr && !read_sources(sources, plan)) ||
      (layouts != nullptr && !read_layouts(layouts, plan)))
    return nullptr;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(kernels); ++index) {
    Plan::Kernel& kernel = plan.kernels.emplace_back();
    PyObject* author = Py_None;
    if (!PyArg_ParseTuple(
            PyTuple_GET_ITEM(kernels, index),
            "OO|O",
            &kernel.dispatcher_kernel,
            &kernel.function,
            &author))
      return nullptr;
    kernel.author = none_to_null(author);
  }
  if (residuals != Py_None && !read_residuals(residuals, plan.residuals))
    return nullptr;
  if (residuals != Py_None)
    // Take another reference, because `all_recordings` outlives the plan.
    Py_XDECREF(all_recordings.exchange(Py_NewRef(plan.residuals.recording)));
  plan.own = OwnKernels{
      none_to_null(autograd), none_to_null(version_counter), none_to_null(backend_select)};
  if (gradient != Py_None) {
    PyObject *node_maker, *setup_context, *inputs, *before_kernel, *stored_defaults;
    if (!PyArg_ParseTuple(
            gradient,
            "OOOOO",
            &node_maker,
            &setup_context,
            &inputs,
            &before_kernel,
            &stored_defaults))
      return nullptr;
    plan.gradient.node_maker = node_maker;
    plan.gradient.setup_context = none_to_null(setup_context);
    plan.gradient.stored_defaults = none_to_null(stored_defaults);
    plan.gradient.as_dispatched = plan.gradient.stored_defaults != nullptr;
    plan.gradient.may_return_inputs = are_fresh == 0 || !plan.returns.parameters.empty();
    plan.gradient.inputs = none_to_null(inputs);
    plan.gradient.before_kernel = none_to_null(before_kernel);
    plan.gradient.recording = plan.residuals.recording;
    plan.gradient.skips_optional_lists =
        plan.gradient.as_dispatched && lists_may_hold_none(plan.parameters);
  }
  plan.op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (plan.op.has_value() && (as_dispatched != 0 || plan.gradient.as_dispatched))
    read_defaults(plan.op->schema(), as_dispatched != 0, plan.parameters);
  plan.always_dispatches =
      plan.unknown_parameter >= 0 || !plan.op.has_value() || plan.kernels.empty();
  return self.release();
  END_HANDLE_TH_ERRORS
}

int traverse_plan(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(plan_of(self).owned_objects);
  return 0;
}

// The type has no tp_clear, so that the garbage collector cannot clear a plan while a call uses it.
// The collector can still break reference cycles, because each cycle with a plan also contains an
// Entry, which has a tp_clear.
void dealloc_plan(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  plan_of(self).~Plan();
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* unknown_parameter(PyObject* self, void*) {
  const Py_ssize_t index = plan_of(self).unknown_parameter;
  return index < 0 ? Py_NewRef(Py_None) : PyLong_FromSsize_t(index);
}

PyGetSetDef plan_attributes[] = {
    {"unknown_parameter",
     unknown_parameter,
     nullptr,
     "The index of the first parameter of an unsupported type, or None.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

} // namespace

bool add_plan_type(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make_plan)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_plan)},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse_plan)},
      {Py_tp_getset, plan_attributes},
      {Py_tp_doc, const_cast<char*>("The call plan of an operator.")},
      {0, nullptr},
  };
  return add_type(module, "torchop._native._call_path.Plan", sizeof(PlanObject), slots, plan_type);
}

} // namespace torchop
