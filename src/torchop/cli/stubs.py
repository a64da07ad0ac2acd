"""`python -m torchop stubs`: tells editors and type checkers what `torch.ops` holds."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from torchop._compat import torch_ops
from torchop._core.registry import find_schema
from torchop._schema import naming
from torchop._schema.naming import OpName
from torchop._schema.schema import Argument, Schema
from torchop.cli.selection import Selection, selecting

# What becomes a name in the source. The dispatcher accepts more; such operators are left out.
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TYPES: Mapping[str, str] = {
    "Tensor": "torch.Tensor",
    "int": "int",
    "SymInt": "int | torch.SymInt",
    "float": "float",
    "SymFloat": "float | torch.SymFloat",
    "bool": "bool",
    "SymBool": "bool | torch.SymBool",
    "complex": "complex",
    "number": "int | float | bool | complex",
    "Scalar": "int | float | bool | complex",
    "str": "str",
    "ScalarType": "torch.dtype",
    "Device": "torch.device | str",
    "Layout": "torch.layout",
    "MemoryFormat": "torch.memory_format",
    "Generator": "torch.Generator",
}


class Overload(NamedTuple):
    """One operator in a stub."""

    name: OpName
    schema: Schema


@click.command()
@selecting
@click.option(
    "-o",
    "out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder to write into. It is made if it does not exist.",
)
def stubs(selection: Selection, out: Path) -> None:
    """Writes type stubs for calls through torch.ops.

    Editors complete such calls with them, and type checkers check them. Name all your packages in
    one command, because the stubs replace one module of PyTorch's own types. Run the command again
    after an update of PyTorch.
    """
    overloads = []
    for op in selection.operators:
        name = naming.parse(op)
        if all(map(_is_name, (name.namespace, name.name, name.overload or "default"))):
            overloads.append(Overload(name, find_schema(name)))
        else:
            click.echo(f"left out, because its name is not a Python name: {op!a}", err=True)
    folder = out / "torch-stubs"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "_ops.pyi").write_text(source(overloads), encoding="utf-8")
    # PEP 561: the other modules are those of PyTorch.
    (folder / "py.typed").write_text("partial\n", encoding="utf-8")
    click.echo(folder / "_ops.pyi")


def _is_name(text: str) -> bool:
    # Checkers take two underscores for a private name, or a parameter without a name.
    is_name = bool(_IDENTIFIER.fullmatch(text)) and not keyword.iskeyword(text)
    return is_name and not text.startswith("__")


def source(overloads: Sequence[Overload]) -> str:
    """The stub of the module that `torch.ops` is in, with these operators."""
    namespaces: dict[str, dict[str, list[Overload]]] = {}
    for overload in overloads:
        packets = namespaces.setdefault(overload.name.namespace, {})
        packets.setdefault(overload.name.name, []).append(overload)
    lines: list[str] = []
    attributes = {}
    for number, (namespace, packets) in enumerate(sorted(namespaces.items())):
        # Numbers keep classes apart: `a_b::c` and `a::b_c` would have one name.
        kind = f"_Namespace{number}_{namespace}"
        attributes[namespace] = kind
        members = []
        for index, (name, members_of_packet) in enumerate(sorted(packets.items())):
            packet = f"_Packet{number}_{index}_{name}"
            lines += _packet(packet, members_of_packet)
            members.append(f"    {name}: {packet}")
        # No base class: an operator that is not there is an error.
        lines += [f"class {kind}:", *members, ""]
    return torch_ops.typed_source(attributes, "\n".join(lines))


def _packet(kind: str, overloads: Sequence[Overload]) -> Iterator[str]:
    lines = [f"class {kind}(OpOverloadPacket[..., Any]):  # type: ignore"]
    for number, (name, schema) in enumerate(overloads):
        overload = f"{kind}_{number}"
        yield f"class {overload}(OpOverload[..., Any]):  # type: ignore"
        yield from _call(schema, is_overloaded=False)
        yield ""
        lines.append(f"    {name.overload or 'default'}: {overload}  # type: ignore")
    for _, schema in overloads:
        lines += _call(schema, is_overloaded=len(overloads) > 1)
    yield from (*lines, "")


def _call(schema: Schema, is_overloaded: bool) -> Iterator[str]:
    if is_overloaded:
        yield "    @_overload"
    parameters, result = _parameters(schema), _result(schema)
    yield f"    def __call__({parameters}) -> {result}:  # type: ignore"
    # A literal, in which nothing of the schema can end the string.
    yield f"        {schema.text!a}"


def _parameters(schema: Schema) -> str:
    names = [argument.name for argument in schema.arguments]
    if not all(_is_name(name) and name != "_op" for name in names):
        return "self, /, *args: Any, **kwargs: Any"
    parts = ["_op" if "self" in names else "self", "/", *map(_parameter, schema.positional)]
    if schema.keyword_only:
        parts += ["*", *map(_parameter, schema.keyword_only)]
    return ", ".join(parts)


def _parameter(argument: Argument) -> str:
    text = f"{argument.name}: {_type(argument.kind, is_result=False)}"
    return f"{text} = {_default(argument.default)}" if argument.has_default else text


def _default(value: Any) -> str:
    if value is None or type(value) in (bool, int, str):
        return ascii(value)
    return repr(value) if type(value) is float and math.isfinite(value) else "..."


def _type(kind: str, is_result: bool) -> str:
    for prefix in ("Optional", "List"):
        if kind.startswith(f"{prefix}[") and kind.endswith("]"):
            item = _type(kind[len(prefix) + 1 : -1], is_result)
            if prefix == "Optional":
                return f"{item} | None"
            return f"list[{item}]" if is_result else f"_Sequence[{item}]"
    return _TYPES.get(kind, "Any")


def _result(schema: Schema) -> str:
    results = [_type(kind, is_result=True) for kind in schema.returns]
    if not results:
        return "None"
    return results[0] if len(results) == 1 else f"tuple[{', '.join(results)}]"
