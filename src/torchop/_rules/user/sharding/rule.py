"""Sharding rules: how DTensor runs an operator on the shards of several devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.library

from torchop._compat import dtensor, libraries
from torchop._compat.classes import OpOverload
from torchop._compat.dtensor import Call, Row
from torchop._core.definition import NOTHING, Definition
from torchop._core.registry import OpLike, op_name, own_definition
from torchop._core.user_rule import Rule, observer, overload_of
from torchop._errors import (
    ArgumentError,
    MissingRuleError,
    ShardingError,
    ShardingRuleError,
    short_repr,
    short_text,
)
from torchop._rules.user.sharding import checks
from torchop._rules.user.sharding.notation import Sharding
from torchop._schema.callables import Registered
from torchop._schema.schema import Schema

if TYPE_CHECKING:
    from torchop._compat.dtensor_registry import Registration

Linear = Sequence["int | str | tuple[int | str, ...]"]
# The options of a rule that is a string.
_DEFAULTS: Mapping[str, Any] = {"whole": "", "reduce": None, "linear": ()}
# Makes the rule of a form, from the functional operator and the rule of that.
FormRule: TypeAlias = "Callable[[OpOverload, ShardingRule], ShardingRule]"


class ShardingRule:
    """A registered rule: the placements that it allows for a call.

    Attributes:
        unhashed: the names of arguments that are not in the key of a call.
        cached: what compilers bake into a graph.
    """

    unhashed: tuple[str, ...] = ()
    cached: object = "transposed"

    def rows(self, op: OpOverload, call: Call) -> list[Row]:
        """What is allowed on one dimension of a mesh, for the tensors of a call."""
        raise NotImplementedError  # each kind defines its own


class _Written(ShardingRule):
    """A rule that is the same for all calls."""

    def __init__(self, rule: Sharding, unhashed: tuple[str, ...]) -> None:
        self.rule = rule
        self.unhashed = unhashed
        self.cached = repr(rule)

    def rows(self, op: OpOverload, call: Call) -> list[Row]:
        return rows_of(op, self.rule, call)


class _Chosen(ShardingRule):
    """A function that chooses a rule for the arguments of a call."""

    def __init__(
        self, function: Callable[..., Any], ask: Callable[..., Any], unhashed: tuple[str, ...]
    ) -> None:
        self.cached = function
        self.ask = ask
        self.unhashed = unhashed

    def rows(self, op: OpOverload, call: Call) -> list[Row]:
        try:
            chosen = self.ask(*call.args, **call.kwargs)
        except Exception as error:
            raise ShardingError(
                f"{op.name()}: the function that chooses the sharding rule raised "
                f"{type(error).__name__}: {short_text(error)}. It gets the arguments of a call, "
                "with an object that has shape, stride, dtype and ndim instead of each tensor."
            ) from error
        try:
            return rows_of(op, _read(op, Schema(op._schema), chosen), call)
        except ShardingRuleError as error:
            raise ShardingError(
                f"{error} The function that chooses the rule returned it."
            ) from None


def rows_of(op: OpOverload, rule: Sharding, call: Call) -> list[Row]:
    """What a rule allows for the tensors of a call."""
    from torchop._rules.user.sharding.rows import Tensors, rows  # most programs have no DTensors

    arguments = op._schema.arguments
    holders = [index for index, a in enumerate(arguments) if dtensor.holds_tensors(a)]
    tensors = [Tensors(holders.index(i.argument), i.info.shape, i.is_written) for i in call.inputs]
    return rows(op.name(), rule, tensors, [result.shape for result in call.results])


class _ShardingRule(Rule[ShardingRule]):
    """A string in the notation, a preset, a rule from `torchop.sharding`, or a function."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._registrations: dict[OpOverload, Registration] = {}
        self._unsupported: Exception | None = None
        # The forms of functional operators, which have a rule as long as these have one.
        self._forms: dict[OpOverload, tuple[OpOverload, FormRule]] = {}

    def follow(self, form: Definition, functional: Definition, form_rule: FormRule) -> None:
        """Derives the rule of a form, if it has none of its own, from that of the operator."""
        op = form.overload
        self._forms[op] = functional.overload, form_rule
        libraries.on_close(form.library, functools.partial(self._forget, op))
        self._refresh(op)

    def _forget(self, form: OpOverload) -> None:
        self._forms.pop(form, None)
        self._disconnect(form)

    def functional(self, op: OpOverload) -> OpOverload:
        """The functional operator whose rule a form follows; otherwise the operator itself."""
        return self._forms[op][0] if op in self._forms else op

    def validate(
        self,
        op: OpOverload,
        value: Any,
        *,
        whole: str = "",
        reduce: Mapping[str, str] | None = None,
        linear: Linear = (),
        unhashed: Sequence[str] = (),
    ) -> ShardingRule:
        if isinstance(value, ShardingRule):  # of a companion
            return value
        given = {"whole": whole, "reduce": reduce, "linear": linear}
        options = {name: each for name, each in given.items() if each != _DEFAULTS[name]}
        schema = Schema(op._schema)
        checks.check_schema(op, schema)
        names = checks.check_unhashed(op, unhashed, schema)
        if isinstance(value, (str, Sharding)):
            return _Written(_read(op, schema, value, options), names)
        if not callable(value):
            raise ShardingRuleError(
                f"{op.name()}: a sharding rule is a text such as {checks.example(schema)!r}, one "
                f"of {', '.join(map(repr, checks.PRESETS))}, torchop.sharding(...), or a function "
                f"of the operator's arguments that returns one of these; got {short_repr(value)}."
            )
        if options:
            raise ShardingRuleError(
                f"{op.name()}: whole=, reduce= and linear= are options of a rule that is a string. "
                "A function that chooses the rule returns torchop.sharding(text, whole=..., "
                "reduce=..., linear=...)."
            )
        return _Chosen(value, observer(f"{op.name()}: a sharding rule", op, value), names)

    def missing(self, op: OpOverload) -> ShardingRule:
        rule = self._derived(op)
        if rule is None:
            raise _missing(op)
        return rule

    def has(self, op: OpLike) -> bool:
        return super().has(op) or self._derived(overload_of(op, self.name)) is not None

    def _derived(self, op: OpOverload) -> ShardingRule | None:
        """The rule of a form, from that of the functional operator, if this has one."""
        if op not in self._forms:
            return None
        functional, form_rule = self._forms[op]
        entry = self._entry(functional)
        return None if entry is None else form_rule(functional, entry.value)

    def attach(self, op: OpOverload) -> None:
        self._refresh(op)

    def replaced(self, op: OpOverload) -> None:
        self._refresh(op)

    def detach(self, op: OpOverload) -> None:
        self._disconnect(op)
        if op in self._forms:  # which follows the functional operator again
            self._refresh(op)
        self._refresh_forms(op)

    def _refresh(self, op: OpOverload) -> None:
        """Tells DTensor the current rule of an operator, and those of its forms."""
        self._disconnect(op)
        if dtensor.is_imported() and (self._entry(op) or self._derived(op)):
            self._connect(op)
        self._refresh_forms(op)

    def _refresh_forms(self, functional: OpOverload) -> None:
        for form, (followed, _) in list(self._forms.items()):
            if followed is functional and self._entry(form) is None:
                self._refresh(form)

    def _disconnect(self, op: OpOverload) -> None:
        registration = self._registrations.pop(op, None)
        if registration is not None:
            from torchop._compat import dtensor_calls  # most programs have no DTensors

            dtensor_calls.release(op)
            registration.undo()

    def cache_parts(self, value: ShardingRule) -> Iterable[object]:
        return (value.cached,)

    def connect_all(self) -> None:
        """Tells DTensor, which has just been imported, all rules."""
        from torchop._compat import dtensor_calls, dtensor_strategies  # most have no DTensors

        try:
            dtensor_calls.explain_missing(_explained)
            dtensor_strategies.remember_results()
        except (AttributeError, ImportError) as error:
            # The import of DTensor must not fail, which may be on behalf of a compiler.
            self._unsupported = error
            return
        for entries in list(self._entries.values()):
            for op in dict.fromkeys(entry.op for entry in entries):
                self._refresh(op)

    def _connect(self, op: OpOverload) -> None:
        if self._unsupported is not None:
            raise ShardingError(
                f"{op.name()}: torchop does not support the DTensor of torch {torch.__version__}, "
                f"so the sharding rule cannot be registered: {self._unsupported}."
            )
        from torchop._compat import dtensor_calls  # most programs have no DTensors
        from torchop._compat.dtensor_registry import Registration  # for the same reason

        unhashed = self.lookup(op).unhashed
        registration = Registration(op, lambda call: self.lookup(op).rows(op, call), unhashed)
        if registration.may_be_stale or dtensor_calls.needs_python(op):
            dtensor_calls.take_over(op, registration)
        self._registrations[op] = registration

    def registration(self, op: OpOverload) -> Registration | None:
        """What DTensor knows of an operator, if it has a rule and DTensor is imported."""
        return self._registrations.get(op)


