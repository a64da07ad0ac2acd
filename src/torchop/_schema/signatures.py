"""The annotations of a function, with those written as strings evaluated."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard, cast

import torch

from torchop._errors import SchemaError, short_text

# Names that `infer_schema` has always promised to know without an import.
_IMPLICIT: dict[str, Any] = {
    "Tensor": torch.Tensor,
    "device": torch.device,
    "dtype": torch.dtype,
    "types": torch.types,
    "torch": torch,
    "Optional": typing.Optional,
    "List": typing.List,  # noqa: UP006  (an annotation may be spelled this way)
    "Sequence": typing.Sequence,
    "Union": typing.Union,
}
_LONGEST_NAME = 80
# Strings that are not evaluated to find out that `Annotated` says nothing.
_MOST_RESULTS = ("None", "Tensor", "torch.Tensor")
# What most annotations are: classes of these types, and generic types whose arguments are such.
_CLASSES = (type, type(torch.Tensor))
_GENERIC = (types.UnionType, types.GenericAlias, type(typing.Optional[int]))  # noqa: UP045  (its type)


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of `function`, every annotation a real type."""
    try:
        original = inspect.signature(function)
    except (TypeError, ValueError):
        fix = method_hint(function) or " Wrap it in a function with annotations, or pass schema=."
        name = spell_function(function)
        raise SchemaError(f"{name} has no signature to infer a schema from.{fix}") from None
    namespace = _Namespace(function)
    parameters = original.parameters.values()
    annotations = [namespace.resolve(p.annotation, p.name) for p in parameters]
    return_annotation = namespace.resolve(original.return_annotation, None)
    # Most annotations are types already, and a signature is slow to copy.
    if return_annotation is original.return_annotation and all(
        annotation is p.annotation for p, annotation in zip(parameters, annotations, strict=True)
    ):
        return original
    pairs = zip(parameters, annotations, strict=True)
    return original.replace(
        parameters=[p.replace(annotation=annotation) for p, annotation in pairs],
        return_annotation=return_annotation,
    )


class _Fields(NamedTuple):
    name: str
    annotation: Any
    default: Any


class _Parameter(_Fields):
    """What `inspect.Parameter` tells of one that is passed by position or by name."""

    __slots__ = ()
    POSITIONAL_OR_KEYWORD = kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
    empty = inspect.Parameter.empty


class _Signature(NamedTuple):
    parameters: dict[str, _Parameter]
    return_annotation: Any


def readable_signature(function: Callable[..., Any]) -> inspect.Signature:
    """The same, to be read only, and for an ordinary function in a third of the time.

    `inspect.signature` looks for what a function may wrap, and checks that its parameters are in a
    possible order.
    """
    names = names_of_plain(function)
    if names is None:
        return signature(function)
    defaults = function.__defaults__ or ()
    first = len(names) - len(defaults)  # of those with a default
    namespace, annotations, empty = _Namespace(function), function.__annotations__, _Parameter.empty
    parameters = {}
    for index, name in enumerate(names):
        annotation = namespace.resolve(annotations.get(name, empty), name)
        default = empty if index < first else defaults[index - first]
        parameters[name] = _Parameter(name, annotation, default)
    returned = namespace.resolve(annotations.get("return", empty), None)
    return cast(inspect.Signature, _Signature(parameters, returned))


