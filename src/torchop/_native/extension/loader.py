"""Loading a compiled extension."""

from __future__ import annotations

import importlib.util
import os
import struct
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

MODULE = "torchop._native._call_path"


class UnusableFileError(ImportError):
    """The file is not an extension that this process can load; one compiled anew may be."""


def load(file: Path) -> ModuleType:
    """Loads the extension from a file; a second time, returns what it loaded the first time.

    Raises:
        UnusableFileError: the file is damaged, or asks for what is not there.
        Exception: whatever the extension itself raises, to refuse this PyTorch for example.
    """
    loaded = sys.modules.get(MODULE)
    if loaded is not None and loaded.__file__ == str(file):
        return loaded  # an extension need not be made to be initialized twice
    if is_cut_off(file):
        raise UnusableFileError(f"{file} is damaged: its end is missing")
    loader = ExtensionFileLoader(MODULE, str(file))
    spec = importlib.util.spec_from_file_location(MODULE, file, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError as error:
        # The import system names the path when the dynamic linker failed. What an extension raises
        # itself has none.
        if error.path is None:
            raise
        raise UnusableFileError(str(error)) from None
    loader.exec_module(module)
    sys.modules[MODULE] = module
    return module


def is_cut_off(file: Path) -> bool:
    """Whether an ELF file is shorter than its header says.

    The dynamic linker does not look: it maps the file, and the process dies when it touches what is
    not there.
    """
    with file.open("rb") as opened:
        header = opened.read(64)
        size = os.fstat(opened.fileno()).st_size
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        return False  # not an ELF file of 64 bits, little-endian: what it is, the linker will say
    (sections,) = struct.unpack_from("<Q", header, 40)
    size_of_entry, entries = struct.unpack_from("<HH", header, 58)
    return size < int(sections) + int(size_of_entry) * int(entries)
