"""An operator with its rules and its call plan.

A rule holds an operator's registrations for one subsystem of PyTorch, such as its kernels or its
backward formula. All rules are compiled into a call plan, which is the only thing that calls read.
A registration changes a rule and invalidates the plan, so that the next call compiles a new one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch.library

from torchop import _hooks
from torchop._compat import libraries, logs, torch_ops
from torchop._compat.classes import OpOverload
from torchop._core import checking
from torchop._core.declaration import Declaration
from torchop._core.lock import (
    compute_then_publish,
    registration_lock,
    run_waiting_hooks,
    then_run_hooks,
)
from torchop._core.registered import Registrations
from torchop._errors import OperatorGoneError
from torchop._schema.convention import Convention
from torchop._schema.schema import Schema

Compiled = TypeVar("Compiled")

# The initial value of mappings in rules. It is read-only, because a registration must replace a
# mapping instead of modifying it: existing call plans (compiled rules) still refer to the old
# mapping.
NOTHING: Mapping[Any, Any] = MappingProxyType({})


class CompiledRule(Generic[Compiled]):
    """One operator's registrations for one subsystem of PyTorch, such as its kernels.

    The subclasses are in `_rules`.
    """

    __slots__ = ("definition",)

    def __init__(self, definition: Definition) -> None:
        self.definition = definition

    def update(self, install: Callable[[], None] | None = None, /, **state: Any) -> None:
        """Set attributes of the rule, and call `install` to add any missing dispatcher kernels.

        If `install` raises, restore the attributes and remove the kernels that it registered.
        Another thread's call may reach a new dispatcher kernel before this method returns. This is
        safe: the call has to wait for `registration_lock` before it can publish a new call plan, so
        it never sees a partial update.
        """
        with registration_lock:
            before = {name: getattr(self, name) for name in state}
            rows = tuple(self.definition.registered)
            try:
                self._set(state)
                if install is not None:
                    install()
            except BaseException:
                self._set(before)
                self.definition.registered.remove_new(rows)
                raise
        logs.registration.debug("%s has the rule: %s", self.definition, self)
        for helper in self.definition.helpers.values():
            helper.inherit(self)

    def __str__(self) -> str:
        return self.repr_text() or f"{type(self).__name__}, nothing registered"

    def _set(self, state: Mapping[str, Any]) -> None:
        baked = [*self.cache_parts()]
        for name, value in state.items():
            setattr(self, name, value)
        # Compare by identity, because registered objects, such as tensors, may override `==`.
        self.definition.revision += [*map(id, baked)] != [*map(id, self.cache_parts())]
        self.definition.outdate_plan()

    def cache_parts(self) -> Iterator[object]:
        """Yield the registered values that compilers bake into graphs, to include in cache keys.

        Each value must be a function, or have a stable `repr`.
        """
        yield from ()

    def compile(self) -> Compiled:
        """Return the rule as immutable data for the call plan, from which calls read it."""
        raise NotImplementedError

    def kernels(self) -> Collection[str | None]:
        """Return the device types for which the rule has kernels. None means every device."""
        return ()

    def repr_text(self) -> str | None:
        """Return a short text about this rule for the handle's `repr`, or None to show nothing."""
        return None


class CallPlan:
    """An operator's compiled rules, indexed by rule class. Call plans are immutable."""

    __slots__ = ("_compiled", "schema")

    def __init__(self, schema: Schema, compiled: Mapping[type[CompiledRule[Any]], Any]) -> None:
        self.schema = schema
        self._compiled = compiled

    def __getitem__(self, rule: type[CompiledRule[Compiled]]) -> Compiled:
        compiled: Compiled = self._compiled[rule]
        return compiled


AnyRule = TypeVar("AnyRule", bound=CompiledRule[Any])
# All rule classes, such as `FakeRule`, in the order in which the `repr` of an operator lists them.
# Each definition has one instance of each class. Since `_rules` imports this module, `_rules` sets
# this variable.
kinds: tuple[type[CompiledRule[Any]], ...] = ()

