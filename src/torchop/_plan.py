"""The call plan: what an operator does, compiled from its rules at registration.

A rule is mutable and checked; a plan is immutable and only read. Every registration compiles a new
plan and swaps it in one assignment, so a call in another thread sees the old one or the new one,
never half of each. The dispatcher kernels read the plan; so will any other way of calling.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from torchop._schema.schema import Schema

if TYPE_CHECKING:
    from torchop._definition import Definition

Compiled = TypeVar("Compiled")


# The registrations of a rule by device, mode or the like, before there is one. They are replaced,
# never changed, because plans hold on to them.
NOTHING: Mapping[Any, Any] = MappingProxyType({})


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
        return cast(Compiled, self._compiled[rule])
