"""The dispatcher's operators: names, schemas, tags and overloads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.library
from torch.fx import GraphModule

from torchop._compat.classes import FunctionSchema, OpOverload, OpOverloadPacket, Tag

# Returns an operator's schema, given its name and overload, or raises RuntimeError if it is not
# defined.
registered_schema: Callable[[str, str], FunctionSchema] = torch._C._get_schema


def parts(qualname: str) -> tuple[str, str, str]:
    """Split an operator's name into namespace, name and overload."""
    namespace, _, name = re.sub(r"\s", "", qualname).partition("::")
    return (namespace, *name.partition(".")[::2])


def joined(namespace: str, name: str, overload: str) -> str:
    return f"{namespace}::{name}" + (f".{overload}" if overload else "")


def is_registered(name: str, overload: str) -> bool:
    """Return whether the dispatcher has a schema for this operator."""
    return torch._C._get_operation_overload(name, overload) is not None


def registered_tags(name: str, overload: str) -> tuple[Tag, ...]:
    return tuple(torch._C._get_operation_overload(name, overload)[2])


def has_entry(namespace: str, name: str, overload: str) -> bool:
    """Return whether the dispatcher has a schema or a kernel for an operator."""
    return torch._C._dispatch_has_kernel(joined(namespace, name, overload))


def all_operators() -> set[str]:
    """Return the names of all defined operators.

    The dispatcher also lists operators that have a kernel but no schema, so filter by schema. Do
    not use `is_registered` for this: TorchScript's `OperatorRegistry` (torch/csrc/jit/runtime/
    operator.cpp) caches operators, and would read freed memory for deregistered ones.
    """
    return set(filter(has_schema, torch._C._dispatch_get_all_op_names()))


def has_schema(qualname: str) -> bool:
    """Return whether an operator is defined, without reading TorchScript's operator registry."""
    name, _, overload = qualname.partition(".")
    try:
        torch._C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return False
    # The dispatcher keeps malformed names of failed definitions, such as "::op".
    return name.count("::") == 1 and not name.startswith(":")


def is_defined_in_python(qualname: str) -> bool:
    """Return whether a `torch.library.Library` defined an operator."""
    return qualname in torch.library._defs


def defined_in_python() -> set[str]:
    """Return the operators that `torch.library.Library` objects defined."""
    # PyTorch stores names as written, and one of its own contains a newline. Copy the set, because
    # a garbage collection may finalize libraries, which removes names from the set.
    names = (re.sub(r"\s", "", name) for name in torch.library._defs.copy())
    return set(filter(has_schema, names))


def in_graph(graph: GraphModule) -> list[OpOverload]:
    """Return the operators that a graph calls or passes to higher-order operators, sorted."""
    values = {
        value
        for module in graph.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        for value in (node.target, *node.args, *node.kwargs.values())
        if isinstance(value, (OpOverload, OpOverloadPacket))
    }
    packets = (value for value in values if isinstance(value, OpOverloadPacket))
    overloads = (getattr(packet, name) for packet in packets for name in packet.overloads())
    found = {op for op in (*values, *overloads) if isinstance(op, OpOverload)}
    return sorted(found, key=OpOverload.name)


def overload_names(qualname: str) -> list[str]:
    """Return the overload names of `namespace::name`; the default overload is ""."""
    _, names = torch._C._jit_get_operation(qualname)
    return list(names or ())


def chosen_overload(
    packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> OpOverload:
    """Return the overload that a packet selects for these arguments.

    Raises:
        RuntimeError: no overload accepts the arguments.
    """
    name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    return cast(OpOverload, getattr(packet, name))


def registration_site(qualname: str, overload: str) -> str:
    """Return the file and line where the library that defines an operator was created.

    Returns "(unknown)" for libraries without a location.
    """
    handle = torch._C._dispatch_find_schema_or_throw(qualname, overload)
    site = re.search(r"registered at (.*:\d+)$", handle.debug(), re.MULTILINE)
    return site.group(1) if site else "(unknown)"
