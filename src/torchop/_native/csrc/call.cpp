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

// Finds a kernel of the dispatch table in the plan. A linear search is fast enough, because a plan
// has few kernels.
const Plan::Kernel* kernel_for(const Plan& plan, PyObject* dispatcher_kernel) {
  for (const Plan::Kernel& kernel : plan.kernels) {
    if (kernel.dispatcher_kernel == dispatcher_kernel)
      return &kernel;
  }
  return nullptr;
}

// Returns whether elements of the tensor share memory, as in an expanded tensor. Best effort: like
// at::has_internal_overlap, only checks for dimensions of stride 0.
bool overlaps_itself(const at::TensorImpl& impl) {
  if (C10_LIKELY(impl.is_non_overlapping_and_dense_default()))
    return false;
  const c10::IntArrayRef sizes = impl.sizes(), strides = impl.strides();
  bool overlaps = false;
  for (size_t dim = 0; dim < sizes.size(); ++dim)
    overlaps |= strides[dim] == 0 && sizes[dim] > 1;
  return overlaps;
}

// Returns whether a kernel is certainly allowed to mutate the tensor. This is uncertain if elements
// of the tensor overlap, if the tensor is an inference tensor and inference mode is off, or if the
// mutation must be recorded in the tensor's history. In these cases, returns false, so that the
// Python kernels check the tensor.
C10_ALWAYS_INLINE bool may_write(PyObject* tensor, const Route& route, bool keeps_history) {
  at::TensorImpl& impl = *impl_of(tensor);
  return !overlaps_itself(impl) &&
      !(route.through_version_counter && impl.is_inference() &&
        !c10::InferenceMode::is_enabled()) &&
      !(keeps_history && impl.requires_grad());
}

// Returns whether all arguments have the layouts that the operator declares. If not, the call falls
// back to the Python kernels, which copy the arguments.
bool has_declared_layouts(const Plan& plan, const Values& values) {
  bool fits = true;
  for (const Plan::Layout& layout : plan.layouts) {
    values.each_tensor_of(layout.parameter, [&](PyObject* tensor) {
      const at::TensorImpl& impl = *impl_of(tensor);
      const auto last =
          impl.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
      fits &= impl.is_contiguous(layout.channels_last ? last : at::MemoryFormat::Contiguous);
    });
  }
  return fits;
}

// Returns whether no other argument shares memory with `tensor`, which belongs to the mutated
// argument at index `written`. There is one exception: an argument that the kernel only reads may
// be the very same tensor. If arguments share memory in any other way, the result of an in-place or
// out= operator depends on the order of reads and writes in the kernel, so the Python kernels must
// check the call. Other operators may mutate several tensors that share memory. But they must not
// mutate a tensor that shares memory with an input, because a formula that saves the input would
// save the new value.
bool has_no_alias(PyObject* tensor, size_t written, const Plan& plan, const Values& values) {
  bool alone = true;
  for (size_t index = 0; index < values.parameters().size(); ++index) {
    if (index == written || !values.parameters().all[index].kind.holds_tensors())
      continue;
    const bool is_input =
        std::find(plan.mutated.begin(), plan.mutated.end(), index) == plan.mutated.end();
    if (!is_input && plan.returns.parameters.empty())
      continue;
    values.each_tensor_of(index, [&](PyObject* other) {
      alone &= (is_input && other == tensor) || !detail::share_memory(other, tensor);
    });
  }
  return alone;
}

// Returns whether all mutations of a call are certainly allowed. `grad` is true if grad mode is
// enabled and an input requires grad.
__attribute__((noinline)) bool mutation_is_plain(
    const Plan& plan, const Values& values, const Route& route, bool grad) {
  bool plain = true;
  // Operators of torch.library.custom_op may mutate tensors that require grad, because PyTorch does
  // not record their mutations in a tensor's history.
  const bool keeps_history = grad && route.through_autograd && !plan.is_foreign;
  const bool may_save = keeps_history && plan.gradient.setup_context != nullptr;
  const bool must_be_alone = may_save || !plan.returns.parameters.empty();
  for (size_t index : plan.mutated) {
    values.each_tensor_of(index, [&](PyObject* tensor) {
      plain &= may_write(tensor, route, keeps_history) &&
          (!must_be_alone || has_no_alias(tensor, index, plan, values));
    });
  }
  return plain;
}

