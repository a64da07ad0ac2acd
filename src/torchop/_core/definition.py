"""An operator: its rules, the plan that they are compiled into, and the definition with both.

A registration changes a rule and makes the plan stale; the next call compiles a new plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

import torch.library

from torchop._compat import deregistration, libraries, logs, registries, torch_ops
from torchop._compat.classes import OpOverload
from torchop._core import checking
from torchop._core.declaration import Declaration
from torchop._core.lock import registration_lock
from torchop._errors import OperatorGoneError
from torchop._schema.convention import Convention
from torchop._schema.schema import Schema

Compiled = TypeVar("Compiled")

# The registrations of a rule by device, mode or the like, before there is one. They are replaced,
# never changed, because plans hold on to them.
NOTHING: Mapping[Any, Any] = MappingProxyType({})


class CompiledRule(Generic[Compiled]):
    """What one operator does for one subsystem of PyTorch.

    Each subclass lives in a file of its own in `_rules`, with its registration function, its
    checks, its dispatcher kernels and its errors.
    """

    __slots__ = ("definition",)

    def __init__(self, definition: Definition) -> None:
        self.definition = definition

    def update(self, install: Callable[[], None] | None = None, /, **state: Any) -> None:
        """Give attributes new values and install missing dispatcher kernels, or do neither.

        A call in another thread may meet a new dispatcher kernel before this is over; it waits for
        the lock then, to compile the plan, and finds the rule changed or as it was.
        """
        with registration_lock:
            before = {name: getattr(self, name) for name in state}
            try:
                self._set(state)
                if install is not None:
                    install()
            except BaseException:
                self._set(before)
                raise
        logs.registration.debug("%s has the rule: %s", self.definition, self)

    def __str__(self) -> str:
        return self.repr_text() or f"{type(self).__name__}, nothing registered"

    def _set(self, state: Mapping[str, Any]) -> None:
        baked = [*self.cache_parts()]
        for name, value in state.items():
            setattr(self, name, value)
        # By identity, because what users register may compare in ways of its own, as tensors do.
        self.definition.revision += [*map(id, baked)] != [*map(id, self.cache_parts())]
        self.definition.outdate_plan()

    def retract(self) -> None:
        """Takes back what PyTorch's registries hold, when the operator is gone or another."""

    def cache_parts(self) -> Iterator[object]:
        """What compilers bake into a graph: functions, and values with a lasting `repr`."""
        yield from ()

    def compile(self) -> Compiled:
        """Returns an immutable picture of the rule, for the plan."""
        raise NotImplementedError  # every rule defines its own

    def kernels(self) -> Collection[str | None]:
        """The device types that it has kernels for; None stands for every device."""
        return ()

    def repr_text(self) -> str | None:
        """What is registered, in a few words for a `repr`; None if nothing is."""
        return None


class CallPlan:
    """The compiled rules of an operator, by the class of the rule."""

    __slots__ = ("_compiled", "schema")

    def __init__(self, schema: Schema, compiled: Mapping[type[CompiledRule[Any]], Any]) -> None:
        self.schema = schema
        self._compiled = compiled

    def __getitem__(self, rule: type[CompiledRule[Compiled]]) -> Compiled:
        compiled: Compiled = self._compiled[rule]
        return compiled


AnyRule = TypeVar("AnyRule", bound=CompiledRule[Any])
# The rules that every operator has, in the order in which they are installed and described. Each
# definition has one object of each; `_rules` says which, because rules need definitions.
kinds: tuple[type[CompiledRule[Any]], ...] = ()

# Installs the dispatcher kernels and the rules of modes that a new operator of ours has from the
# start, and may return a function to call once the dispatcher knows the schema.
Installer: TypeAlias = "Callable[[Definition], Callable[[], None] | None]"
# The installers, which `_rules` sets together with `kinds`.
installers: tuple[Installer, ...] = ()