def _read(
    op: OpOverload, schema: Schema, value: Any, options: Mapping[str, Any] = NOTHING
) -> Sharding:
    """The rule of a string, checked against the schema."""
    if not isinstance(value, (str, Sharding)):
        raise ShardingRuleError(
            f"{op.name()}: a sharding rule is a text such as {checks.example(schema)!r}, or "
            f"torchop.sharding(...); got {short_repr(value)}."
        )
    if options and (isinstance(value, Sharding) or value in checks.PRESETS):
        raise ShardingRuleError(
            f"{op.name()}: whole=, reduce= and linear= are options of a rule that is a string. "
            f"{short_repr(value)} takes no options."
        )
    if isinstance(value, str) and value in checks.PRESETS:
        return checks.fitted(op, checks.preset(value, schema), schema)
    if isinstance(value, str):
        try:
            value = Sharding(value, **options)
        except ShardingRuleError as error:
            raise ShardingRuleError(
                f"{op.name()}: {error} A rule that fits is {checks.example(schema)!r}, or one of "
                f"{', '.join(map(repr, checks.PRESETS))}. Got {schema}."
            ) from None
    return checks.fitted(op, value, schema)


SHARDING = _ShardingRule("sharding")


def _missing(op: OpOverload) -> MissingRuleError:
    functional = SHARDING.functional(op)
    schema = Schema(functional._schema)
    name = functional.name()
    return MissingRuleError(
        f"{op.name()} has no sharding rule, so DTensor cannot tell how it runs on shards. Write "
        f"torchop.register_sharding({name!r}, 'pointwise') if an element of the results needs the "
        "same elements of the tensors, 'replicate' if it needs all, or the dimensions by name, for "
        f"{schema}: {checks.example(schema)!r}. Or call it on local tensors, as in local_map."
    )


