"""Locate the cache folder for the compiled extension and for kernel timings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torchop._errors import NativeUnavailableError

REMEDY = "Set TORCHOP_CACHE_DIR to a folder that only you can write to"


def cache_folder() -> Path:
    """Return `TORCHOP_CACHE_DIR`, or by default `torchop` in the user's cache directory.

    The function resolves symbolic links in the parent path, so that later permission checks see the
    real folders.
    """
    path = os.environ.get("TORCHOP_CACHE_DIR")
    folder = Path(path).absolute() if path else _caches_of_user() / "torchop"
    return Path(os.path.realpath(folder.parent), folder.name)


def _caches_of_user() -> Path:
    path = os.environ.get("XDG_CACHE_HOME")
    # The XDG Base Directory Specification requires us to ignore relative paths.
    if path and Path(path).is_absolute():
        return Path(path)
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    # Reject a relative path, because it would be resolved against the working directory, which may
    # belong to another user.
    if not home.is_absolute():
        raise NativeUnavailableError(f"there is no home folder for a cache. {REMEDY}")
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    return home / ".cache"
