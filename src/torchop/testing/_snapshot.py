"""Detect mutations that the schema of an operator does not declare.

A `Snapshot` copies the inputs of a call before the kernel runs, and compares the inputs with the
copies bit for bit afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchop import UndeclaredMutationError
from torchop._compat import autograd, devices, dispatch, functorch, operators, tracing
from torchop._core.contract import storage_of, version_of
from torchop.extend import OpName, Schema, named_inputs

# A kernel that ignores the strides of a view may write outside the view, so a snapshot also copies
# this many bytes on either side of each tensor. Copying the whole storage could take too much
# memory.
MARGIN = 2**24


class Words(NamedTuple):
    """The parts of error messages that differ between kernels and backward formulas.

    `mutated` is a format string with two fields: `argument`, the name of the mutated argument, and
    `where`, a more detailed description of it. `function` names the function that made the
    mutation. The other parts say how to fix a function that changes values (`fix`), changes
    metadata (`state_fix`), or writes outside the elements of a view (`around_fix`).
    """

    mutated: str
    function: str
    fix: str
    state_fix: str
    around_fix: str = ""


KERNEL = Words(
    # `torch.library.opcheck` raises an error with the same wording.
    "Argument {argument} is not defined as mutable but was mutated, {where}",
    "the kernel",
    "Name it in mutates_args, or write into a copy.",
    "An operator must not change its arguments in this way. Change a copy, or x.detach().",
    " To write there on purpose, take the whole base tensor as an argument and name it in "
    "mutates_args.",
)
# The words for helper operators, which torchop defines itself with generated schemas. Users cannot
# add an argument to `mutates_args` of a helper operator, so the message does not suggest it.
HELPER = KERNEL._replace(fix="Write into a copy, such as x.clone().", around_fix="")
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
    """Copies of the inputs of one call, for detecting mutations that the schema does not declare.

    Inputs that cannot be copied and compared are skipped: fake and meta tensors, tensors inside a
    `torch.func` transform, MKL-DNN and nested tensors, tensors that are too large to copy, and all
    inputs while a device graph is being captured.
    """

    def __init__(
        self,
        schema: Schema,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        words: Words = KERNEL,
    ) -> None:
        self._take(named_inputs(schema, args, kwargs), frozenset(schema.mutated), words)
        # A kernel may resize an out= argument, as in torch.add(x, y, out=torch.empty(0)).
        self._resizable = {a.name for a in schema.keyword_only if a.is_mutated and schema.returns}

    @classmethod
    def of_formula(cls, tensors: Iterable[tuple[str, Tensor]], words: Words) -> Snapshot:
        """Return a snapshot of the arguments of `backward` or `setup_context`.

        `tensors` yields pairs of a description and a tensor. Compilers and `torch.func` transforms
        pass tensors without data, for which only the version counters can be compared.
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
                inputs = []  # copying them would add the copies to the graph
            self._inputs = inputs
            self._mutable_parts = [p for i in inputs if i.is_mutable for p in _parts(i.tensor)]
            by_storage: dict[int, list[Tensor]] = {}
            for part in (part for item in inputs for part in _parts(item.tensor)):
                by_storage.setdefault(storage_of(part), []).append(part)
            self._memories = [m for parts in by_storage.values() for m in _remember(parts)]

    def check(self, name: object) -> None:
        """Raise UndeclaredMutationError if the call changed more than the schema declares."""
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
        """Raise UndeclaredMutationError if the call changed the layout of a mutable argument."""
        with dispatch.plain_tensors(), autograd.below_autograd():
            self._check_layouts(name)

    def _check_layouts(self, name: object) -> None:
        """Check that mutable arguments still have the same storage, shape and strides.

        Functionalization runs the kernel on a copy of the argument and copies only the values back,
        so compiled programs would lose any other change, for example a new shape.
        """
        for item in self._inputs:
            if not item.is_mutable or item.tensor.layout is not torch.strided:
                continue  # writing to a sparse tensor may replace its storages
            now = _state(item.tensor)
            fields = ("storage",) if item.argument in self._resizable else _LAYOUT
            field = next((f for f in fields if now[f] != item.state[f]), None)
            if field is None or _is_inplace_view(name):
                continue
            of = f"the {{}} of argument {item.where.removeprefix('input ')}"
            raise UndeclaredMutationError(
                f"{name}: the kernel {_change(field, item.state, now, of)}. mutates_args only "
                "declares new values, so compiled programs would lose this change. Write into the "
                "tensor with copy_, or return a new tensor."
            )

    def _check_contents(self, name: object, memory: _Memory) -> None:
        changed = memory.changed()
        if changed is None:
            return
        for part in self._mutable_parts:
            if storage_of(part) == memory.storage._cdata:
                memory.elements(changed, part).fill_(False)
            elif overlap(part.untyped_storage(), memory.storage):
                # A mutable argument uses the same memory through another storage, for example if
                # both wrap the same NumPy array, so the change may be a declared mutation.
                return
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
        # If the kernel replaced the storage of a mutable input, no input uses the old storage any
        # more. `holders` is then empty, and a change of the old storage is harmless.
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
            return  # a mutable argument shares this version counter
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
            return f"{name}: memory outside the elements of {item.where} was mutated"
        mutated = self._words.mutated.format(argument=item.argument, where=item.where)
        return f"{name}: {mutated}"


