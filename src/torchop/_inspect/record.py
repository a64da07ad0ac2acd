"""`record`: record the operators that a program calls, with the metadata of the arguments."""

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
from torchop._inspect.registrant import no_operator_reason, registers
from torchop.extend import OpName, short_repr, warn

if TYPE_CHECKING:
    from typing_extensions import Self

# The maximum number of distinct calls to store per operator. Without a limit, an argument that
# changes in every call, such as an optimizer's step count, would use more and more memory.
MAX_KINDS = 100


class Recorded(Mapping[str, list[tuple[CallRecord, int]]]):
    """Maps operators to their distinct calls, each with the number of times it was made.

    `torchop.record` creates a `Recorded`, and a `with` statement starts and ends the recording. You
    may enter a `Recorded` several times, even nested, and in several threads at the same time. For
    each operator, it stores up to 100 distinct calls, and only counts further calls (see `calls`).

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
        # For each operator, counts how often each distinct call was made. The keys of the counters
        # are the reprs of the calls, because the calls themselves can be equal although they
        # differ: 1, 1.0 and True are equal in Python. The key "" counts the calls beyond
        # `MAX_KINDS`.
        self._counts: dict[str, Counter[str]] = {}
        self._kinds: dict[str, CallRecord] = {}  # maps the repr of a call to the call
        self._lock = threading.RLock()  # one thread may read while others record

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
        """Return how often an operator was called, including calls that are not stored.

        Args:
            op: the operator's name.

        Returns:
            The number of calls; 0 if the operator was not called.
        """
        return sum(self._counts.get(op, {}).values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calls to a human-readable JSON file, which `load` reads.

        The file contains plain arguments, such as numbers and strings, but no tensor data.

        Args:
            path: the path of the file. If the file exists, it is replaced only once the new one is
                complete.

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
        from torchop._inspect import recording_file  # few programs need it

        with self._lock:
            text = recording_file.dumps({op: self._all_calls(op) for op in self})
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():  # e.g. /dev/stdout
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
        """Read a file that `save` wrote, without executing code from the file.

        Args:
            path: the file, which may be from another machine.

        Returns:
            A recording with the calls from the file. You cannot enter it to add calls.

        Raises:
            ValueError: `save` did not write the file. The message says where the error is.
            OSError: the file cannot be read.

        Example: see `save`.
        """
        from torchop._inspect import recording_file  # few programs need it

        loaded = cls(())
        for op, (call, count) in recording_file.read(Path(path)):
            loaded._add(op, call, count)
        return loaded

    def update(self, other: Recorded) -> None:
        """Add the calls from another recording.

        Args:
            other: the other recording. It is not changed.

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
        """Return an operator's distinct calls and their counts.

        If there were more than `MAX_KINDS` distinct calls, the last item pairs None with the number
        of calls that are not stored.
        """
        with self._lock:
            counts = sorted(self._counts[op].most_common(), key=lambda count: not count[0])
            return [(self._kinds.get(kind), count) for kind, count in counts]

    def _add(self, op: str, call: CallRecord | None, count: int = 1) -> None:
        """Add a call that was made `count` times. `call` is None for calls beyond `MAX_KINDS`."""
        kind = "" if call is None else repr(call)
        with self._lock:
            counts = self._counts.setdefault(op, Counter())
            if kind not in counts and len(counts) - ("" in counts) >= MAX_KINDS:
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
            if (problem := _no_match_reason(what)) is not None:
                warn(problem, NothingToAccelerateWarning)

    def _record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name not in self._matches:
            op = OpName.parse(name)
            self._matches[name] = any(_is_wanted(op, what) for what in self._what)
        if self._matches[name] and (call := observed(args, kwargs)) is not None:
            self._add(name, call)


def _is_wanted(op: OpName, what: str | ModuleType) -> bool:
    return is_match(op, what) if isinstance(what, str) else registers(what.__name__, op)


def _no_match_reason(what: str | ModuleType) -> str | None:
    if isinstance(what, str):
        return why_nothing_matches("record", what)
    return no_operator_reason(what.__name__)


def record(*what: str | ModuleType) -> Recorded:
    """Record the operators that a block calls, with dtypes and shapes but without tensor data.

    Recording does not change the results of calls, but all calls in this thread become slower,
    because they go through the dispatcher and a TorchDispatchMode.

    Args:
        what: patterns of operator names such as `"mylib::*"`, as in `accelerate`, or packages. A
            package stands for all operators that it defines in Python or registers Python kernels
            for.

    Returns:
        A `Recorded`, for use in a `with` statement. After the block, it maps the name of each
        operator to its distinct calls and how often they were made, most frequent first.

    Raises:
        ValueError: there is no pattern, or no operator's name can match a pattern.
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

    Like `torch.jit.trace`, this observes a program while it runs.
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
    """The active recordings of this thread, which share a single TorchDispatchMode.

    With a separate mode for each recording, only the innermost mode would see calls inside kernels.
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
        # Compare by identity instead of using `list.index`, because recordings that contain the
        # same calls are equal.
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
    # The autograd engine may run a backward pass in another thread, with the modes of the thread
    # that started it. So take the recordings as an argument instead of looking them up in the
    # current thread.
    for recorded in {id(recorded): recorded for recorded in active}.values():
        recorded._record(*call)


_recordings = _Recordings()
