"""`python -m torchop build`: compiles the native call path, and shows where it is.

With `--wheel` it writes `torchop-native`, for machines that should not compile it.
"""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import click
import torch

import torchop
from torchop import NativeUnavailableError
from torchop._native.extension import api as native
from torchop._native.extension import files, recipe, worker
from torchop.cli.selection import require

_METADATA = """\
Metadata-Version: 2.1
Name: torchop-native
Version: {version}
Summary: The native call path of torchop, compiled for PyTorch {torch}.
Requires-Dist: torch==={torch}
Requires-Dist: torchop=={torchop}
"""
_WHEEL = """\
Wheel-Version: 1.0
Generator: torchop {torchop}
Root-Is-Purelib: false
Tag: {tag}
"""


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
        require("wheel", "writing a wheel")
        out = None
    try:
        failure = native.earlier_failure(recipe.make_recipe())
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
            file = _write_wheel(file, wheel_folder)
        except OSError as error:
            raise click.ClickException(
                f"the wheel cannot be written to {wheel_folder}: {error.strerror}"
            ) from None
    click.echo(file)
    click.echo(f"{time.monotonic() - start:.1f} seconds", err=True)


def _write_wheel(extension: Path, folder: Path) -> Path:
    """Writes a wheel with a compiled extension.

    Args:
        extension: the file that the compiler made, with its digest beside it.
        folder: where to write the wheel; made if there is none.

    Returns:
        The path of the wheel, which is there completely or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Only who asks for a wheel needs this package.
    wheel_file = importlib.import_module("wheel.wheelfile").WheelFile
    version = f"{torchop.__version__}+torch{re.sub(r'[^A-Za-z0-9]+', '.', torch.__version__)}"
    values = {
        "version": version,
        "torch": torch.__version__,
        "torchop": torchop.__version__,
        "tag": _tag(),
    }
    name = f"torchop_native-{version}"
    contents: dict[str, str | bytes] = {
        f"{name}.dist-info/METADATA": _METADATA.format(**values),
        f"{name}.dist-info/WHEEL": _WHEEL.format(**values),
    }
    for file in (extension, worker.digest_file(extension)):
        contents[f"{files.WHEEL_PACKAGE}/{file.name}"] = file.read_bytes()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        written = Path(scratch, f"{name}-{values['tag']}.whl")
        with wheel_file(written, "w") as archive:
            for path, content in contents.items():
                archive.writestr(path, content)
        return written.replace(folder / written.name)


def _tag() -> str:
    """Which Pythons and machines can install it, such as `cp311-cp311-linux_x86_64`.

    Not `manylinux`, which promises that any distribution can load it: only this one has shown that.
    """
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    threading = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    return f"{python}-{python}{threading}-{platform}"
