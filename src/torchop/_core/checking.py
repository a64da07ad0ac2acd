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

# Call plans contain checking kernels only while some thread is inside a `checking` block, so other
# calls have no overhead. Entering the first block and exiting the last one invalidates all plans.


class checking(Block):  # noqa: N801  (called like a function)
    """Check that operators mutate only the arguments that their schemas declare as mutated.

    Inside the block, each call copies the inputs of the kernel and compares them bit for bit after
    the kernel ran. The comparison includes metadata, version counters, and the memory around each
    input, so it finds writes by PyTorch, NumPy and C extensions. Declared mutations may change
    values, but not the storage, shape or strides; an `out=` argument may also be resized.

    The block covers all kernels registered with torchop that run in this thread or in its backward
    passes, including kernels called by compiled code and by other kernels. It also covers formulas:
    `backward` must not write into its incoming gradients, and `setup_context` must not write into
    inputs and outputs. Compiled graphs run formulas only during compilation, so compile inside the
    block.

    Blocks can be nested, and can decorate functions. Calls outside of blocks have no overhead.
    Tensors without data, MKL-DNN tensors, tensors too large to copy, and all tensors during the
    capture of a device graph are not compared. On a GPU, the backward pass runs in other threads,
    which blocks cover since PyTorch 2.12. Other threads must not write into the inputs meanwhile.

    Raises:
        UndeclaredMutationError: a kernel or formula mutated something else. Raised by the call.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::normalize", mutates_args=())
        ... def normalize(x: torch.Tensor) -> torch.Tensor:
        ...     return x.div_(x.sum()).clone()
        >>> with torchop.testing.checking():
        ...     normalize(torch.ones(2))
        Traceback (most recent call last):
        torchop.UndeclaredMutationError: docs::normalize: Argument x is not defined as mutable ...

    Like the mutation test of `torch.library.opcheck`, but for all calls of a program.
    """

    def __init__(self) -> None:
        self._entered: list[list[checking]] = []

    def _recreate_cm(self) -> checking:
        return checking()  # a decorated function may run in several threads at the same time

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
# The `open_blocks` of this thread. PyTorch copies context variables to the threads of backward.
_blocks_of_caller: ContextVar[list[checking]] = ContextVar("torchop_checking")
_blocks = 0  # number of open blocks in all threads
_plans: weakref.WeakSet[_Plan] = weakref.WeakSet()


def _switch(blocks: int) -> None:
    global _blocks
    begins_or_ends = bool(blocks) is not bool(_blocks)
    _blocks = blocks
    if begins_or_ends:
        for plan in tuple(_plans):
            plan.outdate_plan()


def is_open() -> bool:
    """Return whether this thread, or the thread that started this backward, is inside a block."""
    if not _blocks or _thread.open_blocks:
        return bool(_blocks)
    return bool(autograd.context_of_backward().get(_blocks_of_caller, ()))


def recompile_for_checking(plan: _Plan) -> None:
    """Invalidate `plan` whenever checking starts or stops. Only a weak reference is stored."""
    with registration_lock:
        _plans.add(plan)


def is_active() -> bool:
    """Return whether any thread is inside a block. The caller must hold `registration_lock`."""
    return bool(_blocks)


def checked(
    name: object,
    schema: Schema,
    kernel: Callable[..., Any],
    *,
    leading: int = 0,
    words: Words = KERNEL,
) -> Callable[..., Any]:
    """Return the kernel for a call plan: a checking wrapper if any thread is inside a block.

    The wrapper ignores the first `leading` arguments, such as the dispatch keys. The caller must
    hold `registration_lock` until it has stored the plan.
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
    """Like `checked`, for a backward formula: check its incoming gradients."""
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
    """Like `checked`, for the `save` function of a formula: check inputs and outputs."""
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
