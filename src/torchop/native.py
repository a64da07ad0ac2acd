"""torchop.native: waiting for native calls, turning them off, and counting them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from numbers import Real

from torchop._core.registry import OpLike, find_schema, op_name, own_definition
from torchop._errors import NativeBuildWarning, NativeUnavailableError, short_repr
from torchop._native import switch
from torchop._native.extension.api import Status, status
from torchop._native.reasons import Reason
from torchop._native.table.calls import entry_of

__all__ = [
    "NativeBuildWarning",
    "NativeUnavailableError",
    "Status",
    "counters",
    "disabled",
    "status",
    "wait",
]


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Sends the calls of this thread through PyTorch's dispatcher inside a `with` block.

    Those of its backward, too, which PyTorch runs in threads of its own on a GPU. The results are
    the same. Use it to compare native calls with the dispatcher, in results or in time. Blocks may
    be nested.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::negate", mutates_args=())
        ... def negate(x: torch.Tensor) -> torch.Tensor:
        ...     return -x
        >>> with torchop.native.disabled():
        ...     negate(torch.ones(2))
        tensor([-1., -1.])
    """
    switch.obtain()  # otherwise the first call inside of the block might do that, and be native
    native = switch.native_module()
    if native is not None:
        native.switch_off(1)
    try:
        yield  # if it becomes available inside the block, the rest of the block may be native
    finally:
        if native is not None:
            native.switch_off(-1)


def wait(timeout: float | None = None) -> bool:
    """Waits until calls are native, so that a benchmark times those, or an image is complete.

    The first call of an operator starts to compile the native call path, once on a machine, and in
    the background. Until that is done, calls take longer. This function starts it too, and
    returns once it has succeeded or failed.

    Args:
        timeout: how many seconds to wait at most; None waits as long as compiling takes. With 0, it
            only loads a native call path that was compiled before.

    Returns:
        Whether calls are native from now on. They are not if the time is over while compiling goes
        on, or if TORCHOP_NATIVE=0 or a Python without the GIL turns native calls off.

    Raises:
        NativeUnavailableError: there is no compiler, it failed, or what it made cannot be loaded.
        TypeError: `timeout` is not a number.
        ValueError: `timeout` is negative, or not a number of seconds.

    Example:
        >>> import torchop
        >>> torchop.native.wait()
        True
    """
    if timeout is not None:
        is_number = isinstance(timeout, Real)
        if not is_number or not timeout >= 0:
            raise (ValueError if is_number else TypeError)(
                f"torchop.native.wait: timeout is {short_repr(timeout)}, and must be a number of "
                "seconds, 0 or more, or None, to wait as long as compiling takes."
            )
        timeout = min(timeout, threading.TIMEOUT_MAX)
    return switch.wait(timeout)


def counters(op: OpLike) -> Mapping[str, int]:
    """Counts the native calls of an operator, and the other calls by reason.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.

    Returns:
        The number of calls by reason; `"native"` for native calls. Reasons without a call are left
        out. Calls before the extension was loaded are not counted.

    Raises:
        ValueError: `op` is not an operator.
        OperatorNotFoundError: there is no operator of this name.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::square_root", mutates_args=())
        ... def square_root(x: torch.Tensor) -> torch.Tensor:
        ...     return x.sqrt()
        >>> sorted(torchop.native.counters(square_root))
        []
    """
    name = op_name(op, "counters")
    definition = own_definition(op, name)
    entry = entry_of(name) if definition is None else definition.entry
    if entry is None:
        find_schema(name)  # raises if there is no such operator; this one has no native calls
        return {}
    counted = zip(Reason, entry.counters, strict=True)
    return {reason.name.lower(): count for reason, count in counted if count}
