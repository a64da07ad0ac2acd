"""Cases and variants. A case is one call that a check makes. A variant generates cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torchop.testing._check.calls import Example

Details: TypeAlias = dict[str, Any]
# A function that converts an example to the arguments of a call, e.g. by transposing its tensors.
Arrangement: TypeAlias = Callable[[Example], Example]


@dataclass(frozen=True)
class Variant:
    """A way to generate cases from the author's examples, such as transposing tensors.

    `make(subject, example)` yields the cases for one example, or raises CannotCheck. `make` is
    called for at most `most` examples. `group` is the kind of change, such as `"layout"`. Failures
    in the same group often have the same cause.
    """

    name: str
    group: str
    make: Callable[..., Iterator[Case]]
    most: int = 3


@dataclass(frozen=True, eq=False)
class Case:
    """One call that a check makes, with a probe that raises if it finds a fault in the operator.

    `arrange` converts `example` to the arguments of the call, or raises CannotCheck. `options`
    contains the keyword arguments of the probe, or is a function that returns the keyword arguments
    for the arguments of the call. If `calls` is true, the probe runs only after the call has
    succeeded. If `shrink` is true and the case fails, `check` searches for a smaller example.
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
        example = self.example.copy()
        return example if self.arrange is None else self.arrange(example)
