"""The exceptions and warnings of torchop.

Each subclasses the builtin exception that `torch.library` raises in the same place, so existing
`except` clauses continue to work.
"""

from __future__ import annotations

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

# The maximum length of a user's repr in messages; no other part of a message grows with the value.
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
    """Return text from other code as a single, printable, shortened line for messages.

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
    """Return a "did you mean" hint with the nearest known name, or an empty string."""
    import difflib  # imported here because only wrong names need it

    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


class _ShortErrors:
    """Shortens PyTorch's errors about a user's string.

    PyTorch shows the whole string. If it points into a multi-byte character, its message cannot be
    decoded.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, UnicodeDecodeError):
            raise RuntimeError(short_text(error.object.decode(errors="replace"))) from None
        if kind in (RuntimeError, ValueError) and len(str(error)) > 4 * _LONGEST:
            raise type(error)(short_text(error)) from None  # type: ignore[misc]


# One object, because each definition enters it several times.
short_errors = _ShortErrors()


class OperatorNameError(ValueError, RuntimeError):
    """The name of an operator breaks a rule of PyTorch's namespaces.

    `torch.library` raises one or the other for it, depending on the rule.
    """


class SchemaError(ValueError, RuntimeError):
    """A schema cannot be inferred, does not parse, or contradicts the function.

    `torch.library` raises a `RuntimeError` for one that does not parse, a `ValueError` otherwise.
    """


class RuleSignatureError(TypeError):
    """A kernel or rule cannot be called the way PyTorch will call it."""


class ArgumentError(TypeError, RuntimeError):
    """A call passed a value of the wrong type, or one that the annotation does not allow."""


class ResultError(TypeError, RuntimeError):
    """A kernel returned the wrong number or type of outputs."""


class AliasError(RuntimeError):
    """An output of a functional operator shares memory with an input or another output."""


class UndeclaredMutationError(RuntimeError):
    """A kernel changed an input that its schema does not mark as mutated, or its storage."""


class MissingKernelError(NotImplementedError):
    """No kernel is registered for the device of a call."""


class MissingFakeError(RuntimeError):
    """An operator was traced without a fake kernel."""


class FakeKernelError(RuntimeError):
    """A fake kernel read data, or returned a tensor that is not fake."""


class TracingError(RuntimeError):
    """A compiler or a transform cannot trace an operator, or its formula, without changing it."""


class MissingFormulaError(RuntimeError):
    """Backward reached an operator that has no autograd formula."""


class GradientError(TypeError, RuntimeError):
    """A backward formula returned wrong gradients, or cannot be derived from a body."""


class MutationError(RuntimeError):
    """An operator would write into a tensor that must not be written."""


class ForwardModeError(NotImplementedError):
    """Forward-mode differentiation reached an operator that has no formula for it."""


class OperatorGoneError(RuntimeError, AssertionError):
    """A handle, overload or library was used after its operator was replaced or its library closed.

    `torch.library` raises `AssertionError` for a closed library, so this is one too.
    """


class ProviderError(ValueError, RuntimeError):
    """A provider is unknown or not allowed, or no provider of a strict order can run a call."""


class MissingRuleError(NotImplementedError):
    """An operator lacks a required rule, such as an inverse."""


class ShardingRuleError(ValueError):
    """A sharding rule cannot be read, or does not fit the schema of its operator."""


class ShardingError(NotImplementedError):
    """The sharding rule of an operator does not accept the placements or shapes of a call."""


class RedefinitionWarning(UserWarning):
    """An operator was defined again, from another place."""


class ProviderWarning(UserWarning):
    """A provider that an order asks for is not used."""


class SchemaWarning(UserWarning):
    """A hand-written schema is valid, but does not suit the function or a compiler."""


class OperatorNotFoundError(RuntimeError, AttributeError):
    """No operator of this name is defined."""


class NativeUnavailableError(RuntimeError):
    """The native call path is required, but not available."""


class NativeBuildWarning(UserWarning):
    """The native call path is not available; operators work without it, but slower."""


class NothingToAccelerateWarning(UserWarning):
    """A pattern or package for `accelerate` or `record` matches no usable operator."""


# Return whether Dynamo is tracing. Replaced by `_compat.compilers`; `bool()` is False.
dynamo_is_tracing: Callable[[], bool] = bool


def _readable(error: Exception) -> str:
    """Return the `repr` of an exception, the only part that Dynamo shows for a fake kernel.

    Dynamo appends it to its own message. The usual `repr` would be a single line with escapes.
    """
    start = "\n" if dynamo_is_tracing() else ""
    return f"{start}{type(error).__module__}.{type(error).__name__}: {error}"


# Tracebacks and documentation show the public import path.
_modules = dict.fromkeys(__all__, "torchop")
_modules |= dict.fromkeys(("NativeBuildWarning", "NativeUnavailableError"), "torchop.native")
for _name, _module in _modules.items():
    globals()[_name].__module__ = _module
    globals()[_name].__repr__ = _readable


def warn(message: str, category: type[Warning]) -> None:
    """Issue a warning at the user's line, outside of torchop, PyTorch and the calling package.

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
    # Also skip PyTorch's frames, and code of graphs, which belongs to no module.
    skipped = {"torchop", "torch", "", _package(frame)} - {"__main__"}
    while frame is not None and _package(frame) in skipped:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _package(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def add_note(error: Exception, note: str) -> None:
    """Add a note to an exception raised by a user's function."""
    add = getattr(error, "add_note", None)  # since Python 3.11
    if (add is None or dynamo_is_tracing()) and len(error.args) < 2:
        (text,) = error.args or ("",)
        if isinstance(text, str):
            if note in text:
                return  # an exception that the program raises again
            # Dynamo shows the `repr`, which has no notes.
            text = f"{text} ({note})".lstrip()
            error.args = (_Unescaped(text) if dynamo_is_tracing() else text,)
            return
    if add is not None and note not in getattr(error, "__notes__", ()):
        add(note)


class _Unescaped(str):
    """The message of an exception, which is not escaped in the `repr` of the exception."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"\n{self}\n"


class Place(NamedTuple):
    """A line of the user's program, for a later warning."""

    file: str
    line: int
    module: str


def users_place() -> Place:
    """Return the location of the first frame outside of torchop."""
    frame = sys._getframe()
    # While torchop is being imported, importlib's frames are not the user's.
    while frame.f_back is not None and _package(frame) in ("torchop", "importlib"):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", ""))


def warn_at(place: Place, message: str, category: type[Warning]) -> None:
    """Issue a warning from another thread at a line of the user's program."""
    warnings.warn_explicit(message, category, *place)
