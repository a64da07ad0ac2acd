"""What a declaration of preconditions may say, and why others are refused."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions.constraints import Constraint, is_dependent

from torchop._errors import RuleSignatureError, nearest
from torchop._rules.user.preconditions.base import Precondition, Satisfies, bounds
from torchop._rules.user.preconditions.relations import OF_INTEGERS, Like, is_of_integers
from torchop._rules.user.preconditions.words import Contiguous, Dtype, OneOf, Shape
from torchop.extend import Argument, short_repr

_OF_TENSORS = (Contiguous, Dtype, Like, Shape)
# The values of arguments that Python can tell apart; the enumerations of PyTorch are ints, too.
_VALUES: dict[str, Any] = {"bool": bool, "int": int, "float": int | float, "str": str, "Tensor": ()}


def check_known(what: str, name: Any, known: Mapping[str, Argument]) -> None:
    """Raises RuleSignatureError for a name that is no argument."""
    if not isinstance(name, str) or name not in known:
        raise RuleSignatureError(
            f"{what}: the operator has no argument {name!r}{nearest(name, known)}. It takes "
            f"{', '.join(known)}."
        )


def check_word(
    what: str, word: Precondition, argument: Argument, known: Mapping[str, Argument]
) -> None:
    """Raises RuleSignatureError for a word that is not about such an argument."""
    for other in word.others:
        check_known(what, other, known)
        if other == argument.name:
            raise RuleSignatureError(f"{what} relates the argument to itself.")
        if isinstance(word, Like) and not known[other].holds_tensors:
            raise RuleSignatureError(f"{what}: {other!r} is of type {known[other].kind}.")
        kind = known[other].kind.removeprefix("Optional[")
        if isinstance(word, OF_INTEGERS) and not kind.startswith(("Tensor", "List[", "int")):
            raise RuleSignatureError(
                f"{what}: it is about a tensor, a list or an int, and {other!r} is of type "
                f"{known[other].kind}."
            )
    numbers = ("int", "float", "bool", "number", "complex")
    is_number = any(kind in argument.kind for kind in numbers)
    expected = "tensors" if isinstance(word, _OF_TENSORS) else "tensors and numbers"
    fits = argument.holds_tensors or (is_number and expected != "tensors")
    if isinstance(word, OneOf):
        plain = argument.kind.removeprefix("Optional[").removesuffix("]")
        types = _VALUES.get(plain, object), type(None) if plain != argument.kind else ()
        wrong = [value for value in word.values if not isinstance(value, types)]
        if wrong:
            raise RuleSignatureError(
                f"{what}: the argument is of type {argument.kind}, which {wrong[0]!r} is not."
            )
    elif not fits:
        raise RuleSignatureError(
            f"{what}: it is for {expected}, but the argument is of type {argument.kind}."
        )


def constrained(what: str, constraint: Constraint) -> Satisfies:
    """A constraint as a word; raises RuleSignatureError for one that tells nothing by itself."""
    ends = [getattr(constraint, f"{end}_bound", None) for end in ("lower", "upper")]
    if is_dependent(constraint) or any(isinstance(end, Tensor) for end in ends):
        raise RuleSignatureError(
            f"{what} depends on tensors that are not there: give it bounds that are numbers, or "
            "write a function whose parameters are named as arguments."
        )
    for end in ends:
        is_number = end is None or (isinstance(end, int | float) and end == end)
        if not is_number or (isinstance(end, int) and not -(2**63) <= end < 2**63):
            raise RuleSignatureError(
                f"{what} has the bound {short_repr(end)}, which is no number that a tensor holds."
            )
    return Satisfies(constraint)


def parameters(what: str, function: Callable[..., Any]) -> list[str]:
    """The parameters of an author's function, which are passed by name."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # a builtin that does not say
        parameters = []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    waits = inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function)
    if waits or not parameters or any(each.kind not in by_name for each in parameters):
        raise RuleSignatureError(
            f"{what} is not a function that returns a bool, and whose parameters have the names of "
            "arguments, without * and /. Write one, such as lambda x: bool((x > 0).all())."
        )
    return [each.name for each in parameters]


def check_range(what: str, words: Iterable[Precondition]) -> None:
    """Raises ValueError for constraints that no number fulfils."""
    constraints = [word for word in words if isinstance(word, Satisfies)]
    is_discrete = any(is_of_integers(word) for word in constraints)
    number = torch.zeros((), dtype=torch.int64 if is_discrete else torch.double)
    low, high = bounds(constraints, number, {})
    if low is not None and high is not None and not low <= high:  # nan, too
        raise ValueError(
            f"{what} contradict each other, because no number is at least {low} and at most "
            f"{high}: {', '.join(map(repr, constraints))}."
        )


def check_shapes(what: str, words: Iterable[Precondition]) -> None:
    """Raises ValueError for shapes that no tensor has."""
    shapes = [word for word in words if isinstance(word, Shape)]
    for one, other in itertools.pairwise(shapes):
        pairs = zip(one.dims, other.dims, strict=False)
        differ = any(a != b for a, b in pairs if isinstance(a, int) and isinstance(b, int))
        if differ or len(one.dims) != len(other.dims):
            raise ValueError(
                f"{what} contradict each other, because no tensor has the shapes {one} and {other}."
            )


def check_choices(what: str, words: Iterable[Precondition]) -> None:
    """Raises ValueError for dtypes and values that exclude each other."""
    choices = [each.dtypes for each in words if isinstance(each, Dtype)]
    choices = choices or [each.values for each in words if isinstance(each, OneOf)]
    if choices and not any(all(one in each for each in choices) for one in choices[0]):
        raise ValueError(f"{what} contradict each other, because {choices} have nothing in common.")
    integers = next((word for word in words if isinstance(word, OF_INTEGERS)), None)
    for word in words if integers is not None else ():
        for dtype in word.dtypes if isinstance(word, Dtype) else ():
            if dtype.is_floating_point or dtype.is_complex:
                raise ValueError(
                    f"{what} contradict each other, because {integers} is about integers, and "
                    f"{dtype} is no dtype of these."
                )
