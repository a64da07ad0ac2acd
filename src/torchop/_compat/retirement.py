"""Destroying an operator whose objects in `torch.ops` others may hold, or be calling."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

import torch

from torchop._compat import operators, torch_ops
from torchop._compat.classes import OpOverload, OpOverloadPacket


def retire_overload(namespace: str, name: str, overload: str, reason: Callable[[], str]) -> None:
    """Makes the objects under `torch.ops` raise, before the operator behind them goes away.

    Whoever still holds one (a compiled graph, a variable) would otherwise call freed memory.
    """
    packet = torch_ops.existing_packet(namespace, name)
    if packet is None:
        return
    # The overload that raises stays where it is: asked for it again, a packet that PyTorch has
    # forgotten would make one that calls, and that nobody could tell when the operator goes.
    held = vars(packet).get(overload or "default")
    if held is not None and not torch_ops.is_retired(held):
        gone = torch_ops.Gone(hash(held), reason)
        if vars(held).get("_pyobj_dispatcher") is not None:
            held._pyobj_dispatcher = None
        # `_op` last, which tells that all of this is done.
        for attribute in ("_op_dk", "_cpp_dispatch_handle", "_handle", "_op"):
            if attribute in vars(held) or attribute == "_handle":
                vars(held)[attribute] = gone
    if not torch_ops.is_retired(packet):
        gone_packet = torch_ops.GonePacket(hash(packet), namespace, name, reason)
        gone_packet.__module__ = packet._op.__module__
        packet._op = gone_packet


@contextlib.contextmanager
def replacing(namespace: str, name: str) -> Iterator[None]:
    """Keeps the packet of a name in `torch.ops`, while the body destroys and defines its operator.

    Without it, a thread that looks the name up would make another packet. Each of the two would
    hand out an overload, of which only one is known here and can be told when the operator goes.
    """
    qualname = f"{namespace}::{name}"
    _replaced.add(qualname)
    try:
        yield
    finally:
        _replaced.discard(qualname)
        _clear_packet(namespace, name)


@contextlib.contextmanager
def emptied(names: Iterable[tuple[str, str, str]], reason: Callable[[str], str]) -> Iterator[None]:
    """Lets nobody into operators any more, while the body destroys them.

    Calls that are under way in other threads are not waited for: nothing tells reliably when the
    last of them has left PyTorch's dispatcher.

    Args:
        names: the operators that the body destroys: namespace, name and overload.
        reason: what a call of one of them is told, given its name.

    Raises:
        RuntimeError: this thread is inside a call of one of them, which would go on in freed
            memory. Nothing has changed then.
    """
    names = tuple(names)
    refuse_running(names)
    for namespace, name, overload in names:
        with contextlib.suppress(AttributeError):
            # There must be something that raises, or torch.ops would make what does not.
            torch_ops.lookup_overload(namespace, name, overload)
        qualname = f"{namespace}::{name}" + (f".{overload}" if overload else "")
        retire_overload(namespace, name, overload, functools.partial(reason, qualname))
    yield
    for namespace, name, _ in names:
        _clear_packet(namespace, name)


def refuse_running(names: Iterable[tuple[str, str, str]]) -> None:
    """Refuses to destroy an operator from inside a call of it.

    Raises:
        RuntimeError: this thread is calling one of these.
    """
    for operator in _called_here() & {f"{namespace}::{name}" for namespace, name, _ in names}:
        raise RuntimeError(f"{operator} cannot be destroyed or replaced from inside a call of it.")


# Further ways of telling which operators this thread is calling.
calls_without_frames: list[Callable[[], Iterable[str]]] = []


def _called_here() -> set[str]:
    """The operators that this thread is in the middle of calling."""
    found = {name for calls in calls_without_frames for name in calls()}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == _OPS_FILE:
            subject = frame.f_locals.get("self")
            if isinstance(subject, OpOverload):
                found.add(str(subject._schema.name))
            elif isinstance(subject, OpOverloadPacket):
                found.add(str(subject._qualified_op_name))
        frame = frame.f_back
    return found


_OPS_FILE = OpOverload.__call__.__code__.co_filename


# Names whose operator is about to be defined anew.
_replaced: set[str] = set()


def _clear_packet(namespace: str, name: str) -> None:
    """Takes a packet out of `torch.ops`, unless its name has an operator, or will have one."""
    qualname = f"{namespace}::{name}"
    packet = torch_ops.existing_packet(namespace, name)
    if packet is None or qualname in _replaced:
        return
    if not operators.overload_names(qualname):
        packets = getattr(torch.ops, namespace)
        delattr(packets, name)
        if name in packets._dir:
            packets._dir.remove(name)
    elif torch_ops.is_retired(packet):
        torch_ops.refresh(packet)
