"""Results that are no tensors: they stay beside the flat operator, which does not carry them.

In eager mode a kernel hands them to the call of the handle that it runs in. A trace has the fake
kernel compute them. Neither is right if the two disagree, so they are compared.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from torchop._compat import fake_tensors, functorch, tracing
from torchop._errors import DataDependentError, FakeKernelError, MissingFakeError

Structure = Any


# How many kinds of inputs of one operator are compared, before it is believed.
_COMPARED = 64


class _Thread(threading.local):
    def __init__(self) -> None:
        # The calls of handles that are under way: each a list of its structure, the values, and
        # whether a kernel that ran several times returned several.
        self.calls: list[list[Any]] = []
        # Of the kernel that finished last: `setup_context` runs after it, and gets its results.
        self.last: tuple[Any, tuple[Any, ...]] | None = None


_thread = _Thread()


class Call:
    """One call of a handle, which waits for the values that its kernel returns."""

    __slots__ = ("_call",)

    def __init__(self, structure: Structure) -> None:
        self._call: list[Any] = [structure, None, False]

    def __enter__(self) -> Call:
        _thread.calls.append(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        _thread.calls.pop()

    def values(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the kernel returned beside tensors.

        Args:
            arguments: the positional arguments of the flat call, with all its tensors.

        Raises:
            DataDependentError: a fake kernel ran, and does not know.
        """
        structure, values, differed = self._call
        if differed and functorch.is_active():
            raise DataDependentError(
                f"{structure.op}: under vmap it was called for each element of a batch, and did "
                "not return the same beside tensors for all. Register a vmap rule, or return a "
                "tensor."
            )
        if values is None:
            raise DataDependentError(
                f"{structure.op}: no kernel of it ran in this call, so nobody knows what it "
                "returns beside tensors. A mode or a Tensor subclass computed the call: call the "
                "handle in there, or register a rule for it with register_torch_dispatch."
            )
        values = known(structure.op, values)
        if fake_tensors.active_fake_mode() is not None:
            # The tracer did not see the fake kernel compute it, and has to be shown how.
            tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
            return tuple(tracing.shown_to_tracer(value, tensors) for value in values)
        return values


def known(op: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values, if a fake kernel knows them all.

    Raises:
        DataDependentError: it does not.
    """
    for value in values:
        if _is_unknown(value):
            raise DataDependentError(
                f"{op}: a result depends on the data of tensors (its fake kernel returned "
                "torchop.data_dependent), and a tracer has none: torch.compile and torch.export "
                "would bake in a wrong value. Call it outside of what is compiled, or return a "
                "tensor."
            )
    return values


def _is_unknown(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_unknown(item) for item in value)
    return value is data_dependent


def hand_over(structure: Structure, values: tuple[Any, ...]) -> None:
    """Gives the values that a kernel returned to whoever waits for them."""
    _thread.last = structure, values
    calls = _thread.calls
    # A kernel that was called flat, inside the kernel of another operator, is not waited for.
    if calls and calls[-1][0] is structure:
        call = calls[-1]
        call[2] = call[2] or (call[1] is not None and call[1] != values)
        call[1] = values


def last_values(structure: Structure, count: int) -> tuple[Any, ...]:
    """What the kernel that finished last in this thread returned beside tensors."""
    last = _thread.last
    return last[1] if last is not None and last[0] is structure else (None,) * count


def traced_fake(structure: Structure) -> Any:
    """The fake kernel, for Dynamo to follow: it only puts the flat operator into the graph.

    Raises:
        MissingFakeError: there is none.
    """
    if structure.fake is None:
        raise MissingFakeError(
            f"There was no fake impl registered for {structure.op}, which returns more than "
            "tensors. torch.compile needs one to know that."
        )
    return structure.fake


def is_checking() -> bool:  # `checking` says so, when it is loaded
    return False


def compare(structure: Structure, flat: Mapping[str, Any], values: tuple[Any, ...]) -> None:
    """Compares what a kernel returned with what the fake kernel says of the same inputs.

    Raises:
        FakeKernelError: they differ.
    """
    if structure.fake is None or fake_tensors.active_fake_mode() is not None:
        return
    always = is_checking()
    if not always:
        if len(structure.compared) >= _COMPARED:
            return
        key = tuple(_metadata(value) for value in flat.values())
        if key in structure.compared:
            return
        structure.compared.add(key)
    try:
        fake_values = _fake_values(structure, flat)
    except Exception:
        if always:
            raise
        return  # some fake kernels run inside a tracer only, and tracers report the errors of all
    for name, real, fake in zip(structure.value_places, values, fake_values, strict=True):
        if not _agree(real, fake):
            raise FakeKernelError(
                f"{structure.op}: {name} is {real!r}, but the fake kernel says {fake!r}, which is "
                "what a compiled program would see. Compute it alike in both; if it depends on "
                "data, return torchop.data_dependent from the fake kernel."
            )


def _fake_values(structure: Structure, flat: Mapping[str, Any]) -> tuple[Any, ...]:
    overload = structure.overload
    assert overload is not None  # its kernel runs
    waiting, last = _thread.calls, _thread.last
    _thread.calls = []
    try:
        mode = fake_tensors.new_fake_mode()
        faked = {name: _faked(mode, value) for name, value in flat.items()}
        with mode:
            overload(**faked)
        assert _thread.last is not None  # the fake kernel returned
        return _thread.last[1]
    finally:
        _thread.calls, _thread.last = waiting, last


def _faked(mode: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value.detach(), static_shapes=True)
    if isinstance(value, (list, tuple)):
        return [_faked(mode, item) for item in value]
    return value


def _is_symbol(fake: Any) -> bool:
    return isinstance(fake, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _agree(real: Any, fake: Any) -> bool:
    """Whether a kernel may return `real` where the fake kernel says `fake`."""
    if fake is data_dependent or _is_symbol(fake):
        return True
    if type(real) is not type(fake):
        return False
    if isinstance(fake, (list, tuple)):
        return len(real) == len(fake) and all(map(_agree, real, fake))
    return bool(real == fake) or (real != real and fake != fake)  # nan is nan


def _metadata(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device, value.layout
    if isinstance(value, (list, tuple)):
        return tuple(_metadata(item) for item in value)
    try:
        hash(value)
    except TypeError:
        return type(value)
    return type(value), value


class _DataDependent:
    def __repr__(self) -> str:
        return "torchop.data_dependent"

    def __reduce__(self) -> str:
        return "data_dependent"  # there is one in a process


data_dependent: Any = _DataDependent()
"""What a fake kernel returns in place of a value that only the data of tensors decides."""
