"""Cases, which are calls that may fail a check, and variants, which generate cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torchop.testing._check.calls import Example

# Tables and numbers that a check adds to its result, such as a table of dtypes.
Details: TypeAlias = dict[str, Any]
# Converts an example to the arguments of a call, for example to transposed tensors.
Arrangement: TypeAlias = Callable[[Example], Example]


@dataclass(frozen=True)
class Variant:
    """A way to generate cases from the author's examples, such as transposing tensors.

    Attributes:
        name: the name of the variant.
        group: the kind of change, such as `"layout"`. Failures in one group often have one cause.
        make: `make(subject, example)` yields the cases for one example, or raises CannotCheck.
        most: the maximum number of examples to generate cases from.
    """

    name: str
    group: str
    make: Callable[..., Iterator[Case]]
    most: int = 3


@dataclass(frozen=True, eq=False)
class Case:
    """One call that a check makes, with the probe that decides whether the operator is wrong.

    Attributes:
        label: a description of the change, for messages.
        example: the example from which `arrange` makes the arguments. Shrinking replaces it.
        arrange: converts the example to the arguments of the call, or raises CannotCheck. By
            default, the arguments are the example.
        group: the group of the variant.
        probe: `probe(call, **options)` raises if the operator is wrong. By default, the probe of
            the check.
        options: more arguments of the probe, or a function that returns them for the call's
            arguments.
        calls: whether the call must succeed before the probe runs.
        shrink: whether to search for a smaller example that fails.
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
        """Return the arguments of the call, made from the example each time."""
        example = self.example.copy()
        return example if self.arrange is None else self.arrange(example)
