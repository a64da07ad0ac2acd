"""Files of compiled extensions: where one is looked for, the user's cache, and loading one.

Whoever can write a file into the cache runs code in every program of the user. So the folder and
what is loaded from it belong to the user, and nobody else may write there; otherwise, the
cache is not used.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import struct
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from torchop._errors import NativeUnavailableError
from torchop._native.extension.recipe import Recipe

MODULE = "torchop._native._call_path"
PREBUILT = Path(__file__).parents[1] / "prebuilt"
_REMEDY = "Set TORCHOP_CACHE_DIR to a folder that only you can write to"


class UnusableFileError(ImportError):
    """The file is not an extension that this process can load; one compiled anew may be."""


class Place(NamedTuple):
    """A place to look in, and what is there."""

    name: str  # what users know it by
    folder: Path | None  # None if there is no such place
    file: Path | None  # the extension, if it is there and may be loaded
    problem: str | None  # why there is no place, or the file may not be loaded


def places(recipe: Recipe) -> list[Place]:
    """The places in the order of the search: `TORCHOP_NATIVE_DIR`, the package, the cache.

    The first two are trusted as the package itself is; the cache only if it is private.
    """
    trusted = [("package", PREBUILT)]
    folder = os.environ.get("TORCHOP_NATIVE_DIR")
    if folder:
        trusted.insert(0, ("TORCHOP_NATIVE_DIR", Path(folder).absolute()))
    return [*(_trusted(name, folder, recipe) for name, folder in trusted), _in_cache(recipe)]


def cache_folder() -> Path:
    """Where the cache is, or would be: `TORCHOP_CACHE_DIR`, or `torchop` in the user's caches.

    Raises:
        NativeUnavailableError: the user has no home.
    """
    path = os.environ.get("TORCHOP_CACHE_DIR")
    if path:
        return Path(path).absolute()
    return _caches_of_user() / "torchop"


def make_cache_folder() -> Path:
    """Makes the folder if there is none, for the user alone.

    Raises:
        NativeUnavailableError: that is not possible, or somebody else could write there.
    """
    path = cache_folder()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise NativeUnavailableError(
            f"the cache folder {path} cannot be made: {error.strerror}. {_REMEDY}"
        ) from None
    check_private(path)
    if not os.access(path, os.W_OK | os.X_OK):
        raise NativeUnavailableError(f"the cache folder {path} is read-only. {_REMEDY}")
    return path


def check_private(path: Path) -> None:
    """Checks a folder, or a file in it.

    Raises:
        NativeUnavailableError: it is a symbolic link, belongs to another user, or is writable by
            others.
    """
    # lstat: a link could be pointed somewhere else between the check and the use.
    info = path.lstat()
    if not (stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode)):
        raise NativeUnavailableError(
            f"{path} is neither a folder nor a file of its own (a symbolic link?), so what it "
            f"leads to may change. {_REMEDY}"
        )
    if not hasattr(os, "geteuid"):
        return  # Windows, where modes say nothing, and a profile is private
    if info.st_uid != os.geteuid():
        raise NativeUnavailableError(
            f"{path} belongs to another user (number {info.st_uid}), who could put code there "
            f"that you would run. {_REMEDY}"
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeUnavailableError(
            f"{path} is writable by others (mode {stat.S_IMODE(info.st_mode):04o}), who could put "
            f"code there that you would run. {_REMEDY}, or run chmod go-w on it"
        )


def load(file: Path) -> ModuleType:
    """Loads the extension from a file; a second time, returns what it loaded the first time.

    Raises:
        UnusableFileError: the file is damaged, or asks for what is not there.
        Exception: whatever the extension itself raises, to refuse this PyTorch for example.
    """
    loaded = sys.modules.get(MODULE)
    if loaded is not None and loaded.__file__ == str(file):
        return loaded  # not every extension can be initialized twice
    if is_cut_off(file):
        raise UnusableFileError(f"{file} is damaged: its end is missing")
    loader = ExtensionFileLoader(MODULE, str(file))
    spec = importlib.util.spec_from_file_location(MODULE, file, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError as error:
        # The import system names the path when the dynamic linker failed. An exception of the
        # extension itself has none.
        if error.path is None:
            raise
        raise UnusableFileError(str(error)) from None
    loader.exec_module(module)
    sys.modules[MODULE] = module
    return module


def is_cut_off(file: Path) -> bool:
    """Whether an ELF file is shorter than its header says.

    The dynamic linker does not check that: it maps the file, and the process dies when it touches a
    missing page.
    """
    with file.open("rb") as opened:
        header = opened.read(64)
        size = os.fstat(opened.fileno()).st_size
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        return False  # not an ELF file of 64 bits, little-endian: the linker will say what it is
    (sections,) = struct.unpack_from("<Q", header, 40)
    size_of_entry, entries = struct.unpack_from("<HH", header, 58)
    return size < int(sections) + int(size_of_entry) * int(entries)


def _trusted(name: str, folder: Path, recipe: Recipe) -> Place:
    file = folder / recipe.file_name
    return Place(name, folder, file if file.is_file() else None, None)


def _in_cache(recipe: Recipe) -> Place:
    folder = None
    try:
        folder = cache_folder()
        file = folder / recipe.file_name
        if not os.path.lexists(file):
            return Place("cache", folder, None, None)
        check_private(folder)
        check_private(file)
    except (NativeUnavailableError, OSError) as error:
        return Place("cache", folder, None, str(error))
    return Place("cache", folder, file, None)


def _caches_of_user() -> Path:
    path = os.environ.get("XDG_CACHE_HOME")
    # The standard of the XDG says to ignore a relative one.
    if path and Path(path).is_absolute():
        return Path(path)
    try:
        home = Path.home()
    except RuntimeError:
        raise NativeUnavailableError(
            f"there is no home folder, and so no place for a cache. {_REMEDY}"
        ) from None
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    return home / ".cache"
