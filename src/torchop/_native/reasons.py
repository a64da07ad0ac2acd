from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Reason(enum.IntEnum):
    """The reasons why a call is native (skips the dispatcher) or falls back to the dispatcher.

    C++ reports reasons as numbers, so the order must be the same as in csrc/reasons.h.
    """

    text: str  # a format string, in which callers replace `{why}` with details of the call

    def __new__(cls, text: str) -> Self:
        reason = int.__new__(cls, len(cls.__members__))
        reason._value_ = int(reason)
        reason.text = text
        return reason

    NATIVE = "the dispatcher would run only the operator's own kernels"
    SWITCHED_OFF = "torchop.native.disabled() is active in this thread"
    OPERATOR = "{why}"
    BINDING = "the arguments do not fit the parameters{why}, so the dispatcher raises an error"
    ARGUMENT_TYPE = "{why}"
    TENSOR_SUBCLASS = "{why} is, or contains, an instance of a Tensor subclass"
    TANGENT = "a tensor carries a tangent of forward-mode differentiation"
    KEYS = (
        "a tensor is not plain and dense (sparse, quantized, meta, conjugated, inside a "
        "transform of torch.func, ...)"
    )
    BACKENDS = "{why}"
    MODE = "a mode, a transform of torch.func or a trace is active"
    PROFILER = "a profiler observes calls"
    FUNCTION_MODE = "a TorchFunctionMode is active, such as `with torch.device(...)`"
    AUTOCAST = "autocast is on, and the operator has an autocast rule"
    KERNEL = "{why}"
    MUTATION = "it mutates {why}"
    ANOMALY = "anomaly detection records where the call was made"
    GRADIENT = "it records a gradient: {why}"
    LAYOUT = "an argument must be copied into the layout that the operator declares"
    CAPTURE = "a device graph is being captured, and a derived formula must take that into account"
