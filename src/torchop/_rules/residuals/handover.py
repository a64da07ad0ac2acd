"""Pass residuals from the kernel to the call that records a gradient.

Residuals are kernel outputs that only the backward pass uses. A kernel cannot simply return them,
because the dispatcher only passes on the results that the schema declares. Instead, the call
creates a `Request` for the current thread, and a wrapper around the kernel stores the residuals in
this request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

from torchop._core.definition import Definition
from torchop._rules.residuals.annotation import hide_residuals

Output = TypeVar("Output")


class Returned:
    __slots__ = ("output", "saved")  # an __init__ would double the time to create an object
    __module__ = "torchop"  # shown in error messages
    _torchop_fix = " Only operators that declare residuals return them, around the whole result."

    output: Any
    saved: tuple[Any, ...]


Returned.__name__ = "residuals(...)"


def residuals(output: Output, /, *saved: Any) -> Output:
    """Return a result together with residuals: values that only the backward pass needs.

    Use this in the kernels and the fake kernel of an operator that declares residuals, either with
    the argument `residuals` of `custom_op` or with `torchop.Residuals` in the return annotation.
    The operator returns `output`. A `setup_context` with a parameter `residuals` receives an object
    with the residuals as attributes. If no gradient is recorded, residuals are ignored, so a kernel
    need not compute them: see `records_gradient`.

    A vmap rule returns `torchop.residuals((output, out_dims), ...)` with the batch dimension of
    each residual, or None for a residual that is not batched. To verify that such a residual really
    is not batched, torchop calls the fake kernel, so the operator needs one.

    Args:
        output: the result of the operator. In a vmap rule, the pair `(output, out_dims)`.
        saved: the residuals in the declared order. They must not share memory with inputs, with
            results or with each other.

    Returns:
        An object that contains the result and the residuals, for the kernel to return. For type
        checkers, it has the type of `output`.

    Raises:
        AliasError: raised by the call if a residual shares memory with another tensor.
        ResultError: raised by the call if the residuals do not match the declaration.

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

    Modeled after the residuals of `jax.custom_vjp`.
    """
    returned: Output = _returned(output, saved)
    return returned


def _returned(output: Any, saved: Any) -> Any:
    returned = Returned()
    returned.output, returned.saved = output, saved
    return returned


# Maps each thread id to the request for the next kernel that the thread runs, and to whether the
# kernel that it is running now must return residuals (extra outputs for the backward pass). While
# no thread has a request, the dict is empty, so all other calls only pay for an emptiness check.
_recording: dict[int, tuple[Request | None, bool]] = {}
_NOTHING = (None, False)


def records_gradient() -> bool:
    """Return whether the running kernel must return residuals.

    If this returns False, a kernel, fake kernel or vmap rule can skip computing the residuals,
    because either the call records no gradient, or the backward pass does not use them. In
    operators without residuals and outside of kernels, this function always returns False.

    In kernels that only take microseconds, import this function by name, because looking it up as
    `torchop.records_gradient` takes as long as calling it.

    Example:
        >>> import torchop
        >>> torchop.records_gradient()
        False

    Modeled after `ctx.needs_input_grad` in the `forward` of a `torch.autograd.Function`.
    """
    return _records() if _recording else False


def _records() -> bool:
    return _recording.get(get_ident(), _NOTHING)[1]


class Request:
    """A request for the residuals of a call, i.e. extra kernel outputs for the backward pass.

    Only a kernel that `wrap_kernel` wrapped with the same `key` fulfills the request, by storing
    the residuals in `saved`.
    """

    __slots__ = ("key", "saved")

    def __init__(self, key: object, saved: tuple[Any, ...] | None = None) -> None:
        self.key = key
        self.saved = saved


def in_native_calls(native: Any) -> tuple[Any, ...]:
    """Replace `_records` and `_returned` with C++ functions."""
    global _records, _returned
    _records, _returned = native.make_handover(Returned, _recording)
    return Returned, _recording, (None, True)


def request(key: object) -> Request:
    """Request residuals from the next kernel with this key that the current thread runs."""
    thread, request = get_ident(), Request(key)
    _recording[thread] = request, _recording.get(thread, _NOTHING)[1]
    return request


def requested(key: object, call: Callable[[], Output]) -> tuple[Output, Request]:
    """Run `call` with a request for the kernel's residuals.

    Return the result of `call`, and the request, in which the kernel has stored the residuals
    (extra outputs for the backward pass).
    """
    thread = get_ident()
    outer = _recording.get(thread, _NOTHING)
    try:
        pending = request(key)
        return call(), pending
    finally:
        _restore(thread, outer)


def _restore(thread: int, state: tuple[Request | None, bool]) -> None:
    if state == _NOTHING:
        _recording.pop(thread, None)
    else:
        _recording[thread] = state


def wrap_kernel(function: Callable[..., Any], key: object) -> Callable[..., Any]:
    """Wrap a kernel or fake kernel to return only the result, without residuals.

    If the current thread has a `Request` with the same key, the wrapper stores the residuals (extra
    outputs for the backward pass) there.
    """
    if author_of(function, key) is not None:
        return function

    @functools.wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not _recording:
            result = function(*args, **kwargs)
            return result.output if type(result) is Returned else result
        thread = get_ident()
        request, records = _recording.get(thread, _NOTHING)
        waiting = None
        if request is not None and request.key is not key:  # for another operator's kernel
            request, waiting = None, request
        # Clear the request before running the kernel, because the kernel may call the operator
        # recursively, and the inner call must not fulfill the request.
        _recording[thread] = waiting, request is not None
        try:
            result = function(*args, **kwargs)
        finally:
            _restore(thread, (waiting, records))
        if type(result) is not Returned:
            return result
        if request is not None:
            request.saved = result.saved
        return result.output

    hide_residuals(kernel, function)
    kernel._torchop_author = key, kernel, function  # type: ignore[attr-defined]
    return kernel


def not_recording(definition: Definition, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make `records_gradient` return False in the kernel of an operator without residuals.

    This matters if the kernel is called inside the kernel of another operator that must return
    residuals (extra outputs for the backward pass). Without this wrapper, `records_gradient` would
    return True in both kernels.
    """
    if not _recording or definition.declaration.residuals is not None:
        return function

    def kernel(*args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        before = _recording.get(thread, _NOTHING)
        _restore(thread, (before[0], False))
        try:
            return function(*args, **kwargs)
        finally:
            _restore(thread, before)

    return kernel


def author_of(function: Any, key: object) -> Callable[..., Any] | None:
    """Return the user's function if `function` is a wrapper that `wrap_kernel` created."""
    of_key, kernel, author = getattr(function, "_torchop_author", (None, None, None))
    # Another wrapper may have copied the attribute with `functools.wraps`, so check that `function`
    # is the object that `wrap_kernel` returned.
    return author if of_key is key and kernel is function else None
