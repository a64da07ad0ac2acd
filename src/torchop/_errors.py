"""The exceptions and warnings of torchop.

Each one subclasses the builtin that callers of `torch.library` already catch, so that changing the
import changes no `except` clause.
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
    "ArgumentValueError",
    "BackwardNotTraceableError",
    "DerivedFormulaError",
    "EffectError",
    "FakeKernelError",
    "ForwardModeError",
    "FunctionalizationError",
    "GradientError",
    "InliningError",
    "MissingEffectError",
    "MissingEffectWarning",
    "MissingFakeError",
    "MissingFormulaError",
    "MissingKernelError",
    "MissingRuleError",
    "MutationError",
    "NativeBuildWarning",
    "NativeUnavailableError",
    "NothingToAccelerateWarning",
    "OpCheckError",
    "OperatorClassError",
    "OperatorGoneError",
    "OperatorNameError",
    "OperatorNotFoundError",
    "ProviderError",
    "ProviderNameError",
    "ProviderWarning",
    "RecordingError",
    "RedefinitionWarning",
    "ResultError",
    "RuleNameError",
    "RuleSignatureError",
    "SchemaError",
    "SchemaWarning",
    "ShardingError",
    "ShardingRuleError",
    "UndeclaredMutationError",
]

# The longest repr of a user's value in a message. No other part of a message grows with the value.
_LONGEST = 200


def short_repr(value: object) -> str:
    """Returns the `repr` of something that a user passed, as messages show it.

    Args:
        value: any object, also one whose `repr` raises.

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
    """Returns somebody else's text as messages show it: one line, printable, shortened.

    Args:
        text: any object; its `str` counts.

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
    """The nearest known name, in brackets; or an empty string."""
    import difflib  # for start-up time: only a wrong name needs it

    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


class _ShortErrors:
    """Mends PyTorch's errors about a user's string.

    PyTorch shows the whole string; or, where it points to a part of a letter that is not ASCII,
    its message cannot be decoded.
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
    """A call passed a value that does not have the type of its parameter."""


class ArgumentValueError(ArgumentError, ValueError):
    """A call passed a value of the right type that is not one of the allowed values."""


class ResultError(TypeError, RuntimeError):
    """A kernel returned the wrong number or type of outputs."""


class AliasError(RuntimeError):
    """An output of a functional operator shares memory with an input or another output."""


class UndeclaredMutationError(RuntimeError):
    """A kernel changed an input that its schema does not mark as mutated, or its storage."""


class MissingKernelError(NotImplementedError):
    """No kernel is registered for the device that a call asks for."""


class MissingFakeError(RuntimeError):
    """An operator was traced without a fake kernel."""


class FakeKernelError(RuntimeError):
    """A fake kernel broke its contract: it read data, or returned something that is not fake."""


class MissingEffectError(RuntimeError):
    """A compiler would remove an operator, because nothing says that it has an effect."""


class FunctionalizationError(RuntimeError):
    """A compiler cannot make the mutation of an operator functional."""


class EffectError(RuntimeError):
    """PyTorch cannot keep a call that has an effect, or the effect is declared too late."""


class InliningError(RuntimeError):
    """A compiler cannot trace the function of an inlined operator."""


class MissingFormulaError(RuntimeError):
    """Backward reached an operator that has no autograd formula."""


class GradientError(TypeError, RuntimeError):
    """A backward formula returned wrong gradients, or kept a residual where nothing guards it."""


class MutationError(RuntimeError):
    """An operator would write into a tensor that must not be written."""


class DerivedFormulaError(RuntimeError):
    """A formula cannot be derived from the body of an operator."""


class BackwardNotTraceableError(RuntimeError):
    """A backward formula read tensor data while a compiler was tracing it."""


class ForwardModeError(NotImplementedError):
    """Forward-mode differentiation reached an operator that has no formula for it."""


class OperatorGoneError(RuntimeError, AssertionError):
    """A handle, overload or library was used after its operator was replaced or its library closed.

    `torch.library` raises `AssertionError` for a closed library, so this is one too.
    """


