"""Preconditions: all that was declared of one operator, and the arguments that fulfil it."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions.constraints import Constraint

from torchop._errors import RuleSignatureError
from torchop._rules.user.preconditions.base import (
    Arguments,
    Precondition,
    Unfit,
    bounds,
    with_size,
)
from torchop._rules.user.preconditions.refusals import (
    check_choices,
    check_known,
    check_range,
    check_shapes,
    check_word,
    constrained,
    parameters,
)
from torchop._rules.user.preconditions.relations import Like, is_of_integers
from torchop._rules.user.preconditions.words import Dtype, OneOf, Shape
from torchop.extend import Argument, Schema, short_repr, short_text, values_by_name

_ATTEMPTS = 20
_MOST_ELEMENTS = 2**24  # of a tensor of an example, so that no machine runs out of memory


class Preconditions:
    """What is valid for the arguments of one operator.

    Args:
        name: the operator, for messages.
        schema: its schema.
        declared: by argument a word, a constraint of `torch.distributions`, or a function of
            arguments; or several of these.
    """

    def __init__(self, name: str, schema: Schema, declared: Mapping[str, Any]) -> None:
        self._schema = schema
        self.by_argument: dict[str, list[Precondition]] = {}
        self.functions: list[tuple[str, Callable[..., Any], list[str]]] = []
        known = {argument.name: argument for argument in schema.arguments}
        for argument, value in declared.items():
            check_known(f"{name}: the preconditions", argument, known)
            words = self.by_argument.setdefault(argument, [])
            for item in value if isinstance(value, (tuple, list)) else (value,):
                what = f"{name}: the precondition {short_repr(item)} of {argument!r}"
                item = constrained(what, item) if isinstance(item, Constraint) else item
                if isinstance(item, Precondition):
                    check_word(what, item, known[argument], known)
                    words.append(item)
                elif callable(item) and not isinstance(item, type):
                    names = parameters(what, item)
                    for each in names:
                        check_known(what, each, known)
                    self.functions.append((argument, item, names))
                else:
                    raise RuleSignatureError(
                        f"{what} is not one: use a constraint of torch.distributions.constraints, "
                        "an object of torchop.preconditions, such as Shape('n'), or a function of "
                        "arguments of the operator that returns a bool."
                    )
            check_range(f"{name}: the preconditions of {argument!r}", words)
            check_shapes(f"{name}: the preconditions of {argument!r}", words)
            check_choices(f"{name}: the preconditions of {argument!r}", words)

    def arguments(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, with defaults."""
        return {**self._defaults(), **values_by_name(self._schema, tuple(args), kwargs)}

    def problem(self, arguments: Arguments) -> str | None:
        """Which precondition does not hold; None if all do."""
        sizes: dict[str, tuple[int, str]] = {
            name: (value, name) for name, value in arguments.items() if isinstance(value, int)
        }
        for name, word in self.words(arguments):
            for part in _parts(arguments[name], word):
                try:
                    problem = word.problem(part, arguments)
                except Unfit as error:
                    problem = str(error)
                if problem is not None:
                    return f"{name!r} is not valid, because {problem}"
                for dim, size in word.named(part).items() if isinstance(word, Shape) else ():
                    other, where = sizes.setdefault(dim, (size, name))
                    if other != size:
                        return f"the size {dim!r} is {other} in {where!r}, but {size} in {name!r}"
        for name, function, names in self.functions:
            try:
                result = function(**{each: arguments[each] for each in names})
                if result:
                    continue
                problem = f"returns {short_repr(result)}"
            except Exception as error:  # the author's function, of arguments it is not for
                problem = f"raises {type(error).__name__}: {short_text(error)}"
            return f"{name!r} is not valid, because the function of {', '.join(names)} {problem}"
        return None

    def fitted(self, arguments: Arguments) -> dict[str, Any]:
        """Valid arguments near these.

        Raises:
            Unfit: there are none.
        """
        made = dict(arguments)
        for _ in range(2):  # one argument may be fitted to another that comes later
            for name, word in self.words(made):
                value = made[name]
                try:
                    parts = [word.fitted(part, made) for part in _parts(value, word)]
                except RuntimeError as error:  # of PyTorch, where a dtype does not hold a number
                    raise Unfit(f"{word} has no value of {name!r}: {short_text(error)}") from None
                made[name] = _joined(value, word, parts)
                made |= self._named_ints(word, made[name], made)
        problem = self.problem(made)
        if problem is not None:
            raise Unfit(problem)
        return made

    def limits(self, arguments: Arguments) -> Iterator[tuple[str, dict[str, Any]]]:
        """Arguments at the limits of what is valid, each with words for it."""
        for name, word in self.words(arguments):
            value = arguments[name]
            changes: list[tuple[str, dict[str, Any]]] = []
            if isinstance(word, Shape):
                for dim in word.named(value):
                    sizes = dict.fromkeys((word.least, 1))
                    changes += [(f"{dim} = {n}", self.resized(arguments, dim, n)) for n in sizes]
            elif not _holds_tensors(value):
                for limit in _limits(word, value, arguments):
                    changed = self._replaced(arguments, name, _joined(value, word, [limit]))
                    changes.append((f"{name} at a limit of {word}", changed))
            for words, changed in changes:
                try:
                    yield words, self.fitted(changed)
                except Unfit:
                    continue

    def generated(self) -> list[dict[str, Any]]:
        """Examples, made from nothing but the declaration.

        Raises:
            Unfit: it says too little.
        """
        one = self._generated_one()
        choices = [(n, w) for n, w in self.words(one) if isinstance(w, OneOf)]
        made = [one]
        for name, each in ((n, each) for n, word in choices for each in word.values):
            if each != one[name]:
                with contextlib.suppress(Unfit):  # such as 5 rows, where it has none to repeat
                    made.append(self.fitted(self._replaced(one, name, each)))
        return made

    def _replaced(self, arguments: Arguments, name: str, value: Any) -> dict[str, Any]:
        """The arguments with another value, and with the sizes that it names."""
        if name in self.least_sizes(arguments) and isinstance(value, int):
            return self.resized(arguments, name, value)
        return {**arguments, name: value}

    def _named_ints(self, word: Precondition, value: Any, arguments: Arguments) -> dict[str, int]:
        """The int arguments that name the sizes of a tensor, with these sizes."""
        if not isinstance(word, Shape) or not isinstance(value, Tensor):
            return {}
        if value.dim() != len(word.dims):
            return {}
        named = word.named(value)
        return {dim: size for dim, size in named.items() if type(arguments.get(dim)) is int}

    def _generated_one(self) -> dict[str, Any]:
        problem = ""
        for seed in range(1, 1 + _ATTEMPTS):
            generator = torch.Generator().manual_seed(seed)
            sizes = self._sizes_of_ints()
            made: dict[str, Any] = {}
            later = sorted(self._schema.arguments, key=self._is_like)
            for argument in later:
                value = self._value(argument, sizes, made, generator)
                if value is not None:
                    made[argument.name] = value
            ordered = {a.name: made[a.name] for a in self._schema.arguments if a.name in made}
            try:
                return self.fitted({**self._defaults(), **ordered})
            except Unfit as error:
                problem = str(error)
        raise Unfit(problem)

    def _sizes_of_ints(self) -> dict[str, int]:
        """The sizes that int arguments name, of which they may say which they may be."""
        named = {dim for words in self.by_argument.values() for w in words for dim in _dims(w)}
        sizes: dict[str, int] = {}
        for argument in self._schema.arguments:
            if argument.kind == "int" and argument.name in named:
                words = self.by_argument.get(argument.name, [])
                size = torch.tensor(3 + len(sizes))
                for word in words:
                    (part,) = _parts(size.item(), word)
                    size = torch.as_tensor(word.fitted(part, sizes))
                sizes[argument.name] = int(size)
        return sizes

    def _is_like(self, argument: Argument) -> bool:
        return any(isinstance(word, Like) for word in self.by_argument.get(argument.name, ()))

    def _defaults(self) -> dict[str, Any]:
        return {a.name: a.default for a in self._schema.arguments if a.has_default}

    def _value(
        self,
        argument: Argument,
        sizes: dict[str, int],
        made: dict[str, Any],
        generator: torch.Generator,
    ) -> Any:
        """A value of an argument, which may have to be fitted; None for the default."""
        words = self.by_argument.get(argument.name, [])
        if argument.kind.removeprefix("Optional[").removesuffix("]") == "Tensor" and words:
            like = next((made.get(w.of) for w in words if isinstance(w, Like)), None)
            shape = next((w for w in words if isinstance(w, Shape)), None)
            if shape is not None:
                for dim in shape.dims:
                    # Distinct, so that a variant can change one of them.
                    size = max(3 + len(sizes), shape.least)
                    sizes.setdefault(str(dim), dim if isinstance(dim, int) else size)
                lengths = [sizes[str(dim)] for dim in shape.dims]
            elif isinstance(like, Tensor):
                lengths = [*like.shape]
            else:
                raise Unfit(f"the shape of {argument.name!r} is not declared; add a Shape")
            dtypes = next((w.dtypes for w in words if isinstance(w, Dtype)), None)
            discrete = any(is_of_integers(word) for word in words)
            dtype = dtypes[0] if dtypes else torch.int64 if discrete else torch.float32
            return random_tensor(lengths, dtype, words, made, generator)
        if argument.name in sizes:
            return sizes[argument.name]
        if argument.has_default:
            return None
        for word in words:
            if isinstance(word, OneOf):
                return word.values[0]
        if argument.kind in ("int", "float", "bool") and words:
            return {"int": int, "float": float, "bool": bool}[argument.kind](1)
        raise Unfit(f"what {argument.name!r} may be is not declared")

    def least_sizes(self, arguments: Arguments) -> dict[str, int]:
        """The names of sizes, and the smallest that each may be."""
        least: dict[str, int] = {}
        for _, word in self.words(arguments):
            if isinstance(word, Shape):
                for dim in filter(lambda dim: isinstance(dim, str), word.dims):
                    least[str(dim)] = max(word.least, least.get(str(dim), 0))
        return least

    def resized(self, arguments: Arguments, dim: str, size: int) -> dict[str, Any]:
        """The arguments with another size wherever it is named."""
        made = dict(arguments)
        if isinstance(made.get(dim), int):
            made[dim] = size
        for name, word in self.words(arguments):
            for place, each in enumerate(word.dims if isinstance(word, Shape) else ()):
                if each == dim:
                    parts = [with_size(part, place, size) for part in _parts(made[name], word)]
                    made[name] = _joined(made[name], word, parts)
        return made

    def words(self, arguments: Arguments) -> Iterator[tuple[str, Precondition]]:
        """The words that are about something: not about what is None, as a default may be."""
        for name, words in self.by_argument.items():
            for word in words:
                if all(arguments.get(each) is not None for each in (name, *word.others)):
                    yield name, word

    def texts(self) -> dict[str, str]:
        """What is declared, in words, by argument."""
        texts = {name: [*map(repr, words)] for name, words in self.by_argument.items()}
        for name, function, names in self.functions:
            text = inspect.getdoc(function) or f"a function of {', '.join(names)}"
            texts[name].append(text.partition("\n")[0])
        return {name: "; ".join(items) for name, items in texts.items()}


