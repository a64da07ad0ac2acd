"""`python -m torchop stubs`: tells editors and type checkers what `torch.ops` holds."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import click

from torchop._compat import ops_stub
from torchop.cli.selection import Selection, require, selecting
from torchop.extend import Argument, Operator, Schema

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
    require("jinja2", "writing stubs")
    overloads = []
    for op in selection.operators:
        operator = Operator(op, "stubs")
        name = operator.name
        if all(map(_is_name, (name.namespace, name.name, name.overload or "default"))):
            overloads.append(operator)
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


def source(overloads: Sequence[Operator]) -> str:
    """The stub of the module that `torch.ops` is in, with these operators."""
    from jinja2 import Template  # not all commands need it

    text = resources.files(__package__).joinpath("stubs.pyi.jinja").read_text(encoding="utf-8")
    names = sorted({overload.name.namespace for overload in overloads})
    namespaces = {name: f"_Namespace{number}_{name}" for number, name in enumerate(names)}
    classes = Template(text, trim_blocks=True, lstrip_blocks=True).render(
        overloads=overloads,
        namespaces=namespaces,
        parameters=_parameters,
        result=_result,
        ascii=ascii,
    )
    return ops_stub.typed_source(namespaces, classes)


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
