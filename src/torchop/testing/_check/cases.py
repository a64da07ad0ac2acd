"""Cases and variants. A case is one call that a check makes. A variant generates cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torchop.testing._check.calls import Example

# Further information that a check adds to its result, such as a table of dtypes.
Details: TypeAlias = dict[str, Any]
# A function that converts an example to the arguments of a call, for example to transposed tensors.
Arrangement: TypeAlias = Callable[[Example], Example]


@dataclass(frozen=True)
class Variant:
    """A way to generate cases from the author's examples, such as transposing tensors.

    Attributes:
        name: the name of the variant.
        group: the kind of change, such as `"layout"`. Failures in the same group often have the
            same cause.
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
        label: a description of the call, for messages.
        example: the example that `arrange` converts to the arguments.
        arrange: a function that converts the example to the arguments of the call, or raises
            CannotCheck. By default, the example is passed unchanged.
        group: the group of the variant.
        probe: a function that raises if the operator is wrong; called as `probe(call, **options)`.
            By default, the probe of the check is used.
        options: more arguments of the probe. If they depend on the arguments of the call, a
            function that takes the arguments and returns the options.
        calls: whether the call must succeed before the probe runs.
        shrink: whether to search for a smaller example if this one fails.
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
        """Return new arguments for the call, made from the example."""
        example = self.example.copy()
        return example if self.arrange is None else self.arrange(example)
