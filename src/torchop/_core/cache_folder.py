"""Where the user's cache is: the compiled extension, and measurements of kernels."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torchop._errors import NativeUnavailableError

REMEDY = "Set TORCHOP_CACHE_DIR to a folder that only you can write to"


def cache_folder() -> Path:
    """Where the cache is, or would be: `TORCHOP_CACHE_DIR`, or `torchop` in the user's caches.

    There is no symbolic link above it: links are followed here, once, so that the folders that are
    checked are those that are used.
    """
    path = os.environ.get("TORCHOP_CACHE_DIR")
    folder = Path(path).absolute() if path else _caches_of_user() / "torchop"
    return Path(os.path.realpath(folder.parent), folder.name)


def _caches_of_user() -> Path:
    path = os.environ.get("XDG_CACHE_HOME")
    # The standard of the XDG says to ignore a relative one.
    if path and Path(path).is_absolute():
        return Path(path)
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    if not home.is_absolute():  # the working directory may hold anybody's files
        raise NativeUnavailableError(
            f"there is no home folder, so there is no place for a cache. {REMEDY}"
        )
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    return home / ".cache"
