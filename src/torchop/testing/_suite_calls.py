"""Record the calls of a test suite with their argument values, and choose examples from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchop._accelerate.patterns import is_match
from torchop._compat import observing
from torchop._inspect.call_record import CallRecord, TensorRecord, TypeRecord, mapped, observed
from torchop.extend import OpName
from torchop.testing import probes

# Tensors of up to this many bytes are stored with their values. For larger tensors, only the
# metadata and the range of values are stored.
_MOST_BYTES = 2**20
# The maximum number of distinct calls to store for each operator, and to use as examples.
_MOST_CALLS, _MOST_EXAMPLES = 64, 6
# Prefer calls with at most this many elements as examples, because larger examples slow down all
# checks.
_MANY_ELEMENTS = 4096


@dataclass(frozen=True)  # not a NamedTuple, because `mapped` would treat it as a list
class SeededTensor:
    """The metadata and value range of a large tensor, which `make` fills with random values."""

    record: TensorRecord
    low: float
    high: float

    def make(self) -> Tensor:
        tensor = self.record.example().detach()
        generator = torch.Generator().manual_seed(0)
        values = torch.rand(tensor.shape, generator=generator, dtype=torch.double)
        values = self.low + (self.high - self.low) * values
        if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
            values = values.round()
        tensor.copy_(values)
        return tensor.requires_grad_(self.record.requires_grad)


class StoredCall(NamedTuple):
    """A call with its arguments, in which `SeededTensor` replaces large tensors."""

    record: CallRecord
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def elements(self) -> int:
        tensors = [part for part in self.record.parts() if isinstance(part, TensorRecord)]
        return sum(math.prod(tensor.shape) for tensor in tensors)

    @property
    def kind(self) -> str:
        """A string with each tensor's dtype and number of dimensions, and all other arguments."""

        def described(part: Any) -> Any:
            is_tensor = isinstance(part, TensorRecord)
            return (str(part.dtype), len(part.shape)) if is_tensor else repr(part)

        return str(mapped(self.record, described))

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        made = mapped((self.args, self.kwargs), _made)
        return made


def _made(value: Any) -> Any:
    return value.make() if isinstance(value, SeededTensor) else value


class SuiteCalls:
    """Record the calls of operators whose names match patterns, between `start` and `stop`.

    Only successful calls are stored, because tests also make calls that are supposed to fail.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = tuple(patterns)
        self._matches: dict[str, bool] = {}
        self._calls: dict[str, dict[str, StoredCall]] = {}
        self._mode: Any = None

    def start(self) -> None:
        self._mode = observing.observing_mode(self._note)
        self._mode.__enter__()

    def stop(self) -> None:
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)

    def save(self, path: Path) -> None:
        torch.save(self._calls, path)

    @property
    def calls(self) -> Mapping[str, list[StoredCall]]:
        return {op: list(calls.values()) for op, calls in self._calls.items()}

    def update(self, path: Path) -> None:
        """Add the calls that another process saved."""
        # The file contains classes of this module, which weights_only=True would reject. It is safe
        # to load, because another process of the same test run has written it.
        for op, calls in torch.load(path, weights_only=False).items():
            for key, call in calls.items():
                self._add(op, key, call)

    def _note(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], None] | None:
        if name not in self._matches:
            op = OpName.parse(name)
            self._matches[name] = any(is_match(op, pattern) for pattern in self._patterns)
        if not self._matches[name] or (record := observed(args, kwargs)) is None:
            return None
        key = repr(record)
        if key in self._calls.get(name, {}) or any(
            isinstance(part, TypeRecord) for part in record.parts()
        ):
            return None
        # Copy the arguments before the call, because the operator may write to them.
        call = StoredCall(record, *_copied(record, args, kwargs))
        return lambda: self._add(name, key, call)

    def _add(self, op: str, key: str, call: StoredCall) -> None:
        calls = self._calls.setdefault(op, {})
        if key in calls:
            return
        calls[key] = call
        if len(calls) > _MOST_CALLS:
            largest = max(calls, key=lambda key: calls[key].elements)
            del calls[largest]


def _copied(
    record: CallRecord, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    values: list[Any] = []
    mapped((args, kwargs), values.append)
    pairs = zip(values, record.parts(), strict=True)
    with torch.no_grad():
        copies = iter([_stored(value, part) for value, part in pairs])
    return mapped((args, kwargs), lambda value: next(copies))


def _stored(value: Any, record: Any) -> Any:
    if not isinstance(record, TensorRecord):
        return value
    plain = value.detach()
    if record.nbytes <= _MOST_BYTES:
        copy = record.example().detach().copy_(plain)
        return copy.requires_grad_(record.requires_grad)
    numbers = plain if not plain.is_complex() else torch.view_as_real(plain)
    numbers = numbers.double()
    numbers = numbers[numbers.isfinite()]
    low, high = (float(numbers.min()), float(numbers.max())) if numbers.numel() else (0.0, 0.0)
    return SeededTensor(record, low, high)


# --------------------------------------------------------------------------------------------------
# Examples


def examples_of(calls: Iterable[StoredCall]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Choose a few different calls as examples, preferring small ones with several dimensions."""
    ordered = sorted(calls, key=_rank)
    chosen: list[StoredCall] = []
    kinds: set[str] = set()
    for call in ordered:
        if call.kind not in kinds and len(chosen) < _MOST_EXAMPLES:
            kinds.add(call.kind)
            chosen.append(call)
    examples = [call.example() for call in chosen or ordered[:1]]
    return _with_union_of_gradients(examples, [call.record for call in ordered])