def random_tensor(
    shape: Iterable[int],
    dtype: torch.dtype,
    words: Iterable[Precondition],
    arguments: Arguments,
    generator: torch.Generator,
) -> Tensor:
    """A tensor of random numbers within the bounds of these words."""
    if min(shape, default=0) < 0 or math.prod(shape) > _MOST_ELEMENTS:
        raise Unfit(f"an example of shape {[*shape]} has a negative size, or would be too large")
    try:
        low, high = bounds(words, torch.zeros(1).to(dtype)[0], arguments)
    except RuntimeError as error:
        raise Unfit(f"no tensor of {dtype} can be made: {short_text(error)}") from None
    if dtype.is_floating_point and low is None and high is None:
        return torch.randn([*shape], generator=generator).to(dtype)
    low = (high - 2 if high is not None else 0) if low is None else low
    high = low + 2 if high is None else high
    share = torch.rand([*shape], generator=generator, dtype=torch.double)
    spread = high - low if dtype.is_floating_point else max(high - low + 1, 0)
    made = low + share * spread
    return (made if dtype.is_floating_point else made.floor()).to(dtype)


def _dims(word: Precondition) -> tuple[str | int, ...]:
    return word.dims if isinstance(word, Shape) else ()


def _holds_tensors(value: Any) -> bool:
    """Whether it is a list of tensors, each of which has to be valid."""
    return isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value)


def _parts(value: Any, word: Precondition) -> list[Any]:
    """What a word is asked about: each of several tensors, or numbers as a tensor."""
    if isinstance(word, OneOf):
        return [value]
    if _holds_tensors(value):
        return [item for item in value if isinstance(item, Tensor)]
    if isinstance(value, Tensor):
        return [value]
    made = torch.tensor(value)
    # As Python's floats are, whatever the default dtype is.
    return [torch.tensor(value, dtype=torch.double) if made.is_floating_point() else made]


def _limits(word: Precondition, value: Any, arguments: Arguments) -> Iterator[Any]:
    (part,) = _parts(value, word)
    with contextlib.suppress(RuntimeError):  # of PyTorch: the dtype does not hold the limit
        yield from word.limits(part, arguments)


def _joined(value: Any, word: Precondition, parts: list[Any]) -> Any:
    """A value with other parts, of the same form."""
    if isinstance(word, OneOf) or isinstance(value, Tensor):
        return parts[0]
    return type(value)(parts) if _holds_tensors(value) else parts[0].tolist()
