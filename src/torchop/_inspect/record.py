"""record: which operators a program calls, and with what kind of arguments."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchop import NothingToAccelerateWarning
from torchop._accelerate.patterns import check_patterns, is_match, why_nothing_matches
from torchop._compat import observing
from torchop._inspect.call_record import CallRecord, observed
from torchop._inspect.registrant import registers, why_nothing
from torchop.extend import OpName, short_repr, warn

if TYPE_CHECKING:
    from typing_extensions import Self

# A limit, because an argument may change with every call, such as the step of an optimizer.
KINDS_KEPT = 100


class Recorded(Mapping[str, list[tuple[CallRecord, int]]]):
    """Recorded calls by the name of the operator: each kind of call, with how often it was made.

    It may be used in several `with` statements, also nested ones, and in several threads at once.
    It keeps 100 kinds of calls of an operator, and only counts the others; see `calls`.

    Example:
        >>> import torch, torchop
        >>> with torchop.record("aten::*") as recorded:
        ...     _ = torch.ones(2).sin()
        >>> sorted(recorded)
        ['aten::ones', 'aten::sin']
    """

    def __init__(self, what: tuple[str | ModuleType, ...]) -> None:
        self._what = what
        self._began = not what
        self._matches: dict[str, bool] = {}
        # The `repr` of each kind, as 1, 1.0 and True are equal, but other calls. Empty for calls
        # whose kind is not kept.
        self._counts: dict[str, Counter[str]] = {}
        self._kinds: dict[str, CallRecord] = {}
        self._lock = threading.RLock()  # other threads may record while one reads

    def __getitem__(self, op: str) -> list[tuple[CallRecord, int]]:
        return [(call, count) for call, count in self._all_calls(op) if call is not None]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._counts))

    def __len__(self) -> int:
        return len(self._counts)

    def __repr__(self) -> str:
        hint = "" if self._began else "; enter it, in a with statement, to record"
        calls = sum(map(self.calls, self))
        return f"<Recorded: calls={calls}, operators={len(self)}{hint}>"

    def calls(self, op: str) -> int:
        """How often an operator was called, calls whose kind is not kept included.

        Args:
            op: its name.

        Returns:
            The number of calls; 0 for an operator that was not called.
        """
        return sum(self._counts.get(op, {}).values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calls to a file of JSON, to read, to compare, and for `load`.

        The file has numbers, strings and other plain arguments, but no contents of tensors.

        Args:
            path: the file. An existing one is replaced once the new one is complete.

        Raises:
            OSError: the file cannot be written.

        Example:
            >>> import pathlib, tempfile, torch, torchop
            >>> with torchop.record("aten::sin") as recorded:
            ...     _ = torch.ones(2).sin()
            >>> path = pathlib.Path(tempfile.mkdtemp(), "calls.json")
            >>> recorded.save(path)
            >>> torchop.Recorded.load(path) == recorded
            True
        """
        from torchop._inspect import recording_file  # few programs use it: keeps start-up short

        with self._lock:
            text = recording_file.dumps({op: self._all_calls(op) for op in self})
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():  # such as /dev/stdout
            target.write_text(text, encoding="utf-8")
            return
        unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what `save` wrote, on this machine or another; nothing in it is executed.

        Args:
            path: the file.

        Returns:
            The calls. They are complete: it cannot be used in a `with` statement.

        Raises:
            RecordingError: the file is not one that `save` wrote; the message names the place.
            OSError: the file cannot be read.

        Example: see `save`.
        """
        from torchop._inspect import recording_file  # see save

        loaded = cls(())
        for op, (call, count) in recording_file.read(Path(path)):
            loaded._add(op, call, count)
        return loaded

    def update(self, other: Recorded) -> None:
        """Adds the calls of another recording.

        Args:
            other: the recording; it does not change.

        Example:
            >>> import torch, torchop
            >>> first, second = torchop.record("aten::*"), torchop.record("aten::*")
            >>> with first, second:
            ...     _ = torch.ones(2)
            >>> first.update(second)
            >>> first
            <Recorded: calls=2, operators=1>
        """
        for op in other:
            for call, count in other._all_calls(op):
                self._add(op, call, count)

    def _all_calls(self, op: str) -> list[tuple[CallRecord | None, int]]:
        """The kinds of calls of an operator, and at the end None for those that are not kept."""
        with self._lock:
            counts = sorted(self._counts[op].most_common(), key=lambda count: not count[0])
            return [(self._kinds.get(kind), count) for kind, count in counts]

    def _add(self, op: str, call: CallRecord | None, count: int = 1) -> None:
        """Adds calls of an operator; `call` is None where their kind is not kept."""
        kind = "" if call is None else repr(call)
        with self._lock:
            counts = self._counts.setdefault(op, Counter())
            if kind not in counts and len(counts) - ("" in counts) >= KINDS_KEPT:
                kind = ""
            counts[kind] += count
            if call is not None and kind:
                self._kinds.setdefault(kind, call)

    def __enter__(self) -> Self:
        if not self._what:
            raise RuntimeError(
                "a recording that was loaded from a file is complete; record again, with "
                "torchop.record(...)."
            )
        self._began = True
        _recordings.enter(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _recordings.exit(self, *error)
        for what in self._what if error[0] is None else ():
            if (problem := _why_nothing(what)) is not None:
                warn(problem, NothingToAccelerateWarning)

    def _record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name not in self._matches:
            op = OpName.parse(name)
            self._matches[name] = any(_is_wanted(op, what) for what in self._what)
        if self._matches[name] and (call := observed(args, kwargs)) is not None:
            self._add(name, call)


def _is_wanted(op: OpName, what: str | ModuleType) -> bool:
    return is_match(op, what) if isinstance(what, str) else registers(what.__name__, op)


def _why_nothing(what: str | ModuleType) -> str | None:
    if isinstance(what, str):
        return why_nothing_matches("record", what)
    return why_nothing(what.__name__)


def record(*what: str | ModuleType) -> Recorded:
    """Records which operators a block calls, with dtypes and shapes, but without data of tensors.

    The program computes the same results in the block, only slower, because all calls of this
    thread go through the dispatcher and a mode in Python.

    Args:
        what: patterns of operator names, as for `accelerate`; or packages, which stand for the
            operators that they define in Python or have Python kernels for.

    Returns:
        A `Recorded`, for a `with` statement. Afterwards, it maps the name of each operator to its
        kinds of calls, the most frequent first, each with its count.

    Raises:
        ValueError: there is no pattern, or one that no name can match.
        TypeError: an argument is neither a string nor a module.

    Warns:
        NothingToAccelerateWarning: at the end of the block, no registered operator matches.

    Example:
        >>> import torch, torchop
        >>> @torch.library.custom_op("docs_others::double", mutates_args=())
        ... def double(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> with torchop.record("docs_others::*") as recorded:
        ...     _ = double(torch.ones(2))
        >>> [(call, count)] = recorded["docs_others::double"]
        >>> call.args[0].shape, count
        ((2,), 1)

    The idea is that of `torch.jit.trace`: to see what a program does, run it.
    """
    patterns = tuple(one for one in what if not isinstance(one, ModuleType))
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                "record expects patterns of operator names, such as 'mylib::*', or packages, "
                f"got {type(pattern).__name__}: {short_repr(pattern)}."
            )
    if patterns or not what:
        check_patterns("record", patterns)
    return Recorded(what)


class _Recordings(threading.local):
    """The active recordings of this thread, which share one mode.

    A second mode would not see what kernels call.
    """

    def __init__(self) -> None:
        self._active: list[Recorded] = []
        self._mode: Any = None

    def enter(self, recorded: Recorded) -> None:
        if not self._active:
            self._mode = observing.observing_mode(partial(_record, self._active))
            self._mode.__enter__()
        self._active.append(recorded)

    def exit(self, recorded: Recorded, *error: Any) -> None:
        # Not `index`: recordings with the same calls are equal.
        if not (indices := [i for i, each in enumerate(self._active) if each is recorded]):
            raise RuntimeError(
                "record(...) was exited in another thread than the one that entered it; exit it "
                "there."
            )
        del self._active[indices[-1]]
        if not self._active:
            mode, self._mode = self._mode, None
            mode.__exit__(*error)


def _record(active: list[Recorded], *call: Any) -> None:
    # It may be called in another thread: PyTorch runs backward in some, in the modes of this one.
    for recorded in {id(recorded): recorded for recorded in active}.values():
        recorded._record(*call)


_recordings = _Recordings()
