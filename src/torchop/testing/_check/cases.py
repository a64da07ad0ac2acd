"""Cases: calls that may show a fault, and the variants that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torchop.testing._check.calls import Example

# Tables and numbers that a check reports in addition to its outcome.
Details: TypeAlias = dict[str, Any]
# Makes the arguments of a call from an example, such as transposed ones.
Arrangement: TypeAlias = Callable[[Example], Example]


@dataclass(frozen=True)
class Variant:
    """A way of changing the author's examples.

    Attributes:
        name: the name of the variant.
        group: the kind of change, such as `"layout"`. One fault often fails a whole group.
        make: `make(subject, example)` yields the cases of one example, or raises CannotCheck.
        most: the number of examples to change.
    """

    name: str
    group: str
    make: Callable[..., Iterator[Case]]
    most: int = 3


@dataclass(frozen=True, eq=False)
class Case:
    """One call that may show a fault, can be shrunk, and can be printed.

    Attributes:
        label: the change, in words.
        example: the example from which the arguments are made. Shrinking replaces it.
        arrange: makes the arguments from the example, or raises CannotCheck. By default, the
            arguments are the example.
        group: the group of the variant.
        probe: `probe(call, **options)` raises if the operator is wrong.
        options: more arguments of the probe, or a function that makes them from the arguments.
        calls: whether the call must succeed before the probe runs.
        shrink: whether to try smaller examples.
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
