"""Cases, which are single calls that a check makes, and variants, which generate cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torchop.testing._check.calls import Example

Details: TypeAlias = dict[str, Any]
# Converts an example to the actual arguments of a call, e.g. by transposing its tensors.
Arrangement: TypeAlias = Callable[[Example], Example]


@dataclass(frozen=True)
class Variant:
    """A way to generate cases from the author's examples, such as transposing tensors.

    `make(subject, example)` yields the cases for one example, or raises CannotCheck if the variant
    does not apply. Checks call `make` for at most `most` examples. `group` is the kind of change,
    such as `"layout"`, and is used to group failures, since one bug often affects a whole kind of
    change.
    """

    name: str
    group: str
    make: Callable[..., Iterator[Case]]
    most: int = 3


@dataclass(frozen=True, eq=False)
class Case:
    """One call that a check makes, with a probe that raises if it finds a bug in the operator.

    `arrange` converts `example` to the arguments of the call, or raises CannotCheck. `options` are
    the keyword arguments of the probe, or a function that computes them from the arguments of the
    call. If `calls` is true, the probe runs only if the call succeeds. If `shrink` is true and the
    case fails, `check` searches for a smaller example that also fails.
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
