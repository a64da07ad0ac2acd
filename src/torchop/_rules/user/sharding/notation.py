"""Parse the notation of sharding rules, such as "b k, k n -> b n".

As in einsum, each comma-separated operand names the dimensions of one tensor, and `->` separates
the arguments from the results.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torchop._errors import ShardingRuleError
from torchop.extend import short_repr, short_text

REDUCTIONS = ("sum", "avg", "max", "min", "product")
ANY, UNNAMED = "...", "."
_SYNTAX = (
    "A rule has one operand for each tensor argument, '->', and one operand for each result, such "
    "as \"b k, k n -> b n\". Operands of residuals follow after ';'. An operand consists of names "
    "of dimensions, '.' and at most one '...', in [brackets] for a list of tensors."
)


class Operand(NamedTuple):
    """The names of a tensor's dimensions.

    If `is_list` is True, the names apply to each tensor in a list.
    """

    names: tuple[str, ...]
    is_list: bool = False

    def __str__(self) -> str:
        text = " ".join(self.names)
        return f"[{text}]" if self.is_list else text

    def dimensions(self, ndim: int, width: int) -> list[str] | None:
        """Return a name for each dimension of a tensor, or None if their number does not fit.

        The dimensions that `...` matches are named `...0`, `...1` and so on. They are numbered from
        the right, as in broadcasting, so the last one has the same name in all tensors of the call.
        `width` is the largest number of dimensions that `...` matches in any tensor of the call.
        """
        if ANY not in self.names:
            return list(self.names) if ndim == len(self.names) else None
        place = self.names.index(ANY)
        count = self.count_any(ndim)
        if count < 0:
            return None
        dots = [f"{ANY}{number}" for number in range(width - count, width)]
        return [*self.names[:place], *dots, *self.names[place + 1 :]]

    def count_any(self, ndim: int) -> int:
        return ndim - len(self.names) + 1 if ANY in self.names else 0


class Sharding:
    """A parsed sharding rule. See `sharding` for the notation and the options.

    Attributes:
        residuals: the operands after ';', for the residuals (kernel outputs that only the backward
            pass uses). None if the text has no ';'.
        whole: the names of dimensions that are never sharded.
        reduce: maps the name of a dimension that a result lacks to the reduction that combines the
            ranks' partial results.
        linear: groups of arguments, where the operator is jointly linear in the arguments of a
            group.
    """

    __slots__ = ("arguments", "linear", "reduce", "residuals", "results", "text", "whole")

    def __init__(
        self,
        text: str,
        whole: str = "",
        reduce: Mapping[str, str] | None = None,
        linear: Sequence[int | str | tuple[int | str, ...]] = (),
    ) -> None:
        if not isinstance(text, str):
            raise ShardingRuleError(
                f"a sharding rule must be a string, got {short_repr(text)} of type "
                f"{type(text).__name__}. {_SYNTAX}"
            )
        if text.count("->") != 1:
            raise ShardingRuleError(
                f"the sharding rule {short_repr(text)} must have one '->'. {_SYNTAX}"
            )
        self.text = " ".join(text.split())
        left, right = self.text.split("->")
        right, has_residuals, saved = right.partition(";")
        self.arguments = _operands(left, text)
        self.results = _operands(right, text)
        self.residuals = (_operands(saved, text) or (Operand(()),)) if has_residuals else None
        self.whole = frozenset(_names(whole, "whole"))
        self.reduce = dict(_reductions(reduce))
        self.linear = tuple(_linear(linear))
        self._check()

    @property
    def shown(self) -> str:
        return short_repr(self.text)

    def __repr__(self) -> str:
        options = [f"whole={' '.join(sorted(self.whole))!r}"] if self.whole else []
        options += [f"reduce={self.reduce}"] if self.reduce else []
        options += [f"linear={self.linear}"] if self.linear else []
        return f"torchop.sharding({', '.join([repr(self.text), *options])})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sharding) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(self.text)

    def saving(self, count: int) -> Sharding | None:
        """Return the rule for calls that also return `count` residuals, i.e. outputs for backward.

        Return None if this sharding rule has no operands for residuals. The returned rule has no
        `linear`, because linearity only guarantees that a Partial argument makes the results
        Partial, not the residuals.
        """
        if self.residuals is None:
            return None
        is_list = len(self.residuals) == 1 and self.residuals[0].is_list
        more = self.residuals * (count if is_list else 1)
        rule = copy.copy(self)
        rule.results, rule.linear = (*self.results, *more), ()
        reduced = [name for name in self.reduce if all(name in operand.names for operand in more)]
        rule.reduce = {name: self.reduce[name] for name in reduced}
        return rule

    def _check(self) -> None:
        arguments = {name for operand in self.arguments for name in operand.names}
        returned = (*self.results, *(self.residuals or ()))
        results = {name for operand in returned for name in operand.names}
        self._check_spaces(arguments | results)
        for what, names in (("whole", self.whole), ("reduce", self.reduce)):
            for name in names:
                if name not in arguments | results or name == UNNAMED:
                    raise ShardingRuleError(
                        f"the sharding rule {self.shown} has no dimension {short_repr(name)}, "
                        f"named by {what}=. It has {_listed(arguments | results)}."
                    )
        for name in self.reduce:
            if name in self.whole:
                raise ShardingRuleError(
                    f"the sharding rule {self.shown}: {short_repr(name)} is in whole= and in "
                    "reduce=. A whole dimension is never sharded, so it is not reduced. Remove "
                    "it from one of the two."
                )
            if self.results and all(name in operand.names for operand in self.results):
                raise ShardingRuleError(
                    f"the sharding rule {self.shown}: {short_repr(name)} is in every result, so it "
                    "is not reduced. Leave it out of reduce=, or out of the results that lack it."
                )
        for name in sorted(results - arguments - self.whole - {UNNAMED}):
            raise ShardingRuleError(
                f"the sharding rule {self.shown}: only a result has the dimension "
                f"{short_repr(name)}, so the rule does not define how it is sharded. If the "
                "operator creates the dimension, write '.' instead. Otherwise use the name of an "
                f"argument's dimension.{spaced(name)}"
            )

    def _check_spaces(self, names: set[str]) -> None:
        """Raise if names probably lack spaces between them, as in einsum's 'bd,d->bd'."""
        if any(len(operand.names) > 1 for operand in (*self.arguments, *self.results)):
            return
        for name in sorted(names):
            if spaced(name) and not names.isdisjoint(name):
                raise ShardingRuleError(
                    f"the sharding rule {self.shown} has the single dimension {name!r}."
                    f"{spaced(name)}"
                )


