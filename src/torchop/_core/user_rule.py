"""The base class for new kinds of registrations, such as inverses or cost formulas.

A `Rule` stores the values that are registered for all operators. Calls do not use these values, so
registering one does not invalidate any call plan. A `CompiledRule`, in contrast, belongs to one
operator and is compiled into the operator's call plan.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch.library

from torchop._compat import compilers, libraries, logs
from torchop._compat.classes import OpOverload
from torchop._core.define import user_code
from torchop._core.definition import Definition
from torchop._core.lock import registration_lock
from torchop._core.observers import check_arguments
from torchop._core.registry import OpLike, overload_of, resolve
from torchop._errors import MissingRuleError, nearest, short_repr, users_place
from torchop._schema import naming
from torchop._schema.callables import Lambda, Registered, decorator_or_call

Value = TypeVar("Value")

_rules: dict[str, Rule[Any]] = {}
# Functions that return whether a rule must not use a name, for example because classes decorated
# with `torchop.operator` may have a member of that name.
reserved_names: list[Callable[[str], bool]] = []


class _Entry(NamedTuple):
    definition: Definition
    op: OpOverload
    value: Any


_Change = Callable[[tuple[_Entry, ...]], tuple[_Entry, ...]]  # replaces an operator's entries


class Origin(NamedTuple):
    """The operator that a derived operator comes from, and how it was derived."""

    op: OpOverload
    kind: str


# The origins of derived operators.
_origins: dict[OpOverload, Origin] = {}


class Rule(Generic[Value]):
    """A new kind of registration for operators, such as a cost formula.

    Create one instance per kind, at module level: `cost = torchop.Rule("cost")`. Users can then
    register values with `op.register_cost(fn)`, with `op.register("cost", fn)`, or with a member
    `cost` of a class decorated with `torchop.operator`, and read them with `cost.lookup(op)`. A
    value is removed when the operator is deregistered, or when the library that was passed as `lib`
    is closed.

    By default, a value is a function that takes the operator's arguments. Override `validate` to
    accept other values, and `missing` to return a default for operators without a value.

    Args:
        name: an identifier, for `op.register(name, ...)` and for members of classes.

    Raises:
        ValueError: `name` is not an identifier, or it is already used.

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

    Generalizes the `register_*` functions of `torch.library` to other kinds of rules.
    """

    def __init__(self, name: str) -> None:
        shipped = type(self).__module__.startswith("torchop._rules.")
        naming.check_rule_name(name, [] if shipped else reserved_names)
        self.name = name
        self._place = users_place()
        # Compare the methods here rather than in `lookup`, because compilers trace `lookup`.
        self._derives_values = type(self).of_derived is not Rule.of_derived
        # Maps operator names to registered values, oldest first. The tuples are only ever replaced,
        # never modified, so lookups need no lock.
        self._entries: dict[str, tuple[_Entry, ...]] = {}
        with registration_lock:
            existing = _rules.get(name)
            if existing is not None:
                if existing._place.module != self._place.module:
                    raise ValueError(
                        f"the rule {name!r} exists already, created at {existing._place.file}:"
                        f"{existing._place.line}. Choose another name, such as "
                        f"'{self._place.module.rpartition('.')[2].strip('_')}_{name}'."
                    )
                # The module that creates the rule is being reloaded, so take over the values that
                # were registered with the previous rule object.
                self._entries = existing._entries
            _rules[name] = self

    def __repr__(self) -> str:
        return f"<torchop.Rule {self.name}>"

    # ----------------------------------------------------------------------------------------------
    # Methods that subclasses may override

    def validate(self, op: OpOverload, value: Any) -> Value:
        """Check a value before it is registered, and return the value to store.

        Args:
            op: the operator, an `OpOverload`.
            value: the value passed to `register`. If an override has additional keyword parameters
                with defaults, users can pass these to `register` as well.

        Returns:
            The value that `lookup` returns.

        Raises:
            RuleSignatureError: `value` does not take the operator's arguments. RuleSignatureError
                is a subclass of `TypeError`. An override may raise any `TypeError` or `ValueError`.
                If it does, nothing is registered.
        """
        check_arguments(f"{op._name}: the rule {self.name!r}", op, value)
        return typing.cast(Value, value)

    def missing(self, op: OpOverload) -> Value:
        """Return the default for an operator that has no registered value, or raise an error.

        Args:
            op: the operator, an `OpOverload`.

        Raises:
            MissingRuleError: always, unless a subclass overrides this.
        """
        raise MissingRuleError(
            f"{op._name}: no {self.name.replace('_', ' ')} is registered. Register one: "
            f"op.register({self.name!r}, ...), or for an operator without a handle "
            f"torchop.get_rule({self.name!r}).register({op._name!r}, ...)."
        )

    def of_derived(self, op: OpOverload, kind: str, origin: OpOverload, value: Value) -> Value:
        """Compute the value of a derived operator from the value of its origin.

        This method is only called if no value was registered for the derived operator itself. If an
        override returns a value, `attach`, `replaced` and `detach` are called for the derived
        operator too.

        Args:
            op: the derived operator, an `OpOverload`.
            kind: how the operator was derived. `"inplace"` and `"out"` are the in-place and out=
                forms from `CustomOp.derive_inplace`, `CustomOp.derive_out` or `out_op`. The other
                kinds are helper operators in compiled graphs. `CustomOp.derive_autograd` creates
                `"training"` (a forward that also returns the tensors that the backward pass needs)
                and `"backward"`. `register_autograd` creates `"backward_kernel"`. Operators that
                mutate their arguments have helpers of the kinds `"mutable"` and `"functional"`.
            origin: the operator that `op` was derived from, an `OpOverload`.
            value: the value registered for `origin`.

        Returns:
            The value, or NotImplemented (the default) if the derived operator has none.

        Example:
            >>> import torch, torchop
            >>> class Bytes(torchop.Rule):
            ...     def of_derived(self, op, kind, origin, value):
            ...         if kind == "out":  # the form takes one more argument
            ...             return lambda *args, out: value(*args)
            ...         return value if kind == "inplace" else NotImplemented
            >>> bytes_moved = Bytes("bytes_moved")
            >>> @torchop.custom_op("docs::thrice", mutates_args=())
            ... def thrice(x: torch.Tensor) -> torch.Tensor:
            ...     return x * 3
            >>> _ = thrice.register_bytes_moved(lambda x: 2 * x.nbytes)
            >>> bytes_moved.lookup(thrice.derive_out())(torch.ones(4), out=torch.empty(4))
            32
        """
        return typing.cast(Value, NotImplemented)

    def attach(self, op: OpOverload) -> None:
        """Called when an operator gets its first value, for example to add it to a registry."""

    def replaced(self, op: OpOverload) -> None:
        """Called when a value is replaced, for example to clear caches of the old value."""

    def detach(self, op: OpOverload) -> None:
        """Called when an operator's last value is removed, or when the operator is deregistered."""

    def cache_parts(self, value: Value) -> Iterable[object]:
        """Return the parts of a value that compilers bake into graphs, to include in cache keys.

        Args:
            value: the value that `validate` returned.

        Returns:
            Functions, and values with a stable `repr`. By default, there are none.
        """
        return ()

    # ----------------------------------------------------------------------------------------------
    # Registration and lookup

    @compilers.eager_only
    def register(
        self,
        op: OpLike,
        value: Registered | Lambda | None = None,
        /,
        *,
        lib: torch.library.Library | None = None,
        **options: Any,
    ) -> Registered:
        """Register a value for an operator, replacing any earlier value.

        Args:
            op: an operator of any package: a handle, `"ns::name"`, `"ns::name.overload"`, an
                `OpOverload`, or a packet with one overload.
            value: a value that `validate` accepts, usually a function. Omit it to use `register` as
                a decorator.
            lib: the library that owns the registration. Closing the library removes the
                registration. By default, the registration lasts as long as the operator.
            options: additional keyword arguments for `validate`.

        Returns:
            `value`.

        Raises:
            OperatorNotFoundError: the operator is not registered.
            TypeError, ValueError: `validate` rejects the value.
        """
        definition = resolve(op, f"the rule {self.name!r}", lib)
        return decorator_or_call(lambda given: self._add(definition, given, options), value)

    def lookup(self, op: OpLike) -> Value:
        """Return the value registered for an operator.

        Args:
            op: the operator, as in `register`.

        Returns:
            The latest registered value, or the result of `missing`.

        Raises:
            MissingRuleError: no value is registered, and the rule has no default.
            OperatorGoneError: the handle's operator was deregistered.
            OperatorNotFoundError: the operator is not registered.
        """
        overload = overload_of(op, f"the rule {self.name!r}")
        value: Value = self._find(overload)  # no cast, because compilers trace this
        return self.missing(overload) if value is NotImplemented else value

    def has(self, op: OpLike) -> bool:
        """Return whether an operator has a value for this rule, either registered or derived.

        A default returned by `missing` does not count as a value.

        Args:
            op: the operator, as in `register`.

        Raises:
            OperatorGoneError: the handle's operator was deregistered.
            OperatorNotFoundError: the operator is not registered.
        """
        return self._find(overload_of(op, f"the rule {self.name!r}")) is not NotImplemented

    @staticmethod
    def origin(op: OpOverload) -> tuple[OpOverload, str] | None:
        """Return (operator that `op` was derived from, kind), or None if `op` was not derived."""
        return _origins.get(op)

    def _find(self, op: OpOverload) -> Any:
        entry = self._entry(op)
        if entry is not None:
            return entry.value
        origin = _origins.get(op) if self._derives_values else None
        if origin is None:
            return NotImplemented
        value = self._find(origin.op)
        if value is NotImplemented:
            return value
        return self.of_derived(op, origin.kind, origin.op, value)

    def _entry(self, op: OpOverload) -> _Entry | None:
        # Skip values of an earlier operator of the same name that has since been redefined.
        entries = self._entries.get(op._name, ())
        last = None
        for entry in entries:  # a plain loop, because compilers trace it (torchop.inverse calls it)
            if entry.op is op:
                last = entry
        return last

    def _add(self, definition: Definition, value: Any, options: Mapping[str, Any]) -> None:
        op = definition.overload
        with definition.registered.registering(f"rule {self.name!r}"), user_code():
            entry = _Entry(definition, op, self.validate(op, value, **options))
            before = self._entries.get(op._name, ())
            for deregistered in {id(e.op): e.op for e in before if e.op is not op}.values():
                self.detach(deregistered)
            earlier = [e for e in before if e.op is op and e.definition is definition]
            attached: list[OpOverload] = []
            try:
                self._put(op, lambda entries: _adding(entries, entry), attached)
            except BaseException:
                with registration_lock:
                    others = (e for e in self._entries.get(op._name, ()) if e is not entry)
                    self._store(op._name, (*earlier, *others))
                for each in reversed(attached):
                    self.detach(each)
                raise
        if not earlier:
            remove = functools.partial(_remove, self.name, op, definition)
            libraries.after_close(definition.library, remove)
        logs.registration.debug("%s has the rule: %s", definition, self.name)

    def _family(self, op: OpOverload) -> list[OpOverload]:
        """Return `op`, and the derived operators whose value is computed from the value of `op`."""
        if not self._derives_values:
            return [op]
        derived = [d for d, o in _origins.items() if o.op is op and self._entry(d) is None]
        return [op, *(each for d in derived for each in self._family(d))]

    def _put(self, op: OpOverload, change: _Change, attached: list[OpOverload]) -> None:
        """Change an operator's values for this rule, and call `attach`, `replaced` or `detach`."""
        affected = self._family(op)
        had = [self._find(each) is not NotImplemented for each in affected]
        with registration_lock:
            self._store(op._name, change(self._entries.get(op._name, ())))
        for each, existed in zip(affected, had, strict=True):
            if self._find(each) is NotImplemented:
                if existed:
                    self.detach(each)
            elif existed:
                self.replaced(each)
            else:
                self.attach(each)
                attached.append(each)

    def _store(self, name: str, entries: tuple[_Entry, ...]) -> None:
        if entries:
            self._entries[name] = entries
        else:
            self._entries.pop(name, None)


