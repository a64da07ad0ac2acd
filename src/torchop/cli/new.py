"""`python -m torchop new`: a package of operators that builds, tests and publishes itself."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import keyword
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

import torchop
from torchop import OperatorNameError
from torchop.cli.selection import require
from torchop.extend import OpName, short_repr, short_text
from torchop.testing._extras import ON_INDEX


def _name(context: click.Context, argument: click.Parameter, name: str) -> str:
    """The name of a package that can be made."""
    spelling = re.sub(r"\W", "_", name.lower())
    is_name = spelling.isidentifier() and not keyword.iskeyword(spelling)
    if name != spelling or not is_name:
        example = short_text(spelling) if is_name else "mykernels"
        raise click.BadParameter(
            f"{short_repr(name)} is not a name for a package, such as {example}"
        )
    try:
        OpName.parse_new(f"{name}::operator")
    except OperatorNameError as error:
        raise click.BadParameter(str(error)) from None
    spec = importlib.util.find_spec(name)
    taken = ""
    # A folder without an `__init__.py` has no origin: it may be that of an earlier package.
    if name in sys.stdlib_module_names or (spec is not None and spec.origin is not None):
        taken = "a module"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution(name)
        taken = taken or "an installed package"
    if taken:
        raise click.BadParameter(
            f"there is {taken} {name} already, which this package would hide or replace when it "
            "is installed; choose a name that is not in use here"
        )
    return name


@click.command()
@click.argument("name", callback=_name)
@click.option(
    "--native",
    type=click.Choice(["ctypes", "torch", "none"]),
    help="The kernel in C++: called through ctypes, defined as an operator with TORCH_LIBRARY, or "
    "none. The default is ctypes. With --hf-kernels, it is none.",
)
@click.option(
    "--hf-kernels",
    is_flag=True,
    help="Use the layout of Hugging Face's kernels: build.toml, torch-ext, a namespace for each "
    "version.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder to make. The default is NAME in the working directory.",
)
def new(name: str, native: str | None, hf_kernels: bool, out: Path | None) -> None:
    """Writes a new package with operators, tests and CI.

    NAME is the name of the package and the namespace of its operators. The package has an operator
    in Triton with a fallback for CPUs, one in NumPy and one in C++. It also has tests, a workflow
    for continuous integration, and all that publishing needs.
    """
    require("jinja2", "a new package")
    if hf_kernels and native not in (None, "none"):
        raise click.UsageError(
            "--hf-kernels goes with --native none: kernel-builder compiles C++ by rules of its own."
        )
    hub_name = name.replace("_", "-")
    if hf_kernels and not re.fullmatch("[a-z][-a-z0-9]*[a-z0-9]", hub_name):
        raise click.BadParameter(
            f"a name on the Hub of Hugging Face has two characters or more, begins with a letter, "
            f"and ends with a letter or a digit; got {short_repr(name)}",
            param_hint="NAME",
        )
    values = {
        "name": name,
        "native": native or ("none" if hf_kernels else "ctypes"),
        "hf": hf_kernels,
        "hub_name": hub_name,
        "package": f"{'torch-ext' if hf_kernels else 'src'}/{name}",
        "torchop": torchop.__version__,
        "on_index": ON_INDEX,
        # How the source of the package writes the name of an operator.
        "op": ('add_op_namespace_prefix("{}")' if hf_kernels else f'"{name}::{{}}"').format,
    }
    folder = out or Path(name)
    if folder.exists():
        raise click.ClickException(f"{folder} exists already; choose another name, or --out.")
    try:
        _write(values, folder)
    except OSError as error:
        raise click.ClickException(f"{folder} cannot be made: {error.strerror}") from None
    click.echo(folder)
    click.echo(f"Next: cd {folder} && pip install -e '.[test]' && pytest", err=True)


def _write(values: dict[str, Any], folder: Path) -> None:
    """Writes all files, or none."""
    # Only this command needs it.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("torchop.cli", "template"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        tree = Path(scratch, "package")
        for template in environment.list_templates():
            path = template.removesuffix(".jinja").replace("package/", f"{values['package']}/")
            file = tree / path
            text = environment.get_template(template).render(values)
            if text:  # otherwise it is of another kind of package
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
        tree.rename(folder)
