"""Define an operator with the schema of another one, and an empty kernel."""

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
    """Define an operator like `op` with a kernel that only returns `result`.

    Args:
        op: the original operator.
        kernel: the original kernel, whose signature determines how calls pass defaults.
        result: the result of all calls.
        is_custom_op: whether to use `custom_op`, or `define` and `impl`.
    """

    def empty(*args: Any, **kwargs: Any) -> Any:
        return result

    empty.__signature__ = inspect.signature(kernel)  # type: ignore[attr-defined]
    name, schema = f"op{next(_numbers)}", str(op._schema)
    # The schema is printed with `($0! -> )` for mutated arguments, which the parser rejects.
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