def _adding(entries: tuple[_Entry, ...], entry: _Entry) -> tuple[_Entry, ...]:
    op, definition = entry.op, entry.definition
    return (*(e for e in entries if e.op is op and e.definition is not definition), entry)


def _remove(name: str, op: OpOverload, definition: Definition) -> None:
    rule = _rules[name]  # by name, because reloading its module replaces the rule

    def without(entries: tuple[_Entry, ...]) -> tuple[_Entry, ...]:
        return tuple(e for e in entries if e.op is not op or e.definition is not definition)

    before = rule._entries.get(op._name, ())
    if len(without(before)) < len(before):
        rule._put(op, without, [])  # if `detach` raises, the entries stay removed


def follow_origin(op: Definition, derived: Definition, kind: str) -> None:
    """Let a derived operator use the rule values of the operator it was derived from."""
    overload = derived.overload
    detaching: list[Callable[[], None]] = []

    def forget() -> None:
        following = _following(overload)
        _origins.pop(overload, None)  # before `detach`, which may raise
        for rule, each in following:
            rule.detach(each)

    libraries.after_close(derived.library, forget)
    with user_code():
        try:
            _origins[overload] = Origin(op.overload, kind)
            for rule, each in _following(overload):
                rule.attach(each)
                detaching.append(functools.partial(rule.detach, each))
        except BaseException:
            _origins.pop(overload, None)
            for detach in reversed(detaching):
                detach()
            raise


