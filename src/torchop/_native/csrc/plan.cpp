// plan.cpp: making plans from Python, and executing them.
#include "plan.h"

#include <algorithm>

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include "frames.h"
#include "thread.h"

namespace torchop {

PyTypeObject* plan_type = nullptr;

// ------------------------------------------------------------------------------------------------
// Execution

namespace {

PyObject* function_for(const Plan& plan, PyObject* kernel) {
  for (const auto& [ours, function] : plan.kernels) {
    if (ours == kernel)
      return function;
  }
  return nullptr;
}

bool overlaps_itself(const at::TensorImpl& impl) {
  if (C10_LIKELY(impl.is_non_overlapping_and_dense_default()))
    return false;
  const c10::IntArrayRef sizes = impl.sizes(), strides = impl.strides();
  bool overlaps = false;
  for (size_t dim = 0; dim < sizes.size(); ++dim)
    overlaps |= strides[dim] == 0 && sizes[dim] > 1;
  return overlaps;
}

// Whether a tensor may be written. The Python rules know when it may not, and how to say it.
C10_ALWAYS_INLINE bool may_write(PyObject* tensor, const Route& route, bool grad) {
  at::TensorImpl& impl = *impl_of(tensor);
  return !overlaps_itself(impl) &&
      !(route.through_version_counter && impl.is_inference() &&
        !c10::InferenceMode::is_enabled()) &&
      !(grad && route.through_autograd && impl.requires_grad());
}

// Of the two conventional forms, no other argument may be a part of the memory that is written. An
// input may be all of it.
bool is_alone(size_t written, const Plan& plan, const Values& values) {
  PyObject* tensor = values[written];
  bool alone = true;
  for (size_t index = 0; index < values.parameters().size(); ++index) {
    if (index == written || !values.parameters().all[index].kind.holds_tensors())
      continue;
    const bool is_input =
        std::find(plan.mutated.begin(), plan.mutated.end(), index) == plan.mutated.end();
    values.each_tensor_of(index, [&](PyObject* other) {
      alone &=
          (is_input && other == tensor) || detail::storage_of(other) != detail::storage_of(tensor);
    });
  }
  return alone;
}

// `grad` is whether a tensor of the call requires grad, and that counts.
bool mutation_is_plain(const Plan& plan, const Values& values, const Route& route, bool grad) {
  bool plain = true;
  for (size_t index : plan.mutated) {
    values.each_tensor_of(
        index, [&](PyObject* tensor) { plain &= may_write(tensor, route, grad); });
    if (!plan.returns.parameters.empty())
      plain &= is_alone(index, plan, values);
  }
  return plain;
}

// Asks the rule for unusual results.
__attribute__((noinline, cold)) PyObject* finish(
    const Plan& plan, const Values& values, PyObject* made) {
  THPObjectPtr result(made);
  THPObjectPtr args = values.positional(), keywords = values.keyword_only();
  if (!args || !keywords)
    return nullptr;
  return PyObject_CallFunctionObjArgs(
      plan.finish, args.get(), keywords.get(), result.get(), nullptr);
}

C10_ALWAYS_INLINE PyObject* run(
    const Plan& plan, const Values& values, PyObject* function, bool recorded = false) {
  PyObject* made = values.pass_to(function, recorded);
  if (made == nullptr || C10_LIKELY(is_as_promised(made, plan.returns, values)))
    return made;
  return finish(plan, values, made);
}

void count_versions(const Plan& plan, const Values& values) {
  for (size_t index : plan.mutated)
    values.each_tensor_of(index, [](PyObject* tensor) { impl_of(tensor)->bump_version(); });
}

} // namespace

namespace {

// Until it changes, the number of a dictionary tells that nothing in it has. Later releases of
// Python have none.
uint64_t version_of(PyObject* dictionary) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dictionary)->ma_version_tag;
#else
  return 0;
#endif
}

// The keys are strings or None, so no Python runs here.
bool holds(const Plan::Source& source) {
  if (!PyDict_CheckExact(source.container))
    return (PySet_GET_SIZE(source.container) != 0 &&
            PySet_Contains(source.container, source.key) == 1) == (source.value == Py_True);
  const uint64_t version = version_of(source.container);
  if (C10_LIKELY(version != 0 && version == source.version))
    return true;
  if (PyDict_GetItemWithError(source.container, source.key) != source.value)
    return false;
  source.version = version;
  return true;
}

} // namespace

bool is_outdated(const Plan& plan) {
  for (const Plan::Source& source : plan.sources) {
    if (C10_UNLIKELY(!holds(source)))
      return true;
  }
  return false;
}

