"""Results that are not tensors, which the flat operator does not return.

In eager mode, a kernel passes them to the call of the handle. In a trace, the fake kernel computes
them. The two must agree, so they are compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchop._compat import fake_tensors, functorch, tracing
from torchop._errors import DataDependentError, FakeKernelError, MissingFakeError, short_repr

# How many kinds of inputs of one operator are compared, before its fake kernel is believed.
_MOST_COMPARED = 64


class _Thread(threading.local):
    def __init__(self) -> None:
        # The calls of handles that are under way, the innermost last.
        self.calls: list[Call] = []
        # What the kernel that finished last returned: `setup_context` runs after it, and needs it.
        self.last: tuple[Values, tuple[Any, ...]] | None = None


_thread = _Thread()


class Values:
    """What one operator returns beside tensors.

    Attributes:
        places: how messages name the values; empty where tensors are all that it returns.
        fake: the user's fake kernel, when there is one.
    """

    def __init__(self, op: str, places: tuple[str, ...]) -> None:
        self.op = op
        self.places = places
        self.fake: Callable[..., Any] | None = None
        # The metadata of inputs for which a kernel and the fake kernel agreed.
        self._compared: set[Any] = set()

    def describe_by(self, fake: Callable[..., Any]) -> None:
        """Notes the fake kernel, which computes the values for a tracer."""
        self.fake = fake
        self._compared = set()

    def traced_fake(self) -> Callable[..., Any]:
        """The fake kernel, for Dynamo to follow: it only puts the flat operator into the graph."""
        if self.fake is None:
            raise MissingFakeError(
                f"There was no fake impl registered for {self.op}, which returns more than "
                "tensors. torch.compile needs one to know the other results."
            )
        return self.fake

    def known(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values; refuses those that a fake kernel does not know."""
        for value in values:
            if _is_unknown(value):
                raise DataDependentError(
                    f"{self.op}: a result depends on the data of tensors (its fake kernel returned "
                    "torchop.data_dependent), and a traced call has no data: torch.compile and "
                    "torch.export would bake in a wrong value. Call it outside the compiled "
                    "function, or return a tensor."
                )
        return values

    def hand_over(self, values: tuple[Any, ...]) -> None:
        """Gives the values that a kernel returned to the call that waits for them."""
        _thread.last = self, values
        calls = _thread.calls
        # A kernel that was called flat, inside the kernel of another operator, is not waited for.
        if calls and calls[-1].operator is self:
            call = calls[-1]
            call.differed = call.differed or (call.returned is not None and call.returned != values)
            call.returned = values

    def last(self) -> tuple[Any, ...]:
        """The values of the kernel that finished last in this thread."""
        last = _thread.last
        return last[1] if last is not None and last[0] is self else (None,) * len(self.places)

    def compare(
        self,
        overload: Callable[..., Any] | None,
        arguments: Mapping[str, Any],
        values: tuple[Any, ...],
    ) -> None:
        """Refuses values of a kernel that differ from the fake kernel's, for flat arguments."""
        if self.fake is None or fake_tensors.active_fake_mode() is not None:
            return
        always = is_checking()
        if not always:
            if len(self._compared) >= _MOST_COMPARED:
                return
            key = tuple(_metadata(value) for value in arguments.values())
            if key in self._compared:
                return
            self._compared.add(key)
        assert overload is not None  # its kernel runs
        try:
            fakes = _values_on_fake_tensors(overload, arguments)
        except Exception:
            if always:
                raise
            # Some fake kernels run inside a tracer only, and tracers report the errors of all.
            return
        for place, real, fake in zip(self.places, values, fakes, strict=True):
            if not _agree(real, fake):
                raise FakeKernelError(
                    f"{self.op}: {place} is {short_repr(real)}, but the fake kernel says "
                    f"{short_repr(fake)}, which is what a compiled program would see. Compute the "
                    "same value in both. If it depends on data, return torchop.data_dependent "
                    "from the fake kernel."
                )


class Call:
    """One call of a handle, which waits for the values that its kernel returns.

    Attributes:
        operator: the values of the operator that is called.
        returned: what the kernel returned beside tensors, when it ran.
        differed: whether a kernel that ran several times did not return the same each time.
    """

    __slots__ = ("differed", "operator", "returned")

    def __init__(self, operator: Values) -> None:
        self.operator = operator
        self.returned: tuple[Any, ...] | None = None
        self.differed = False

    def __enter__(self) -> Call:
        _thread.calls.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _thread.calls.pop()

    def values(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the kernel returned beside tensors, for the positional arguments of a flat call."""
        if self.differed and functorch.is_active():
            raise DataDependentError(
                f"{self.operator.op}: under vmap it was called for each element of a batch, and "
                "its results other than tensors differ between elements. Register a vmap rule, or "
                "return a tensor."
            )
        if self.returned is None:
            raise DataDependentError(
                f"{self.operator.op}: none of its kernels ran in this call, so its results other "
                "than tensors are unknown. A mode or a Tensor subclass computed the call: call "
                "the handle there, or register a rule for it with register_torch_dispatch. "
                "Selective checkpointing saves only tensors: register the policy 'recompute'."
            )
        values = self.operator.known(self.returned)
        if fake_tensors.active_fake_mode() is not None:
            # The tracer did not see the fake kernel compute it, and has to be shown how.
            tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
            return tuple(tracing.shown_to_tracer(value, tensors) for value in values)
        return values


def _is_unknown(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_unknown(item) for item in value)
    # Not `value is data_dependent`: until 2.12, Dynamo cannot compare a symbol with an object.
    return isinstance(value, _DataDependent)


# Whether a block of `torchop.checking()` is open in this thread, in which every call is compared.
# Those blocks belong to the core, above this package: its module puts its own function here, and
# `bool()` is False.
is_checking: Callable[[], bool] = bool


def _values_on_fake_tensors(
    overload: Callable[..., Any], arguments: Mapping[str, Any]
) -> tuple[Any, ...]:
    """What the fake kernel returns beside tensors."""
    calls, last = _thread.calls, _thread.last
    _thread.calls = []
    try:
        mode = fake_tensors.new_fake_mode()
        fakes = {name: _fake(mode, value) for name, value in arguments.items()}
        with mode:
            overload(**fakes)
        assert _thread.last is not None  # the fake kernel returned
        return _thread.last[1]
    finally:
        _thread.calls, _thread.last = calls, last


def _fake(mode: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value.detach(), static_shapes=True)
    if isinstance(value, (list, tuple)):
        return [_fake(mode, item) for item in value]
    return value


def _agree(real: Any, fake: Any) -> bool:
    """Whether a kernel may return `real` where the fake kernel says `fake`."""
    if fake is data_dependent or isinstance(fake, (torch.SymInt, torch.SymFloat, torch.SymBool)):
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
