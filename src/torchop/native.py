"""torchop.native: turning native calls off, and counting them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torchop._core.registry import OpLike, find_schema, op_name, own_definition
from torchop._native import low_level, switch
from torchop._native.extension.api import Status, status
from torchop._native.reasons import Reason

__all__ = ["Status", "counters", "disabled", "status"]


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Sends the calls of this thread through PyTorch's dispatcher inside a `with` block.

    The results are the same. Use it to compare native calls with the dispatcher, in results or in
    time. Blocks may be nested.

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
        native.switch_off()
    try:
        yield  # if it becomes available inside the block, the rest of the block may be native
    finally:
        if native is not None:
            native.switch_on()


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
    entry = low_level.entry_of(name) if definition is None else definition.entry
    if entry is None:
        find_schema(name)  # raises if there is no such operator; this one has no native calls
        return {}
    counted = zip(Reason, entry.counters, strict=True)
    return {reason.name.lower(): count for reason, count in counted if count}
