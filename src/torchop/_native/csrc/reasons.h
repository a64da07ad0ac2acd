// reasons.h: why a call goes to the dispatcher; the order is that of `Reason` in reasons.py.
#pragma once

#include <cstdint>

namespace torchop {

enum class Reason : uint8_t {
  Native,         // it does not
  SwitchedOff,    // torchop.native.disabled()
  Operator,       // the plan says that this operator always goes there
  Binding,        // the arguments do not fit the parameters
  ArgumentType,   // the dispatcher converts an argument, or refuses it
  TensorSubclass, // a tensor that is neither Tensor nor Parameter
  Tangent,        // forward-mode differentiation
  Keys,           // a tensor that is not dense, or not plain: sparse, quantized, meta, conjugated
  Backends,       // no tensor, or tensors of several backends
  Mode,           // a mode, a transform of torch.func, a trace
  Profiler,       // somebody observes calls
  FunctionMode,   // a TorchFunctionMode, torch.device(...) contexts among them
  Autocast,       // the operator has an autocast rule, and autocast is on
  Kernel,         // a kernel that is not ours would run
  Mutation,       // of an inference tensor, or of one that requires grad
  Anomaly,        // anomaly detection records where a node was made
  Gradient,       // this operator's gradient is not wired here
  Capture,        // of a graph on the device, which the formula has to know
  Count,
};

} // namespace torchop
