"""Look up operators in the dispatcher: their names, schemas, tags and overloads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.library

from torchop._compat.classes import FunctionSchema, OpOverload, OpOverloadPacket, Tag

# `registered_schema(name, overload)` returns an operator's schema, or raises RuntimeError if the
# operator is not defined.
registered_schema: Callable[[str, str], FunctionSchema] = torch._C._get_schema


def parts(qualname: str) -> tuple[str, str, str]:
    namespace, _, name = re.sub(r"\s", "", qualname).partition("::")
    return (namespace, *name.partition(".")[::2])


def joined(namespace: str, name: str, overload: str) -> str:
    return f"{namespace}::{name}" + (f".{overload}" if overload else "")


def is_registered(name: str, overload: str) -> bool:
    return torch._C._get_operation_overload(name, overload) is not None


def registered_tags(name: str, overload: str) -> tuple[Tag, ...]:
    return tuple(torch._C._get_operation_overload(name, overload)[2])


def has_entry(namespace: str, name: str, overload: str) -> bool:
    """Return whether the dispatcher has an entry for an operator: a schema, a kernel or both."""
    return torch._C._dispatch_has_kernel(joined(namespace, name, overload))


def all_operators() -> set[str]:
    """Return the names of all defined operators.

    The dispatcher's list also contains operators with a kernel but no schema, so filter the list
    with `has_schema`. `is_registered` would not do, because it reads TorchScript's
    `OperatorRegistry` (torch/csrc/jit/runtime/operator.cpp), whose cache would access freed memory
    for deregistered operators.
    """
    return set(filter(has_schema, torch._C._dispatch_get_all_op_names()))


def has_schema(qualname: str) -> bool:
    """Return whether an operator is defined. Unlike `is_registered`, this is never stale."""
    name, _, overload = qualname.partition(".")
    try:
        torch._C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return False
    # Check the name too, because the dispatcher keeps a malformed name such as "::op" after its
    # definition has failed.
    return name.count("::") == 1 and not name.startswith(":")


def is_defined_in_python(qualname: str) -> bool:
    return qualname in torch.library._defs


def defined_in_python() -> set[str]:
    # Strip whitespace, because PyTorch stores names as written, and one of its own names contains a
    # newline. Iterate over a copy of the set: if the garbage collector finalized a library during
    # the loop, names would be removed from the set, and Python would raise RuntimeError.
    names = (re.sub(r"\s", "", name) for name in torch.library._defs.copy())
    return set(filter(has_schema, names))


def chosen_overload(
    packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> OpOverload:
    """Return the overload that a packet selects for a call. Raise RuntimeError if none matches."""
    name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    return cast(OpOverload, getattr(packet, name))


def registration_site(qualname: str, overload: str) -> str:
    try:
        handle = torch._C._dispatch_find_schema_or_throw(qualname, overload)
    except RuntimeError:  # another thread has just deregistered the operator
        return "(unknown)"
    site = re.search(r"registered at (.*:\d+)$", handle.debug(), re.MULTILINE)
    return site.group(1) if site else "(unknown)"