def spaced(name: str) -> str:
    """Return a hint if a name looks like several names without spaces, such as "bd"."""
    if not 1 < len(name) < 5 or not name.isalpha():  # longer names are probably words
        return ""
    return f" Separate names of dimensions by spaces. Did you mean {short_repr(' '.join(name))}?"


def _operands(side: str, text: str) -> tuple[Operand, ...]:
    if not side.strip():
        return ()
    return tuple(_operand(part.strip(), text) for part in side.split(","))


def _operand(part: str, text: str) -> Operand:
    is_list = part.startswith("[") and part.endswith("]")
    names = tuple((part[1:-1] if is_list else part).split())
    for name in names:
        if name not in (ANY, UNNAMED) and not re.fullmatch(r"[^\W\d]\w*", name, re.ASCII):
            raise ShardingRuleError(
                f"the sharding rule {short_repr(text)}: {short_repr(name)} is not the name of a "
                f"dimension. {_SYNTAX}"
            )
    for name, count in Counter(names).items():
        if name != UNNAMED and count > 1:
            raise ShardingRuleError(
                f"the sharding rule {short_repr(text)}: the operand {short_repr(part)} has "
                f"{short_repr(name)} twice. One mesh dimension shards one dimension of a tensor: "
                "give each another name."
            )
    return Operand(names, is_list)


