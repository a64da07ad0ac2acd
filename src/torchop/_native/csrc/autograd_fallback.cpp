#include "autograd_fallback.h"

#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>

#include "dispatch.h"
#include "errors.h"

namespace torchop {

namespace {

// The dispatch key of the only kernel of a FallbackOperator (our copy of an operator). It must have
// a lower priority than the Autograd keys, because PyTorch's autograd fallback redispatches to it.
constexpr DispatchKey fallback_kernel_key = DispatchKey::BackendSelect;

// The native call that the kernel of a FallbackOperator runs, and its result. The operator receives
// a pointer to this object as an int argument.
struct Computation {
  c10::function_ref<PyObject*()> compute;
  THPObjectPtr result;
};

// Converts a result to an IValue for PyTorch's autograd fallback. The fallback only reads results
// of type Tensor and Tensor[], so all other results become None.
c10::IValue as_ivalue(PyObject* value, const c10::Argument& declared) {
  if (value == nullptr)
    return {};
  if (is_tensor(value))
    return THPVariable_Unpack(value);
  if (!PyList_Check(value) || !declared.type()->isSubtypeOf(*c10::ListType::ofTensors()))
    return {};
  c10::List<at::Tensor> tensors;
  for (Py_ssize_t item = 0; item < PyList_GET_SIZE(value); ++item) {
    if (PyObject* tensor = PyList_GET_ITEM(value, item); is_tensor(tensor))
      tensors.push_back(THPVariable_Unpack(tensor));
  }
  return tensors;
}

// Returns the result at `index` (borrowed), or nullptr if it is missing. The schema has `count`
// results. If the kernel returned fewer results, the first ones are missing, as on the dispatcher's
// stack.
PyObject* result_at(PyObject* results, size_t index, size_t count) {
  if (!PyTuple_Check(results))
    return index + 1 == count ? results : nullptr;
  const Py_ssize_t place = PyTuple_GET_SIZE(results) - Py_ssize_t(count) + Py_ssize_t(index);
  return place < 0 ? nullptr : PyTuple_GET_ITEM(results, place);
}

// The kernel of every FallbackOperator. PyTorch's autograd fallback redispatches to it, and it runs
// the native call in the Computation whose address is on top of the stack.
void run_computation(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  // `FallbackOperator::call` pushed this pointer, and keeps the Computation alive until it returns.
  auto& computation = *reinterpret_cast<Computation*>(torch::jit::pop(*stack).toInt());
  torch::jit::drop(*stack, 1);
  computation.result = THPObjectPtr(computation.compute());
  if (!computation.result)
    throw_python_error();
  PyObject* result = computation.result.get();
  const std::vector<c10::Argument>& returns = op.schema().returns();
  for (size_t index = 0; index < returns.size(); ++index)
    stack->push_back(as_ivalue(result_at(result, index, returns.size()), returns[index]));
}

c10::FunctionSchema fallback_schema(const c10::OperatorHandle& op) {
  return c10::FunctionSchema(
      op.operator_name().name,
      op.operator_name().overload_name,
      {c10::Argument("tensors", c10::ListType::ofTensors()),
       c10::Argument("computation", c10::IntType::get())},
      op.schema().returns());
}

} // namespace

FallbackOperator::FallbackOperator(const c10::OperatorHandle& op)
    : definition_(c10::OperatorName(op.operator_name())), handle_(op) {
  // An OperatorHandle can only be created by copying another one. So `handle_` starts as a copy of
  // the real operator's handle, and is now redirected to our definition.
  const_cast<Definition*&>(member_of(OperatorDefinition{}, handle_)) = &definition_;
  definition_.op.registerSchema(fallback_schema(op), "registered by torchop");
  auto& dispatcher = c10::Dispatcher::singleton();
  // Hold the dispatcher's lock, because registerKernel reads the dispatcher's fallback kernels
  // without locking.
  std::lock_guard<std::mutex> lock(member_of(DispatcherGuard{}, dispatcher)->mutex);
  definition_.op.registerKernel(
      dispatcher,
      fallback_kernel_key,
      c10::KernelFunction::makeFromBoxedFunction<&run_computation>(),
      std::nullopt,
      nullptr,
      "registered by torchop");
}

PyObject* FallbackOperator::call(
    const Values& values, c10::function_ref<PyObject*()> compute) const {
  c10::List<at::Tensor> tensors;
  for (size_t index = 0; index < values.parameters().size(); ++index) {
    const Kind& kind = values.parameters().all[index].kind;
    // PyTorch's autograd fallback ignores arguments of type Tensor?[].
    if (kind.holds_tensors() && !kind.items_are_optional)
      values.each_tensor_of(
          index, [&](PyObject* tensor) { tensors.push_back(THPVariable_Unpack(tensor)); });
  }
  Computation computation{compute, {}};
  torch::jit::Stack stack;
  torch::jit::push(stack, std::move(tensors), int64_t(reinterpret_cast<intptr_t>(&computation)));
  autograd_fallback_kernel().callBoxed(handle_, DispatchKeySet(fallback_kernel_key), &stack);
  return computation.result.release();
}

} // namespace torchop