def _rank(call: StoredCall) -> tuple[bool, bool, int]:
    shapes = [part.shape for part in call.record.parts() if isinstance(part, TensorRecord)]
    has_rows = any(sum(size > 1 for size in shape) > 1 for shape in shapes)
    return call.elements > _MANY_ELEMENTS, not has_rows, call.elements


def _with_union_of_gradients(
    examples: list[tuple[tuple[Any, ...], dict[str, Any]]], records: Sequence[CallRecord]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Make an argument require grad in all examples if it requires grad in any call.

    An example may come from a test in which only one argument requires grad. Without this step, the
    checks would then leave out the gradients of all other arguments.
    """

    def places(call: Any) -> Iterator[tuple[str, Any]]:
        args, kwargs = call
        for key, value in [*enumerate(args), *kwargs.items()]:
            for item in value if isinstance(value, list) else [value]:
                yield str(key), item

    needed = {
        key
        for record in records
        for key, part in places(record)
        if isinstance(part, TensorRecord) and part.requires_grad
    }
    for example in examples:
        for key, value in places(example):
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                value.requires_grad_(key in needed)
    return examples


def has_rows(example: Any) -> bool:
    """Return whether any tensor has at least two dimensions with more than one element.

    Transposing a tensor without two such dimensions does not change its layout, so many layout
    checks would find nothing.
    """
    return any(sum(size > 1 for size in t.shape) > 1 for t in probes.tensors_of(example))


def grown(example: Any, *, rows: int) -> Any:
    """Return an example with larger tensors, with new values in the range of the old values.

    Dimensions of size 1 are enlarged to size 3. If `rows` is not 0, a leading dimension of this
    size is added to each tensor that has at least one dimension.
    """
    generator = torch.Generator().manual_seed(0)

    def change(tensor: Tensor) -> Tensor:
        if not probes.is_plain(tensor) or not tensor.dim() or not tensor.numel():
            return tensor
        shape = [3 if size == 1 else size for size in tensor.shape]
        shape = [rows, *shape] if rows else shape
        flat = tensor.detach().flatten()
        places = torch.randint(0, flat.numel(), (math.prod(shape),), generator=generator)
        values = flat[places.to(flat.device)]
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            other = flat[places.roll(1).to(flat.device)]
            share = torch.rand(values.shape, generator=generator).to(values)
            values = values * share + other * (1 - share)
            values = values * (
                0.75 + 0.25 * torch.rand(values.shape, generator=generator).to(values)
            )
        return values.view(shape).contiguous().requires_grad_(tensor.requires_grad)

    return probes.mapped(example, change)
