"""record: which operators a program calls, and with what kind of arguments."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchop._compat import modes

if TYPE_CHECKING:
    from typing_extensions import Self

# What is recorded as it is; anything else by its type, of which no example can be made.
_PLAIN = (
    type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format
)  # fmt: skip


class TensorRecord(NamedTuple):
    """What is recorded of a tensor.

    Attributes:
        dtype: of its elements.
        shape: of it.
        device: where it lies.
        requires_grad: whether it requires grad.

    Example:
        >>> import torch, torchop
        >>> torchop.TensorRecord(torch.int8, (2,), "cpu", False).example()
        tensor([1, 1], dtype=torch.int8)
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    requires_grad: bool

    def example(self) -> torch.Tensor:
        """A tensor of this kind, of ones."""
        made = torch.ones(self.shape, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)


class CallRecord(NamedTuple):
    """What is recorded of a call.

    Attributes:
        args: tensors as `TensorRecord`, what is no plain value as its type, the rest as it is.
        kwargs: the same.

    Example:
        >>> import torch, torchop
        >>> call = torchop.CallRecord((2.0, torch.Generator), {})
        >>> call.example() is None  # nothing is known of the generator
        True
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Arguments of this kind; None if one was recorded by its type."""
        try:
            args = tuple(map(_example, self.args))
            return args, {name: _example(value) for name, value in self.kwargs.items()}
        except TypeError:
            return None


class Recorded(Mapping[str, list[tuple[CallRecord, int]]]):
    """The calls by the name of the operator: each kind of call, with how often it came.

    Example:
        >>> import torch, torchop
        >>> with torchop.record("aten::*") as recorded:
        ...     _ = torch.ones(2).sin()
        >>> sorted(recorded)
        ['aten::ones', 'aten::sin']
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._patterns = patterns
        self._counts: dict[str, Counter[str]] = {}
        self._kinds: dict[str, CallRecord] = {}
        self._mode: Any = None

    def __getitem__(self, op: str) -> list[tuple[CallRecord, int]]:
        return [(self._kinds[kind], count) for kind, count in self._counts[op].most_common()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def __enter__(self) -> Self:
        self._mode = modes.observing_mode(self._note)
        self._mode.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        mode, self._mode = self._mode, None
        mode.__exit__(kind, error, traceback)

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns):
            return
        call = CallRecord(
            tuple(map(_record, args)),
            {key: _record(value) for key, value in kwargs.items()},
        )
        text = repr(call)  # 1, 1.0 and True are equal, and not the same call
        self._kinds.setdefault(text, call)
        self._counts.setdefault(name, Counter())[text] += 1


def record(*patterns: str) -> Recorded:
    """Notes which operators a block calls, with dtypes and shapes, and no contents of tensors.

    While the block runs, all calls go through the dispatcher.

    Args:
        patterns: names of operators, as for `accelerate`.

    Returns:
        What to use in a `with` statement; afterwards a mapping from the name of an operator to its
        kinds of calls, the most frequent first, each with how often it came.

    Raises:
        ValueError: no pattern, or one that no name can match.
        TypeError: a pattern is not a string.

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

    The idea is `torch.jit.trace`'s: to see what a program does, run it.
    """
    from torchop._accelerate import check_patterns

    check_patterns("record", patterns)
    return Recorded(patterns)


def _record(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        shape = tuple(map(int, value.shape))
        return TensorRecord(value.dtype, shape, str(value.device), value.requires_grad)
    if isinstance(value, (list, tuple)):
        return [_record(item) for item in value]
    return value if type(value) in _PLAIN else type(value)


def _example(recorded: Any) -> Any:
    if isinstance(recorded, TensorRecord):
        return recorded.example()
    if isinstance(recorded, list):
        return [_example(item) for item in recorded]
    if isinstance(recorded, type):
        raise TypeError(f"no example can be made of {recorded.__name__}")
    return recorded