# An installer registers the dispatcher kernels of a new operator, and its rules for modes. It may
# return a function to be called once the schema is defined in the dispatcher.
Installer: TypeAlias = "Callable[[Definition], Callable[[], None] | None]"
# All installers, in the order in which they run. The package `_rules` sets this variable too.
installers: tuple[Installer, ...] = ()


class Definition:
    """An operator's registered rules, and the call plan compiled from them.

    If `custom_op` created the operator, there is one definition, which registers all dispatcher
    kernels when the operator is defined. For an operator from another package, there is one
    definition for each library that registers rules for it, and these definitions add a dispatcher
    kernel only when a rule needs it.
    """

    __slots__ = (
        "__weakref__",
        "_callers_library",
        "_library",
        "_overload",
        "_plan",
        "_rules",
        "_version",
        "calls",
        "declaration",
        "deregistration_reason",
        "handle",
        "helpers",
        "name",
        "registered",
        "revision",
        "schema",
    )

    def __init__(
        self,
        declaration: Declaration,
        library: torch.library.Library,
        callers_library: torch.library.Library | None = None,
        registered: Registrations | None = None,
    ) -> None:
        self.declaration = declaration
        self.name = declaration.name
        self.schema = declaration.schema
        self.handle: Any = None
        # None while the operator is registered. Once the operator is deregistered, this is the
        # reason, which later calls report in their error message.
        self.deregistration_reason: str | None = None
        # Hold a weak reference, because the library that the caller passed may be freed first.
        self._callers_library = None if callers_library is None else weakref.ref(callers_library)
        self._library = library if self.is_ours else weakref.ref(library)
        # Compiled graphs guard on this number, so registrations must increment it if they change
        # anything that compilers bake into graphs.
        self.revision = 0
        self._overload: OpOverload | None = None
        # Create the rules on first use, because a typical program never calls most of its
        # operators. Store them in a list, because a dict would take three times as much memory.
        self._rules: list[CompiledRule[Any]] = []
        self._plan: CallPlan | None = None
        self._version = 0  # the number of calls of `outdate_plan`
        self.registered = registered or Registrations(str(declaration.name))
        # The `OwnCalls` object, which prepares native calls (calls that skip the dispatcher). None
        # for operators from other packages, and until the C++ extension is loaded.
        self.calls: Any = None
        # The helper operators that replace this operator in compiled graphs, by kind, as instances
        # of `_rules.helper_operators.HelperOperator`.
        self.helpers: Mapping[str, Any] = NOTHING

    def __str__(self) -> str:
        return str(self.name)

    @property
    def function(self) -> Callable[..., Any] | None:
        return self.declaration.function

    @property
    def is_ours(self) -> bool:
        return self.declaration.function is not None

    @property
    def is_being_defined(self) -> bool:
        """True until a new operator has a handle, without which no other thread can call it."""
        return self.is_ours and self.handle is None

    @property
    def convention(self) -> Convention:
        return self.declaration.convention

    @property
    def structure(self) -> Any:
        """The object that flattens structured arguments, such as dataclasses, or None."""
        return self.convention.structure

    @property
    def authors_function(self) -> Any:
        """The function that was passed to `custom_op`, before it was wrapped for flat arguments."""
        return self.function if self.structure is None else self.structure.function

    def authored(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a kernel so that it returns only the result, if the operator declares residuals.

        Residuals are extra kernel outputs that only the backward pass uses.
        """
        declared = self.declaration.residuals
        if declared is None or function is self.function:  # already wrapped
            return function
        return cast("Callable[..., Any]", declared.wrap(function))

    @property
    def entry(self) -> Any:
        """The C++ object that runs calls without the dispatcher, or None before it is created."""
        return None if self.calls is None else self.calls.entry

    @property
    def library(self) -> torch.library.Library:
        library = self._held_library
        if library is None or library.m is None:
            raise OperatorGoneError(
                self.deregistration_reason or f"{self}: the library that defined it was closed."
            )
        return library

    @property
    def _held_library(self) -> torch.library.Library | None:
        held = self._library
        return held() if isinstance(held, weakref.ref) else held

    @property
    def callers_library(self) -> torch.library.Library | None:
        """The library passed to `custom_op` as `lib`. None if it was omitted or freed."""
        return None if self._callers_library is None else self._callers_library()

    @property
    def overload(self) -> OpOverload:
        """The operator's OpOverload.

        It is cached only if `custom_op` created the operator, because other packages may redefine
        their operators.
        """
        if self._overload is not None:
            return self._overload
        overload = torch_ops.lookup_overload(*self.name)
        if self.is_ours:
            self._overload = overload
        return overload

    def rule(self, kind: type[AnyRule]) -> AnyRule:
        for rule in self._rules:
            if type(rule) is kind:
                return rule
        self._rules.append(kind(self))
        return self.rule(kind)  # another thread may have been faster, so return the first one

    def install(self) -> list[Callable[[], None]]:
        """Register the dispatcher kernels of a new operator, and its rules for modes.

        Return functions that the caller must call once the schema is defined in the dispatcher.
        """
        return [finish for install in installers if (finish := install(self)) is not None]

    @property
    def rules(self) -> Mapping[type[CompiledRule[Any]], CompiledRule[Any]]:
        return {kind: self.rule(kind) for kind in kinds}

    @property
    def plan(self) -> CallPlan:
        """The call plan (all rules, compiled). The first call after a registration creates it.

        Compiling it lazily keeps imports fast, because each registration would otherwise compile a
        new plan.
        """
        plan = self._plan
        return self._compile() if plan is None else plan

    def _compile(self) -> CallPlan:
        run_waiting_hooks()
        checking.recompile_for_checking(self)

        def compute() -> dict[Any, Any]:
            _hooks.before_plan(self)
            return {kind: rule.compile() for kind, rule in self.rules.items()}

        def publish(compiled: dict[Any, Any]) -> CallPlan:
            if self._plan is None:
                self._plan = CallPlan(self.schema, compiled)
            return self._plan

        return compute_then_publish(compute, publish, lambda: (self._version, self.calls))

    def compiled(self, kind: type[CompiledRule[Compiled]]) -> Compiled:
        """Return `plan[kind]`, but faster than by indexing, for use in the backward pass."""
        compiled: Compiled = (self._plan or self.plan)._compiled[kind]
        return compiled

    @property
    def has_plan(self) -> bool:
        return self._plan is not None

    def outdate_plan(self) -> None:
        """Make the next call compile a new call plan. The caller must hold `registration_lock`."""
        self._version += 1
        self._plan = None
        _hooks.plan_outdated(self)
        if self.deregistration_reason is not None:
            self.convention.deregistered(self.deregistration_reason)

    def implement(self, key: str, kernel: Callable[..., Any], *, with_keyset: bool = False) -> None:
        libraries.implement(
            self.library,
            self.name.local,
            key,
            kernel,
            with_keyset=with_keyset,
            replaces=not self.is_being_defined,  # a new operator has no kernels to replace
        )
        self.registered.add(key, kernel)

    def implement_temporarily(self, key: str, kernel: Callable[..., Any]) -> None:
        """Register a kernel that can be removed again with `self.registered.remove(key)`."""
        remove = libraries.implement_temporarily(self.library, self.name.local, key, kernel)
        self.registered.add(key, kernel, remove)

    def check_defined(self) -> None:
        if self.deregistration_reason is not None:
            raise OperatorGoneError(self.deregistration_reason)

    def deregister(self, reason: str) -> None:
        """Deregister the operator, so that later calls raise OperatorGoneError with this reason.

        Calls that are already running finish with the old kernels. If the operator is already
        deregistered, this is a no-op. Without the C++ extension, an operator cannot be deregistered
        from inside its own call, so this raises RuntimeError.
        """
        with then_run_hooks():
            if self.deregistration_reason is not None:
                return  # another operator may have this name now
            torch_ops.invalidate({self.name: reason})  # first, because it may raise
            self.deregistration_reason = reason
            logs.registration.debug("%s is deregistered: %s", self, reason)
            self.outdate_plan()
            if (library := self._held_library) is not None:
                libraries.deregister(library, self.name)

    def library_closed(self) -> None:
        """Remove the operator's rules from PyTorch's registries, after its library was closed."""
        with registration_lock:
            self.registered.close()
            if self.deregistration_reason is None:
                self.deregistration_reason = libraries.closing_reason(str(self))
                self.outdate_plan()
