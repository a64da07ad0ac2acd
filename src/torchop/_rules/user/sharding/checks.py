from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torchop._compat.dtensor_calls import first_hashed
from torchop._errors import ShardingError, ShardingRuleError
from torchop._rules.residuals import residual_count
from torchop._rules.user.sharding.notation import ANY, Operand, Sharding
from torchop.extend import Argument, OpOverload, Schema, short_repr

PRESETS = ("pointwise", "replicate", "batch")
_BATCH = "batch"
# Error messages suggest 'replicate', because it is correct for every operator. They must not
# suggest a sharding rule in which every operand is '...': it would fit every schema too, but
# declares that the operator is pointwise.
IN_DOUBT = "If in doubt, write 'replicate': it is right for every operator."


def tensor_arguments(schema: Schema) -> list[Argument]:
    """Return the tensor arguments. A sharding rule has one operand for each of them."""
    return [argument for argument in schema.arguments if argument.holds_tensors]


def tensor_results(schema: Schema) -> list[str]:
    """Return the types of the tensor results. A sharding rule has one operand for each of them."""
    return [kind for kind in schema.returns if "Tensor" in kind]


def preset(name: str, schema: Schema) -> Sharding:
    operand = f"{_BATCH} {ANY}" if name == "batch" else ANY
    whole = {"pointwise": "", "replicate": ANY, "batch": ANY}[name]
    arguments = [str(Operand((operand,), a.is_tensor_list)) for a in tensor_arguments(schema)]
    results = [str(Operand((operand,), "List[" in kind)) for kind in tensor_results(schema)]
    rule = Sharding(f"{', '.join(arguments)} -> {', '.join(results)}", whole)
    # One operand in brackets describes any number of residuals (kernel outputs for the backward
    # pass).
    rule.residuals = (Operand(tuple(operand.split()), is_list=True),)
    return rule


def fitted(op: OpOverload, rule: Sharding, schema: Schema) -> Sharding:
    """Check that a sharding rule fits a schema, and return a copy with all operands filled in.

    An empty side of the rule, as in "b ->", describes a 0-dim tensor if the schema has one tensor
    on that side.
    """
    arguments, results = tensor_arguments(schema), tensor_results(schema)
    fitting = copy.copy(rule)
    if len(arguments) == 1 and not rule.arguments:
        fitting.arguments = (Operand(()),)
    if len(results) == 1 and not rule.results:
        fitting.results = (Operand((), "List[" in results[0]),)
    taken = {argument.name: argument.is_tensor_list for argument in arguments}
    returned = {f"result {index}": "List[" in kind for index, kind in enumerate(results)}
    count = residual_count(op)
    saved = " (and residuals, after ';')" if count else ""
    what, got = f"{op.name()}: the sharding rule {rule.shown}", f"{IN_DOUBT} Got {schema}."
    for operands, tensors, side, listed in (
        (fitting.arguments, taken, "before '->', but the operator takes", f" ({', '.join(taken)})"),
        (fitting.results, returned, "after '->', but the operator returns", saved),
    ):
        if len(operands) != len(tensors):
            raise ShardingRuleError(
                f"{what} has {_count(len(operands), 'operand')} {side} "
                f"{_count(len(tensors), 'tensor')}{listed}. {got}"
            )
        for operand, (name, is_list) in zip(operands, tensors.items(), strict=True):
            if operand.is_list is not is_list:
                kind = "a list of tensors" if is_list else "one tensor"
                must = "must be" if is_list else "must not be"
                raise ShardingRuleError(
                    f"{what}: {name} is {kind}, so the operand {must} in [brackets]. {got}"
                )
    if ";" in rule.text and not fits_residuals(rule, count):
        raise ShardingRuleError(
            f"{what} has {_count(len(rule.residuals or ()), 'operand')} after ';', but the "
            f"operator declares {_count(count, 'residual')}. Got {schema}."
        )
    _check_written(op, rule, schema, fitting)
    fitting.linear = _numbered(op, rule, arguments)
    return fitting


def fits_residuals(rule: Sharding, count: int) -> bool:
    """Return whether a sharding rule has the right number of operands for the residuals.

    Residuals are kernel outputs that only the backward pass uses. There must be one operand for
    each residual, or a single operand in brackets for all residuals.
    """
    operands = rule.residuals or ()
    return len(operands) == count or (count > 0 and [o.is_list for o in operands] == [True])


def residuals_error(op: OpOverload, count: int, shown: str) -> ShardingError:
    return ShardingError(
        f"{op.name()}: a call that records a gradient saves {count} "
        f"residual{'s' * (count > 1)}, and the sharding rule {shown} does not say how these "
        "are sharded. Write an operand for each of them after a semicolon, such as '; b h' in "
        "'b h d -> b h d; b h', or register another rule for "
        f"'{op.name()}__with_residuals'. If in doubt, use 'replicate': every rank computes "
        "everything."
    )


