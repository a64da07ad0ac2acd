"""Cases: calls that may show a fault, and the variants that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torchop.testing._check.calls import Example

# Tables and numbers that a check reports beside its outcome.
Details: TypeAlias = dict[str, Any]
# Makes the arguments of a call from an example, such as transposed ones.
Arrangement: TypeAlias = Callable[[Example], Example]


@dataclass(frozen=True)
class Variant:
    """A way of changing the author's examples.

    Attributes:
        name: its name.
        group: the group of variants that one fault shows in, such as `"layout"`.
        make: `make(subject, example)` yields the cases of one example; raises CannotCheck if there
            are none.
        most: how many of the examples are changed.
    """

    name: str
    group: str
    make: Callable[..., Iterator[Case]]
    most: int = 3


@dataclass(frozen=True, eq=False)
class Case:
    """One call that may show a fault, be made smaller, and be printed.

    Attributes:
        label: what is special about it, in words.
        example: the example from which its arguments are made; smaller ones are tried instead.
        arrange: makes the arguments from the example; raises CannotCheck if it cannot. By default,
            they are the example.
        group: the group of the variant.
        probe: `probe(call, **options)` raises if the operator is wrong.
        options: more arguments of the probe, or a function that makes them of the arguments.
        calls: whether the call must be accepted before the probe runs.
        shrink: whether smaller examples are tried.
    """

    label: str
    example: Example
    arrange: Arrangement | None = None
    group: str = "plain"
    probe: Callable[..., object] | None = None
    options: Mapping[str, Any] | Callable[[Example], Mapping[str, Any]] = field(
        default_factory=dict
    )
    calls: bool = True
    shrink: bool = True

    def arguments(self) -> Example:
        """Return new arguments."""
        example = self.example.copy()
        return example if self.arrange is None else self.arrange(example)
