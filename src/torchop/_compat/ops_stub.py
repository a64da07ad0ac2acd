"""The source of PyTorch's module of `torch.ops`, for a stub of it."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping

import torch
from torch._ops import _OpNamespace


def typed_source(namespaces: Mapping[str, str], classes: str) -> str:
    """The source of PyTorch's module of `torch.ops`, as a stub with more types in it.

    Args:
        namespaces: the name of a class for each namespace, which is an attribute of `torch.ops`.
        classes: the source of these classes.
    """
    lines = inspect.getsource(sys.modules[_OpNamespace.__module__]).splitlines()
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.ClassDef) and node.name == type(torch.ops).__name__:
            first = node.body[0].lineno - 1
            attributes = [
                f"    {name}: {kind}  # type: ignore" for name, kind in namespaces.items()
            ]
            lines[first:first] = attributes
    # A stub is no program: it needs no annotations of the future, and its classes may come last.
    names = (
        "from collections.abc import Sequence as _Sequence",
        "from typing import Any",
        "from typing import overload as _overload",
        "import torch",
    )
    return "\n".join([*lines, "", *names, "", classes])
