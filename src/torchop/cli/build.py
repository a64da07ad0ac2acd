"""`python -m torchop build`: compiles the native call path, and shows where it is."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import click

from torchop._errors import NativeUnavailableError
from torchop._native.extension import api as native
from torchop._native.extension import files
from torchop._native.extension.recipe import make_recipe
from torchop.cli.native_wheel import write_wheel


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder for the compiled file, to which TORCHOP_NATIVE_DIR can point. The default is "
    "your cache. With --wheel: the folder for the wheel. The default is the working directory.",
)
@click.option("--wheel", is_flag=True, help="Write an installable wheel, torchop-native.")
@click.option("--force", is_flag=True, help="Compile again, even if a compiled file exists.")
def build(out: Path | None, wheel: bool, force: bool) -> None:
    """Compiles the native call path, the C++ code of fast calls.

    Nothing is compiled if a compiled file exists already. The command prints the path of the file.
    If an earlier build failed, the command says when and why, and tries again.
    """
    start = time.monotonic()
    wheel_folder = Path() if out is None else out
    if wheel:
        if importlib.util.find_spec("wheel") is None:
            raise click.ClickException("writing a wheel needs the package wheel: pip install wheel")
        out = None
    try:
        failure = native.earlier_failure(make_recipe())
        if failure is not None:
            click.echo(f"An earlier build failed, {failure}\n", err=True)
        file = native.build(out, force=force)
        try:
            files.load(file, cached=out is None)
        except files.UnusableFileError:
            if force:
                raise
            file = native.build(out, force=True)
            files.load(file, cached=out is None)
    except NativeUnavailableError as error:
        raise click.ClickException(f"the native call path cannot be built: {error}") from None
    except Exception as error:
        raise click.ClickException(f"{file} is there, but cannot be loaded: {error}") from None
    if wheel:
        try:
            file = write_wheel(file, wheel_folder)
        except OSError as error:
            raise click.ClickException(
                f"the wheel cannot be written to {wheel_folder}: {error.strerror}"
            ) from None
    click.echo(file)
    click.echo(f"{time.monotonic() - start:.1f} seconds", err=True)