def _explained(op: OpOverload) -> Exception | None:
    """The error for an operator of ours without a rule; None for operators of others."""
    definition = own_definition(op, op_name(op, "sharding"))
    return None if definition is None else _missing(op)


def mixed_error(name: object, error: RuntimeError) -> ArgumentError | None:
    """The error for a call with DTensors and plain tensors, if DTensor raised `error` for that.

    DTensor raises it before it asks for a strategy, so only the handle can explain it.
    """
    if not dtensor.is_mixed(error):
        return None
    return ArgumentError(
        f"{name}: some tensors of the call are DTensors, and others are plain. Make all of them "
        "DTensors, such as by torch.distributed.tensor.distribute_tensor(tensor, mesh, "
        "[Replicate()]); or call it on local tensors: inside of "
        "torch.distributed.tensor.experimental.local_map, or on tensor.to_local()."
    )


def register_sharding(
    op: OpLike,
    rule: Registered | None = None,
    /,
    *,
    whole: str = "",
    reduce: Mapping[str, str] | None = None,
    linear: Linear = (),
    unhashed: Sequence[str] = (),
    lib: torch.library.Library | None = None,
) -> Registered:
    """Registers how an operator runs on the shards of DTensors.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload; also of another package.
        rule: a string in the notation of `torchop.sharding`, such as `"b k, k n -> b n"`; or
            `"pointwise"`, `"batch"` (the first dimension of every tensor is the batch) or
            `"replicate"`; or a rule from `torchop.sharding`; or a function of the operator's
            arguments that returns one of these. For each tensor, the function gets an object with
            the `shape`, `stride`, `dtype` and `ndim` of the whole tensor. Without a rule, a
            decorator is returned.
        whole: as for `torchop.sharding`.
        reduce: as for `torchop.sharding`.
        linear: as for `torchop.sharding`.
        unhashed: names of arguments to leave out of the key of DTensor's cache. Use it for values
            that change in every call, such as a learning rate, if neither the rule nor the shape of
            a result depends on them.
        lib: the library whose lifetime the registration shares; by default it stays as long as
            the operator.

    Returns:
        `rule`.

    Raises:
        ShardingRuleError: a `ValueError`: the rule does not fit the schema.
        RuleSignatureError: a `TypeError`: the function does not take the operator's arguments.
        OperatorNotFoundError: nobody defined the operator.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::row_softmax", mutates_args=())
        ... def row_softmax(x: torch.Tensor) -> torch.Tensor:
        ...     return x.softmax(-1)
        >>> torchop.register_sharding(row_softmax, "... d -> ... d", whole="d")
        '... d -> ... d'

    The idea is the `register_sharding` of `torch.distributed.tensor.experimental`, with named
    dimensions instead of placements.
    """
    return SHARDING.register(
        op, rule, lib=lib, whole=whole, reduce=reduce, linear=linear, unhashed=unhashed
    )


dtensor.when_imported(SHARDING.connect_all)
