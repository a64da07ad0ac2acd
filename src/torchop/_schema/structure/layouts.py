"""Layouts: the parts of structured results that are not tensors, such as strings and dict keys.

Compilers and the dispatcher support few result types besides tensors. So an operator returns its
tensors and a single int, which stands for everything else in the result. The int identifies the
*layout*, i.e. a tuple with the values of all non-tensor parts. In compiled code, the fake kernel
determines the layout, so the int is a constant.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchop._compat import compilers
from torchop._errors import ResultError


class Layouts:
    """The layouts (non-tensor parts of results) that an operator has returned. None is removed."""

    def __init__(self, op: object, places: Sequence[str]) -> None:
        self._op = op
        self._places = places
        self._lock = threading.Lock()
        self._numbers: dict[Any, int] = {}
        self._values: dict[int, tuple[Any, ...]] = {}
        values = self._values

        @compilers.constant_in_traces
        def values_of(number: int) -> tuple[Any, ...]:
            return values[number]

        self.values_of: Callable[[int], tuple[Any, ...]] = values_of

    def number_of(self, values: tuple[Any, ...], exact: tuple[str, ...] = ()) -> int:
        """Return the number that identifies a layout, i.e. the non-tensor parts of a result.

        `exact` holds the text of each number in `values`. The text tells apart values such as 1.0
        and 1, which are equal but must not share a layout.
        """
        try:
            return self._numbers[values, exact]
        except (KeyError, TypeError):  # symbolic numbers cannot be hashed
            return self._add(values, exact)

    def _add(self, values: tuple[Any, ...], exact: tuple[str, ...]) -> int:
        for place, value in zip(self._places, values, strict=True):
            if _is_symbolic(value):
                raise ResultError(
                    f"{self._op}: {place} is a symbolic number, which depends on a size, but "
                    "compilers need a constant. Return the number as a field of type int outside "
                    "of lists and dicts, or in a tensor."
                )
        # Derive the number from the content, so that it is the same in every process. This matters
        # because files with recorded calls contain the number.
        text = repr((values, exact)).encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big")
        with self._lock:
            while self._values.setdefault(number, values) is not values:
                number += 1
                if self._numbers.get((values, exact)) is not None:
                    return self._numbers[values, exact]
            self._numbers[values, exact] = number
        return number


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_symbolic, value))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
