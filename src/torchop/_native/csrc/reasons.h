// reasons.h: the reasons why a call goes through the dispatcher instead of running natively. Keep
// the order in sync with `Reason` in reasons.py.
#pragma once

#include <cstdint>

namespace torchop {

enum class Reason : uint8_t {
  Native,         // the call is native, so it does not fall back
  SwitchedOff,    // the call is inside `with torchop.native.disabled():`
  Operator,       // no call to this operator can be native
  Binding,        // the arguments do not match the parameters
  ArgumentType,   // the dispatcher must convert an argument or reject it
  TensorSubclass, // a tensor that is neither Tensor nor Parameter
  Tangent,        // a tensor has a forward-mode tangent
  Keys,     // a tensor is not an ordinary dense tensor, but for example sparse, meta or conjugated
  Backends, // there are no tensors, or tensors on several backends
  Mode,     // a dispatch mode, a torch.func transform or a trace is active
  Profiler, // a profiler or another RecordFunction callback is active
  FunctionMode, // a TorchFunctionMode is active, including `with torch.device(...)`
  Autocast,     // autocast is enabled and the operator has an autocast rule
  Kernel,       // the dispatcher would run a kernel that is not in the call plan (plan.h)
  Mutation,     // a mutated tensor needs a check, such as one that requires grad or overlaps itself
  Anomaly,      // anomaly detection must record a stack trace for the node
  Gradient,     // a gradient is needed, but native calls cannot record it for this operator
  Layout,       // an argument must be copied into the layout that the operator declares
  Capture,      // a CUDA graph is being captured, and the gradient formula may draw random numbers
  Count,        // the number of reasons
};

} // namespace torchop