def names_of_plain(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """The parameters of an ordinary function, if each takes an argument by position or by name."""
    if not is_ordinary(function) or function.__kwdefaults__:
        return None
    code = function.__code__
    unusual = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    if code.co_posonlyargcount or code.co_kwonlyargcount or code.co_flags & unusual:
        return None
    names = code.co_varnames[: code.co_argcount]
    return names if len(names) >= len(function.__defaults__ or ()) else None


def is_ordinary(function: Callable[..., Any]) -> TypeGuard[types.FunctionType]:
    """Whether it was written with def or lambda, and is what its code says.

    To ask for its `__dict__` would make one, which the function then keeps.
    """
    return type(function) is types.FunctionType and not any(
        map(functools.partial(hasattr, function), _DISGUISES)
    )


# The attributes by which `inspect` takes a function for another one, or for a coroutine function.
_DISGUISES = (
    "__wrapped__",
    "__signature__",
    "__partialmethod__",
    "_partialmethod",
    "_is_coroutine_marker",
)


def spell_function(function: Callable[..., Any]) -> str:
    """How a message names a function: `module.qualname`, or its type where it has none."""
    # The end of a long name tells more than its start: that is where the function's own name is.
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if qualname is None:
        return f"this {type(function).__name__}"
    text = f"{module}.{qualname}" if module else str(qualname)
    return text if len(text) <= _LONGEST_NAME else f"...{text[3 - _LONGEST_NAME :]}"


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function; those of a partial or a callable object are of its class."""
    if hasattr(function, "__code__") and not hasattr(function, "__signature__"):
        return function.__annotations__
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some builtins
        return {}
    by_name = {name: p.annotation for name, p in signature.parameters.items()}
    by_name["return"] = signature.return_annotation
    return {name: value for name, value in by_name.items() if value is not signature.empty}


def written_result(function: Callable[..., Any]) -> Any:
    """The annotation of the result, evaluated, with what `Annotated` says beside the type."""
    written = annotations_of(function).get("return")
    if not isinstance(written, str) or written in _MOST_RESULTS:
        return written
    return _Namespace(function)._evaluate(written, None)


def method_hint(function: Callable[..., Any]) -> str:
    """What to do about a function that belongs to a class; mostly nothing."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return (
            f" Pass the forward of {owner.__qualname__} without 'ctx', and register its backward."
        )
    try:
        first = next(iter(inspect.signature(function).parameters), None)
    except (TypeError, ValueError):
        return ""
    if first not in ("self", "cls") or "." not in getattr(function, "__qualname__", ""):
        return ""
    return (
        " It is a method, and an operator has no instances: write @staticmethod above it and leave "
        f"out {first!r}, or pass the method of an instance."
    )


def shorten(text: str, longest: int = 60) -> str:
    """A text as it is, or its start: so that no message grows with what it complains about."""
    return short_text(text if len(text) <= longest else f"{text[: longest - 3]}...")


class _Namespace:
    """Where the strings of one function's annotations are looked up."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @functools.cached_property
    def _closure(self) -> Any:
        """The plain function that was written, below what wraps it; few annotations need it."""
        underlying = inspect.unwrap(self._function)
        while isinstance(underlying, functools.partial):
            underlying = inspect.unwrap(underlying.func)
        if inspect.ismethod(underlying):
            underlying = underlying.__func__
        if not isinstance(underlying, types.FunctionType):
            underlying = type(underlying).__call__
        return underlying

    @property
    def _globals(self) -> dict[str, Any]:
        return getattr(self._closure, "__globals__", {})

    def resolve(self, annotation: Any, parameter: str | None) -> Any:
        """The annotation of a parameter, or of the result where `parameter` is None."""
        kind = type(annotation)
        if kind in _CLASSES:
            return annotation
        if kind in _GENERIC and all(type(item) in _CLASSES for item in annotation.__args__):
            return annotation
        if isinstance(annotation, typing.ForwardRef):
            annotation = annotation.__forward_arg__
        if isinstance(annotation, str):
            return self.resolve(self._evaluate(annotation, parameter), parameter)
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Annotated:
            return self.resolve(args[0], parameter)
        if origin in (None, typing.Literal) or not args:
            return annotation
        items = tuple(
            item if item is Ellipsis or isinstance(item, list) else self.resolve(item, parameter)
            for item in args
        )
        if items == args:
            return annotation
        if origin in (typing.Union, types.UnionType):
            return typing.Union[items]  # noqa: UP007  (the members are only known here)
        return types.GenericAlias(origin, items)

    def _evaluate(self, text: str, parameter: str | None) -> Any:
        try:
            # Annotations are code of the module that defines the function, as typing treats them.
            return eval(text, self._globals, {**_IMPLICIT, **self._locals()})
        except Exception as error:
            place = "return" if parameter is None else f"parameter {shorten(repr(parameter))}"
            raise SchemaError(
                f"{spell_function(self._function)}: Unsupported type annotation {shorten(text)}. "
                f"It is not a type. Evaluating it for {place} raised: {shorten(str(error))}. "
                "Import what it names at module level, or, for a local name, remove `from "
                "__future__ import annotations`."
            ) from None

    def _locals(self) -> dict[str, Any]:
        # Globals win over the implicit names; a closure wins over both, as in the function's body.
        names = {name: self._globals[name] for name in _IMPLICIT if name in self._globals}
        if isinstance(self._closure, types.FunctionType):
            names |= closure_of(self._closure)
        return names


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """The variables around a function that it reads, as far as they have a value."""
    variables = {}
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # it gets one after the function was defined
            variables[name] = cell.cell_contents
    return variables


def names_in(code: types.CodeType) -> set[str]:
    """What code reads by name, also in the functions inside of it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def package_of(function: types.FunctionType) -> str:
    """The package in which a function runs; `__module__` is what functools.wraps copies."""
    return str(function.__globals__.get("__name__")).partition(".")[0]
