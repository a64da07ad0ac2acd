"""checking: finds kernels that write into arguments which their schemas do not mark as mutated."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

from torchop._compat import autograd, compilers
from torchop._core.blocks import Block
from torchop._core.call import named_inputs, named_outputs
from torchop._core.lock import registration_lock
from torchop._core.snapshot import BACKWARD, KERNEL, SETUP_CONTEXT, Snapshot, Words
from torchop._schema.schema import Schema

# This costs nothing while nobody uses it, because the plan then contains the plain kernel. The
# first block in the process makes all plans stale, so they are compiled again with a checking
# kernel. The end of the last block does the same.


class checking(Block):  # noqa: N801  (called like a function)
    """Checks in each call that an operator only mutates the arguments that its schema names.

    It compares the inputs of a kernel before and after it runs, bit for bit, except those that the
    schema declares as mutated; of these, the storage, shape and strides must stay. An `out=`
    argument may be resized. Because it also compares the memory around them, their shape,
    strides and storage, and PyTorch's count of in-place writes, it finds writes of PyTorch, of
    NumPy and of C extensions.

    It checks the calls of this thread and of its backward, also from compiled code and from other
    kernels, and every kernel that was registered with torchop. It also checks that `backward` does
    not write into its incoming gradients, nor `setup_context` into inputs and outputs. A compiled
    graph has run both when it was compiled, so it must be compiled in the block.

    On a GPU, backward runs in threads of PyTorch's own, and before PyTorch 2.12 no block reaches
    these. Blocks may be nested, and you can decorate a function. A block is slow, because it copies
    the inputs of each call; calls outside of blocks cost nothing extra. Some inputs cannot be
    compared: tensors without data, MKL-DNN tensors, tensors for whose copy the device has no room,
    and all tensors while a graph is captured on their device. Other threads should not write into
    the same memory meanwhile.

    Raises:
        UndeclaredMutationError: in the block, by the call of an operator.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::normalize", mutates_args=())
        ... def normalize(x: torch.Tensor) -> torch.Tensor:
        ...     return x.div_(x.sum()).clone()
        >>> with torchop.testing.checking():
        ...     normalize(torch.ones(2))
        Traceback (most recent call last):
        torchop.UndeclaredMutationError: docs::normalize: Argument x is not defined as mutable ...

    The idea is the check of `torch.library.opcheck`, for the calls of a whole program.
    """

    def __init__(self) -> None:
        self._entered: list[list[checking]] = []

    def _recreate_cm(self) -> checking:
        return checking()  # a decorated function may run in several threads at once

    def __enter__(self) -> None:
        with registration_lock:
            _switch(_blocks + 1)
        self._entered.append(_thread.open_blocks)
        _thread.open_blocks.append(self)
        _blocks_of_caller.set(_thread.open_blocks)

    def __exit__(self, *exception: object) -> None:
        if not self._entered:
            raise RuntimeError("checking() was exited, but it was not entered")
        self._entered.pop().remove(self)  # of the thread that entered, whichever leaves
        with registration_lock:
            _switch(_blocks - 1)


class _Plan(Protocol):
    def outdate_plan(self) -> None: ...


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open_blocks: list[checking] = []


_thread = _Thread()
# The list of the thread, which its backward finds in the threads that PyTorch runs it in.
_blocks_of_caller: ContextVar[list[checking]] = ContextVar("torchop_checking")
_blocks = 0  # open in all threads
_plans: weakref.WeakSet[_Plan] = weakref.WeakSet()


def _switch(blocks: int) -> None:
    global _blocks
    begins_or_ends = bool(blocks) is not bool(_blocks)
    _blocks = blocks
    if begins_or_ends:
        for plan in tuple(_plans):
            plan.outdate_plan()


def is_open() -> bool:
    """Whether a block is open of this thread, or of the one whose backward it runs."""
    if not _blocks or _thread.open_blocks:
        return bool(_blocks)
    return bool(autograd.context_of_backward().get(_blocks_of_caller, ()))


def follow(plan: _Plan) -> None:
    """Has a plan, of kernels from `checked`, compiled again when checking begins or ends.

    What holds the plan is not kept alive here.
    """
    with registration_lock:
        _plans.add(plan)


def is_watching() -> bool:
    """Whether a block is open in any thread. The registration lock must be held."""
    return bool(_blocks)


def checked(
    name: object,
    schema: Schema,
    kernel: Callable[..., Any],
    *,
    leading: int = 0,
    words: Words = KERNEL,
) -> Callable[..., Any]:
    """Returns the kernel for a plan: one that looks, while a block is open somewhere.

    The kernel takes `leading` arguments before those of the operator. The registration lock must be
    held until the plan is in place.
    """
    if not _blocks:
        return kernel

    @compilers.never_traced
    @functools.wraps(kernel)
    def looking(*args: Any, **kwargs: Any) -> Any:
        if not is_open():
            return kernel(*args, **kwargs)
        snapshot = Snapshot(schema, args[leading:], kwargs, words)
        result = kernel(*args, **kwargs)
        snapshot.check(name)
        return result

    return looking


def checked_backward(
    name: object, backward: Callable[..., Any] | None
) -> Callable[..., Any] | None:
    """Return the backward formula for a plan, which checks its gradients as `checked` does."""
    if backward is None or not _blocks:
        return backward

    @compilers.never_traced
    @functools.wraps(backward)
    def looking(ctx: Any, *grads: Any) -> Any:
        if not is_open():
            return backward(ctx, *grads)
        snapshot = Snapshot.of_formula(named_outputs(grads), BACKWARD)
        result = backward(ctx, *grads)
        snapshot.check(name)
        return result

    return looking


def checked_save(
    name: object, schema: Schema, save: Callable[..., None] | None
) -> Callable[..., None] | None:
    """Return the `save` of a formula for a plan, which checks the inputs and the output."""
    if save is None or not _blocks:
        return save

    @compilers.never_traced
    @functools.wraps(save)
    def looking(ctx: Any, inputs: Any, keywords: Any, output: Any, *seen: Any) -> None:
        if not is_open():
            save(ctx, inputs, keywords, output, *seen)
            return
        named = [(where, tensor) for _, where, tensor in named_inputs(schema, inputs, keywords)]
        snapshot = Snapshot.of_formula([*named, *named_outputs(output)], SETUP_CONTEXT)
        save(ctx, inputs, keywords, output, *seen)
        snapshot.check(name)

    return looking
