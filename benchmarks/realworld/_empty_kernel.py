"""An operator that is called as another one is, and whose kernel returns at once."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any

import torch

from torchop._compat import dispatch

NAMESPACE = "realworld_empty"
_KEYS = ("CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
_numbers = itertools.count()
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def twin(op: Any, kernel: Callable[..., Any], result: Any, is_custom_op: bool) -> Any:
    """Registers it.

    Args:
        op: the other operator.
        kernel: its kernel, whose signature decides what a call does about defaults.
        result: what is returned each time.
        is_custom_op: whether it was made by `custom_op`; else by `define` and `impl`.
    """

    def empty(*args: Any, **kwargs: Any) -> Any:
        return result

    empty.__signature__ = inspect.signature(kernel)  # type: ignore[attr-defined]
    name, schema = f"op{next(_numbers)}", str(op._schema)
    # What is written is printed as `($0! -> )`, which the parser does not read.
    schema = re.sub(r"\(\$?(\w+)! -> \)", r"(a\1!)", schema[schema.index("(") :])
    if is_custom_op:
        written = [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
        qualname = f"{NAMESPACE}::{name}"
        torch.library.custom_op(qualname, empty, mutates_args=written, schema=schema)
    else:
        _library.define(name + schema)
        for key in filter(lambda key: dispatch.has_kernel(op._name, key), _KEYS):
            _library.impl(name, empty, key)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
