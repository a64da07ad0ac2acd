"""data_dependent: what a fake kernel returns for a value that it cannot know."""

from __future__ import annotations

from typing import Any


class _DataDependent:
    def __repr__(self) -> str:
        return "torchop.data_dependent"

    def __reduce__(self) -> str:
        return "data_dependent"  # there is one in a process


data_dependent: Any = _DataDependent()
"""What a fake kernel returns in place of a value that only the data of tensors decides."""