def _names(text: object, what: str) -> Iterator[str]:
    if not isinstance(text, str):
        raise ShardingRuleError(
            f"{what}= of a sharding rule must be a string with names of dimensions, separated by "
            f"spaces, got {short_repr(text)}."
        )
    yield from text.split()


def _reductions(reduce: object) -> Iterator[tuple[str, str]]:
    if reduce is None:
        return
    if not isinstance(reduce, Mapping):
        raise ShardingRuleError(
            'reduce= of a sharding rule must be a dict such as {"k": "sum"}, got '
            f"{short_repr(reduce)}."
        )
    for name, how in reduce.items():
        if not isinstance(how, str) or how not in REDUCTIONS:
            raise ShardingRuleError(
                f"reduce={{{short_repr(name)}: {short_repr(how)}}} of a sharding rule: the "
                f"reduction must be one of {_listed(REDUCTIONS)}."
            )
        yield name, how


def _linear(linear: object) -> Iterator[tuple[int | str, ...]]:
    if isinstance(linear, str) or not isinstance(linear, Sequence):
        raise ShardingRuleError(
            "linear= of a sharding rule must be a tuple of numbers or names of arguments, got "
            f"{short_repr(linear)}."
        )
    for item in linear:
        group = item if isinstance(item, tuple) else (item,)
        for each in group:
            if not isinstance(each, (int, str)) or isinstance(each, bool):
                raise ShardingRuleError(
                    "linear= of a sharding rule takes numbers or names of arguments, or tuples of "
                    f"these for arguments that are summed together; got {short_repr(each)}."
                )
        yield group


def _listed(names: object) -> str:
    return short_text(", ".join(sorted(map(repr, names))))  # type: ignore[call-overload]


def sharding(
    text: str,
    *,
    whole: str = "",
    reduce: Mapping[str, str] | None = None,
    linear: Sequence[int | str | tuple[int | str, ...]] = (),
) -> Sharding:
    """Return a sharding rule, for `register_sharding` and for functions that choose a rule.

    A rule has one operand per tensor argument, in the order of the schema, then `->`, then one
    operand per result. An operand names the dimensions of the tensor. DTensor may shard a dimension
    if it appears in all results and in all mutated arguments. It then shards this dimension in
    every tensor that has it, and replicates the other tensors. If a result lacks the dimension,
    DTensor gathers the dimension before the call, unless `reduce` defines how to combine partial
    results.

    Args:
        text: the operands, such as `"b k, k n -> b n"` for a matrix product. `.` is an unnamed
            dimension, which is never sharded. `...` stands for any number of dimensions, aligned at
            the right as in broadcasting. An operand in `[brackets]` describes each tensor in a
            list. If the operator has residuals, their operands follow after a `;`.
        whole: names of dimensions that are never sharded, separated by spaces. `...` is allowed.
        reduce: a dict from the names of dimensions that a result lacks to the reduction that
            combines the ranks' partial results: `"sum"`, `"avg"`, `"max"`, `"min"` or `"product"`.
        linear: the arguments in which the operator is linear, by name or by index among the
            tensors. If such an argument is a partial sum on each rank, DTensor does not need to
            reduce it before the call, because the result is then a partial sum too. A tuple of
            arguments means that the operator is linear in all of them together, as an addition is.

    Returns:
        The rule.

    Raises:
        ShardingRuleError: the string is not a valid rule. This error is a `ValueError`.

    Example:
        >>> import torchop
        >>> torchop.sharding("b k, k n -> b n", reduce={"k": "sum"}, linear=(0, 1))
        torchop.sharding('b k, k n -> b n', reduce={'k': 'sum'}, linear=((0,), (1,)))

    The notation is based on `einops`. As with the factors of Shardy, the partitioner of JAX, a
    dimension is sharded in all tensors at once.
    """
    return Sharding(text, whole, reduce, linear)
