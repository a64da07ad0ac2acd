"""The context manager `checking`, which detects undeclared writes in all calls of a program."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torchop._accelerate.patterns import is_match
from torchop._compat import autograd, compilers, observing, operators
from torchop._core.blocks import Block
from torchop._core.checking import set_checker
from torchop._core.lock import registration_lock
from torchop.extend import Operator, OpName, Schema, named_inputs, named_outputs
from torchop.testing._snapshot import BACKWARD, HELPER, KERNEL, SETUP_CONTEXT, Snapshot


class checking(Block):  # noqa: N801  (called like a function)
    """Check that operators mutate only the arguments that their schemas declare as mutated.

    Inside `with checking():`, each call of an operator copies the inputs of the kernel and compares
    them bit for bit after the kernel has run. The comparison includes metadata, version counters,
    and the memory around each input, so it detects writes by PyTorch, NumPy and C extensions. A
    declared mutation may change the values of an argument, but not its storage, shape or strides.
    An `out=` argument may also be resized.

    The `with` block checks all kernels registered with torchop that run in this thread or in its
    backward passes, including kernels called by compiled code and by other kernels. For operators
    defined with torchop, it also checks backward formulas: `backward` must not write into its
    incoming gradients, and `setup_context` must not write into inputs and outputs. With
    `torch.compile`, formulas run only while a graph is being compiled, so compile inside the block.
    For operators of other packages, a `TorchDispatchMode` checks the calls. PyTorch's own operators
    are not checked.

    `checking()` can be nested, and can decorate a function. Calls outside the block have no
    overhead. Tensors without data, MKL-DNN tensors, tensors that are too large to copy, and all
    tensors during the capture of a device graph are skipped. On a GPU, the backward pass runs in
    other threads, so it is checked only with PyTorch 2.12 or later. No other thread may write into
    the inputs during a call, because `checking` would attribute these writes to the kernel.

    Raises:
        UndeclaredMutationError: a kernel or formula made a mutation that the schema does not
            declare. This exception is raised by the call.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::normalize", mutates_args=())
        ... def normalize(x: torch.Tensor) -> torch.Tensor:
        ...     return x.div_(x.sum()).clone()
        >>> with torchop.testing.checking():
        ...     normalize(torch.ones(2))
        Traceback (most recent call last):
        torchop.UndeclaredMutationError: docs::normalize: Argument x is not defined as mutable ...

    `checking` is modeled on the mutation test of `torch.library.opcheck`, but checks all calls of a
    program.
    """

    def __init__(self) -> None:
        self._entered: list[list[checking]] = []

    def _recreate_cm(self) -> checking:
        # Several threads may call a decorated function at the same time, so use a new context
        # manager for each call.
        return checking()

    def __enter__(self) -> None:
        with registration_lock:
            _switch(_blocks + 1)
        self._entered.append(_thread.open_blocks)
        _thread.open_blocks.append(self)
        _thread.enter_mode()
        _blocks_of_caller.set(_thread.open_blocks)

    def __exit__(self, *exception: object) -> None:
        if not self._entered:
            raise RuntimeError("checking() was exited, but it was not entered")
        # Another thread may exit the block, so update the list of the thread that entered it.
        self._entered.pop().remove(self)
        _thread.exit_mode()
        with registration_lock:
            _switch(_blocks - 1)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open_blocks: list[checking] = []
        self._mode: Any = None

    def enter_mode(self) -> None:
        if self._mode is None:
            self._mode = observing.observing_mode(_snapshot_of_others)
            self._mode.__enter__()

    def exit_mode(self) -> None:
        """Exit the dispatch mode of this thread once all of its `checking` blocks are closed.

        A thread cannot change the modes of another thread. So if another thread exits the last
        block of this thread, the mode stays active, but no longer checks anything.
        """
        if self._mode is not None and not self.open_blocks:
            mode, self._mode = self._mode, None
            mode.__exit__(None, None, None)


_thread = _Thread()
# The open `checking` blocks of the current thread. PyTorch copies context variables to its backward
# threads, so a backward thread sees the list of the thread that called backward.
_blocks_of_caller: ContextVar[list[checking]] = ContextVar("torchop_checking")
_blocks = 0  # the number of open `checking` blocks across all threads


def _switch(blocks: int) -> None:
    global _blocks
    begins_or_ends = bool(blocks) is not bool(_blocks)
    _blocks = blocks
    if begins_or_ends:
        set_checker(_Checker() if blocks else None)


def is_open() -> bool:
    """Return whether this thread is inside `checking()`.

    A backward thread counts as inside if the thread that called backward is inside.
    """
    if not _blocks or _thread.open_blocks:
        return bool(_blocks)
    return bool(autograd.context_of_backward().get(_blocks_of_caller, ()))


def _snapshot_of_others(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], None] | None:
    """Take a snapshot before a call of an operator that was not defined with torchop.

    Return a function that checks the snapshot after the call. Return None for PyTorch's own
    operators, which are not checked, and for operators defined with torchop, which `_Checker`
    checks.
    """
    if not is_open() or _is_of_pytorch(name):
        return None
    operator = Operator(name, "checking")
    if operator.handle is not None:
        return None
    snapshot = Snapshot(operator.schema, args, kwargs)
    return lambda: snapshot.check(name)


@functools.cache
def _is_of_pytorch(name: str) -> bool:
    """Return whether an operator is defined by PyTorch itself.

    Some of these operators, such as `c10d::allreduce_`, write to arguments that their schemas do
    not declare as mutable. Users cannot fix this, so these operators are not checked.
    """
    op = OpName.parse(name)
    site = operators.registration_site(op.packet, op.overload)
    return not is_match(op, "*") or "/torch/csrc/" in site or "/aten/src/ATen/" in site


class _Checker:
    """Implement `_core.checking.Checker` by comparing snapshots before and after each call."""

    def kernel(
        self,
        name: object,
        schema: Schema,
        kernel: Callable[..., Any],
        *,
        leading: int,
        is_helper: bool,
    ) -> Callable[..., Any]:
        words = HELPER if is_helper else KERNEL

        def take(*args: Any, **kwargs: Any) -> Snapshot:
            return Snapshot(schema, args[leading:], kwargs, words)

        return _checked(name, kernel, take)

    def backward(self, name: object, backward: Callable[..., Any]) -> Callable[..., Any]:
        def take(ctx: Any, *grads: Any) -> Snapshot:
            return Snapshot.of_formula(named_outputs(grads), BACKWARD)

        return _checked(name, backward, take)

    def save(self, name: object, schema: Schema, save: Callable[..., None]) -> Callable[..., None]:
        def take(ctx: Any, inputs: Any, keywords: Any, output: Any, *seen: Any) -> Snapshot:
            named = [(where, tensor) for _, where, tensor in named_inputs(schema, inputs, keywords)]
            return Snapshot.of_formula([*named, *named_outputs(output)], SETUP_CONTEXT)

        return _checked(name, save, take)


def _checked(
    name: object, function: Callable[..., Any], take: Callable[..., Snapshot]
) -> Callable[..., Any]:
    """Wrap a function so that undeclared mutations raise an error inside `checking()`."""

    @compilers.never_traced
    @functools.wraps(function)
    def checking_kernel(*args: Any, **kwargs: Any) -> Any:
        if not is_open():
            return function(*args, **kwargs)
        snapshot = take(*args, **kwargs)
        result = function(*args, **kwargs)
        snapshot.check(name)
        return result

    return checking_kernel
