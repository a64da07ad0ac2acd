"""Context manager `checking`: detect kernels that write into arguments not declared as mutated."""

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

# Without an open block, plans contain the plain kernels, so calls have no overhead. Entering the
# first block in the process invalidates all plans, and they are compiled again with checking
# kernels. Exiting the last block does the reverse.


class checking(Block):  # noqa: N801  (called like a function)
    """Check in each call that an operator only mutates the arguments that its schema declares.

    Compares the inputs of a kernel before and after it runs, bit for bit, except inputs that the
    schema declares as mutated. Mutated inputs must still have their storage, shape and strides,
    except an `out=` argument, which may be resized. The comparison also covers the memory around
    the inputs, their metadata, and PyTorch's version counters. It therefore finds writes by
    PyTorch, NumPy and C extensions.

    Checks all kernels registered with torchop, in calls of this thread and of its backward,
    including calls from compiled code and from other kernels. Also checks that `backward` does not
    write into its incoming gradients, nor `setup_context` into inputs and outputs. Compiled graphs
    run these two functions only while they are compiled, so compile in the block.

    On a GPU, backward runs in threads of PyTorch. Before PyTorch 2.12, blocks do not reach these
    threads. Blocks can be nested, and can decorate functions. Calls in a block are slow, because
    their inputs are copied; calls outside of blocks have no overhead. Some inputs cannot be
    compared: tensors without data, MKL-DNN tensors, tensors that the device has no memory to copy,
    and all tensors while a graph is captured on their device. Other threads must not write into the
    same memory meanwhile.

    Raises:
        UndeclaredMutationError: raised by the call of an operator in the block.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::normalize", mutates_args=())
        ... def normalize(x: torch.Tensor) -> torch.Tensor:
        ...     return x.div_(x.sum()).clone()
        >>> with torchop.testing.checking():
        ...     normalize(torch.ones(2))
        Traceback (most recent call last):
        torchop.UndeclaredMutationError: docs::normalize: Argument x is not defined as mutable ...

    Applies the check of `torch.library.opcheck` to all calls of a program.
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
        self._entered.pop().remove(self)  # another thread may exit the block
        with registration_lock:
            _switch(_blocks - 1)


class _Plan(Protocol):
    def outdate_plan(self) -> None: ...


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open_blocks: list[checking] = []


_thread = _Thread()
# The thread's `open_blocks`. PyTorch copies the context to threads that run its backward.
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
    """Return whether this thread, or the thread whose backward it runs, has an open block."""
    if not _blocks or _thread.open_blocks:
        return bool(_blocks)
    return bool(autograd.context_of_backward().get(_blocks_of_caller, ()))


def recompile_for_checking(plan: _Plan) -> None:
    """Invalidate this plan whenever checking starts or stops. Holds the plan weakly."""
    with registration_lock:
        _plans.add(plan)


def is_active() -> bool:
    """Return whether any thread has an open `checking` block. Requires `registration_lock`."""
    return bool(_blocks)


def checked(
    name: object,
    schema: Schema,
    kernel: Callable[..., Any],
    *,
    leading: int = 0,
    words: Words = KERNEL,
) -> Callable[..., Any]:
    """Return a kernel that checks its calls if a block is open in any thread, else `kernel`.

    The first `leading` arguments of the kernel are not the operator's. The caller must hold
    `registration_lock` until the plan is stored.
    """
    if not _blocks:
        return kernel

    @compilers.never_traced
    @functools.wraps(kernel)
    def checking_kernel(*args: Any, **kwargs: Any) -> Any:
        if not is_open():
            return kernel(*args, **kwargs)
        snapshot = Snapshot(schema, args[leading:], kwargs, words)
        result = kernel(*args, **kwargs)
        snapshot.check(name)
        return result

    return checking_kernel


def checked_backward(
    name: object, backward: Callable[..., Any] | None
) -> Callable[..., Any] | None:
    """Return the backward formula for a plan, checking gradients if a block is open."""
    if backward is None or not _blocks:
        return backward

    @compilers.never_traced
    @functools.wraps(backward)
    def checking_kernel(ctx: Any, *grads: Any) -> Any:
        if not is_open():
            return backward(ctx, *grads)
        snapshot = Snapshot.of_formula(named_outputs(grads), BACKWARD)
        result = backward(ctx, *grads)
        snapshot.check(name)
        return result

    return checking_kernel


def checked_save(
    name: object, schema: Schema, save: Callable[..., None] | None
) -> Callable[..., None] | None:
    """Return the `save` of a formula for a plan, checking inputs and output if a block is open."""
    if save is None or not _blocks:
        return save

    @compilers.never_traced
    @functools.wraps(save)
    def checking_kernel(ctx: Any, inputs: Any, keywords: Any, output: Any, *seen: Any) -> None:
        if not is_open():
            save(ctx, inputs, keywords, output, *seen)
            return
        named = [(where, tensor) for _, where, tensor in named_inputs(schema, inputs, keywords)]
        snapshot = Snapshot.of_formula([*named, *named_outputs(output)], SETUP_CONTEXT)
        save(ctx, inputs, keywords, output, *seen)
        snapshot.check(name)

    return checking_kernel
