"""The exceptions and warnings of torchop.

Each exception subclasses the builtin exception that `torch.library` raises for the same mistake, so
existing `except` clauses keep working.
"""

from __future__ import annotations

import functools
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

__all__ = [
    "AliasError",
    "ArgumentError",
    "FakeKernelError",
    "ForwardModeError",
    "GradientError",
    "MissingFakeError",
    "MissingFormulaError",
    "MissingKernelError",
    "MissingRuleError",
    "MutationError",
    "NothingToAccelerateWarning",
    "OperatorGoneError",
    "OperatorNameError",
    "OperatorNotFoundError",
    "ProviderError",
    "ProviderWarning",
    "RedefinitionWarning",
    "ResultError",
    "RuleSignatureError",
    "SchemaError",
    "SchemaWarning",
    "ShardingError",
    "ShardingRuleError",
    "TracingError",
    "UndeclaredMutationError",
]

# The maximum length of a user's value in an error message.
_LONGEST = 200


def short_repr(value: object) -> str:
    """Return the `repr` of a user's value, shortened for messages.

    Args:
        value: any object, even one whose `repr` raises.

    Example:
        >>> from torchop.extend import short_repr
        >>> len(short_repr("x" * 1000)) < 300
        True
    """
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}, whose repr() raised {type(error).__name__}>"
    return short_text(text)


