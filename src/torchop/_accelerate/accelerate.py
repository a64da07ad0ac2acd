from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from torchop import NothingToAccelerateWarning
from torchop._accelerate.patterns import (
    all_names,
    check_patterns,
    defined_names,
    is_match,
    why_nothing_to_accelerate,
)
from torchop._compat import compilers, foreign_operators, logs, operators, registries
from torchop._core.lock import registration_lock
from torchop._core.registry import find_schema
from torchop._native import switch
from torchop._native.extension import api
from torchop._native.table import calls as table
from torchop.extend import OpName, warn

if TYPE_CHECKING:
    from typing_extensions import Self

Result = TypeVar("Result")

# The `Acceleration` objects that have not been undone. An operator is accelerated for as long as a
# pattern of one of these objects matches it.
_active: list[Acceleration] = []
# For each operator that matches an active `Acceleration`, the reason why it is not accelerated, or
# None if it is.
_problems: dict[OpName, str | None] = {}
_stop_watching: registries.RegistrationHook | None = None
_DEREGISTERED = "it was deregistered"


class AcceleratedOperator(NamedTuple):
    """The state of one operator, i.e. one row in the table of an `Acceleration`.

    Attributes:
        op: the name of the operator.
        accelerated: whether calls to the operator can be native, i.e. bypass the dispatcher.
        reason: why the operator is not accelerated. Empty if it is accelerated.
        constants: the names of the `int` arguments. For each new value of these, `torch.compile`
            recompiles. To avoid this, declare them as `SymInt` in the schema.

    Example:
        >>> import torch, torchop
        >>> torch.library.define("docs_others::bare", "(Tensor x) -> Tensor")
        >>> with torchop.accelerate("docs_others::bare") as acceleration:
        ...     acceleration.operators[0].reason
        'none of its kernels is a Python function'
    """

    op: str
    accelerated: bool
    reason: str
    constants: tuple[str, ...] = ()


class Acceleration:
    """The result of `accelerate`. Print it to see a table of the operators.

    The acceleration ends when `undo` is called, or at the end of a `with` block.

    Example:
        >>> import torch, torchop
        >>> torch.library.define("docs_others::later", "(Tensor x) -> Tensor")
        >>> acceleration = torchop.accelerate("docs_others::later")
        >>> print(acceleration)
        operator            accelerated  reason
        docs_others::later  no           none of its kernels is a Python function
        >>> acceleration.undo()
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._patterns = patterns

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns that were passed to `accelerate`."""
        return self._patterns

    @property
    def is_active(self) -> bool:
        """Whether the acceleration is in effect."""
        return self in _active

    @property
    def operators(self) -> tuple[AcceleratedOperator, ...]:
        """The registered operators that match a pattern."""
        with registration_lock:
            of_python = defined_names()
            return tuple(_row(name, name in of_python) for name in self._matching())

    def undo(self) -> None:
        """Stop accelerating the matching operators. A second call is a no-op.

        Operators that also match another active `Acceleration` stay accelerated. If other code has
        replaced a function in `torch.ops` in the meantime, its replacement is left in place.
        """
        with registration_lock:
            if self in _active:
                _active.remove(self)
                _release_unmatched()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<Acceleration of {', '.join(self._patterns)}>"

    def __str__(self) -> str:
        operators = self.operators
        if not operators:
            return f"no operator matches {', '.join(self._patterns)} yet"
        rows = [("operator", "accelerated", "reason")]
        rows += [(each.op, "yes" if each.accelerated else "no", each.reason) for each in operators]
        constants = [
            f"{each.op}: torch.compile compiles it again for each value of "
            f"{', '.join(each.constants)}. Declare int arguments as SymInt in the schema to share "
            "one graph."
            for each in operators
            if each.constants
        ]
        return "\n".join([aligned(rows), *constants])

    def _matches(self, name: OpName) -> bool:
        return any(is_match(name, pattern) for pattern in self._patterns)

    def _matching(self) -> list[OpName]:
        """Return the names of the registered operators that match a pattern.

        Operators from C++ code are included only if a pattern names their namespace, without
        wildcards.
        """
        names = defined_names()
        parts = (pattern.partition("::") for pattern in self._patterns)
        namespaces = {start for start, colons, _ in parts if colons and not set("*?[") & set(start)}
        if namespaces:
            names |= {name for name in all_names() if name.namespace in namespaces}
        return sorted(name for name in names if self._matches(name))


