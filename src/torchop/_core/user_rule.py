"""Rule: a kind of registration outside PyTorch's dispatcher, such as an inverse.

A `CompiledRule` is what one operator does for one subsystem of PyTorch, and is part of its call
plan. A `Rule` is a kind of registration for all operators: calls never read it, so an operator
without one pays nothing, and a registration makes no plan stale.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch.library

from torchop._compat import libraries, torch_ops
from torchop._compat.classes import OpOverload
from torchop._compat.settings import undone
from torchop._core.definition import Definition
from torchop._core.lock import registration_lock
from torchop._core.registry import OpLike, find_schema, op_name, own_definition, resolve
from torchop._errors import MissingRuleError, RuleNameError, nearest, short_repr, users_place
from torchop._schema.callables import Registered, accepts, check_signature, decorator_or_call
from torchop._schema.convention import FLAT
from torchop._schema.schema import Schema

Value = TypeVar("Value")

_rules: dict[str, Rule[Any]] = {}
# Whether a name is already used for something else; the class form adds its check.
reserved_names: list[Callable[[str], bool]] = []


class _Entry(NamedTuple):
    """The registration through one definition, for the operator that had the name at that time."""

    definition: Definition
    op: OpOverload
    value: Any


class Rule(Generic[Value]):
    """A kind of registration of your own: its name, what it accepts, and what is there without one.

    Make one object for each kind, at module level: `cost = torchop.Rule("cost")`. From then on,
    operators have it like a rule of torchop's: `op.register_cost(fn)`, `op.register("cost", fn)`,
    and a member `cost` in the class form. `cost.lookup(op)` returns what was registered. It
    disappears with the operator, or with the library that it was registered through.

    As it stands, a rule is a function with the operator's parameters. A subclass that says
    otherwise overrides `validate`; `missing` says what an operator without a registration has.

    Args:
        name: an identifier, by which operators and the class form know the rule.

    Raises:
        RuleNameError: a `ValueError`: not an identifier, or a name that means something else.

    Example:
        >>> import torch, torchop
        >>> class Cost(torchop.Rule):
        ...     def missing(self, op):
        ...         return lambda *args: 0
        >>> cost = Cost("cost")
        >>> @torchop.custom_op("docs::double", mutates_args=())
        ... def double(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> @double.register_cost
        ... def _(x):
        ...     return 8 * x.numel()
        >>> cost.lookup(double)(torch.ones(3)), cost.lookup("aten::sin")(torch.ones(3))
        (24, 0)

    The idea is that of the `register_*` functions of `torch.library`, for what it has none for.
    """

    def __init__(self, name: str) -> None:
        _check_name(name, shipped=type(self).__module__.startswith("torchop._rules."))
        self.name = name
        self._place = users_place()
        # By the operator's name, the last registration last. The tuples are replaced, not changed.
        self._entries: dict[str, tuple[_Entry, ...]] = {}
        with registration_lock:
            existing = _rules.get(name)
            if existing is not None:
                if existing._place.module != self._place.module:
                    raise RuleNameError(
                        f"there is a rule {name!r} already, made at {existing._place.file}:"
                        f"{existing._place.line}. Choose another name, such as "
                        f"'{self._place.module.rpartition('.')[2].strip('_')}_{name}'."
                    )
                self._entries = existing._entries  # its module is loaded again
            _rules[name] = self

    def __repr__(self) -> str:
        return f"<torchop.Rule {self.name}>"

    # ----------------------------------------------------------------------------------------------
    # What a subclass may say otherwise

    def validate(self, op: OpOverload, value: Any) -> Value:
        """Checks what is registered, and returns what is to be kept of it.

        Args:
            op: the operator, an `OpOverload`.
            value: what was passed to `register`.

        An override may take more, by keyword and with defaults: the options of `register`.

        Returns:
            What `lookup` will return.

        Raises:
            RuleSignatureError: a `TypeError`: `value` does not take the operator's arguments. An
                override raises `TypeError` or `ValueError`, and nothing is registered then.
        """
        check_arguments(f"{op._name}: the rule {self.name!r}", op, value)
        return typing.cast(Value, value)

    def missing(self, op: OpOverload) -> Value:
        """Returns what `lookup` returns for an operator without a registration, or raises.

        Args:
            op: the operator, an `OpOverload`.

        Raises:
            MissingRuleError: as long as a subclass does not override this.
        """
        raise MissingRuleError(
            f"{op._name}: no {self.name.replace('_', ' ')} is registered. Register one: "
            f"op.register({self.name!r}, ...), or for an operator without a handle "
            f"torchop.get_rule({self.name!r}).register({op._name!r}, ...)."
        )

    def attach(self, op: OpOverload) -> None:
        """Called when an operator gets its first registration: the place to tell other tools."""

    def replaced(self, op: OpOverload) -> None:
        """Called when another value is registered in place of one: drops what was made of that."""

    def detach(self, op: OpOverload) -> None:
        """Called when its last registration, or the operator, disappears: undoes `attach`."""

    def cache_parts(self, value: Value) -> Iterable[object]:
        """Returns what compilers bake into a graph of a registered value, for `cache_key_tag`.

        Args:
            value: what `validate` returned.

        Returns:
            Functions, and values with a lasting `repr`; as it stands, none.
        """
        return ()

    # ----------------------------------------------------------------------------------------------
    # Registering, and asking

    def register(
        self,
        op: OpLike,
        value: Registered | None = None,
        /,
        *,
        lib: torch.library.Library | None = None,
        **options: Any,
    ) -> Registered:
        """Registers a value of this kind, in place of the one before; a decorator without one.

        Args:
            op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
                packet with one overload; yours or anybody's.
            value: what `validate` accepts; usually a function.
            lib: the library whose lifetime the registration shares; by default it stays as long as
                the operator.
            options: keyword arguments of `validate`, in a subclass that takes more than `value`.

        Returns:
            `value`.

        Raises:
            OperatorNotFoundError: nobody defined the operator.
            TypeError, ValueError: what `validate` has to say.
        """
        definition = resolve(op, f"the rule {self.name!r}", lib)
        return decorator_or_call(lambda given: self._add(definition, given, options), value)

    def lookup(self, op: OpLike) -> Value:
        """Returns what was registered for an operator.

        Args:
            op: the operator, named in any of the ways of `register`.

        Returns:
            What was registered last, or what `missing` returns.

        Raises:
            MissingRuleError: nothing is registered, and the rule does not say what that means.
            OperatorGoneError: the handle's operator was replaced or closed.
            OperatorNotFoundError: nobody defined the operator.
        """
        overload = overload_of(op, self.name)
        entry = self._entry(overload)
        if entry is None:
            return self.missing(overload)
        value: Value = entry.value
        return value

    def has(self, op: OpLike) -> bool:
        """Whether something is registered for an operator.

        Args:
            op: the operator, named in any of the ways of `register`.

        Raises:
            OperatorGoneError: the handle's operator was replaced or closed.
            OperatorNotFoundError: nobody defined the operator.
        """
        return self._entry(overload_of(op, self.name)) is not None

    def _entry(self, op: OpOverload) -> _Entry | None:
        # What was registered for an operator that had this name before is not for this one.
        entries = self._entries.get(op._name, ())
        last = None
        for entry in entries:  # a plain loop, because compilers trace it in torchop.inverse
            if entry.op is op:
                last = entry
        return last

    def _add(self, definition: Definition, value: Any, options: Mapping[str, Any]) -> None:
        with registration_lock:
            op = definition.overload
            entry = _Entry(definition, op, self.validate(op, value, **options))
            before = self._entries.get(op._name, ())
            for ended in {id(e.op): e.op for e in before if e.op is not op}.values():
                self.detach(ended)
            current = tuple(e for e in before if e.op is op)
            others = tuple(e for e in current if e.definition is not definition)
            self._entries[op._name] = (*others, entry)
            if not current:
                undone(lambda: self.attach(op), lambda: self._entries.pop(op._name, None))
            else:
                self.replaced(op)
            if len(others) == len(current):  # the first one of this definition
                remove = functools.partial(_remove, self.name, op, definition)
                libraries.on_close(definition.library, remove)


def _remove(name: str, op: OpOverload, definition: Definition) -> None:
    with registration_lock:
        rule = _rules[name]  # by name: its module may have been loaded again
        before = rule._entries.get(op._name, ())
        after = tuple(e for e in before if e.op is not op or e.definition is not definition)
        if len(after) == len(before):
            return
        if after:
            rule._entries[op._name] = after
        else:
            del rule._entries[op._name]
        if any(entry.op is op for entry in after):
            rule.replaced(op)
        else:
            rule.detach(op)


def get_rule(name: str) -> Rule[Any]:
    """Returns a rule by its name: one of torchop's, or one that any package made.

    The reference lists the rules that torchop ships, such as `"inverse"`. What the dispatcher knows
    of, such as a fake kernel, is no rule of this kind.

    Args:
        name: what `torchop.Rule` was called with.

    Returns:
        The rule, to register for operators that have no handle, or to look up.

    Raises:
        RuleNameError: a `ValueError`: there is no such rule; proposes the nearest name.

    Example:
        >>> import torch, torchop
        >>> torchop.get_rule("inverse").register("aten::exp", torch.log) is torch.log
        True
        >>> torchop.inverse("aten::exp")(torch.ones(2))
        tensor([0., 0.])
    """
    rule = _rules.get(name)
    if rule is None:
        raise RuleNameError(
            f"there is no rule {short_repr(name)}{nearest(name, _rules)}. The rules are "
            f"{', '.join(sorted(_rules))}; a package makes one by torchop.Rule(name) when it is "
            "imported."
        )
    return rule


def rule_names() -> tuple[str, ...]:
    """The names of all rules that were made so far."""
    return tuple(_rules)


def cache_parts(op: OpLike) -> list[object]:
    """What compilers bake into graphs of all that is registered for an operator."""
    rules = [rule for rule in list(_rules.values()) if rule.has(op)]
    return [part for rule in rules for part in rule.cache_parts(rule.lookup(op))]


def registered_rules(definition: Definition) -> list[str]:
    """The names of the rules that an operator has, for its `repr`."""
    return [
        name.replace("_", " ")
        for name, rule in list(_rules.items())
        if any(e.definition is definition for e in rule._entries.get(str(definition), ()))
    ]


def overload_of(op: OpLike, rule: str) -> OpOverload:
    """The overload that an operator has now, which must not have ended."""
    name = op_name(op, f"the rule {rule!r}")
    definition = own_definition(op, name)
    if definition is not None:
        definition.check_defined()
        return definition.overload
    find_schema(name)  # raises where there is none
    return torch_ops.lookup_overload(*name)


def _check_name(name: object, *, shipped: bool) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise RuleNameError(
            f"the name of a rule is an identifier such as 'cost', because it is also the name of "
            f"a member of classes; got {short_repr(name)}."
        )
    if name.startswith("_"):
        raise RuleNameError(
            f"the name of a rule does not start with an underscore, because the class form takes "
            f"such members for the author's own; got {short_repr(name)}."
        )
    if not shipped and any(is_reserved(name) for is_reserved in reserved_names):
        raise RuleNameError(
            f"{short_repr(name)} means something else in the class form of an operator, or on its "
            "handle; choose another name for the rule."
        )


# --------------------------------------------------------------------------------------------------
# Functions that get the arguments of a call, such as a vmap rule or a fake kernel


def call_signature(op: OpOverload) -> inspect.Signature:
    """The parameters with which an operator is called, and their defaults."""
    definition = own_definition(op, op_name(op, "call_signature"))
    if definition is not None and definition.structure is not None:
        return inspect.signature(definition.authors_function)
    return inspect.Signature(
        [
            inspect.Parameter(
                argument.name,
                inspect.Parameter.KEYWORD_ONLY
                if argument.keyword_only
                else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=argument.default if argument.has_default else inspect.Parameter.empty,
            )
            for argument in Schema(op._schema).arguments
        ]
    )


def check_arguments(
    what: str,
    op: OpOverload,
    function: Any,
    *,
    leading: tuple[str, ...] = (),
    without_first: bool = False,
) -> None:
    """Refuses a function that does not take `leading` and the operator's arguments."""
    positional, keywords = _names(op)
    check_signature(what, function, (*leading, *positional[int(without_first) :]), keywords)


def observer(
    what: str,
    op: OpOverload,
    function: Any,
    *,
    leading: tuple[str, ...] = (),
    result: str | None = None,
) -> Callable[..., Any]:
    """Makes a function of the operator's arguments one that PyTorch can ask about a call.

    PyTorch has the arguments of the schema, without those that equal their default. `function` gets
    `leading` and all of them; of an operator with structured arguments, it gets the structures, in
    which what PyTorch passes for a tensor, such as its shape, stands in the place of the tensor.
    If `result` is the name by which PyTorch passes the result, too, `function` gets it if it can.
    """
    positional, keywords = _names(op)
    takes_result = (
        result is not None
        and callable(function)
        and accepts(function, (*leading, *positional), (*keywords, result))
    )
    if not takes_result:
        check_signature(what, function, (*leading, *positional), keywords)
    definition = own_definition(op, op_name(op, what))
    convention = FLAT if definition is None else definition.convention
    schema = Schema(op._schema) if definition is None else definition.schema

    def ask(*args: Any, **kwargs: Any) -> Any:
        passed = {} if result is None else {result: convention.result(kwargs.pop(result))}
        filled, keywords = schema.fill_defaults(args[len(leading) :], kwargs)
        filled, keywords = convention.arguments(filled, keywords)
        if takes_result:
            keywords |= passed
        return function(*args[: len(leading)], *filled, **keywords)

    return ask


def _names(op: OpOverload) -> tuple[list[str], list[str]]:
    """The names of the arguments that can be passed by position, and of the others."""
    parameters = call_signature(op).parameters.values()
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    return [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY], keywords
