"""Which operators the dispatcher knows, and what it knows of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.library

from torchop._compat.classes import FunctionSchema, OpOverload, OpOverloadPacket, Tag

# The schema of an operator that the dispatcher knows, by name and overload; or RuntimeError.
registered_schema: Callable[[str, str], FunctionSchema] = torch._C._get_schema


def parts(qualname: str) -> tuple[str, str, str]:
    """The namespace, the name and the overload of an operator, as PyTorch writes them in one."""
    namespace, _, name = re.sub(r"\s", "", qualname).partition("::")
    return (namespace, *name.partition(".")[::2])


def joined(namespace: str, name: str, overload: str) -> str:
    """The parts of a name in one, as PyTorch writes them."""
    return f"{namespace}::{name}" + (f".{overload}" if overload else "")


def is_registered(name: str, overload: str) -> bool:
    """Whether the dispatcher has a schema for this operator, whoever defined it."""
    return torch._C._get_operation_overload(name, overload) is not None


def registered_tags(name: str, overload: str) -> tuple[Tag, ...]:
    """The tags of an operator that the dispatcher knows."""
    return tuple(torch._C._get_operation_overload(name, overload)[2])


def has_entry(namespace: str, name: str, overload: str) -> bool:
    """Whether the dispatcher has an entry of this name: a schema, or a kernel without one."""
    return torch._C._dispatch_has_kernel(joined(namespace, name, overload))


def all_operators() -> set[str]:
    """The names of all operators that are defined.

    The dispatcher also lists those that have a kernel and were never defined.

    TorchScript's registry, which `is_registered` uses, must not be asked about an operator that
    may be destroyed: it remembers some, and reads freed memory.
    """
    return set(filter(has_schema, torch._C._dispatch_get_all_op_names()))


def has_schema(qualname: str) -> bool:
    """Return whether an operator is defined, without asking TorchScript's registry."""
    name, _, overload = qualname.partition(".")
    try:
        torch._C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return False
    # A definition that failed leaves names behind that cannot be split, such as "::op".
    return name.count("::") == 1 and not name.startswith(":")


def is_defined_in_python(qualname: str) -> bool:
    """Whether an operator was defined through a library of `torch.library`, or of ours."""
    return qualname in torch.library._defs


def defined_in_python() -> set[str]:
    """The names of the operators that were defined through a library in Python."""
    # PyTorch keeps the names as they were written, one of them with a new line. A copy, because a
    # garbage collection may finalize libraries, which removes their names.
    names = (re.sub(r"\s", "", name) for name in torch.library._defs.copy())
    return set(filter(has_schema, names))


def overload_names(qualname: str) -> list[str]:
    """The overloads defined under `namespace::name`; the default one is the empty string."""
    _, names = torch._C._jit_get_operation(qualname)
    return list(names or ())


def chosen_overload(
    packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> OpOverload:
    """The overload that a call of a packet would call; RuntimeError if none takes the arguments."""
    name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    return cast(OpOverload, getattr(packet, name))


def registration_site(qualname: str, overload: str) -> str:
    """The file and line where the library was made that defined an operator, or "(unknown)"."""
    handle = torch._C._dispatch_find_schema_or_throw(qualname, overload)
    site = re.search(r"registered at (.*:\d+)$", handle.debug(), re.MULTILINE)
    return site.group(1) if site else "(unknown)"
