// call.cpp: decide whether a call is native (`decide`), and run native calls (`try_call`).
#include "call.h"

#include <algorithm>

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include "disabled.h"
#include "frames.h"
#include "free_threads.h"

namespace torchop {

namespace {

// Returns the plan's entry for a kernel of the dispatcher's table, or nullptr if the plan has none.
// A plan has few kernels, so a linear search is fastest.
const Plan::Kernel* kernel_for(const Plan& plan, PyObject* dispatcher_kernel) {
  for (const Plan::Kernel& kernel : plan.kernels) {
    if (kernel.dispatcher_kernel == dispatcher_kernel)
      return &kernel;
  }
  return nullptr;
}

// Returns whether several elements of the tensor share memory, as in an expanded tensor. Like
// at::has_internal_overlap, which PyTorch's operators use, detects only stride 0.
bool overlaps_itself(const at::TensorImpl& impl) {
  if (C10_LIKELY(impl.is_non_overlapping_and_dense_default()))
    return false;
  const c10::IntArrayRef sizes = impl.sizes(), strides = impl.strides();
  bool overlaps = false;
  for (size_t dim = 0; dim < sizes.size(); ++dim)
    overlaps |= strides[dim] == 0 && sizes[dim] > 1;
  return overlaps;
}

// Returns whether a kernel may write to the tensor: it must not overlap itself, and the version
// counter and autograd must allow the write. Otherwise the call falls back to the dispatcher, whose
// Python kernels raise the right error.
C10_ALWAYS_INLINE bool may_write(PyObject* tensor, const Route& route, bool keeps_history) {
  at::TensorImpl& impl = *impl_of(tensor);
  return !overlaps_itself(impl) &&
      !(route.through_version_counter && impl.is_inference() &&
        !c10::InferenceMode::is_enabled()) &&
      !(keeps_history && impl.requires_grad());
}

// For in-place and out= operators: returns whether no other argument shares the memory of the
// mutated argument, except an input that is the same tensor. Other overlaps make the result depend
// on the kernel's order of reads and writes, so the Python rules check them.
bool has_no_alias(size_t written, const Plan& plan, const Values& values) {
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

// `grad` means that grad mode is enabled and an input requires grad.
__attribute__((noinline)) bool mutation_is_plain(
    const Plan& plan, const Values& values, const Route& route, bool grad) {
  bool plain = true;
  // torch.library.custom_op does not rebase the history of mutated arguments, so its operators may
  // mutate tensors that require grad.
  const bool keeps_history = grad && route.through_autograd && !plan.is_foreign;
  for (size_t index : plan.mutated) {
    values.each_tensor_of(
        index, [&](PyObject* tensor) { plain &= may_write(tensor, route, keeps_history); });
    if (!plan.returns.parameters.empty())
      plain &= has_no_alias(index, plan, values);
  }
  return plain;
}

// Checks and converts a result that `is_valid_result` rejected. Steals `made`.
__attribute__((noinline, cold)) PyObject* finish(
    const Plan& plan, const Values& values, PyObject* made) {
  THPObjectPtr result(made);
  THPObjectPtr args = values.positional(), keywords = values.keyword_only();
  if (!args || !keywords)
    return nullptr;
  return PyObject_CallFunctionObjArgs(
      plan.finish, args.get(), keywords.get(), result.get(), nullptr);
}

// Calls the kernel and returns its checked result, or nullptr with an exception. Stores residuals
// in `saved`, if the kernel returned some. Sets `is_unusual` if Python converted the result.
C10_ALWAYS_INLINE PyObject* run(
    const Plan& plan,
    const Values& values,
    PyObject* function,
    bool& is_unusual,
    THPObjectPtr& saved,
    bool recorded = false) {
  PyObject* made = values.pass_to(function, recorded);
  if (made == nullptr || C10_LIKELY(is_valid_result(made, plan.returns, values)))
    return made;
  saved = take_residuals(plan.residuals, made);
  if (saved && is_valid_result(made, plan.returns, values))
    return made;
  is_unusual = true;
  return finish(plan, values, made);
}

__attribute__((noinline, cold)) PyObject* convert(const Plan& plan, PyObject* made) {
  THPObjectPtr result(made);
  return result ? PyObject_CallOneArg(plan.convert, result.get()) : nullptr;
}

// Returns the plan's fallback operator, and creates it on first use.
__attribute__((noinline)) const FallbackOperator& fallback_of(const Plan& plan) {
  FallbackOperator* found = plan.fallback_operator.load(std::memory_order_acquire);
  if (C10_LIKELY(found != nullptr))
    return *found;
  auto made = std::make_unique<FallbackOperator>(*plan.op);
  if (plan.fallback_operator.compare_exchange_strong(found, made.get()))
    return *made.release();
  return *found; // another thread was first
}

// Bumps the versions before the kernel runs, like `torch.library`, because a kernel that raises may
// have written already.
void count_versions(const Plan& plan, const Values& values, const Route& route) {
  if (!route.through_version_counter)
    return;
  for (size_t index : plan.mutated)
    values.each_tensor_of(index, [](PyObject* tensor) { impl_of(tensor)->bump_version(); });
}

} // namespace

Decision decide(
    const Plan& plan, Values& values, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  Decision decision;
  auto stop = [&](Reason reason) {
    decision.reason = reason;
    return decision;
  };
  // Each check relies on the earlier ones. A plan that always dispatches may have no operator, so
  // this check comes before any use of the table. Arguments can be inspected only after they are
  // bound.
  if (C10_UNLIKELY(plan.always_dispatches))
    return stop(Reason::Operator);
  if (C10_UNLIKELY(is_disabled()))
    return stop(Reason::SwitchedOff);
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  if (Reason reason = thread_reason(local); C10_UNLIKELY(reason != Reason::Native))
    return stop(reason);
  TensorSummary seen;
  if (Reason reason = values.bind(args, nargsf, keywords); C10_UNLIKELY(reason != Reason::Native))
    return stop(reason);
  if (Reason reason = values.inspect(seen, local.excluded_.has(DispatchKey::AutogradFunctionality));
      C10_UNLIKELY(reason != Reason::Native))
    return stop(reason);
  if (C10_UNLIKELY(
          plan.parameters.has_device_string_defaults && values.passes_device_string_default()))
    return stop(Reason::ArgumentType);
  if (Reason reason = tensors_reason(seen); C10_UNLIKELY(reason != Reason::Native))
    return stop(reason);

  // The key set as the dispatcher computes it, in DispatchKeyExtractor.
  const DispatchKeySet keys = (seen.keys | local.included_) - local.excluded_;
  {
#ifdef Py_GIL_DISABLED
    TableRead read(this_thread());
    if (C10_UNLIKELY(!plan.lifetime->exists.load() || plan.lifetime->changes.load() != 0))
      return stop(Reason::Operator); // a change started after the call entered
#endif
    decision.route = find_route(table_of(*plan.op), plan.own, keys);
  }
  if (C10_UNLIKELY(decision.route.reason != Reason::Native))
    return stop(decision.route.reason);
  decision.kernel = kernel_for(plan, decision.route.kernel);
  if (C10_UNLIKELY(decision.kernel == nullptr))
    return stop(Reason::Kernel);

  const bool grad = seen.requires_grad && c10::GradMode::is_enabled();
  if (!plan.mutated.empty() && !mutation_is_plain(plan, values, decision.route, grad))
    return stop(Reason::Mutation);
  if (grad && decision.route.through_fallback) {
    if (torch::autograd::AnomalyMode::is_enabled())
      return stop(Reason::Anomaly);
    decision.notes_gradient = true;
  } else if (grad && decision.route.through_autograd) {
    if (plan.gradient.node_maker == nullptr)
      return stop(Reason::Gradient);
    if (C10_UNLIKELY(plan.gradient.skips_optional_lists && !wants_gradient(values)))
      return decision;
    if (torch::autograd::AnomalyMode::is_enabled())
      return stop(Reason::Anomaly);
    decision.records_gradient = true;
  }
  return decision;
}

PyObject* try_call(
    const Plan& plan,
    PyObject* const* args,
    size_t nargsf,
    PyObject* keywords,
    bool enters_cpp,
    Reason& reason) {
  Values values(plan.parameters);
  const Decision decision = decide(plan, values, args, nargsf, keywords);
  reason = decision.reason;
  if (C10_UNLIKELY(reason != Reason::Native))
    return nullptr;
  WithoutDynamo frames; // Dynamo must not trace the kernel and setup_context as user code
  bool is_unusual = false;
  PyObject* function = decision.kernel->function;
  THPObjectPtr saved;
  // If an enclosing call of this thread records already, only the Python wrapper can tell which
  // kernel the request is for.
  const bool calls_author =
      decision.kernel->author != nullptr && !thread_records(plan.residuals.recording);
  if (calls_author)
    function = decision.kernel->author;
  note_call(function);
  // The kernel of an operator with residuals may call this operator. Residuals are requested from
  // that kernel only.
  std::optional<Recording> suspended;
  if (plan.residuals.type == nullptr && thread_records(all_recordings))
    suspended.emplace(all_recordings).stop();
  PyObject* result;
  if (decision.records_gradient) {
    // `record` makes the node before it runs the kernel, because connecting an input may raise.
    // Nothing was written then.
    const Residuals* residuals =
        calls_author && plan.residuals.setup != Py_None ? &plan.residuals : nullptr;
    result = record(plan.gradient, values, residuals, saved, [&] {
      count_versions(plan, values, decision.route);
      return run(plan, values, function, is_unusual, saved, true);
    });
    if (C10_UNLIKELY(result == nullptr && PyErr_Occurred() == nullptr))
      reason = Reason::Capture;
  } else if (decision.notes_gradient) {
    result = fallback_of(plan).call(values, [&] {
      count_versions(plan, values, decision.route);
      return run(plan, values, function, is_unusual, saved);
    });
  } else {
    count_versions(plan, values, decision.route);
    // If the operator has no kernel at Autograd, the dispatcher does not exclude the Autograd keys
    // while the kernel runs, and records the operators that it calls.
    std::optional<at::AutoDispatchBelowAutograd> below;
    if (decision.route.through_autograd)
      below.emplace();
    result = run(plan, values, function, is_unusual, saved);
  }
  if (C10_UNLIKELY(is_unusual && plan.convert != nullptr)) {
    // OpOverload dispatches calls with keyword arguments in C++ only.
    if (enters_cpp || (keywords != nullptr && PyTuple_GET_SIZE(keywords) > 0))
      return convert(plan, result);
  }
  return result;
}

} // namespace torchop
