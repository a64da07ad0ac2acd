"""accelerate: native calls for operators that were registered with torch.library."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchop import NothingToAccelerateWarning
from torchop._accelerate.patterns import (
    all_names,
    check_patterns,
    defined_names,
    is_match,
    why_nothing_to_accelerate,
)
from torchop._compat import foreign_operators, logs, registries
from torchop._core.lock import registration_lock
from torchop._core.registry import find_schema
from torchop._native import switch
from torchop._native.extension import api
from torchop._native.table import calls as table
from torchop.extend import OpName, warn

if TYPE_CHECKING:
    from typing_extensions import Self

# The accelerations in effect. An operator stays accelerated until none of them matches it.
_active: list[Acceleration] = []
_problems: dict[OpName, str | None] = {}  # why matching operators are not accelerated
_stop_watching: registries.RegistrationHook | None = None


class AcceleratedOperator(NamedTuple):
    """A row of the table that an `Acceleration` prints.

    Attributes:
        op: the name of the operator.
        accelerated: whether its calls are native where they can be.
        reason: why not; empty if they are.
        constants: the arguments for whose every value `torch.compile` compiles a program again,
            because the schema says `int` and not `SymInt`.

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
    """What `accelerate` did. Print it to see a table of the operators, and call `undo` to undo it.

    It is a context manager too, which calls `undo` at the end of the block. Otherwise it lasts
    until you call `undo`.

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
        """Whether it is still in effect."""
        return self in _active

    @property
    def operators(self) -> tuple[AcceleratedOperator, ...]:
        """The operators that match now, with the reason for each that is not accelerated."""
        with registration_lock:
            of_python = defined_names()
            return tuple(_row(name, name in of_python) for name in self._matching())

    def undo(self) -> None:
        """Undoes the acceleration. It can be called again, and in any order.

        The objects in `torch.ops` are restored, unless somebody else has changed them since. An
        operator that another active acceleration matches stays accelerated.
        """
        with registration_lock:
            if self in _active:
                _active.remove(self)
                _forget_unmatched()

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
            f"{each.op}: compiled again for each value of {', '.join(each.constants)}: the schema "
            "says int, and SymInt would be one graph for all"
            for each in operators
            if each.constants
        ]
        return "\n".join([aligned(rows), *constants])

    def _matches(self, name: OpName) -> bool:
        return any(is_match(name, pattern) for pattern in self._patterns)

    def _matching(self) -> list[OpName]:
        """Return matching operators of Python, and of C++ if a pattern names the namespace."""
        names = defined_names()
        parts = (pattern.partition("::") for pattern in self._patterns)
        namespaces = {start for start, colons, _ in parts if colons and not set("*?[") & set(start)}
        if namespaces:
            names |= {name for name in all_names() if name.namespace in namespaces}
        return sorted(name for name in names if self._matches(name))


def accelerate(*patterns: str) -> Acceleration:
    """Gives native calls to operators of other packages, which makes their calls faster.

    It is for operators whose kernels are Python functions, registered with
    `torch.library.custom_op`, or with `define` and `impl` of a `torch.library.Library`. From then
    on, their handles, their objects under `torch.ops` and compiled graphs make native calls if
    PyTorch's dispatcher would only run the kernel and the wrappers of `custom_op`. Every other call
    goes to the dispatcher as before.

    You can call it before the operators exist, because those that are registered later are
    accelerated then. A second call changes nothing.

    Args:
        patterns: names of operators, such as `"mylib::crop"`, with `*`, `?` and `[...]` as in names
            of files: `"mylib::*"`, `"*"`. A name stands for all its overloads.

    Returns:
        An `Acceleration`. Call `undo`, or use it in a `with` statement. It prints as a table of the
        operators, with the reason for each that is not accelerated.

    Raises:
        ValueError: no pattern, or one that no name can match.
        TypeError: a pattern is not a string.

    Warns:
        NothingToAccelerateWarning: a pattern is probably misspelt, because no registered operator
            matches it although its namespace, or a similar one, exists; or all operators that match
            were defined in C++.

    Example:
        >>> import torch, torchop
        >>> @torch.library.custom_op("docs_others::negate", mutates_args=())
        ... def negate(x: torch.Tensor) -> torch.Tensor:
        ...     return -x
        >>> with torchop.accelerate("docs_others::*") as acceleration:
        ...     negate(torch.ones(2))
        tensor([-1., -1.])

    The idea is that of `functools.singledispatch`: decide once, so that a call is a look-up.
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
        for problem in why_nothing_to_accelerate(patterns):
            warn(problem, NothingToAccelerateWarning)
    except BaseException:  # such as a warning that the user made an error
        acceleration.undo()
        raise
    return acceleration


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def why_not(name: OpName) -> str | None:
    """Return why calls of an operator are not native; None if torchop defined it."""
    with registration_lock:
        if name not in defined_names():
            return _row(name, False).reason
        library = registries.published_library(str(name))
        if _is_ours(library or foreign_operators.defining_libraries().get(str(name))):
            return None
        if not _is_wanted(name):
            return f"it is not accelerated; torchop.accelerate({str(name)!r}) does that"
        return _row(name, True).reason or None


def _is_ours(library: torch.library.Library | None) -> bool:
    return type(library).__module__.startswith("torchop.")


def _adopt_all() -> None:
    """Accelerate the matching operators that exist."""
    if switch.native_module() is None:
        return
    wanted = filter(_is_wanted, defined_names())
    matching = {name: registries.published_library(str(name)) for name in wanted}
    defining = foreign_operators.defining_libraries() if None in matching.values() else {}
    for name, library in matching.items():
        _adopt(name, library or defining.get(str(name)))


def _is_wanted(name: OpName) -> bool:
    return any(acceleration._matches(name) for acceleration in _active)


def _adopt(name: OpName, library: torch.library.Library | None) -> None:
    problem = _problems[name] = table.accelerate(name, library)
    logs.calls.info("%s, to be accelerated: %s", name, problem or "done")


def _defined(library: torch.library.Library, qualname: str) -> None:
    """Accelerate an operator that was just defined, if it matches."""
    # PyTorch reports an invalid name.
    with contextlib.suppress(ValueError), registration_lock:
        name = OpName.parse(qualname)
        if _is_wanted(name) and not _is_ours(library):
            _adopt(name, library)


def _forget_unmatched() -> None:
    global _stop_watching
    for name in list(table.accelerated):
        if not _is_wanted(name):
            table.release(name)
    if not _active and _stop_watching is not None:
        _stop_watching()
        _stop_watching = None


def _row(name: OpName, is_of_python: bool) -> AcceleratedOperator:
    reason: str | None
    if not is_of_python:
        reason = "it was defined in C++"
    elif not _is_wanted(name):
        reason = "the acceleration was undone"
    elif switch.native_module() is None:
        reason = api.why_missing()
    elif table.is_made_here(name):
        reason = table.MADE_HERE
    elif (calls := table.accelerated.get(name)) is None:
        reason = _problems.get(name) or "it was deregistered"
    else:
        calls.outdate()  # registrations of other packages do not outdate it
        calls()
        reason = calls.problem
    constants = find_schema(name).constants
    return AcceleratedOperator(str(name), reason is None, reason or "", constants)
