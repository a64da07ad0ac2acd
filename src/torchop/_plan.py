"""The call plan: what an operator does, compiled from its rules.

A rule is mutable and checked; a plan is immutable and only read. Every registration outdates the
plan, and the next call compiles a new one, under the lock of registrations: a call in another
thread sees the old plan or the new one, never half of each. The dispatcher kernels read the plan;
what native calls follow is made from it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torchop._schema.schema import Schema

if TYPE_CHECKING:
    from torchop._definition import Definition

Compiled = TypeVar("Compiled")


# One registration at a time in the whole process. PyTorch's registries are plain dicts and sets,
# and a definition touches several of them.
registration_lock = threading.RLock()
# A thread that holds it while another forks is not there in the child, and would never let go.
if hasattr(os, "register_at_fork"):  # there is no forking on Windows
    os.register_at_fork(
        after_in_child=registration_lock._at_fork_reinit  # type: ignore[attr-defined]
    )

# The registrations of a rule by device, mode or the like, before there is one. They are replaced,
# never changed, because plans hold on to them.
NOTHING: Mapping[Any, Any] = MappingProxyType({})


# The rules that every operator has, in the order in which they are installed and described. Each
# definition has one object of each; `_rules` says which, because rules need definitions.
kinds: tuple[type[Rule[Any]], ...] = ()


class Rule(Generic[Compiled]):
    """What one operator does for one subsystem of PyTorch.

    Each subclass lives in a file of its own in `_rules`, with its registration function, its
    checks, its dispatcher kernels and its errors.
    """

    __slots__ = ("definition",)

    def __init__(self, definition: Definition) -> None:
        self.definition = definition

    def install(self) -> None:
        """Registers the dispatcher kernels that an operator of ours has from birth."""

    def install_on_defined(self) -> None:
        """Registers those that can only be made when the dispatcher knows the schema."""

    def update(self, install: Callable[[], None] | None = None, /, **state: Any) -> None:
        """Changes the rule, as one step that happens or does not.

        A call in another thread may meet a new dispatcher kernel before this is over; it waits for
        the lock then, to compile the plan, and finds the rule changed or as it was.

        Args:
            install: registers the dispatcher kernels that are missing.
            state: the new values of attributes.
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

    def _set(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.definition.outdate_plan()

    def retract(self) -> None:
        """Takes back what PyTorch's registries hold, when the operator is another one by now."""

    def baked(self) -> Iterator[object]:
        """What compilers bake into a graph: functions, and values with a lasting `repr`."""
        yield from ()

    def compile(self) -> Compiled:
        """Returns an immutable picture of the rule, for the plan."""
        raise NotImplementedError  # every rule defines its own

    def describe(self) -> str | None:
        """What is registered, in a few words for a `repr`; None if nothing is."""
        return None


class CallPlan:
    """The compiled rules of an operator, by the class of the rule."""

    __slots__ = ("_compiled", "schema")

    def __init__(self, schema: Schema, compiled: Mapping[type[Rule[Any]], Any]) -> None:
        self.schema = schema
        self._compiled = compiled

    def __getitem__(self, rule: type[Rule[Compiled]]) -> Compiled:
        compiled: Compiled = self._compiled[rule]
        return compiled