@compilers.eager_only
def accelerate(*patterns: str) -> Acceleration:
    """Make calls to operators of other packages native, so that they bypass PyTorch's dispatcher.

    This works for operators with Python kernels that were registered with
    `torch.library.custom_op`, or with `define` and `impl` of a `torch.library.Library`. A call
    through a handle, through `torch.ops` or from a compiled graph is native if the dispatcher would
    only run the kernel and the wrappers that `custom_op` adds to it. Every other call falls back to
    the dispatcher.

    Operators that are registered later are accelerated too, so you can import packages in any
    order.

    Args:
        patterns: operator names such as `"mylib::crop"`, optionally with the wildcards `*`, `?` and
            `[...]`, such as `"mylib::*"` or `"*"`. A name without an overload stands for all
            overloads.

    Returns:
        An `Acceleration`. Print it to see which operators are accelerated, and why others are not.
        To end the acceleration, call its `undo`, or use it in a `with` statement.

    Raises:
        ValueError: no pattern was given, or a pattern matches no valid name.
        TypeError: a pattern is not a string.

    Warns:
        NothingToAccelerateWarning: a pattern is probably misspelled, because it matches no
            registered operator although its namespace or a similar one exists. This is also issued
            if all matching operators were defined in C++, because these cannot be accelerated.

    Example:
        >>> import torch, torchop
        >>> @torch.library.custom_op("docs_others::negate", mutates_args=())
        ... def negate(x: torch.Tensor) -> torch.Tensor:
        ...     return -x
        >>> with torchop.accelerate("docs_others::*") as acceleration:
        ...     negate(torch.ones(2))
        tensor([-1., -1.])

    Modeled after `functools.singledispatch`, which caches the function that it selects instead of
    selecting it again in every call.
    """
    global _stop_watching
    check_patterns("accelerate", patterns)
    acceleration = Acceleration(patterns)
    try:
        with registration_lock:
            _active.append(acceleration)
            if _stop_watching is None:
                _stop_watching = foreign_operators.watch_definitions(_defined)
        switch.request(_adopt_all)
        if switch.native_module() is None:
            # The C++ extension is not loaded yet, so `_adopt_all` only counts calls. `switch` calls
            # `_adopt_all` again once the extension is loaded.
            _adopt_all()
        for problem in why_nothing_to_accelerate(patterns):
            warn(problem, NothingToAccelerateWarning)
    except BaseException:  # such as a warning that a filter turned into an error
        acceleration.undo()
        raise
    return acceleration


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def why_not(name: OpName) -> str | None:
    """Return why calls to an operator go through the dispatcher, or None if they are native."""
    with registration_lock:
        if name not in defined_names():
            return _row(name, False).reason
        library = registries.published_library(str(name))
        if _is_ours(library or foreign_operators.defining_libraries().get(str(name))):
            return None
        if not _is_matched(name):
            return f"it is not accelerated; torchop.accelerate({str(name)!r}) does that"
        return _row(name, True).reason or None


def _is_ours(library: torch.library.Library | None) -> bool:
    return type(library).__module__.startswith("torchop.")


def _adopt_all() -> None:
    wanted = filter(_is_matched, defined_names())
    matching = {name: registries.published_library(str(name)) for name in wanted}
    defining = foreign_operators.defining_libraries() if None in matching.values() else {}
    for name, library in matching.items():
        _adopt(name, library or defining.get(str(name)))


def _is_matched(name: OpName) -> bool:
    return any(acceleration._matches(name) for acceleration in _active)


def _adopt(name: OpName, library: torch.library.Library | None) -> None:
    gone: str | None = _DEREGISTERED
    problem = _unless_deregistered(name, lambda: table.accelerate(name, library), gone)
    _problems[name] = problem
    logs.calls.info("%s, to be accelerated: %s", name, problem or "done")


def _defined(library: torch.library.Library, qualname: str) -> None:
    # `OpName.parse` raises ValueError for an invalid name. Ignore the error here, because PyTorch
    # itself reports invalid names.
    with contextlib.suppress(ValueError):
        name = OpName.parse(qualname)
        if _is_matched(name) and not _is_ours(library):
            _adopt(name, library)


def _release_unmatched() -> None:
    global _stop_watching
    is_loaded = switch.native_module() is not None
    for name in list(table.accelerated) if is_loaded else defined_names():
        if not _is_matched(name):
            table.release(name)
    if not _active and _stop_watching is not None:
        _stop_watching()
        _stop_watching = None


def _unless_deregistered(name: OpName, compute: Callable[[], Result], otherwise: Result) -> Result:
    """Return `compute()`, or `otherwise` if the operator is deregistered in the meantime.

    This can happen at any time, because PyTorch does not hold `registration_lock` while it
    deregisters an operator.
    """
    try:
        return compute()
    except RuntimeError:
        if operators.has_schema(str(name)):
            raise
        return otherwise


def _row(name: OpName, is_of_python: bool) -> AcceleratedOperator:
    deregistered = AcceleratedOperator(str(name), False, _DEREGISTERED)
    return _unless_deregistered(name, lambda: _current_row(name, is_of_python), deregistered)


def _current_row(name: OpName, is_of_python: bool) -> AcceleratedOperator:
    reason: str | None
    if not is_of_python:
        reason = "it was defined in C++"
    elif not _is_matched(name):
        reason = "the acceleration was undone"
    elif switch.native_module() is None:
        reason = api.why_missing()
    elif table.is_made_here(name):
        reason = table.MADE_HERE
    elif (calls := table.accelerated.get(name)) is None:
        reason = _problems.get(name) or _DEREGISTERED
    else:
        calls.outdate()  # check again, in case another package has registered a kernel
        calls()
        reason = calls.problem
    constants = find_schema(name).constants
    return AcceleratedOperator(str(name), reason is None, reason or "", constants)