def _following(op: OpOverload) -> list[tuple[Rule[Any], OpOverload]]:
    """Return a (rule, operator) pair for each value that `op` inherits from its origin operator.

    The list includes the operators that in turn inherit the value from `op`.
    """
    return [
        (rule, each)
        for rule in list(_rules.values())
        if rule._entry(op) is None and rule._find(op) is not NotImplemented
        for each in rule._family(op)
        if rule._find(each) is not NotImplemented
    ]


def get_rule(name: str) -> Rule[Any]:
    """Return the rule with this name.

    The reference documentation lists the rules that torchop provides, such as `"inverse"`. Rules
    for subsystems of PyTorch, such as fake kernels, are not instances of `torchop.Rule`.

    Args:
        name: the name passed to `torchop.Rule`.

    Returns:
        The rule. Its methods `register` and `lookup` also work for operators without a handle.

    Raises:
        ValueError: there is no rule with this name. The message suggests the most similar name.

    Example:
        >>> import torch, torchop
        >>> torchop.get_rule("inverse").register("aten::exp", torch.log) is torch.log
        True
        >>> torchop.inverse("aten::exp")(torch.ones(2))
        tensor([0., 0.])
    """
    rule = _rules.get(name)
    if rule is None:
        raise ValueError(
            f"there is no rule {short_repr(name)}{nearest(name, _rules)}. The rules are "
            f"{', '.join(sorted(_rules))}. Import the package that creates the rule with "
            "torchop.Rule first."
        )
    return rule


def rule_names() -> tuple[str, ...]:
    return tuple(_rules)


def registered_rules(definition: Definition) -> list[str]:
    return [
        name.replace("_", " ")
        for name, rule in list(_rules.items())
        if any(e.definition is definition for e in rule._entries.get(str(definition), ()))
    ]