def check_schema(op: OpOverload, schema: Schema) -> None:
    if not tensor_arguments(schema):
        raise ShardingRuleError(
            f"{op.name()}: a sharding rule needs an operator that takes tensors, because DTensor "
            f"handles only calls with tensors. Got {schema}."
        )
    by_keyword = [a.name for a in schema.arguments if a.keyword_only and a.is_tensor_list]
    if by_keyword:
        raise ShardingRuleError(
            f"{op.name()}: DTensor does not look into lists of tensors that are passed by keyword, "
            f"such as {by_keyword[0]!r}. Make it positional. Got {schema}."
        )
    if len(schema.returns) > 1 and any("List[" in kind for kind in tensor_results(schema)):
        raise ShardingRuleError(
            f"{op.name()}: DTensor does not support a list of tensors alongside other results. "
            f"Return one list, or each tensor as a result. Got {schema}."
        )


def check_unhashed(op: OpOverload, unhashed: object, schema: Schema) -> tuple[str, ...]:
    if isinstance(unhashed, str) or not isinstance(unhashed, Sequence):
        raise ShardingRuleError(
            f"{op.name()}: unhashed= must be a tuple of argument names, such as ('lr',); got "
            f"{short_repr(unhashed)}."
        )
    names = tuple(unhashed)
    plain = {a.name: a for a in schema.arguments if not a.holds_tensors}
    for name in names:
        if not isinstance(name, str) or name not in plain:
            raise ShardingRuleError(
                f"{op.name()}: unhashed= must name arguments that are not tensors, got "
                f"{short_repr(name)}. Got {schema}."
            )
    first = first_hashed(op, names)
    for name in names:
        index = [a.name for a in schema.arguments].index(name)
        if not plain[name].keyword_only and first is not None and index > first:
            raise ShardingRuleError(
                f"{op.name()}: unhashed= cannot name {name!r}, because DTensor's key has all "
                f"positional arguments from {schema.arguments[first].name!r} on. Make it "
                f"keyword-only, or move it before {schema.arguments[first].name!r}. Got {schema}."
            )
    return names


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _check_written(op: OpOverload, rule: Sharding, schema: Schema, fitting: Sharding) -> None:
    """Raise if the operator's mutations contradict the sharding rule.

    The rule cannot reduce a dimension that a mutated argument lacks, because each rank would only
    write its part of the sum. If a result is a mutated argument, both must have the same operand,
    because they are the same tensor.
    """
    arguments = tensor_arguments(schema)
    written = {
        argument.name: operand
        for argument, operand in zip(arguments, fitting.arguments, strict=True)
        if argument.is_mutated
    }
    for name, operand in written.items():
        for dimension in rule.reduce:
            if dimension not in operand.names:
                raise ShardingRuleError(
                    f"{op.name()}: the sharding rule {rule.shown} reduces "
                    f"{short_repr(dimension)}, but the written argument {name!r} lacks this "
                    "dimension, so each rank would write only a part of the sum. To gather the "
                    f"dimension, remove it from reduce=. Got {schema}."
                )
    for index, name in _returned(op):
        operands = (fitting.results[index], written[name])
        if operands[0] != operands[1]:
            raise ShardingRuleError(
                f"{op.name()}: result {index} is the argument {name!r}, so both must have the same "
                f"operand. The sharding rule {rule.shown} has {short_repr(str(operands[0]))} and "
                f"{short_repr(str(operands[1]))}. Got {schema}."
            )


def _returned(op: OpOverload) -> Iterator[tuple[int, str]]:
    """Yield (result index, argument name) for each result that is a mutated argument."""
    results = [r for r in op._schema.returns if "Tensor" in str(r.real_type)]
    for index, result in enumerate(results):
        for argument in op._schema.arguments:
            mine: Any = result.alias_info
            theirs: Any = argument.alias_info
            is_both = mine is not None and theirs is not None and theirs.is_write
            if is_both and mine.before_set & theirs.before_set:
                yield index, argument.name


def _numbered(
    op: OpOverload, rule: Sharding, arguments: Sequence[Argument]
) -> tuple[tuple[int, ...], ...]:
    names = [argument.name for argument in arguments]

    def number(each: int | str) -> int:
        if each in names:
            return names.index(str(each))
        if isinstance(each, int) and 0 <= each < len(names):
            return each
        raise ShardingRuleError(
            f"{op.name()}: the sharding rule {rule.shown}: linear= names {short_repr(each)}. It "
            f"takes numbers of tensors, from 0 to {len(names) - 1}, or their names: "
            f"{', '.join(names)}."
        )

    groups = tuple(tuple(map(number, group)) for group in rule.linear)
    written = [index for index, argument in enumerate(arguments) if argument.is_mutated]
    for group in groups:
        if any(index not in group for index in written):
            raise ShardingRuleError(
                f"{op.name()}: the sharding rule {rule.shown}: linear= has "
                f"{', '.join(names[i] for i in group)} without the written arguments "
                f"{', '.join(names[i] for i in written)}. A partial sum in one implies a partial "
                "sum in the other, so put them into one tuple."
            )
    return groups
