"""The way of residuals from a kernel to the call that records a gradient."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

Output = TypeVar("Output")


class Residuals:
    """The result of a kernel, and its residuals."""

    __slots__ = ("output", "saved")

    def __init__(self, output: Any, saved: tuple[Any, ...]) -> None:
        self.output = output
        self.saved = saved


def residuals(output: Output, /, *saved: Any) -> Output:
    """Returns a result from a kernel, with what only the backward needs of it.

    Kernels and fake kernels of an operator that was defined with `residuals=` return it. Callers
    get `output`; the `setup_context` of `register_autograd` gets the rest as `residuals`, if it has
    a parameter of this name. Where no gradient is recorded, the rest is dropped, and a kernel need
    not compute it: see `records_gradient`.

    Args:
        output: the result of the operator.
        saved: the residuals, in the order of `residuals=`. They must not share memory with inputs
            or results, as results must not.

    Returns:
        What the kernel returns; for type checkers, it is the result.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::logsumexp", mutates_args=(),
        ...                    residuals={"softmax": torch.Tensor})
        ... def logsumexp(x: torch.Tensor) -> torch.Tensor:
        ...     if not torchop.records_gradient():
        ...         return x.logsumexp(-1)
        ...     return torchop.residuals(x.logsumexp(-1), x.softmax(-1))
        >>> def setup_context(ctx, inputs, output, residuals):
        ...     ctx.save_for_backward(residuals.softmax)
        >>> @logsumexp.register_autograd(setup_context=setup_context)
        ... def backward(ctx, grad):
        ...     (softmax,) = ctx.saved_tensors
        ...     return grad.unsqueeze(-1) * softmax
        >>> x = torch.zeros(2, requires_grad=True)
        >>> logsumexp(x).backward()
        >>> x.grad
        tensor([0.5000, 0.5000])

    The idea is that of the residuals of `jax.custom_vjp`.
    """
    return cast(Output, Residuals(output, saved))


class _Thread(threading.local):
    request: Request | None = None  # of a call that wants the residuals of the next kernel
    records = False  # whether the kernel that runs is that of such a call


_thread = _Thread()


def records_gradient() -> bool:
    """Returns whether the call whose kernel runs is recorded for a backward that wants residuals.

    A kernel of an operator with residuals asks it, to compute and return them only then. It is the
    same for the fake kernel. It is False outside of kernels, and in those of other operators.

    Example:
        >>> import torchop
        >>> torchop.records_gradient()
        False

    It is what `ctx.needs_input_grad` tells the forward of a `torch.autograd.Function`.
    """
    return _thread.records


class Request:
    """A call that records a gradient, and waits for the residuals of the kernel that it runs."""

    __slots__ = ("key", "saved")

    def __init__(self, key: object) -> None:
        self.key = key
        self.saved: tuple[Any, ...] | None = None


def request(key: object) -> Request:
    """Asks the next kernel of an operator, which this thread calls now, for its residuals."""
    _thread.request = made = Request(key)
    return made


def requested(key: object, call: Callable[[], Output]) -> tuple[Output, Request]:
    """What a call returns that runs a kernel of an operator, and the request to that kernel."""
    outer = _thread.request
    try:
        made = request(key)
        return call(), made
    finally:
        _thread.request = outer


def handing_over(function: Callable[..., Any], key: object) -> Callable[..., Any]:
    """Makes a kernel, or a fake one, return the result alone, and hand over the residuals.

    The call that wants them, a `Request` with the same key, may be far outside: the dispatcher and
    what chooses between kernels are in between, and return what the schema says.
    """

    @functools.wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        thread = _thread
        request = thread.request
        if request is not None and request.key is not key:  # it waits for another operator
            request = None
        if request is None and not thread.records:
            result = function(*args, **kwargs)
            return result.output if type(result) is Residuals else result
        outer = thread.records
        thread.records = request is not None
        if request is not None:
            thread.request = None  # the kernel may call the operator, too
        try:
            result = function(*args, **kwargs)
        finally:
            thread.records = outer
        if type(result) is not Residuals:
            return result
        if request is not None:
            request.saved = result.saved
        return result.output

    return kernel
