"""Which of PyTorch's inner functions a function is, and what it closes over.

A function is known by its code object, which is a constant of the function that makes it. What it
closes over says for which operator it was made.
"""

from __future__ import annotations

import contextlib
from types import CodeType, FunctionType
from typing import Any


def made_by(function: Any, maker: Any, *names: str) -> dict[str, Any] | None:
    """What a function closes over, if it is the one of these names inside `maker`; else None."""
    code = _code_inside(maker, *names)
    if (
        code is None
        or not isinstance(function, FunctionType)
        or function.__code__ is not code
        or function.__globals__ is not maker.__globals__
        or function.__defaults__ is not None
        or function.__kwdefaults__ is not None
    ):
        return None
    found = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that was never assigned
            found[name] = cell.cell_contents
    return found


def _code_inside(function: Any, *names: str) -> CodeType | None:
    """The code of a function inside a function, by their names; None if there is none."""
    code: CodeType | None = getattr(function, "__code__", None)
    for name in names:
        constants = code.co_consts if code is not None else ()
        found = [c for c in constants if isinstance(c, CodeType) and c.co_name == name]
        code = found[0] if len(found) == 1 else None
    return code