def short_text(text: object) -> str:
    """Return any text as a single printable line of limited length, for use in messages.

    Args:
        text: any object; its `str` is used.

    Example:
        >>> from torchop.extend import short_text
        >>> print(short_text("two\\nlines"))
        two lines
    """
    text = str(text)
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2 - 2]} ... {text[3 - _LONGEST // 2 :]}"
    text = re.sub(r"\s*\n\s*", " ", text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def nearest(name: object, names: Iterable[str]) -> str:
    """Return a "did you mean" hint with the most similar known name, or an empty string."""
    import difflib  # imported late, because only misspelled names need it

    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


class _ShortErrors:
    """A context manager that shortens PyTorch's errors about a string that the user passed.

    PyTorch quotes the whole string in its message. If the error position is inside a multi-byte
    character, the message is not valid UTF-8, and PyTorch raises a UnicodeDecodeError instead.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, UnicodeDecodeError):
            raise RuntimeError(short_text(error.object.decode(errors="replace"))) from None
        if kind in (RuntimeError, ValueError) and len(str(error)) > 4 * _LONGEST:
            raise type(error)(short_text(error)) from None  # type: ignore[misc]


# Share one instance, because every operator definition enters this context manager several times.
short_errors = _ShortErrors()


class OperatorNameError(ValueError, RuntimeError):
    """The name of an operator or namespace is invalid.

    This subclasses both ValueError and RuntimeError, because `torch.library` raises one or the
    other, depending on the mistake.
    """


class SchemaError(ValueError, RuntimeError):
    """A schema cannot be inferred or parsed, or does not match the function.

    This subclasses both ValueError and RuntimeError, because `torch.library` raises RuntimeError
    for a schema that does not parse, and ValueError otherwise.
    """


class RuleSignatureError(TypeError):
    """The signature of a kernel or rule does not accept the arguments that PyTorch will pass."""


class ArgumentError(TypeError, RuntimeError):
    """A call passed an argument of the wrong type, or a value that the annotation excludes."""


class ResultError(TypeError, RuntimeError):
    """A kernel returned the wrong number or type of outputs."""


class AliasError(RuntimeError):
    """An output of a functional operator shares memory with an input or another output."""


class UndeclaredMutationError(RuntimeError):
    """A kernel mutated an input, or the storage of an input, without declaring it in the schema."""


class MissingKernelError(NotImplementedError):
    """The operator has no kernel for the device of the call."""


class MissingFakeError(RuntimeError):
    """An operator was traced without a fake kernel."""


class FakeKernelError(RuntimeError):
    """A fake kernel read data, or returned a tensor that is not fake or has wrong metadata."""


class TracingError(RuntimeError):
    """A compiler or transform would change the meaning of an operator or backward formula."""


class MissingFormulaError(RuntimeError):
    """The backward pass reached an operator that has no backward formula."""


class GradientError(TypeError, RuntimeError):
    """A backward formula returned wrong gradients, or cannot be derived from the kernel."""


class MutationError(RuntimeError):
    """An operator would mutate a tensor that it must not mutate, such as an expanded tensor."""


class ForwardModeError(NotImplementedError):
    """Forward-mode differentiation reached an operator without a jvp formula."""


class OperatorGoneError(RuntimeError, AssertionError):
    """An operator was used after it was deregistered, or a library after it was closed.

    This also subclasses AssertionError, because `torch.library` raises AssertionError when a closed
    library is used.
    """


class ProviderError(ValueError, RuntimeError):
    """A provider of kernels is unknown or not allowed.

    This is also raised if no provider in a strict priority order can run a call.
    """


class MissingRuleError(NotImplementedError):
    """An operator lacks a required rule, such as an inverse."""


class ShardingRuleError(ValueError):
    """A sharding rule does not parse, or does not fit the schema of the operator."""


class ShardingError(NotImplementedError):
    """The sharding rule of an operator does not accept the placements or shapes of a call."""


class RedefinitionWarning(UserWarning):
    """An operator was redefined by other code, or a rule was replaced by another package."""


class ProviderWarning(UserWarning):
    """A provider of kernels cannot be used, although a priority order names it."""


class SchemaWarning(UserWarning):
    """A schema is valid, but probably wrong for the function, or unusable for a compiler."""


class OperatorNotFoundError(RuntimeError, AttributeError):
    """No operator with this name is defined."""


class NativeUnavailableError(RuntimeError):
    """The native call path is required, but cannot be compiled or loaded."""


class NativeBuildWarning(UserWarning):
    """The native call path cannot be used. Operators work without it, but calls are slower."""


class NothingToAccelerateWarning(UserWarning):
    """A pattern or package for `accelerate` or `record` matches no usable operator."""


def mistake(text: str, kind: type[Exception] = SchemaError) -> Exception:
    """Create an error without the operator's name in its message, which `naming` adds later."""
    error = kind(text)
    error.__dict__["lacks_name"] = True
    return error


class naming:  # noqa: N801  (called like a function)
    """A context manager that adds an operator's name to errors created by `mistake`.

    Other errors, such as errors in user code, are left unchanged.
    """

    def __init__(self, operator: object) -> None:
        self._operator = operator

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and error.__dict__.pop("lacks_name", False):
            error.args = (f"{self._operator}: {error}",)


# Returns whether Dynamo is tracing. This default is always False, until `_compat.compilers`
# replaces it.
dynamo_is_tracing: Callable[[], bool] = bool


def _readable(error: Exception) -> str:
    """Return the `repr` of a torchop exception with its line breaks unescaped.

    When a fake kernel raises a torchop exception, Dynamo appends the `repr` to its own message.
    With escaped line breaks, the message would be hard to read.
    """
    start = "\n" if dynamo_is_tracing() else ""
    return f"{start}{type(error).__module__}.{type(error).__name__}: {error}"


# Show the public import path in tracebacks and in the documentation.
_modules = dict.fromkeys(__all__, "torchop")
_modules |= dict.fromkeys(("NativeBuildWarning", "NativeUnavailableError"), "torchop.native")
for _name, _module in _modules.items():
    globals()[_name].__module__ = _module
    globals()[_name].__repr__ = _readable


def warn(message: str, category: type[Warning]) -> None:
    """Issue a warning that points to the user's line, outside of torchop, PyTorch and the caller.

    Args:
        message: the text.
        category: a class of warnings.

    Example:
        >>> import warnings
        >>> from torchop.extend import warn
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn("The tool has seen no call.", UserWarning)
        >>> print(caught[0].message)
        The tool has seen no call.
    """
    frame, level = sys._getframe().f_back, 2
    assert frame is not None  # the caller's frame
    # Skip the frames of torchop, of PyTorch, of the caller's package, and of compiled graphs, which
    # have an empty module name.
    skipped = {"torchop", "torch", "", _package(frame)} - {"__main__"}
    while frame is not None and _package(frame) in skipped:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _package(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def add_note(error: Exception, note: str) -> None:
    add = getattr(error, "add_note", None)  # since Python 3.11
    if (add is None or dynamo_is_tracing()) and len(error.args) < 2:
        (text,) = error.args or ("",)
        if isinstance(text, str):
            if note in text:
                return  # added when this exception was raised before
            # Add the note to the message itself: Python 3.10 does not support notes, and Dynamo
            # shows only the `repr`, which omits them.
            text = f"{text} ({note})".lstrip()
            error.args = (_Unescaped(text) if dynamo_is_tracing() else text,)
            return
    if add is not None and note not in getattr(error, "__notes__", ()):
        add(note)


class _Unescaped(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return f"\n{self}\n"


class Place(NamedTuple):
    file: str
    line: int
    module: str


@functools.cache
def _is_internal(module: str) -> bool:
    return module.partition(".")[0] in ("torchop", "torch", "importlib", "contextlib")


def users_place() -> Place:
    """Return the source line of the innermost frame outside of torchop and PyTorch."""
    frame = sys._getframe()
    # Skip internal frames. Besides torchop's own frames, the stack may contain frames of PyTorch
    # (while a kernel runs), of importlib (while torchop is being imported) and of contextlib
    # (inside a `with` block of torchop).
    while frame.f_back is not None and _is_internal(str(frame.f_globals.get("__name__"))):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", ""))


def warn_at(place: Place, message: str, category: type[Warning]) -> None:
    """Issue a warning at the file and line `place`, for use where no user code is on the stack."""
    warnings.warn_explicit(message, category, *place)
