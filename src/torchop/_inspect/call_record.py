"""Records of operator calls, from which example arguments for the same call can be created."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torchop._compat import observing, tracing
from torchop._core.registry import own_definition
from torchop._rules.autograd import function
from torchop._rules.providers.tuned import PLAIN
from torchop._schema.naming import OpName
from torchop._schema.structure.shapes import as_mapping

_LONGEST = 200  # the maximum length of a call in messages
_TENSORS = (torch.Tensor, torch.nn.Parameter)  # tensors of other subclasses become TypeRecords


class TensorRecord(NamedTuple):
    """The metadata of a tensor in a recorded call.

    Attributes:
        dtype: the dtype of the tensor.
        shape: the shape of the tensor.
        device: the device of the tensor, such as `"cuda:0"`.
        requires_grad: whether the tensor requires grad, and autograd recorded the call for a
            backward pass.
        stride: the strides of the tensor, in elements. None if the tensor is contiguous.

    Example:
        >>> import torch, torchop
        >>> torchop.testing.TensorRecord(torch.int8, (2,), "cpu", False).example()
        tensor([1, 1], dtype=torch.int8)
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    requires_grad: bool
    stride: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """The size in bytes of an example tensor with this metadata."""
        return self._elements * self.dtype.itemsize

    @property
    def _elements(self) -> int:
        """The number of elements in the memory that the tensor spans, including any gaps."""
        if self.stride is None or 0 in self.shape:
            return math.prod(self.shape)
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    def example(self) -> torch.Tensor:
        """Return a tensor of ones with this metadata."""
        stride = torch.empty(self.shape, device="meta").stride()
        if self.stride is not None:
            stride = self.stride
        tensor = torch.empty_strided(self.shape, stride, dtype=self.dtype, device=self.device)
        memory = tensor.as_strided((self._elements,), (1,))
        try:
            memory.fill_(1)
        except NotImplementedError:  # a storage-only dtype such as torch.bits8
            memory.view(torch.uint8).fill_(1)
        return tensor.requires_grad_(self.requires_grad)


class TypeRecord(NamedTuple):
    """An argument whose value was not recorded, only its type, so no example can be created.

    Attributes:
        name: the name of the type, such as `"torch._C.Generator"`, or the kind of the tensor, such
            as `"sparse_coo tensor"`.

    Example:
        >>> from torchop.testing import CallRecord, TypeRecord
        >>> CallRecord((TypeRecord("torch._C.Generator"),), {}).example() is None
        True
    """

    name: str


class CallRecord(NamedTuple):
    """A recorded call.

    Attributes:
        args: the positional arguments. A tensor is recorded as a `TensorRecord`, and a list item by
            item. None, numbers, strings, dtypes, devices, layouts and memory formats are recorded
            as they are, and any other value as a `TypeRecord`.
        kwargs: the keyword arguments, recorded in the same way.

    Example:
        >>> import torch, torchop
        >>> tensor = torchop.testing.TensorRecord(torch.float32, (2,), "cpu", False)
        >>> torchop.testing.CallRecord((tensor, 2.0), {"dim": None}).example()
        ((tensor([1., 1.]), 2.0), {'dim': None})
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return example arguments, with tensors of ones, or None if an argument is a TypeRecord.

        The value of a TypeRecord was not recorded.
        """
        if any(isinstance(part, TypeRecord) for part in self.parts()):
            return None
        return mapped(self, lambda p: p.example() if isinstance(p, TensorRecord) else p)

    def parts(self) -> Iterator[Any]:
        """Yield each argument of the call, or each item if the argument is a list."""
        parts: list[Any] = []
        mapped(self, parts.append)
        return iter(parts)


def mapped(
    call: tuple[tuple[Any, ...], Mapping[str, Any]], change: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `change` to each argument of a call, or to each item if the argument is a list."""

    def changed(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and not isinstance(value, (TensorRecord, TypeRecord)):
            return [changed(item) for item in value]
        return change(value)

    args, kwargs = call
    return tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()}


def described(op: str, call: CallRecord) -> str:
    """Format a call's arguments in one line, e.g. `(float32[2, 3] on cpu, 4.0, dim=None)`.

    If the operator takes structures, such as dataclasses, show these objects instead of the
    flattened arguments of the schema.
    """
    positional, keywords = _objects(op, call)
    args = [_described(value) for value in positional]
    args += [f"{name}={_described(value)}" for name, value in keywords.items()]
    text = f"({', '.join(args)})"
    # Replace control characters in names, because a terminal would interpret them.
    text = "".join(c if c.isprintable() else "?" for c in text[:_LONGEST])
    return text if len(text) < _LONGEST else f"{text}..."


def _objects(op: str, call: CallRecord) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    definition = own_definition(None, OpName.parse(op))
    structure = None if definition is None else definition.structure
    if structure is None:
        return call
    try:
        objects: tuple[tuple[Any, ...], Mapping[str, Any]]
        objects = structure.objects(*call.args, **call.kwargs)
        return objects
    except Exception:  # recorded with another version of the operator, or the class rejects records
        return call


def _described(value: Any) -> str:
    if isinstance(value, TensorRecord):
        grad = ", requires_grad" if value.requires_grad else ""
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)} on {value.device}{grad}"
    if isinstance(value, TypeRecord):
        return f"<{value.name}>"
    fields = as_mapping(value)
    if fields is not value:
        parts = [f"{name}={_described(field)}" for name, field in fields.items()]
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_described(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_described, value))}]"
    return repr(value)


def observed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallRecord | None:
    """Return a `CallRecord` for a call that the mode of `observing_mode` has reported.

    Return None if a compiler is tracing the call, because its arguments are not real then.
    """
    parts: list[Any] = []
    mapped((args, kwargs), parts.append)
    if any(map(_is_traced, parts)):
        return None
    return record_of(args, kwargs, observing.records_gradient(function.__name__))


def record_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], records_gradient: bool = True
) -> CallRecord:
    def record(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value if type(value) in PLAIN else TypeRecord(_name_of(type(value)))
        if special := _special_kind(value):
            return TypeRecord(special)
        return TensorRecord(
            value.dtype,
            tuple(value.shape),
            str(value.device),
            value.requires_grad and records_gradient,
            None if value.is_contiguous() else tuple(value.stride()),
        )

    return CallRecord(*mapped((args, kwargs), record))


def _is_traced(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # A plain meta tensor does not count as traced, because programs also use such tensors
        # outside of traces.
        return tracing.is_traced(value) and not (type(value) in _TENSORS and value.is_meta)
    # A symbolic value always belongs to a trace. Only check its type: reading its value would add a
    # guard.
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _special_kind(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor if `TensorRecord` does not support it, and "" otherwise."""
    if type(tensor) not in _TENSORS:
        return _name_of(type(tensor))
    if tensor.is_quantized:
        return "quantized tensor"
    if tensor.layout is not torch.strided:
        return f"{str(tensor.layout).removeprefix('torch.')} tensor"
    return ""


def _name_of(cls: type) -> str:
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    return f"{module}{cls.__qualname__}"
