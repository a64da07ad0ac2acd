"""`python -m torchop new`: a package of operators that builds, tests and publishes itself."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import click

import torchop
from torchop._errors import OperatorNameError, short_repr, short_text
from torchop._schema import naming


class _Kind(NamedTuple):
    """What a new package has."""

    name: str
    native: str
    hf: bool

    @property
    def package(self) -> str:
        return f"torch-ext/{self.name}" if self.hf else f"src/{self.name}"

    @property
    def hub_name(self) -> str:
        """The name on the Hub of Hugging Face, which has dashes in place of underscores."""
        return self.name.replace("_", "-")

    def op(self, name: str) -> str:
        """How the source of the package writes the name of an operator."""
        return f'add_op_namespace_prefix("{name}")' if self.hf else f'"{self.name}::{name}"'

    def files(self) -> dict[str, str]:
        """The template of each file."""
        files = {
            "pyproject.toml": "pyproject.toml",
            "README.md": "README.md",
            ".gitignore": "gitignore",
            ".github/workflows/test.yml": "workflow.yml",
            "tests/test_operators.py": "test_operators.py",
            f"{self.package}/__init__.py": "init.py",
            f"{self.package}/__main__.py": "main.py",
            f"{self.package}/triton_ops.py": "triton_ops.py",
            f"{self.package}/numpy_ops.py": "numpy_ops.py",
        }
        if self.native != "none":
            files |= {
                f"{self.package}/native_ops.py": "native_ops.py",
                "csrc/softcap.cpp": "softcap.cpp",
                "hatch_build.py": "hatch_build.py",
            }
        if self.hf:
            files |= {"build.toml": "build.toml", f"{self.package}/_ops.py": "ops.py"}
        return files


@click.command()
@click.argument("name")
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
    _check_name(name)
    if importlib.util.find_spec("jinja2") is None:
        raise click.ClickException("a new package needs jinja2: pip install jinja2")
    if hf_kernels and native not in (None, "none"):
        raise click.UsageError(
            "--hf-kernels goes with --native none: kernel-builder compiles C++ by rules of its own."
        )
    kind = _Kind(name, native or ("none" if hf_kernels else "ctypes"), hf_kernels)
    if hf_kernels and not re.fullmatch("[a-z][-a-z0-9]*[a-z0-9]", kind.hub_name):
        raise click.BadParameter(
            f"a name on the Hub of Hugging Face has two characters or more, begins with a letter, "
            f"and ends with a letter or a digit; got {short_repr(name)}",
            param_hint="NAME",
        )
    folder = out or Path(name)
    if folder.exists():
        raise click.ClickException(f"{folder} exists already; choose another name, or --out.")
    try:
        _write(kind, folder)
    except OSError as error:
        raise click.ClickException(f"{folder} cannot be made: {error.strerror}") from None
    click.echo(folder)
    click.echo(f"Next: cd {folder} && pip install -e '.[test]' && pytest", err=True)


def _check_name(name: str) -> None:
    try:
        if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
            spelling = re.sub(r"\W", "_", name.lower())
            is_better = spelling.isidentifier() and not keyword.iskeyword(spelling)
            raise OperatorNameError(
                f"{short_repr(name)} is not a name for a package, such as "
                f"{short_text(spelling) if is_better else 'mykernels'}"
            )
        naming.check_new(f"{name}::operator")
    except OperatorNameError as error:
        raise click.BadParameter(str(error), param_hint="NAME") from None
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise click.BadParameter(
            f"there is a module {name} already, which this package would hide or replace when it "
            "is installed; choose a name that cannot be imported here",
            param_hint="NAME",
        )


def _write(kind: _Kind, folder: Path) -> None:
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
    values = {
        "name": kind.name,
        "native": kind.native,
        "hf": kind.hf,
        "hub_name": kind.hub_name,
        "package": kind.package,
        "op": kind.op,
        "torchop": torchop.__version__,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        tree = Path(scratch, "package")
        for path, template in kind.files().items():
            file = tree / path
            file.parent.mkdir(parents=True, exist_ok=True)
            text = environment.get_template(f"{template}.jinja").render(values)
            file.write_text(text, encoding="utf-8")
        tree.rename(folder)