// Calls `Plan::finish`, which checks and converts a result that `is_valid_result` did not accept.
// Steals the reference to `made`.
__attribute__((noinline, cold)) PyObject* finish(
    const Plan& plan, const Values& values, PyObject* made) {
  THPObjectPtr result(made);
  THPObjectPtr args = values.positional(), keywords = values.keyword_only();
  if (!args || !keywords)
    return nullptr;
  return PyObject_CallFunctionObjArgs(
      plan.finish, args.get(), keywords.get(), result.get(), nullptr);
}

// Calls the kernel and returns the checked result, or nullptr with an exception set. Stores
// residuals in `saved`. Sets `is_unusual` if Python code had to convert the result.
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

__attribute__((noinline)) const FallbackOperator& fallback_of(const Plan& plan) {
  FallbackOperator* found = plan.fallback_operator.load(std::memory_order_acquire);
  if (C10_LIKELY(found != nullptr))
    return *found;
  auto made = std::make_unique<FallbackOperator>(*plan.op);
  if (plan.fallback_operator.compare_exchange_strong(found, made.get()))
    return *made.release();
  return *found; // created by another thread
}

// Bumps the versions of the mutated tensors. As in torch.library, this happens before the kernel
// runs, because the kernel may write to a tensor and then raise. Keep in sync with `count_versions`
// in bypass.cpp and in _rules/mutation/kernels.py, which must bump the same tensors.
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
  // The order of these checks matters. Check `always_dispatches` first, because `plan.op` may be
  // empty if it is true. `inspect` reads the values that `bind` sets.
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
  if (C10_UNLIKELY(!plan.layouts.empty() && !has_declared_layouts(plan, values)))
    return stop(Reason::Layout);

  // Compute the same key set as the dispatcher (DispatchKeyExtractor).
  const DispatchKeySet keys = (seen.keys | local.included_) - local.excluded_;
  decision.route = find_route(table_of(*plan.op), plan.own, keys);
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
    decision.runs_in_fallback = true;
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
  // If a call further up the stack has requested residuals from its kernel, this kernel may or may
  // not be the one that must return them. Only the Python wrapper can tell, so run it instead of
  // the author's function.
  const bool calls_author =
      decision.kernel->author != nullptr && !thread_records(plan.residuals.recording);
  if (calls_author)
    function = decision.kernel->author;
  note_call(function);
  // The caller may be the kernel of another operator that must return residuals. Since this
  // operator has no residuals, `records_gradient()` must return False in its kernel.
  std::optional<Recording> suspended;
  if (plan.residuals.type == nullptr && thread_records(all_recordings))
    suspended.emplace(all_recordings).stop();
  PyObject* result;
  if (decision.records_gradient) {
    // `record` creates the node before it calls this lambda. So if creating the node raises, the
    // kernel has not run yet and has not mutated any argument.
    const Residuals* residuals =
        calls_author && plan.residuals.setup != Py_None ? &plan.residuals : nullptr;
    result = record(plan.gradient, values, residuals, saved, [&] {
      count_versions(plan, values, decision.route);
      return run(plan, values, function, is_unusual, saved, true);
    });
    if (C10_UNLIKELY(result == nullptr && PyErr_Occurred() == nullptr))
      reason = Reason::Capture;
  } else if (decision.runs_in_fallback) {
    result = fallback_of(plan).call(values, [&] {
      count_versions(plan, values, decision.route);
      return run(plan, values, function, is_unusual, saved);
    });
  } else {
    count_versions(plan, values, decision.route);
    // Exclude the Autograd keys while the kernel runs, as the dispatcher does after an Autograd
    // kernel. If the operator has no Autograd kernel, leave the keys enabled, so that autograd
    // records the operators that the kernel calls.
    std::optional<at::AutoDispatchBelowAutograd> below;
    if (decision.route.through_autograd)
      below.emplace();
    result = run(plan, values, function, is_unusual, saved);
  }
  if (C10_UNLIKELY(is_unusual && plan.convert != nullptr)) {
    // OpOverload runs calls with keyword arguments in the C++ dispatcher, which converts the
    // results, so native calls must convert them too.
    if (enters_cpp || (keywords != nullptr && PyTuple_GET_SIZE(keywords) > 0))
      return convert(plan, result);
  }
  return result;
}

} // namespace torchop
