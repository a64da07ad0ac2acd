"""Define a copy of an operator whose kernel does nothing."""

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
    """Define an operator with the schema of `op` and a kernel that only returns `result`.

    The new kernel gets the signature of `kernel`, because the signature determines how default
    values are passed. If `is_custom_op` is true, the operator is defined with `custom_op`,
    otherwise with `define` and `impl`.
    """

    def empty(*args: Any, **kwargs: Any) -> Any:
        return result

    empty.__signature__ = inspect.signature(kernel)  # type: ignore[attr-defined]
    name, schema = f"op{next(_numbers)}", str(op._schema)
    # `str` prints alias annotations of mutated arguments as `($0! -> )`, but the parser rejects
    # this.
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
