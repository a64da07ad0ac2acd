"""`python -m torchop build`: compiles the native call path, and shows where it is."""

from __future__ import annotations

import time
from pathlib import Path

import click

from torchop._errors import NativeUnavailableError
from torchop._native.extension import api as native
from torchop._native.extension import files
from torchop._native.extension.recipe import make_recipe


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder to build into, for TORCHOP_NATIVE_DIR; your cache if you name none.",
)
@click.option("--force", is_flag=True, help="Compile although it is there already.")
def build(out: Path | None, force: bool) -> None:
    """Compiles the native call path, unless it is there; writes the path of its file.

    Where an earlier build failed, it says when and why, and tries again.
    """
    start = time.monotonic()
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
    click.echo(file)
    click.echo(f"{time.monotonic() - start:.1f} seconds", err=True)
