"""Snapshots of the inputs of a call, compared bit for bit with the inputs after the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchop._compat import autograd, devices, dispatch, functorch, operators, tracing
from torchop._core.call import named_inputs
from torchop._core.contract import storage_of
from torchop._errors import UndeclaredMutationError
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

# How far around a tensor its memory is compared. A kernel that takes a view for a contiguous tensor
# writes near it; the whole of what it is a view of may be as large as the device's memory.
MARGIN = 2**24  # bytes


class Words(NamedTuple):
    """The words of errors: for a kernel, or for a function of a formula.

    Attributes:
        mutated: what happened to an input, of which it formats the `argument` and `where`.
        function: who wrote into it.
        fix: what to do instead.
        state_fix: what to do instead of changing the shape and the like.
        around_fix: what else to do, if the memory beside a view is to be written.
    """

    mutated: str
    function: str
    fix: str
    state_fix: str
    around_fix: str = ""


KERNEL = Words(
    # The words that torch.library's opcheck has for it come first.
    "Argument {argument} is not defined as mutable but was mutated, {where}",
    "the kernel",
    "Name it in mutates_args, or write into a copy.",
    "An operator may not do that to an argument. Change a copy, or x.detach().",
    " To write there on purpose, take the whole base tensor as an argument and name it in "
    "mutates_args.",
)
# Of operators whose schema torchop wrote, so that it declares no mutation.
COMPANION = KERNEL._replace(fix="Write into a copy, such as x.clone().", around_fix="")
BACKWARD = Words(
    "the incoming gradient of {where} was mutated",
    "backward",
    "Autograd passes the same tensor to other nodes, so write into a copy, such as grad.clone().",
    "Autograd passes the same tensor to other nodes, so change a copy, or grad.detach().",
)
SETUP_CONTEXT = Words(
    "{where} was mutated",
    "setup_context",
    "Callers use the same tensor, so write into a copy, such as x.clone().",
    "Callers use the same tensor, so change a copy, or x.detach().",
)


class Snapshot:
    """The inputs of one call, and what of them its schema does not allow to be mutated.

    What cannot be compared is left out: tensors without data of their own (fake ones, those inside
    a transform of `torch.func`, meta tensors), kinds that hide it (MKL-DNN, nested tensors), memory
    of which the device has no room for a copy, and everything while a graph is captured.
    """

    def __init__(
        self,
        schema: Schema,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        words: Words = KERNEL,
    ) -> None:
        self._take(named_inputs(schema, args, kwargs), frozenset(schema.mutated), words)
        # PyTorch's operators with out= may resize it, as torch.add(x, y, out=torch.empty(0)).
        self._resizable = {a.name for a in schema.keyword_only if a.is_mutated and schema.returns}

    @classmethod
    def of_formula(cls, tensors: Iterable[tuple[str, Tensor]], words: Words) -> Snapshot:
        """A snapshot of what a function of a formula gets: tensors, and what messages call them.

        Compilers and transforms of `torch.func` run formulas on tensors without data, of which the
        counts of in-place writes are compared.
        """
        snapshot = cls.__new__(cls)
        named = [(where, where, tensor) for where, tensor in tensors]
        snapshot._take(named, frozenset(), words)
        taken = {id(item.tensor) for item in snapshot._inputs}
        snapshot._counted = [
            _Input(*each, False, {"version": version_of(each[2])})
            for each in named
            if id(each[2]) not in taken
        ]
        return snapshot

    def _take(
        self, named: Iterable[tuple[str, str, Tensor]], mutable: frozenset[str], words: Words
    ) -> None:
        self._words = words
        self._counted: list[_Input] = []
        with dispatch.plain_tensors(), autograd.below_autograd():
            inputs = [
                _Input(argument, where, tensor, argument in mutable, _state(tensor))
                for argument, where, tensor in named
                if _has_data(tensor)
            ]
            if devices.are_captured([item.tensor for item in inputs]):
                inputs = []  # what a graph captures must not be read
            self._inputs = inputs
            self._mutable_parts = [p for i in inputs if i.is_mutable for p in _parts(i.tensor)]
            by_storage: dict[int, list[Tensor]] = {}
            for part in (part for item in inputs for part in _parts(item.tensor)):
                by_storage.setdefault(storage_of(part), []).append(part)
            self._memories = [m for parts in by_storage.values() for m in _remember(parts)]

    def check(self, name: object) -> None:
        """Raises UndeclaredMutationError if an input of the operator is not what it was."""
        with dispatch.plain_tensors(), autograd.below_autograd():
            self._check_layouts(name)
            protected = [item for item in self._inputs if not item.is_mutable]
            for item in protected:
                self._check_state(name, item)
            for memory in self._memories:
                self._check_contents(name, memory)
            for item in protected:
                self._check_version(name, item)
        for item in self._counted:
            self._check_version(name, item)

    def check_layouts(self, name: object) -> None:
        """Raise UndeclaredMutationError if a declared mutation changed more than values."""
        with dispatch.plain_tensors(), autograd.below_autograd():
            self._check_layouts(name)

    def _check_layouts(self, name: object) -> None:
        """Check that mutated tensors still have their storage, shape and strides.

        Functionalization passes the kernel a copy, and copies its values back, so compiled programs
        lose everything else.
        """
        for item in self._inputs:
            if not item.is_mutable or item.tensor.layout is not torch.strided:
                continue  # a sparse tensor replaces its storages whenever it is written
            now = _state(item.tensor)
            fields = ("storage",) if item.argument in self._resizable else _LAYOUT
            field = next((f for f in fields if now[f] != item.state[f]), None)
            if field is None or _is_inplace_view(name):
                continue
            of = f"the {{}} of argument {item.where.removeprefix('input ')}"
            raise UndeclaredMutationError(
                f"{name}: the kernel {_change(field, item.state, now, of)}. Compiled programs keep "
                "the old one, because mutates_args declares new values only. Write into the tensor "
                "with copy_, or return a new tensor."
            )

    def _check_contents(self, name: object, memory: _Memory) -> None:
        changed = memory.changed()
        if changed is None:
            return
        for part in self._mutable_parts:
            if storage_of(part) == memory.storage._cdata:
                memory.elements(changed, part).fill_(False)
            elif overlap(part.untyped_storage(), memory.storage):
                return  # the same memory under another name, as NumPy makes it
        if not changed.any():
            return
        holders = [
            (item, part)
            for item in sorted(self._inputs, key=lambda item: item.is_mutable)
            for part in _parts(item.tensor)
            if storage_of(part) == memory.storage._cdata
        ]
        for item, part in holders:
            written = memory.elements(changed, part).any(-1)
            if written.any():
                index = written.nonzero()[0].tolist()
                at = f", first at index {index}" if item.tensor.layout is torch.strided else ""
                raise UndeclaredMutationError(
                    f"{self._mutated(name, item)}: {self._words.function} changed its values{at}. "
                    f"{self._words.fix}"
                )
        # A mutable input that was resized or got another storage may not be there any more.
        for item, _ in holders[:1]:
            raise UndeclaredMutationError(
                f"{self._mutated(name, item)}: {self._words.function} wrote into its storage, "
                "outside the elements of this view. Use its strides and its storage offset, or "
                f"make it contiguous.{self._words.around_fix}"
            )

    def _check_version(self, name: object, item: _Input) -> None:
        before, now = item.state["version"], version_of(item.tensor)
        if before == now:
            return
        storages = {storage_of(part) for part in self._mutable_parts}
        if storages and any(storage_of(part) in storages for part in _parts(item.tensor)):
            return  # views are counted together
        compared = len(item.state) > 1
        values = ", although its values are the same" if compared else ""
        raise UndeclaredMutationError(
            f"{self._mutated(name, item)}: {self._words.function} wrote into it{values} "
            f"(its version went from {before} to {now}). {self._words.fix}"
        )

    def _check_state(self, name: object, item: _Input) -> None:
        now = _state(item.tensor)
        for what, before in item.state.items():
            if what != "version" and now.get(what) != before:
                raise UndeclaredMutationError(
                    f"{self._mutated(name, item)}: {self._words.function} "
                    f"{_change(what, item.state, now, 'its {}')}. {self._words.state_fix}"
                )

    def _mutated(self, name: object, item: _Input) -> str:
        if item.is_mutable:
            return f"{name}: memory that is not defined as mutable was mutated, beside {item.where}"
        mutated = self._words.mutated.format(argument=item.argument, where=item.where)
        return f"{name}: {mutated}"


def overlap(left: torch.UntypedStorage, right: torch.UntypedStorage) -> bool:
    """Whether two storages wrap the same memory of a device, which is how NumPy and DLPack do."""
    if left.device != right.device or left.device.type == "meta":
        return False
    # Some devices have no addresses.
    if not left.nbytes() or not right.nbytes() or not left.data_ptr() or not right.data_ptr():
        return False
    return (
        left.data_ptr() < right.data_ptr() + right.nbytes()
        and right.data_ptr() < left.data_ptr() + left.nbytes()
    )


class _Input(NamedTuple):
    argument: str
    where: str
    tensor: Tensor
    is_mutable: bool
    state: Mapping[str, Any]


class _Memory(NamedTuple):
    """A range of a storage, as bytes."""

    storage: torch.UntypedStorage
    size: int
    start: int
    before: Tensor

    def changed(self) -> Tensor | None:
        """Which bytes have changed, as a bool for each; None if none has."""
        if self.storage.nbytes() != self.size:
            return None  # resized: the state of its tensors says so, unless it is that of out=
        now = bytes_of(self.storage)[self.start : self.start + self.before.numel()]
        if now.shape != self.before.shape or torch.equal(now, self.before):
            return None
        return now != self.before

    def elements(self, changed: Tensor, tensor: Tensor) -> Tensor:
        """The part of `changed` that a tensor of this storage covers: its shape, times bytes."""
        if not tensor.numel():
            return changed[:0]
        size, steps = tensor.element_size(), tensor.stride()
        # An expanded dimension would name the same bytes again, and could not be written.
        shape = [1 if step == 0 else n for n, step in zip(tensor.shape, steps, strict=True)]
        return changed.as_strided(
            (*shape, size),
            (*(step * size for step in steps), 1),
            tensor.storage_offset() * size - self.start,
        )


# What a kernel that writes into a tensor must leave alone, the cause before its consequences.
_LAYOUT = (
    *("storage", "storage size", "dtype", "device", "shape", "strides", "storage offset"),
    *("conjugate bit", "negative bit"),
)


def _change(field: str, before: Mapping[str, Any], now: Mapping[str, Any], of: str) -> str:
    """Return words for a change of one field of a state; `of` names the field of an argument."""
    if field == "storage":
        return f"swapped {of.format('storage')}, as set_ and assignments to .data do"
    sizes = f"from {before[field]} to {now.get(field)}"
    if field == "storage size":
        return f"resized {of.format('storage')}, {sizes} bytes, as resize_ does"
    return f"changed {of.format(field)}, {sizes}"


def _is_inplace_view(name: object) -> bool:
    """Whether an operator has the tag of PyTorch's own `t_`, `resize_` and `set_`."""
    parts = OpName.parse(str(name))
    return operators.is_registered(
        parts.packet, parts.overload
    ) and torch.Tag.inplace_view in operators.registered_tags(parts.packet, parts.overload)


