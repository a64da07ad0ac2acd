"""`register_sharding`, the rule that stores sharding rules, and their registration with DTensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.library

from torchop._compat import dtensor, dtensor_registry, dtensor_strategies
from torchop._compat.classes import CustomOpDef, OpOverloadPacket
from torchop._compat.dtensor_calls import Call, Row, holds_tensors
from torchop._compat.dtensor_registry import Registration
from torchop._core.user_rule import Rule
from torchop._errors import MissingRuleError, ShardingError, ShardingRuleError
from torchop._rules.user.sharding import checks, like
from torchop._rules.user.sharding.derived import Rows, ShardingRule, rule_of_derived
from torchop._rules.user.sharding.notation import Sharding
from torchop._schema.callables import Lambda, Registered
from torchop.extend import Operator, OpLike, OpOverload, Schema, observer, short_repr, short_text

Linear = Sequence["int | str | tuple[int | str, ...]"]
# The defaults of the options of `register_sharding`
_DEFAULTS: Mapping[str, Any] = {"whole": "", "reduce": None, "linear": ()}


def _chosen(choose: Callable[..., Any]) -> Rows:
    """Return a function that calls `choose` to get a sharding rule, and returns the rule's rows.

    A row lists the placements of all tensors of a call on one dimension of the device mesh.
    """

    def rows(op: OpOverload, call: Call) -> list[Row]:
        try:
            chosen = choose(*call.args, **call.kwargs)
        except Exception as error:
            raise ShardingError(
                f"{op.name()}: the function that chooses the sharding rule raised "
                f"{type(error).__name__}: {short_text(error)}. It receives the arguments of a "
                "call, with objects that have shape, stride, dtype and ndim in place of tensors."
            ) from error
        try:
            return rows_of(_read(op, Schema(op._schema), chosen, {}), op, call)
        except ShardingRuleError as error:
            raise ShardingError(
                f"{error} The function that chooses the rule returned it."
            ) from None

    return rows


def rows_of(rule: Sharding, op: OpOverload, call: Call) -> list[Row]:
    """Return the rows, i.e. the ways to shard a call, that a sharding rule allows.

    If the call has more results than the schema declares, the additional results are residuals
    (kernel outputs that only the backward pass uses).
    """
    from torchop._rules.user.sharding.rows import CallTensor, rows  # rarely used

    arguments, returns = op._schema.arguments, op._schema.returns
    count = len(call.results) - len(returns)
    # If the operator returns a list, DTensor counts each tensor in the list as a result. In this
    # case, a higher count does not mean that the call returns residuals (outputs for the backward
    # pass).
    if count > 0 and all("List[" not in str(result.real_type) for result in returns):
        rule = _with_residuals(op, rule, count)
    holders = [index for index, a in enumerate(arguments) if holds_tensors(a)]
    tensors = [
        CallTensor(holders.index(i.argument), i.info.shape, i.is_written) for i in call.inputs
    ]
    return rows(op.name(), rule, tensors, [result.shape for result in call.results])


def _with_residuals(op: OpOverload, rule: Sharding, count: int) -> Sharding:
    saving = rule.saving(count)
    if saving is not None:
        return saving
    raise checks.residuals_error(op, count, rule.shown)


class _ShardingRule(Rule[ShardingRule]):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Maps each operator to its registration with DTensor, or to None until DTensor is imported.
        self._registrations: dict[OpOverload, Registration | None] = {}
        self._unsupported: Exception | None = None

    def validate(
        self, op: OpOverload, value: Any, *, unhashed: Sequence[str] = (), **given: Any
    ) -> ShardingRule:
        options = {name: each for name, each in given.items() if each != _DEFAULTS.get(name)}
        schema = Schema(op._schema)
        checks.check_schema(op, schema)
        names = checks.check_unhashed(op, unhashed, schema)
        if isinstance(value, (str, Sharding)):
            read = _read(op, schema, value, options)
            return ShardingRule(functools.partial(rows_of, read), repr(read), names)
        if isinstance(value, (OpOverload, OpOverloadPacket, CustomOpDef)):
            rule = like.rule(op, schema, value, names, options)
            self._check_acyclic(op, rule)
            return rule
        if not callable(value):
            raise ShardingRuleError(
                f"{op.name()}: a sharding rule must be a string such as 'b k, k n -> b n', one of "
                f"{', '.join(map(repr, checks.PRESETS))}, torchop.sharding(...), an ATen operator "
                "with the same signature, or a function of the operator's arguments that returns "
                f"a rule of the first three kinds; got {short_repr(value)}."
            )
        if options:
            raise ShardingRuleError(
                f"{op.name()}: whole=, reduce= and linear= are options of a rule that is a string. "
                "A function that chooses the rule returns torchop.sharding(text, whole=..., "
                "reduce=..., linear=...)."
            )
        choose = observer(f"{op.name()}: a sharding rule", op, value)
        return ShardingRule(_chosen(choose), value, names)

    def _check_acyclic(self, op: OpOverload, rule: ShardingRule) -> None:
        """Raise if an operator would reuse its own sharding rule, directly or indirectly."""
        aten = rule.like
        while aten is not None and aten is not op:
            aten = self.lookup(aten).like if self.has(aten) else None
        if aten is op:
            raise ShardingRuleError(
                f"{op.name()}: the sharding rule {rule.cached} is sharded like {op.name()} itself. "
                "Without a registration, DTensor uses the built-in rule of an ATen operator."
            )

    def missing(self, op: OpOverload) -> ShardingRule:
        raise self.missing_error(op)

    def of_derived(
        self, op: OpOverload, kind: str, origin: OpOverload, value: ShardingRule
    ) -> ShardingRule:
        rule = rule_of_derived(op, kind, origin, value)
        return super().of_derived(op, kind, origin, value) if rule is None else rule

    def attach(self, op: OpOverload) -> None:
        self._registrations[op] = self._connected(op) if dtensor.is_imported() else None

    def replaced(self, op: OpOverload) -> None:
        self.detach(op)
        self.attach(op)

    def detach(self, op: OpOverload) -> None:
        registration = self._registrations.pop(op, None)
        if registration is not None:
            dtensor_registry.release(op)
            registration.undo()

    def cache_parts(self, value: ShardingRule) -> Iterable[object]:
        return (value.cached,)

    def connect_all(self) -> None:
        """Register all sharding rules with DTensor, once DTensor is imported."""
        try:
            dtensor_registry.explain_missing(_explained)
            dtensor_strategies.remember_results()
        except (AttributeError, ImportError) as error:
            # Do not raise here, because this may run when a compiler imports DTensor in a program
            # that does not use it. Instead, the next registration of a sharding rule raises the
            # error.
            self._unsupported = error
            return
        for op in list(self._registrations):
            self.replaced(op)

    def _connected(self, op: OpOverload) -> Registration:
        if self._unsupported is not None:
            raise ShardingError(
                f"{op.name()}: torchop does not support the DTensor of torch {torch.__version__}, "
                f"so the sharding rule cannot be registered: {self._unsupported}."
            )
        rule = self.lookup(op)
        registration = Registration(
            op, lambda call: self.lookup(op).rows(op, call), rule.unhashed, rule.like
        )
        if registration.may_be_stale or dtensor_registry.needs_python(op):
            dtensor_registry.take_over(op, registration)
        return registration

    def registration(self, op: OpOverload) -> Registration | None:
        return self._registrations.get(op)

    def missing_error(self, op: OpOverload) -> MissingRuleError:
        origin, kind = op, ""
        # Find the original operator, which is not derived from another one. This may take several
        # steps, because a helper operator may itself have helper operators.
        while (derived := self.origin(origin)) is not None:
            origin, kind = derived
        called = origin if kind in ("training", "backward") else op  # the operator that users call
        schema, name = Schema(origin._schema), origin.name()
        return MissingRuleError(
            f"{called.name()} has no sharding rule, so DTensor cannot run it on shards. "
            f"Write torchop.register_sharding({name!r}, 'pointwise') if an element of a result "
            "needs the same elements of the tensors, 'replicate' if it needs all, or one that "
            f"names dimensions, such as 'b k, k n -> b n'. Got {schema}. "
            "Or call it on local tensors, in local_map."
        )


def _read(op: OpOverload, schema: Schema, value: Any, options: Mapping[str, Any]) -> Sharding:
    if not isinstance(value, (str, Sharding)):
        raise ShardingRuleError(
            f"{op.name()}: a sharding rule must be a string such as 'b k, k n -> b n', or "
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
            # A string without an arrow may be a misspelled preset such as 'pointwise', so list the
            # presets.
            presets = f"{', '.join(map(repr, checks.PRESETS))} are rules too. "
            raise ShardingRuleError(
                f"{op.name()}: {error} {'' if '->' in value else presets}{checks.IN_DOUBT} "
                f"Got {schema}."
            ) from None
    return checks.fitted(op, value, schema)


SHARDING = _ShardingRule("sharding")


def _explained(op: OpOverload) -> Exception | None:
    """Return the error that DTensor should raise for an operator without a sharding rule.

    If torchop did not define the operator, return None, and DTensor raises its own error.
    """
    is_ours = Operator(op, "sharding").handle is not None
    return SHARDING.missing_error(op) if is_ours else None


def register_sharding(
    op: OpLike,
    rule: Registered | Lambda | None = None,
    /,
    *,
    whole: str = "",
    reduce: Mapping[str, str] | None = None,
    linear: Linear = (),
    unhashed: Sequence[str] = (),
    lib: torch.library.Library | None = None,
) -> Registered:
    """Register how an operator runs on the shards of DTensors.

    Args:
        op: the operator, as a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload. Another package may have defined it.
        rule: one of the following. Omit it to use `register_sharding` as a decorator of a function
            that chooses the rule.

            - A string in the notation of `torchop.sharding`, such as `"b k, k n -> b n"`.
            - `"pointwise"`; `"batch"` if the first dimension of every tensor is the batch, so that
              only this dimension may be sharded; or `"replicate"` if no dimension may be sharded.
            - A rule from `torchop.sharding`.
            - A function that takes the operator's arguments and returns one of the rules above. In
              place of each tensor, it receives an object with the `shape`, `stride`, `dtype` and
              `ndim` of the global tensor.
            - An ATen operator with the same signature, such as `torch.ops.aten.topk.default`, to
              use the DTensor rule of that operator.
        whole: see `torchop.sharding`.
        reduce: see `torchop.sharding`.
        linear: see `torchop.sharding`.
        unhashed: names of arguments that DTensor's cache should ignore. Use this for values that
            change in every call, such as a learning rate, because each new value would be a cache
            miss. Neither the rule nor the shape of a result may depend on these arguments.
        lib: the library that owns the registration: closing it removes the registration. By
            default, the registration lasts as long as the operator.

    Returns:
        `rule`, or a decorator if `rule` is omitted.

    Raises:
        ShardingRuleError: the rule does not fit the schema. This error is a `ValueError`.
        RuleSignatureError: the function does not accept the operator's arguments. This error is a
            `TypeError`.
        OperatorNotFoundError: the operator is not defined.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::row_softmax", mutates_args=())
        ... def row_softmax(x: torch.Tensor) -> torch.Tensor:
        ...     return x.softmax(-1)
        >>> torchop.register_sharding(row_softmax, "... d -> ... d", whole="d")
        '... d -> ... d'

    Based on `torch.distributed.tensor.experimental.register_sharding`, with named dimensions
    instead of placements.
    """
    return SHARDING.register(
        op, rule, lib=lib, whole=whole, reduce=reduce, linear=linear, unhashed=unhashed
    )


dtensor.when_imported(SHARDING.connect_all)
