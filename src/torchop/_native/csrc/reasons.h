// reasons.h: reasons why calls fall back to the dispatcher. Same order as `Reason` in reasons.py.
#pragma once

#include <cstdint>

namespace torchop {

enum class Reason : uint8_t {
  Native,         // the call does not fall back
  SwitchedOff,    // inside torchop.native.disabled()
  Operator,       // the plan supports no native calls
  Binding,        // the arguments do not match the parameters
  ArgumentType,   // the dispatcher must convert an argument or reject it
  TensorSubclass, // a tensor that is neither Tensor nor Parameter
  Tangent,        // a tensor has a forward-mode tangent
  Keys,     // a tensor is not plain and dense, for example sparse, quantized, meta or conjugated
  Backends, // no tensors, or tensors of several backends
  Mode,     // a dispatch mode, a torch.func transform or a trace is active
  Profiler, // a profiler or another RecordFunction callback is active
  FunctionMode, // a TorchFunctionMode is active, including `with torch.device(...)`
  Autocast,     // autocast is enabled and the operator has an autocast rule
  Kernel,       // the dispatcher would run a kernel that the plan does not know
  Mutation,     // mutates an inference tensor, an overlapping tensor, or one that requires grad
  Anomaly,      // anomaly detection must record a stack trace for the node
  Gradient,     // native calls cannot record this operator's gradient
  Capture,      // a device graph is being captured, and a derived formula needs the dispatcher
  Count,
};

} // namespace torchop