def _has_data(tensor: Tensor) -> bool:
    if tracing.is_traced(tensor) or functorch.is_wrapped(tensor):
        return False
    try:
        _state(tensor)
        storages = [part.untyped_storage() for part in _parts(tensor)]
        # A tensor that only wraps another has a size, but no memory.
        return all(storage.data_ptr() or not storage.nbytes() for storage in storages)
    except Exception:  # a tensor may raise anything, but the call itself must not fail for that
        return False


# The strided tensors in which a sparse one keeps what it holds.
_PARTS: dict[torch.layout, tuple[Callable[[Tensor], Tensor], ...]] = {
    torch.sparse_coo: (Tensor._indices, Tensor._values),
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
}


def _parts(tensor: Tensor) -> list[Tensor]:
    parts = _PARTS.get(tensor.layout)
    return [tensor] if parts is None else [part(tensor) for part in parts]


def _state(tensor: Tensor) -> dict[str, Any]:
    """The state of a tensor besides its values, in the order in which messages name it."""
    parts = _parts(tensor)
    storages = [part.untyped_storage() for part in parts]
    memory = {
        "storage": [storage._cdata for storage in storages],
        "storage size": " and ".join(str(storage.nbytes()) for storage in storages),
    }
    # Those of a sparse tensor come last, because each write may replace them.
    state: dict[str, Any] = {
        **(memory if tensor.layout is torch.strided else {}),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "shape": list(tensor.shape),
        "requires_grad": tensor.requires_grad,
        "conjugate bit": tensor.is_conj(),
        "negative bit": tensor.is_neg(),
        "version": version_of(tensor),
    }
    if tensor.layout is torch.sparse_coo:
        state["coalesced flag"] = tensor.is_coalesced()
    state["strides"] = [part.stride() for part in parts]
    state["storage offset"] = [part.storage_offset() for part in parts]
    return state | memory


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written in place; None if that is not counted."""
    # PyTorch counts reading a compressed one too, where no graph is recorded.
    is_compressed = tensor.layout in _PARTS and tensor.layout is not torch.sparse_coo
    return None if is_compressed or tensor.is_inference() else tensor._version


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The memory of a storage, as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _remember(parts: Sequence[Tensor]) -> Iterator[_Memory]:
    """Copies the memory of tensors that share one storage, and some memory around them."""
    storage = parts[0].untyped_storage()
    spans = [_span(part) for part in parts]
    start = max(min(first for first, _ in spans) - MARGIN, 0)
    end = min(max(last for _, last in spans) + MARGIN, storage.nbytes())
    try:
        yield _Memory(storage, storage.nbytes(), start, bytes_of(storage)[start:end].clone())
    except RuntimeError:  # which is what devices raise; few have torch.OutOfMemoryError
        return  # there is no memory for a copy, but the call itself must not fail for that


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    size, first = tensor.element_size(), int(tensor.storage_offset())
    if not tensor.numel():
        return first * size, first * size
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + int(sum((length - 1) * step for length, step in pairs))
    return first * size, (last + 1) * size