class Follower(Protocol):
    """What is told when a plan of an operator is compiled, and outdated: its native calls."""

    def attach(self) -> None: ...
    def outdate(self) -> None: ...


class Definition:
    """An operator as seen through one library.

    The operators made by `custom_op` are ours: they have all their dispatcher kernels from the
    start. For an operator that somebody else defined, a definition holds only what was registered
    for it through this library, and installs a kernel when a rule first needs it.
    """

    __slots__ = (
        "__weakref__",
        "_callers_library",
        "_library",
        "_overload",
        "_plan",
        "_rules",
        "declaration",
        "dispatcher_kernels",
        "follower",
        "handle",
        "name",
        "reason_gone",
        "revision",
        "schema",
    )

    def __init__(
        self,
        declaration: Declaration,
        library: torch.library.Library,
        callers_library: torch.library.Library | None = None,
    ) -> None:
        self.declaration = declaration
        self.name = declaration.name
        self.schema = declaration.schema
        self.handle: Any = None
        # Why calls are refused, once the operator was replaced or its library closed.
        self.reason_gone: str | None = None
        # Somebody else's library must be freed when they drop it, so this reference is weak.
        self._callers_library = None if callers_library is None else weakref.ref(callers_library)
        self._library = library if self.is_ours else weakref.ref(library)
        # How often something changed that compilers bake into graphs, which have a guard on it.
        self.revision = 0
        self._overload: OpOverload | None = None
        # Made when they are first asked for: a package defines operators that are never called.
        self._rules: list[CompiledRule[Any]] = []  # which takes a third of a dictionary's memory
        self._plan: CallPlan | None = None
        # By dispatch key, the kernel that a call runs there. A native call replaces these kernels,
        # and no others.
        self.dispatcher_kernels: Mapping[str, Callable[..., Any]] = NOTHING
        self.follower: Follower | None = None

    def __str__(self) -> str:
        return str(self.name)

    @property
    def function(self) -> Callable[..., Any] | None:
        """The kernel for every device; None for operators of others."""
        return self.declaration.function

    @property
    def is_ours(self) -> bool:
        """Whether `custom_op` made the operator."""
        return self.declaration.function is not None

    @property
    def is_being_defined(self) -> bool:
        """Whether it is an operator of ours without a handle yet, so that nobody can use it."""
        return self.is_ours and self.handle is None

    @property
    def convention(self) -> Convention:
        """How an author's functions are called."""
        return self.declaration.convention

    @property
    def structure(self) -> Any:
        """What is between the author's arguments and the schema's; None for most operators."""
        return self.convention.structure

    @property
    def authors_function(self) -> Any:
        """The function as its author wrote it; None for operators of others."""
        return self.function if self.structure is None else self.structure.function

    def authored(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel or fake kernel of the author, which hands its residuals over, if it has some."""
        declared = self.declaration.residuals
        if declared is None or function is self.function:  # which the definition has made one
            return function
        return cast("Callable[..., Any]", declared.wrap(function))

    @property
    def entry(self) -> Any:
        """Where native calls come in, if there are any."""
        return getattr(self.follower, "entry", None)

    @property
    def library(self) -> torch.library.Library:
        """The library that holds this definition's dispatcher kernels."""
        library = self._held_library
        if library is None or library.m is None:
            raise OperatorGoneError(
                self.reason_gone or f"{self}: the library it lived in was closed."
            )
        return library

    @property
    def _held_library(self) -> torch.library.Library | None:
        held = self._library
        return held() if isinstance(held, weakref.ref) else held

    @property
    def callers_library(self) -> torch.library.Library | None:
        """The caller's library in which an operator of ours was defined, if there was one."""
        return None if self._callers_library is None else self._callers_library()

    @property
    def overload(self) -> OpOverload:
        """The operator under `torch.ops`; for others' operators, the one there is now."""
        if self._overload is not None:
            return self._overload
        overload = torch_ops.lookup_overload(*self.name)
        if self.is_ours:
            self._overload = overload
        return overload

    def rule(self, kind: type[AnyRule]) -> AnyRule:
        """This operator's rule of one kind."""
        for rule in self._rules:
            if type(rule) is kind:
                return rule
        self._rules.append(kind(self))
        return self.rule(kind)  # another thread may have made one before

    def install(self) -> list[Callable[[], None]]:
        """Install the kernels of a new operator of ours.

        Returns:
            The functions to call once the dispatcher knows the schema.
        """
        return [finish for install in installers if (finish := install(self)) is not None]

    @property
    def rules(self) -> Mapping[type[CompiledRule[Any]], CompiledRule[Any]]:
        """All of them, by kind."""
        return {kind: self.rule(kind) for kind in kinds}

    @property
    def plan(self) -> CallPlan:
        """What calls read; compiled for the first one after a registration.

        A package registers many rules, and many operators that a process never calls.
        """
        plan = self._plan
        if plan is None:
            with registration_lock:
                plan = self._plan
                if plan is None:
                    checking.follow(self)
                    compiled = {kind: rule.compile() for kind, rule in self.rules.items()}
                    plan = self._plan = CallPlan(self.schema, compiled)
                    if self.follower is not None:
                        try:
                            self.follower.attach()
                        except BaseException:
                            self._plan = None  # the next call tries again
                            raise
        return plan

    def compiled(self, kind: type[CompiledRule[Compiled]]) -> Compiled:
        """One rule, as the plan has it: what every backward asks for."""
        compiled: Compiled = (self._plan or self.plan)._compiled[kind]
        return compiled

    @property
    def has_plan(self) -> bool:
        """Whether a call asked for the plan since the last registration."""
        return self._plan is not None

    def outdate_plan(self) -> None:
        """Makes the next call compile a new plan; the registration lock must be held."""
        self._plan = None
        if self.follower is not None:
            self.follower.outdate()
        if self.reason_gone is not None:
            self.convention.ended(self.reason_gone)

    def implement(self, key: str, kernel: Callable[..., Any], *, with_keyset: bool = False) -> None:
        """Registers a kernel of a rule at one dispatch key."""
        libraries.implement(
            self.library,
            self.name.local,
            key,
            kernel,
            with_keyset=with_keyset,
            replaces=not self.is_being_defined,  # a new operator has no kernels to replace
        )
        self.dispatcher_kernels = {**self.dispatcher_kernels, key: kernel}

    def implement_for_now(self, key: str, kernel: Callable[..., Any]) -> Callable[[], None]:
        """Registers a kernel of a rule at one dispatch key; returns what takes it back."""
        take_back = libraries.implement_for_now(self.library, self.name.local, key, kernel)
        self.dispatcher_kernels = {**self.dispatcher_kernels, key: kernel}
        return take_back

    def check_defined(self) -> None:
        """Refuses to go on with an operator that was replaced, or whose library was closed."""
        if self.reason_gone is not None:
            raise OperatorGoneError(self.reason_gone)

    def end(self, reason: str) -> None:
        """End the operator and free its name, unless it has ended; calls raise the reason then.

        It raises RuntimeError, and the operator does not end, while this thread is calling it.
        """
        with registration_lock:
            if self.reason_gone is not None:
                return  # the name may be that of another operator by now
            deregistration.refuse_running([self.name])
            self.reason_gone = reason
            logs.registration.debug("%s ends: %s", self, reason)
            library = self._held_library
            deregistration.retire([self.name], lambda name: reason)
            self.outdate_plan()
            if self.is_ours and library is not None:
                registries.unpublish(str(self.name), library)
                library._destroy()

    def library_closed(self) -> None:
        """Takes back what the rules hold elsewhere, and makes whoever holds the operator refuse."""
        with registration_lock:
            for rule in self.rules.values():
                rule.retract()
            if self.reason_gone is None:
                self.reason_gone = libraries.gone_with_library(str(self))
                self.outdate_plan()