Decision decide(
    const Plan& plan, Values& values, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  Decision decision;
  auto stop = [&](Reason reason) {
    decision.reason = reason;
    return decision;
  };
  if (C10_UNLIKELY(plan.always_dispatches))
    return stop(Reason::Operator);
  if (C10_UNLIKELY(thread.switched_off > 0))
    return stop(Reason::SwitchedOff);
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  if (Reason reason = thread_reason(local); C10_UNLIKELY(reason != Reason::Native))
    return stop(reason);
  Seen seen;
  if (Reason reason = values.bind(args, nargsf, keywords); C10_UNLIKELY(reason != Reason::Native))
    return stop(reason);
  if (Reason reason = values.look(seen, local.excluded_.has(DispatchKey::AutogradFunctionality));
      C10_UNLIKELY(reason != Reason::Native))
    return stop(reason);
  if (Reason reason = tensors_reason(seen); C10_UNLIKELY(reason != Reason::Native))
    return stop(reason);

  decision.route =
      follow(table_of(*plan.op), plan.own, (seen.keys | local.included_) - local.excluded_);
  if (C10_UNLIKELY(decision.route.reason != Reason::Native))
    return stop(decision.route.reason);
  decision.function = function_for(plan, decision.route.kernel);
  if (C10_UNLIKELY(decision.function == nullptr))
    return stop(Reason::Kernel);

  const bool grad = seen.requires_grad && c10::GradMode::is_enabled();
  if (grad && decision.route.through_fallback)
    return stop(Reason::Gradient);
  if (!plan.mutated.empty() && !mutation_is_plain(plan, values, decision.route, grad))
    return stop(Reason::Mutation);
  if (grad && decision.route.through_autograd) {
    if (plan.gradient.node_class == nullptr)
      return stop(Reason::Gradient);
    if (torch::autograd::AnomalyMode::is_enabled())
      return stop(Reason::Anomaly);
    decision.records_gradient = true;
  }
  return decision;
}

PyObject* try_call(
    const Plan& plan, PyObject* const* args, size_t nargsf, PyObject* keywords, Reason& reason) {
  Values values(plan.parameters);
  const Decision decision = decide(plan, values, args, nargsf, keywords);
  reason = decision.reason;
  if (C10_UNLIKELY(reason != Reason::Native))
    return nullptr;
  WithoutDynamo frames; // neither the kernel nor setup_context is the user's program
  if (decision.route.through_version_counter)
    count_versions(plan, values);
  if (decision.records_gradient)
    return record(
        plan.gradient, values, [&] { return run(plan, values, decision.function, true); });
  std::optional<at::AutoDispatchBelowAutograd> below;
  if (decision.route.through_autograd)
    below.emplace();
  return run(plan, values, decision.function);
}

// ------------------------------------------------------------------------------------------------
// The Python type

