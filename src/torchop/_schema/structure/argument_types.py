"""register_argument_type: classes of users as arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from torchop._errors import SchemaError, short_repr
from torchop._schema import signatures, types
from torchop._schema.callables import check_callable

T = TypeVar("T")


class ArgumentType(NamedTuple):
    """What a user registered for a class; the parameters of `unflatten` are its fields."""

    flatten: Callable[[Any], Any]
    unflatten: Callable[..., Any]
    signature: inspect.Signature


_registered: dict[type, ArgumentType] = {}


def registered(annotation: Any) -> ArgumentType | None:
    """What was registered for a class, itself and no other; None if nothing was."""
    return _registered.get(annotation) if isinstance(annotation, type) else None


def register_argument_type(
    cls: type[T], *, flatten: Callable[[T], dict[str, Any]], unflatten: Callable[..., T]
) -> None:
    """Lets operators take objects of a class of yours.

    The flat operator takes one argument for each parameter of `unflatten`. So an exported program
    holds plain values, and only needs your class when the kernel runs.

    Args:
        cls: the class; subclasses are other classes.
        flatten: `flatten(object)` returns the parts, a dict by the names of the parameters of
            `unflatten`. Compilers trace it.
        unflatten: `unflatten(**parts)` makes an equal object. The annotations of its parameters are
            those that a parameter of `custom_op` may have.

    Raises:
        SchemaError: a `ValueError`: a parameter of `unflatten` has no name or no annotation, or
            `cls` is a type that operators take already.
        TypeError: `cls` is no class, or one of the others no function.

    Example:
        >>> import fractions, torch, torchop
        >>> def halves(numerator: int, denominator: int = 1) -> fractions.Fraction:
        ...     return fractions.Fraction(numerator, denominator)
        >>> torchop.register_argument_type(
        ...     fractions.Fraction,
        ...     flatten=lambda f: {"numerator": f.numerator, "denominator": f.denominator},
        ...     unflatten=halves,
        ... )
        >>> @torchop.custom_op("docs::times", mutates_args=())
        ... def times(x: torch.Tensor, by: fractions.Fraction) -> torch.Tensor:
        ...     return x * by.numerator / by.denominator
        >>> times(torch.ones(2), fractions.Fraction(3, 2))
        tensor([1.5000, 1.5000])
        >>> print(times.schema)
        docs::times(Tensor x, *, SymInt by_numerator, SymInt by_denominator=1) -> Tensor

    The idea is `torch.utils._pytree.register_pytree_node`, with parts that have names and types.
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_argument_type expects a class, got {short_repr(cls)}.")
    where = f"register_argument_type({cls.__name__})"
    check_callable(f"{where}: flatten", flatten)
    check_callable(f"{where}: unflatten", unflatten)
    if types.argument_type(cls) is not None or issubclass(cls, torch.Tensor):
        raise SchemaError(f"register_argument_type: operators accept {types.spell(cls)} already.")
    signature = signatures.signature(unflatten)
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise SchemaError(
                f"{where}: unflatten is called with a keyword for each part, which "
                f"{short_repr(str(parameter))} cannot take. Name the parts."
            )
        if parameter.annotation is parameter.empty:
            raise SchemaError(
                f"{where}: the parameter {parameter.name!r} of unflatten must have a type "
                "annotation, which gives the schema its type."
            )
    _registered[cls] = ArgumentType(flatten, unflatten, signature)
