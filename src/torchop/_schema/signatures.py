"""Signatures of functions, with evaluated annotations."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable
from typing import Any

import torch

from torchop._errors import SchemaError, short_text

# As in `torch.library.infer_schema`, string annotations may use these names without an import.
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


def signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        original = inspect.signature(function)
    except (TypeError, ValueError):
        fix = method_hint(function) or " Wrap it in a function with annotations, or pass schema=."
        name = spell_function(function)
        raise SchemaError(f"{name} has no signature to infer a schema from.{fix}") from None
    namespace = _Namespace(function)
    written = [original.return_annotation, *(p.annotation for p in original.parameters.values())]
    evaluated = list(map(namespace.resolve, written, (None, *original.parameters)))
    if all(map(operator.is_, evaluated, written)):
        return original  # `replace` is slow
    returned, *annotations = evaluated
    pairs = zip(original.parameters.values(), annotations, strict=True)
    parameters = [p.replace(annotation=annotation) for p, annotation in pairs]
    return original.replace(parameters=parameters, return_annotation=returned)


def spell_function(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if qualname is None:
        return f"this {type(function).__name__}"
    text = f"{module}.{qualname}" if module else str(qualname)
    # Cut off the start of a long name, because the end of the name is its most specific part.
    return text if len(text) <= _LONGEST_NAME else f"...{text[3 - _LONGEST_NAME :]}"


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function, a partial or a callable object."""
    if hasattr(function, "__code__") and not hasattr(function, "__signature__"):
        return function.__annotations__
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return {}
    by_name = {name: p.annotation for name, p in signature.parameters.items()}
    by_name["return"] = signature.return_annotation
    return {name: value for name, value in by_name.items() if value is not signature.empty}


def written_annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the evaluated annotations of a function, including `Annotated` metadata.

    Annotations that cannot be evaluated are left out, because schema inference rejects them later.
    """
    namespace, evaluated = _Namespace(function), {}
    for name, annotation in annotations_of(function).items():
        try:
            is_text = isinstance(annotation, str)
            evaluated[name] = namespace.evaluate(annotation, name) if is_text else annotation
        except SchemaError:
            continue
    return evaluated


def method_hint(function: Callable[..., Any]) -> str:
    """Return advice for an error message if the function is a method, or else an empty string."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return (
            f" Pass the forward of {owner.__qualname__} without 'ctx', and register the backward."
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
    return short_text(text if len(text) <= longest else f"{text[: longest - 3]}...")


class _Namespace:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def resolve(self, annotation: Any, parameter: str | None) -> Any:
        """Evaluate string annotations, including those inside generic types, and strip `Annotated`.

        `parameter` is the parameter's name for error messages, or None for the return annotation.
        """
        if isinstance(annotation, typing.ForwardRef):
            annotation = annotation.__forward_arg__
        if isinstance(annotation, str):
            return self.resolve(self.evaluate(annotation, parameter), parameter)
        origin = typing.get_origin(annotation)
        if origin in (None, typing.Literal):
            return annotation
        args = typing.get_args(annotation)
        if origin is typing.Annotated:
            return self.resolve(args[0], parameter)
        items = tuple(
            item if item is Ellipsis or isinstance(item, list) else self.resolve(item, parameter)
            for item in args
        )
        if items == args:
            return annotation
        if origin in (typing.Union, types.UnionType):
            return typing.Union[items]  # noqa: UP007  (the members are known only at run time)
        return types.GenericAlias(origin, items)

    def evaluate(self, text: str, parameter: str | None) -> Any:
        try:
            # Annotations are code in the author's own module, so evaluating them is as safe here as
            # in typing.get_type_hints, which also calls `eval`.
            return eval(text, *self._names)
        except Exception as error:
            place = "return" if parameter is None else f"parameter {shorten(repr(parameter))}"
            raise SchemaError(
                f"{spell_function(self._function)}: Unsupported type annotation {shorten(text)}. "
                f"It is not a type. Evaluating it for {place} raised: {shorten(str(error))}. "
                "Import the name at module level, or, for a local name, remove `from "
                "__future__ import annotations`."
            ) from None

    @functools.cached_property
    def _names(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The globals and locals for evaluating annotations.

        For a partial or a wrapped function, these are taken from the author's original function.
        """
        written: Any = inspect.unwrap(self._function)
        while isinstance(written, functools.partial):
            written = inspect.unwrap(written.func)
        if inspect.ismethod(written):
            written = written.__func__
        if not isinstance(written, types.FunctionType):
            written = type(written).__call__
        variables = getattr(written, "__globals__", {})
        # Look up names in the same order as the function's body does: closure variables shadow
        # globals. Globals in turn shadow the implicit names, such as `Tensor`.
        names = _IMPLICIT | {name: variables[name] for name in _IMPLICIT if name in variables}
        if isinstance(written, types.FunctionType):
            names |= closure_of(written)
        return variables, names


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    variables = {}
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # the variable is not assigned yet
            variables[name] = cell.cell_contents
    return variables


def names_in(code: types.CodeType) -> set[str]:
    """Return the global and attribute names that code uses, including in nested functions."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def package_of(function: types.FunctionType) -> str:
    # Read the module's name from the globals, because `functools.wraps` overwrites `__module__`.
    return str(function.__globals__.get("__name__")).partition(".")[0]
