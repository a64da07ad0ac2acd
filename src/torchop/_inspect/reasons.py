"""Describe why a call is native, i.e. skips the dispatcher, or why it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchop._compat import aliasing, dispatch
from torchop._core.definition import Definition
from torchop._errors import short_text
from torchop._native import switch
from torchop._native.plan import NativeCalls, is_returnable, unknown_type
from torchop._native.reasons import Reason
from torchop._native.table.calls import accelerated, calls_of, entry_of
from torchop._native.table.ours import registered_kernels
from torchop._schema.schema import OPTIONAL_TENSOR_LISTS
from torchop._schema.text import arguments_alone
from torchop.extend import Operator, OpName, Schema, mutated_tensors, named_inputs, values_by_name

if TYPE_CHECKING:
    from torchop._native._call_path import Entry


class Call(NamedTuple):
    """A call, with details from the C++ extension about why the call needs the dispatcher.

    `definition` is None if torchop did not define the operator. If the reason is about an argument,
    `refused` is the argument's index in the schema. `key` is the dispatch key at which the
    dispatcher would look up the first kernel that a native call (without the dispatcher) cannot
    replace.
    """

    name: OpName
    definition: Definition | None
    schema: Schema
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    refused: int = 0
    key: str = ""

    @property
    def tensors(self) -> list[Tensor]:
        inputs = named_inputs(self.schema, self.args, self.kwargs)
        return [tensor for _, _, tensor in inputs]

    @property
    def entry(self) -> Entry | None:
        return entry_of(self.name) if self.definition is None else self.definition.entry

    def describe(self, reason: Reason) -> str:
        why = _DETAILS.get(reason)
        return reason.text.format(why=None if why is None else why(self))


def why_not_called(call: Call) -> str:
    native = switch.native_module()
    if native is not None and not registered_kernels(native, call.name):
        return _why_no_kernel(call)
    return "torchop has called none of its kernels yet"


def _why_never(call: Call) -> str:
    if (problem := _problem(call)) is not None:
        return problem
    is_of_others = call.definition is None and is_returnable(call.schema)
    if is_of_others and not registered_kernels(_native_module(), call.name):
        return _why_no_kernel(call)
    assert call.entry is not None  # this reason comes from the operator's entry
    assert call.entry.plan is not None
    return unknown_type(call.schema, call.entry.plan)


def _why_no_kernel(call: Call) -> str:
    table = dispatch.kernel_table(str(call.name))
    for backend in _native_module().backends:
        if backend in table:
            return f"its kernel for {dispatch.format_key(backend)} {_kernel_problem(call, backend)}"
    return "it has no kernel for a device whose tensors native calls take"


def _why_not_its_kernel(call: Call) -> str:
    """Describe the kernel that the dispatcher selects, and why a native call cannot run it.

    A native call runs the operator's kernel directly from C++, without the dispatcher.
    """
    if (problem := _problem(call)) is not None:
        return problem
    key, definition = call.key, call.definition
    fallback = definition and definition.registered.kernel("CompositeExplicitAutograd")
    is_raising = fallback is not None and fallback is _python_kernel(call, key)
    if is_raising or key not in dispatch.kernel_table(str(call.name)):
        return f"it has no kernel for {dispatch.format_key(key)}"
    if key == "ADInplaceOrView" and call.schema.is_view:
        return "PyTorch's kernel for views must run"
    if call.definition is None and key not in _native_module().backends:
        return f"the dispatcher would first run the kernel at {key}"
    return f"the dispatcher would run the kernel at {key}, which {_kernel_problem(call, key)}"


def _kernel_problem(call: Call, key: str) -> str:
    if _python_kernel(call, key) is None:
        return "is not a Python function"
    if not _native_module().is_plain_kernel(call.name.packet, call.name.overload, key):
        return "takes dispatch keys"
    return "was registered by other means"


def _python_kernel(call: Call, key: str) -> Any:
    return _native_module().python_kernel(call.name.packet, call.name.overload, key)


def _native_module() -> Any:
    native = switch.native_module()
    assert native is not None  # the extension rejected the call
    return native


def _why_no_backend(call: Call) -> str:
    return "the tensors are on devices of several types" if call.tensors else "there is no tensor"


def _refused(call: Call) -> str:
    name = call.schema.arguments[call.refused].name
    return f"argument {call.schema.places.get(name, name)!r}"


def _why_refused(call: Call) -> str:
    argument = call.schema.arguments[call.refused]
    values = values_by_name(call.schema, call.args, call.kwargs)
    value = values.get(argument.name, argument.default)
    is_list = argument.kind in OPTIONAL_TENSOR_LISTS and isinstance(value, list | tuple)
    if is_list and all(item is None or isinstance(item, Tensor) for item in value):
        return (
            f"{_refused(call)} is a list of optional tensors, and one of them has dispatch keys "
            "that no other argument has: the dispatcher does not inspect such lists"
        )
    is_list = "List[" in argument.kind
    if "PyObject" in argument.kind and (not is_list or isinstance(value, list | tuple)):
        return (
            f"{_refused(call)} {'has' if is_list else 'is'} an object that PyTorch may inspect: "
            "a tensor, list, tuple or dict, or an object with __torch_function__ or computed "
            "attributes"
        )
    written = arguments_alone(call.schema.written)[call.refused]
    return (
        f"{_refused(call)} does not have exactly the schema's type '{written}', but is "
        f"{_format_type(value)}, so the dispatcher converts or rejects it"
    )


def _format_type(value: Any) -> str:
    name = type(value).__name__
    if not isinstance(value, list | tuple):
        return f"of type {name}"
    return f"a {name} of {', '.join(dict.fromkeys(type(item).__name__ for item in value))}"


def _why_unbound(call: Call) -> str:
    try:
        Operator(call.name, "explain").signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        return f" ({short_text(error)})"
    return ""


def _why_not_written(call: Call) -> str:
    for name, tensor in mutated_tensors(call.schema, call.args, call.kwargs):
        why = _why_not_plain(tensor, keeps_history=call.definition is not None)
        if why is not None:
            return f"argument {call.schema.places.get(name, name)!r}, {why}"
    places = [call.schema.places.get(name, name) for name in call.schema.mutated]
    names = " and ".join(f"argument {place!r}" for place in places)
    return f"{names}, sharing memory with another argument"


def _why_not_plain(tensor: Tensor, *, keeps_history: bool) -> str | None:
    if aliasing.overlaps_itself(tensor):
        return "with several elements in the same memory"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "an inference tensor, outside of inference mode"
    if keeps_history and torch.is_grad_enabled() and tensor.requires_grad:
        return "which requires grad"
    return None


def _problem(call: Call) -> str | None:
    calls = accelerated.get(call.name)
    return None if calls is None else calls.problem


def _why_dispatcher_records(call: Call) -> str:
    definition = call.definition
    calls: NativeCalls | None = calls_of(call.name) if definition is None else definition.calls
    return (calls and calls.gradient_problem) or "its formula is not known"


# Functions that return the details of a reason, for the reasons whose text depends on the call.
_DETAILS = {
    Reason.OPERATOR: _why_never,
    Reason.BINDING: _why_unbound,
    Reason.ARGUMENT_TYPE: _why_refused,
    Reason.TENSOR_SUBCLASS: _refused,
    Reason.BACKENDS: _why_no_backend,
    Reason.KERNEL: _why_not_its_kernel,
    Reason.MUTATION: _why_not_written,
    Reason.GRADIENT: _why_dispatcher_records,
}
