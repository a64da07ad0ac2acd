"""Define operators, and create their handles, i.e. the objects that users call."""

from torchop import _hooks
from torchop._compat import dynamo_variables
from torchop._core import define
from torchop._define.handle import CustomOp, make_handle

# `_core` and `_native` need the handle type, but importing it would be circular, so set it here.
define.make_handle = make_handle
_hooks.handle_type = CustomOp
dynamo_variables.trace_as_overload(CustomOp)
