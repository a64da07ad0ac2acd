"""torchop.native: control and observe native calls.

A call is native if torchop's C++ extension runs the kernel directly, without going through
PyTorch's dispatcher.
"""

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
    """Disable native calls in this thread inside a `with` block.

    All calls in the block go through PyTorch's dispatcher and give the same results, including
    calls in a backward pass that starts in the block. Use `disabled` to compare results or timings
    with and without native calls. You can nest these blocks.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::negate", mutates_args=())
        ... def negate(x: torch.Tensor) -> torch.Tensor:
        ...     return -x
        >>> with torchop.native.disabled():
        ...     negate(torch.ones(2))
        tensor([-1., -1.])
    """
    switch.obtain()  # else the first call in the block could load the extension, and be native
    native = switch.native_module()
    if native is not None:
        native.switch_off(1)
    try:
        yield  # calls may become native if the extension finishes loading inside the block
    finally:
        if native is not None:
            native.switch_off(-1)


def wait(timeout: float | None = None) -> bool:
    """Wait until calls are native, for example before a benchmark or while building an image.

    Native calls need a C++ extension. If it has not been compiled on this machine yet, the 1,000th
    call in a program starts compiling it in the background, and calls stay slower until it is
    loaded. `wait` starts compiling it right away, and returns once it is loaded.

    Args:
        timeout: the maximum number of seconds to wait, or None for no limit. With 0, `wait` does
            not wait: it loads the extension if it is compiled, or else starts to compile it.

    Returns:
        Whether calls are native now. This is False if the timeout expired, if TORCHOP_NATIVE=0 is
        set, or if Python runs without the GIL.

    Raises:
        NativeUnavailableError: no compiler was found, or compiling or loading failed.
        TypeError: `timeout` is not a number.
        ValueError: `timeout` is negative or NaN.

    Example:
        >>> import torchop
        >>> torchop.native.wait()
        True
    """
    if timeout is not None:
        is_number = isinstance(timeout, Real)
        if not is_number or not timeout >= 0:
            raise (ValueError if is_number else TypeError)(
                "torchop.native.wait: timeout must be a non-negative number of seconds, or None to "
                f"wait for the build; got {short_repr(timeout)}."
            )
        timeout = min(timeout, threading.TIMEOUT_MAX)
    return switch.wait(timeout)


def counters(op: OpLike) -> Mapping[str, int]:
    """Return how many calls to an operator were native, and how many were not, by reason.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.

    Returns:
        A mapping from reasons to numbers of calls. The key `"native"` counts the native calls.
        Reasons that never occurred are left out, and so are calls from before the extension was
        loaded.

    Raises:
        ValueError: `op` is not an operator.
        OperatorNotFoundError: the operator is not defined.

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
        find_schema(name)  # raise if the operator does not exist
        return {}
    counted = zip(Reason, entry.counters, strict=True)
    return {reason.name.lower(): count for reason, count in counted if count}