class OperatorClassError(TypeError):
    """A class does not describe an operator: a member is wrong or missing."""


class ProviderError(RuntimeError):
    """No provider of a strict order can run a call, or what a provider says of calls is wrong."""


class ProviderNameError(ValueError):
    """An operator has no provider of this name, or the name is not allowed."""


class RuleNameError(ValueError):
    """There is no rule of this name, or the name is not allowed."""


class MissingRuleError(NotImplementedError):
    """An operator does not have a rule that was asked for, such as an inverse."""


class ShardingRuleError(ValueError):
    """A sharding rule cannot be read, or does not fit the schema of its operator."""


class ShardingError(NotImplementedError):
    """The sharding rule of an operator does not accept the placements or shapes of a call."""


class MissingEffectWarning(UserWarning):
    """Compilers refuse a new operator, because nothing says that it has an effect."""


class RedefinitionWarning(UserWarning):
    """An operator was defined again, from another place."""


class ProviderWarning(UserWarning):
    """A provider that an order asks for is not used."""


class SchemaWarning(UserWarning):
    """A hand-written schema is allowed, but not what its function or a compiler needs."""


class OperatorNotFoundError(RuntimeError, AttributeError):
    """No operator of this name is defined."""


class OpCheckError(Exception):
    """A check of `opcheck` failed."""


class NativeUnavailableError(RuntimeError):
    """The native call path is required, but not available."""


class NativeBuildWarning(UserWarning):
    """The native call path is not available; operators work without it, but slower."""


class NothingToAccelerateWarning(UserWarning):
    """A pattern or package for `accelerate` or `record` matches nothing that they can use."""


class RecordingError(ValueError):
    """A file is not a recording of calls, or is damaged."""


# Whether Dynamo is tracing: `_compat.compilers` puts its function here, and `bool()` is False.
dynamo_is_tracing: Callable[[], bool] = bool


def _readable(error: Exception) -> str:
    """The `repr`, because Dynamo shows only that of an exception in a fake kernel.

    Dynamo shows it after its own words. The usual `repr` would be a single line with escapes.
    """
    start = "\n" if dynamo_is_tracing() else ""
    return f"{start}{type(error).__module__}.{type(error).__name__}: {error}"


# In tracebacks and documentation they stand where users import them from.
for _name in __all__:
    globals()[_name].__module__ = "torchop"
    globals()[_name].__repr__ = _readable


def warn(message: str, category: type[Warning]) -> None:
    """Warns at the user's line, outside of torchop, PyTorch and the package that calls this.

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
    assert frame is not None  # that of the caller
    # Calls come through PyTorch, too; and the code of its graphs belongs to no module.
    passed_over = {"torchop", "torch", "", _package(frame)} - {"__main__"}
    while frame is not None and _package(frame) in passed_over:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _package(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def add_note(error: Exception, note: str) -> None:
    """Adds a note to an exception of a user's function."""
    add = getattr(error, "add_note", None)  # since Python 3.11
    if (add is None or dynamo_is_tracing()) and len(error.args) < 2:
        (text,) = error.args or ("",)
        if isinstance(text, str):
            if note in text:
                return  # an exception that a program keeps, and raises again
            # Dynamo shows the `repr`, which has no notes.
            text = f"{text} ({note})".lstrip()
            error.args = (_Unescaped(text) if dynamo_is_tracing() else text,)
            return
    if add is not None and note not in getattr(error, "__notes__", ()):
        add(note)


class _Unescaped(str):
    """The text of an exception, which appears unescaped in the `repr` of the exception too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"\n{self}\n"


class Place(NamedTuple):
    """A line of the user's program, to warn about later."""

    file: str
    line: int
    module: str


def users_place() -> Place:
    """The line of the first frame outside torchop."""
    frame = sys._getframe()
    # Those of imports are not the user's where torchop is being imported.
    while frame.f_back is not None and _package(frame) in ("torchop", "importlib"):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", ""))


def warn_at(place: Place, message: str, category: type[Warning]) -> None:
    """Warns from another thread, as if a line of the user's had called `warnings.warn`."""
    warnings.warn_explicit(message, category, *place)