namespace {

Plan& plan_of(PyObject* self) {
  return *reinterpret_cast<Plan*>(self);
}

PyObject* given(PyObject* object) {
  return object == Py_None ? nullptr : object;
}

// (name, type, is_mutated) or (name, type, is_mutated, default)
bool read_parameter(PyObject* item, Parameter& parameter, int& is_mutated, bool& is_supported) {
  const char* type;
  if (!PyArg_ParseTuple(
          item, "Usp|O", &parameter.name, &type, &is_mutated, &parameter.default_value))
    return false;
  is_supported &= parse_kind(type, parameter.kind);
  return true;
}

bool read_parameters(PyObject* items, PyObject* keyword_names, Plan& plan, bool& is_supported) {
  Parameters& parameters = plan.parameters;
  const Py_ssize_t count = PyTuple_GET_SIZE(items);
  const Py_ssize_t keyword_only = PyTuple_GET_SIZE(keyword_names);
  parameters.positional = size_t(count - keyword_only);
  parameters.keyword_names = keyword_only == 0 ? nullptr : keyword_names;
  bool has_lists = false;
  for (Py_ssize_t index = 0; index < count; ++index) {
    Parameter& parameter = parameters.all.emplace_back();
    int is_mutated;
    if (!read_parameter(PyTuple_GET_ITEM(items, index), parameter, is_mutated, is_supported))
      return false;
    const bool is_just_tensor =
        parameter.kind.holds_tensors() && !parameter.kind.is_list && !parameter.kind.is_optional;
    if (is_just_tensor && parameters.leading_tensors == size_t(index))
      ++parameters.leading_tensors;
    has_lists |= parameter.kind.is_list;
    parameters.has_tensor_lists |= parameter.kind.is_list && parameter.kind.holds_tensors();
    if (is_mutated != 0)
      plan.mutated.push_back(size_t(index));
  }
  if (keyword_only == 0 && !has_lists)
    parameters.as_given = parameters.positional;
  return true;
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

bool read_returns(PyObject* kinds, PyObject* parameters, bool are_fresh, Returns& returns) {
  returns.count = size_t(PyTuple_GET_SIZE(kinds));
  returns.are_fresh = are_fresh;
  for (size_t index = 0; index < returns.count; ++index) {
    const char* kind = PyUnicode_AsUTF8(PyTuple_GET_ITEM(kinds, index));
    if (kind == nullptr)
      return false;
    const bool is_optional = std::string_view(kind) == "Optional[Tensor]";
    returns.are_tensors &= is_optional || std::string_view(kind) == "Tensor";
    returns.are_optional.push_back(is_optional);
  }
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(parameters); ++index)
    returns.parameters.push_back(PyLong_AsSize_t(PyTuple_GET_ITEM(parameters, index)));
  return !PyErr_Occurred();
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
      nullptr};
  const char *name, *overload;
  PyObject *parameters, *keyword_names, *kernels, *returns, *returned, *gradient, *finish;
  PyObject *autograd, *version_counter, *backend_select;
  PyObject* sources = nullptr;
  int are_fresh, is_foreign = 0;
  if (!PyArg_ParseTupleAndKeywords(
          args,
          keywords,
          "ssO!O!O!(OOO)O!O!pOO|O!p",
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
          &is_foreign))
    return nullptr;
  THPObjectPtr self(type->tp_alloc(type, 0));
  if (!self)
    return nullptr;
  Plan& plan = plan_of(self.get());
  new (&plan.parameters) Parameters();
  new (&plan.returns) Returns();
  new (&plan.gradient) Gradient();
  new (&plan.mutated) std::vector<size_t>();
  new (&plan.own) OwnKernels();
  new (&plan.kernels) std::vector<std::pair<PyObject*, PyObject*>>();
  new (&plan.sources) std::vector<Plan::Source>();
  new (&plan.op) std::optional<c10::OperatorHandle>();
  plan.finish = finish;
  plan.is_foreign = is_foreign != 0;
  plan.kept = PyTuple_Pack(
      9,
      parameters,
      keyword_names,
      kernels,
      autograd,
      version_counter,
      backend_select,
      gradient,
      finish,
      sources == nullptr ? Py_None : sources);
  if (plan.kept == nullptr)
    return nullptr;
  bool is_supported = true;
  if (!read_parameters(parameters, keyword_names, plan, is_supported) ||
      !read_returns(returns, returned, are_fresh != 0, plan.returns) ||
      (sources != nullptr && !read_sources(sources, plan)))
    return nullptr;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(kernels); ++index) {
    PyObject *ours, *function;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(kernels, index), "OO", &ours, &function))
      return nullptr;
    plan.kernels.emplace_back(ours, function);
  }
  plan.own = OwnKernels{given(autograd), given(version_counter), given(backend_select)};
  if (gradient != Py_None && can_make_nodes()) {
    PyObject *node_class, *setup_context, *inputs = Py_None;
    if (!PyArg_ParseTuple(gradient, "OO|O", &node_class, &setup_context, &inputs))
      return nullptr;
    plan.gradient =
        Gradient{node_class, given(setup_context), plan.is_foreign, are_fresh == 0, given(inputs)};
  }
  plan.op = c10::Dispatcher::singleton().findSchema({name, overload});
  plan.always_dispatches = !is_supported || !plan.op.has_value() || plan.kernels.empty();
  return self.release();
  END_HANDLE_TH_ERRORS
}

int traverse_plan(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(plan_of(self).kept);
  return 0;
}

// There is no tp_clear: a plan that is being called must stay whole. Every cycle through a plan
// goes through the entry that holds it too, which can be cleared.
void dealloc_plan(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Plan& plan = plan_of(self);
  plan.parameters.~Parameters();
  plan.returns.~Returns();

  plan.mutated.~vector();
  plan.kernels.~vector();
  plan.sources.~vector();
  plan.op.~optional();
  Py_XDECREF(plan.kept);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* always_dispatches(PyObject* self, void*) {
  return PyBool_FromLong(plan_of(self).always_dispatches);
}

PyGetSetDef plan_attributes[] = {
    {"always_dispatches",
     always_dispatches,
     nullptr,
     "Whether no call of the operator is native.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

} // namespace

int add_plan_type(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make_plan)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_plan)},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse_plan)},
      {Py_tp_getset, plan_attributes},
      {Py_tp_doc, const_cast<char*>("What an operator does, compiled for native calls.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {
      "torchop._native._call_path.Plan",
      sizeof(Plan),
      0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
      slots,
  };
  plan_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (plan_type == nullptr)
    return -1;
  return PyModule_AddObjectRef(module, "Plan", reinterpret_cast<PyObject*>(plan_type));
}

} // namespace torchop
