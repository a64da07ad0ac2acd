"""Rule: a kind of registration outside PyTorch's dispatcher, such as an inverse.

A `CompiledRule` is what one operator does for one subsystem of PyTorch, and is part of its call
plan. A `Rule` is a kind of registration for all operators: calls never read it, so an operator
without one pays nothing, and a registration makes no plan stale.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch.library

from torchop._compat import libraries, logs
from torchop._compat.classes import OpOverload
from torchop._core.definition import Definition
from torchop._core.lock import registration_lock
from torchop._core.observers import check_arguments
from torchop._core.registry import OpLike, overload_of, resolve
from torchop._errors import MissingRuleError, nearest, short_repr, users_place
from torchop._schema import naming
from torchop._schema.callables import Lambda, Registered, decorator_or_call

Value = TypeVar("Value")

_rules: dict[str, Rule[Any]] = {}
# Whether a name is already used for something else; the class form adds its check.
reserved_names: list[Callable[[str], bool]] = []


class _Entry(NamedTuple):
    """The registration through one definition, for the operator that had the name at that time."""

    definition: Definition
    op: OpOverload
    value: Any


class Origin(NamedTuple):
    """The operator that torchop derived another one from, and what it made of it."""

    op: OpOverload
    kind: str


# The origin of each derived operator; the registration lock guards it.
_origins: dict[OpOverload, Origin] = {}


class Rule(Generic[Value]):
    """A kind of registration that you add: its name, what it accepts, and what it is by default.

    Make one object for each kind, at module level: `cost = torchop.Rule("cost")`. From then on,
    operators have it like a rule of torchop's: `op.register_cost(fn)`, `op.register("cost", fn)`,
    and a member `cost` in the class form. `cost.lookup(op)` returns what was registered. It
    disappears with the operator, or with the library that it was registered through.

    What is registered is a function with the operator's parameters, unless a subclass accepts
    something else by overriding `validate`. If `missing` is overridden, it returns what operators
    without a registration have.

    Args:
        name: an identifier, by which operators and the class form know the rule.

    Raises:
        ValueError: not an identifier, or a name that means something else.

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

    The idea is that of the `register_*` functions of `torch.library`, for any kind of rule.
    """

    def __init__(self, name: str) -> None:
        shipped = type(self).__module__.startswith("torchop._rules.")
        naming.check_rule_name(name, [] if shipped else reserved_names)
        self.name = name
        self._place = users_place()
        # Found out once, because compilers trace lookups, and most rules do not override it.
        self._knows_derived = type(self).of_derived is not Rule.of_derived
        # By the operator's name, the last registration last. The tuples are replaced, not changed.
        self._entries: dict[str, tuple[_Entry, ...]] = {}
        with registration_lock:
            existing = _rules.get(name)
            if existing is not None:
                if existing._place.module != self._place.module:
                    raise ValueError(
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
            value: what was passed to `register`. An override may take more by keyword, with
                defaults: the options of `register`.

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

    def of_derived(self, op: OpOverload, kind: str, origin: OpOverload, value: Value) -> Value:
        """Returns the value of a derived operator, made from that of the operator it comes from.

        The value counts as long as nothing is registered for the derived operator itself. `attach`,
        `replaced` and `detach` are called for derived operators too.

        Args:
            op: the derived operator, an `OpOverload`.
            kind: what it is: a form, `"inplace"` or `"out"`, of `CustomOp.derive_inplace`,
                `CustomOp.derive_out` or `out_op`; or a companion, which stands for the operator in
                compiled graphs: `"training"` (the operator, which also returns what its backward
                needs) or `"backward"` of `CustomOp.derive_autograd`, `"backward_kernel"` of
                `register_autograd`, and `"mutable"` or `"functional"` of an operator that mutates.
            origin: the operator that it was derived from, an `OpOverload`.
            value: what is registered for `origin`.

        Returns:
            The value, or NotImplemented if the derived operator has none, which is the default.

        Example:
            >>> import torch, torchop
            >>> class Bytes(torchop.Rule):
            ...     def of_derived(self, op, kind, origin, value):
            ...         if kind == "out":  # which takes one more argument
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
        """Called when an operator gets its first value: the place to tell other tools."""

    def replaced(self, op: OpOverload) -> None:
        """Called when another value takes the place of one: drops what was made of the old one."""

    def detach(self, op: OpOverload) -> None:
        """Called when its last value, or the operator, disappears: undoes `attach`."""

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
        value: Registered | Lambda | None = None,
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
            TypeError, ValueError: `validate` refuses the value.
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
            MissingRuleError: nothing is registered, and the rule has no default.
            OperatorGoneError: the handle's operator was replaced or closed.
            OperatorNotFoundError: nobody defined the operator.
        """
        overload = overload_of(op, f"the rule {self.name!r}")
        value: Value = self._find(overload)  # no cast, because compilers trace this
        return self.missing(overload) if value is NotImplemented else value

    def has(self, op: OpLike) -> bool:
        """Whether something is registered for an operator.

        Args:
            op: the operator, named in any of the ways of `register`.

        Raises:
            OperatorGoneError: the handle's operator was replaced or closed.
            OperatorNotFoundError: nobody defined the operator.
        """
        return self._find(overload_of(op, f"the rule {self.name!r}")) is not NotImplemented

    @staticmethod
    def origin(op: OpOverload) -> tuple[OpOverload, str] | None:
        """Returns what torchop derived an `OpOverload` from, and the kind; None if it is not."""
        return _origins.get(op)

    def _find(self, op: OpOverload) -> Any:
        """The value of an operator, its own or by its origin's; NotImplemented if it has none."""
        entry = self._entry(op)
        if entry is not None:
            return entry.value
        origin = _origins.get(op) if self._knows_derived else None
        if origin is None:
            return NotImplemented
        value = self._find(origin.op)
        if value is NotImplemented:
            return value
        return self.of_derived(op, origin.kind, origin.op, value)

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
            others = [e for e in current if e.definition is not definition]
            attached: list[OpOverload] = []
            try:
                self._put(op, (*others, entry), attached)
            except BaseException:
                self._store(op._name, current)
                for each in reversed(attached):
                    self.detach(each)
                raise
            if not any(e.op is op and e.definition is definition for e in before):
                remove = functools.partial(_remove, self.name, op, definition)
                libraries.on_close(definition.library, remove)
        logs.registration.debug("%s has the rule: %s", definition, self.name)

    def _family(self, op: OpOverload) -> list[OpOverload]:
        """An operator, and those derived from it whose values follow from its own."""
        if not self._knows_derived:
            return [op]
        derived = [d for d, o in _origins.items() if o.op is op and self._entry(d) is None]
        return [op, *(each for d in derived for each in self._family(d))]

    def _put(self, op: OpOverload, entries: tuple[_Entry, ...], attached: list[OpOverload]) -> None:
        """Changes the entries of an operator's name, and tells the subclass what that changes."""
        affected = self._family(op)
        had = [self._find(each) is not NotImplemented for each in affected]
        self._store(op._name, entries)
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


