"""The wheel `torchop-native`: the compiled call path, for machines that should not compile it."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

import torchop
from torchop._native.extension import files, worker

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


def write_wheel(extension: Path, folder: Path) -> Path:
    """Writes a wheel with a compiled extension.

    Args:
        extension: the file that the compiler made, with its digest beside it.
        folder: where to write the wheel; made if there is none.

    Returns:
        The path of the wheel, which is there completely or not at all.
    """
    # Only who asks for a wheel needs this package.
    wheel_file = importlib.import_module("wheel.wheelfile").WheelFile
    version = f"{torchop.__version__}+torch{re.sub(r'[^A-Za-z0-9]+', '.', torch.__version__)}"
    tag = _tag()
    folder.mkdir(parents=True, exist_ok=True)
    name = f"torchop_native-{version}-{tag}.whl"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        tree = Path(scratch, "tree")
        package = tree / files.WHEEL_PACKAGE
        package.mkdir(parents=True)
        for file in (extension, worker.digest_file(extension)):
            shutil.copyfile(file, package / file.name)
            (package / file.name).chmod(0o644)
        described = {"version": version, "torch": torch.__version__, "tag": tag}
        information = tree / f"torchop_native-{version}.dist-info"
        information.mkdir()
        for text, file_name in ((_METADATA, "METADATA"), (_WHEEL, "WHEEL")):
            contents = text.format(torchop=torchop.__version__, **described)
            (information / file_name).write_text(contents, encoding="utf-8")
        written = Path(scratch, name)
        with wheel_file(written, "w") as archive:
            archive.write_files(str(tree))
        return written.replace(folder / name)


def _tag() -> str:
    """Which Pythons and machines can install it, such as `cp311-cp311-linux_x86_64`.

    Not `manylinux`, which promises that any distribution can load it: only this one has shown that.
    """
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    threading = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    return f"{python}-{python}{threading}-{platform}"
