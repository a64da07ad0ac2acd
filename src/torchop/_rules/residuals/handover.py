"""Passing residuals from a kernel to the call that records a gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

from torchop._core.definition import Definition
from torchop._rules.residuals.annotation import show_output_alone
from torchop._schema.schema import Schema

Output = TypeVar("Output")


class Returned:
    """The result of a kernel, and its residuals."""

    __slots__ = ("output", "saved")  # set by `_returned`: a call of __init__ would double the time
    __module__ = "torchop"  # for messages
    _torchop_fix = " Only operators that declare residuals return them, around the whole result."

    output: Any
    saved: tuple[Any, ...]


Returned.__name__ = "residuals(...)"


def residuals(output: Output, /, *saved: Any) -> Output:
    """Returns a result from a kernel, with what only the backward needs of it.

    Kernels and fake kernels of an operator return it whose definition declares residuals, with
    `residuals=` or in the annotation of the result: see `Residuals`. Callers
    get `output`; the `setup_context` of `register_autograd` gets the rest as `residuals`, if it has
    a parameter of this name. Where no gradient is recorded, the rest is dropped, and a kernel need
    not compute it: see `records_gradient`. A vmap rule, which calls the operator, returns
    `torchop.residuals((output, out_dims), ...)` with the dimension that is mapped over of each
    residual, or None. The fake kernel tells whether that is right, so None needs one.

    Args:
        output: the result of the operator; in a vmap rule, the pair that it returns.
        saved: the residuals, in the order of their declaration. They must not share memory with
            inputs or results, as results must not.

    Returns:
        What the kernel returns; for type checkers, it is the result.

    Raises:
        AliasError: by the call: a residual shares memory with an input, a result or another one.
        ResultError: by the call: the residuals are not those that are declared, or none are.

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
    made: Output = _returned(output, saved)
    return made


def _returned(output: Any, saved: Any) -> Any:
    made = Returned()
    made.output, made.saved = output, saved
    return made


# By thread: the request for the next kernel, and whether the running kernel took a request. Only
# threads that record a gradient have an entry, so an empty dictionary answers most questions.
_recording: dict[int, tuple[Request | None, bool]] = {}
_NOTHING = (None, False)


def records_gradient() -> bool:
    """Returns whether the call whose kernel runs is recorded for a backward that wants residuals.

    A kernel of an operator with residuals asks it, to compute and return them only then. It is the
    same for the fake kernel and for the vmap rule. It is False outside of these, and in those of
    other operators.

    A kernel that takes microseconds imports it by its name, because looking it up in `torchop`
    takes as long as the answer.

    Example:
        >>> import torchop
        >>> torchop.records_gradient()
        False

    It is what `ctx.needs_input_grad` tells the forward of a `torch.autograd.Function`.
    """
    # The cheapest test comes first, because kernels call this function in every call.
    return _records() if _recording else False


def _records() -> bool:
    return _recording.get(get_ident(), _NOTHING)[1]


class Request:
    """The request of a call that records a gradient for the residuals of its kernel."""

    __slots__ = ("key", "saved")

    def __init__(self, key: object, saved: tuple[Any, ...] | None = None) -> None:
        self.key = key
        self.saved = saved


def in_native_calls(native: Any) -> tuple[Any, ...]:
    """Return the state that native calls read and set, and replace functions by C++ ones."""
    global _records, _returned
    _records, _returned = native.make_handover(Returned, _recording)
    return Returned, _recording, (None, True)


def request(key: object) -> Request:
    """Request the residuals of the next kernel of an operator that this thread calls."""
    thread, made = get_ident(), Request(key)
    _recording[thread] = made, _recording.get(thread, _NOTHING)[1]
    return made


def requested(key: object, call: Callable[[], Output]) -> tuple[Output, Request]:
    """Call a kernel through `call`; return the result and the request, which has the residuals."""
    thread = get_ident()
    outer = _recording.get(thread, _NOTHING)
    try:
        made = request(key)
        return call(), made
    finally:
        _put_back(thread, outer)


def _put_back(thread: int, state: tuple[Request | None, bool]) -> None:
    if state == _NOTHING:
        _recording.pop(thread, None)
    else:
        _recording[thread] = state


def handing_over(function: Callable[..., Any], key: object) -> Callable[..., Any]:
    """Wrap a kernel or fake kernel, so that it returns the result and stores the residuals.

    They are stored in the `Request` with the same key, and not returned, because the dispatcher and
    the choice between providers are in between, and return results of the schema only.
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
        waiting = None  # the request for a kernel of another operator, which calls this one
        if request is not None and request.key is not key:
            request, waiting = None, request
        # Taken once, because the kernel may call its own operator.
        _recording[thread] = waiting, request is not None
        try:
            result = function(*args, **kwargs)
        finally:
            _put_back(thread, (waiting, records))
        if type(result) is not Returned:
            return result
        if request is not None:
            request.saved = result.saved
        return result.output

    show_output_alone(kernel, function)
    kernel._torchop_author = key, kernel, function  # type: ignore[attr-defined]
    return kernel


def not_recording(definition: Definition, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel in which `records_gradient` is False, even inside a call that records one.

    A kernel with residuals is returned as it is, because `handing_over` sets this for it.
    """
    if not _recording or definition.declaration.residuals is not None:
        return function

    def kernel(*args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        before = _recording.get(thread, _NOTHING)
        _put_back(thread, (before[0], False))
        try:
            return function(*args, **kwargs)
        finally:
            _put_back(thread, before)

    return kernel


def author_of(function: Any, key: object) -> Callable[..., Any] | None:
    """Return the author's kernel if `handing_over` returned this very function, else None."""
    made_for, kernel, author = getattr(function, "_torchop_author", (None, None, None))
    # Another wrapper may have copied the attributes.
    return author if made_for is key and kernel is function else None


def as_tuple(schema: Schema, result: Any) -> tuple[Any, ...]:
    """Return the results of a call as a tuple; a single result is none."""
    count = len(schema.returns)
    return tuple(result) if count > 1 else (result,) * count