def _remove(name: str, op: OpOverload, definition: Definition) -> None:
    with registration_lock:
        rule = _rules[name]  # by name: its module may have been loaded again
        before = rule._entries.get(op._name, ())
        after = tuple(e for e in before if e.op is not op or e.definition is not definition)
        if len(after) < len(before):
            # Not undone where `detach` raises, or the operator could never end.
            rule._put(op, after, [])


def follow(op: Definition, derived: Definition, kind: str) -> None:
    """Lets the values of an operator count for one derived from it, until the derived one ends."""
    overload = derived.overload
    detaching: list[Callable[[], None]] = []

    def forget() -> None:
        with registration_lock:
            following = _following(overload)
            _origins.pop(overload, None)  # first, because `detach` may raise
            for rule, each in following:
                rule.detach(each)

    with registration_lock:
        libraries.on_close(derived.library, forget)
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
    """The rules by which a derived operator, and what is derived from it, follow its origin."""
    return [
        (rule, each)
        for rule in list(_rules.values())
        if rule._entry(op) is None and rule._find(op) is not NotImplemented  # few rules pass
        for each in rule._family(op)
        if rule._find(each) is not NotImplemented
    ]


def get_rule(name: str) -> Rule[Any]:
    """Returns a rule by its name: one of torchop's, or one that any package made.

    The reference lists the rules that torchop ships, such as `"inverse"`. What the dispatcher knows
    of, such as a fake kernel, is not a rule of this kind.

    Args:
        name: what `torchop.Rule` was called with.

    Returns:
        The rule, to register for operators that have no handle, or to look up.

    Raises:
        ValueError: there is no such rule; proposes the nearest name.

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
            f"{', '.join(sorted(_rules))}; a package makes one by torchop.Rule(name) when it is "
            "imported."
        )
    return rule


def rule_names() -> tuple[str, ...]:
    """The names of all rules that were made so far."""
    return tuple(_rules)


def registered_rules(definition: Definition) -> list[str]:
    """The names of the rules that an operator has, for its `repr`."""
    return [
        name.replace("_", " ")
        for name, rule in list(_rules.items())
        if any(e.definition is definition for e in rule._entries.get(str(definition), ()))
    ]