def overlap(left: torch.UntypedStorage, right: torch.UntypedStorage) -> bool:
    """Return whether two storages overlap in memory, e.g. because both wrap one NumPy array."""
    if left.device != right.device or left.device.type == "meta":
        return False
    # Empty storages cannot overlap, and storages on some devices have no address.
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
    """A copy of part of a storage.

    `before` contains the copied bytes, which start at offset `start` in the storage. `size` is the
    total size of the storage in bytes.
    """

    storage: torch.UntypedStorage
    size: int
    start: int
    before: Tensor

    def changed(self) -> Tensor | None:
        """Return a boolean mask of the changed bytes, or None if nothing changed."""
        if self.storage.nbytes() != self.size:
            return None  # the storage was resized, which `_check_state` reports
        now = bytes_of(self.storage)[self.start : self.start + self.before.numel()]
        if now.shape != self.before.shape or torch.equal(now, self.before):
            return None
        return now != self.before

    def elements(self, changed: Tensor, tensor: Tensor) -> Tensor:
        """Return the part of the mask `changed` that covers the elements of a tensor, as a view.

        The view has the shape of the tensor, plus a last dimension for the bytes of each element.
        """
        if not tensor.numel():
            return changed[:0]
        size, steps = tensor.element_size(), tensor.stride()
        # PyTorch rejects writes to a view whose elements share memory, so reduce expanded
        # dimensions to size 1.
        shape = [1 if step == 0 else n for n, step in zip(tensor.shape, steps, strict=True)]
        return changed.as_strided(
            (*shape, size),
            (*(step * size for step in steps), 1),
            tensor.storage_offset() * size - self.start,
        )


# The fields of `_state` that a declared mutation must not change. The error message names only the
# first changed field, so causes precede their consequences. For example, "storage" precedes
# "storage size", because a new storage often has a different size.
_LAYOUT = (
    *("storage", "storage size", "dtype", "device", "shape", "strides", "storage offset"),
    *("conjugate bit", "negative bit"),
)


def _change(field: str, before: Mapping[str, Any], now: Mapping[str, Any], of: str) -> str:
    """Describe the change of a field of `_state` for an error message.

    `of` is a format string that names the owner of the field, such as "its {}".
    """
    if field == "storage":
        return f"swapped {of.format('storage')}, as set_ and assignments to .data do"
    sizes = f"from {before[field]} to {now.get(field)}"
    if field == "storage size":
        return f"resized {of.format('storage')}, {sizes} bytes, as resize_ does"
    return f"changed {of.format(field)}, {sizes}"


def _is_inplace_view(name: object) -> bool:
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
        # The storage of a wrapper subclass has a nonzero size, but no memory that could be copied.
        return all(storage.data_ptr() or not storage.nbytes() for storage in storages)
    except Exception:  # a Tensor subclass may raise anything, which must not break the user's call
        return False


# Maps each sparse layout to functions that return the strided tensors inside a sparse tensor.
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
    parts = _parts(tensor)
    storages = [part.untyped_storage() for part in parts]
    memory = {
        "storage": [storage._cdata for storage in storages],
        "storage size": " and ".join(str(storage.nbytes()) for storage in storages),
    }
    # For a sparse tensor, compare the storages last. Any write to the tensor may replace its
    # storages, so if another field has changed too, that field describes the write more precisely.
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


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _remember(parts: Sequence[Tensor]) -> Iterator[_Memory]:
    """Copy the memory of tensors that share one storage, with `MARGIN` bytes on either side.

    Yield nothing if there is not enough memory for the copy, so that the tensors are skipped.
    """
    storage = parts[0].untyped_storage()
    spans = [_span(part) for part in parts]
    start = max(min(first for first, _ in spans) - MARGIN, 0)
    end = min(max(last for _, last in spans) + MARGIN, storage.nbytes())
    try:
        yield _Memory(storage, storage.nbytes(), start, bytes_of(storage)[start:end].clone())
    except RuntimeError:  # out of memory; not all devices raise torch.OutOfMemoryError
        return


def _span(tensor: Tensor) -> tuple[int, int]:
    size, first = tensor.element_size(), int(tensor.storage_offset())
    if not tensor.numel():
        return first * size, first * size
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + int(sum((length - 1) * step for length, step in pairs))
    return first * size, (last + 1) * size
