"""The user's cache of compiled extensions: one folder, private to the user.

Whoever can write a file into it runs code in every program of the user. So the folder and what is
loaded from it belong to the user, and nobody else may write there; otherwise it is not used.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from torchop._errors import NativeUnavailableError

_REMEDY = "Set TORCHOP_CACHE_DIR to a folder that only you can write to"


def folder() -> Path:
    """Where the cache is, or would be: `TORCHOP_CACHE_DIR`, or `torchop` in the user's caches.

    Raises:
        NativeUnavailableError: the user has no home.
    """
    chosen = os.environ.get("TORCHOP_CACHE_DIR")
    if chosen:
        return Path(chosen).absolute()
    return _caches_of_user() / "torchop"


def make_folder() -> Path:
    """Makes the folder if there is none, for the user alone.

    Raises:
        NativeUnavailableError: that is not possible, or somebody else could write there.
    """
    path = folder()
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
    found = path.lstat()
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        raise NativeUnavailableError(
            f"{path} is neither a folder nor a file of its own (a symbolic link?), so what it "
            f"leads to may change. {_REMEDY}"
        )
    if not hasattr(os, "geteuid"):
        return  # Windows, where modes say nothing, and a profile is private
    if found.st_uid != os.geteuid():
        raise NativeUnavailableError(
            f"{path} belongs to another user (number {found.st_uid}), who could put code there "
            f"that you would run. {_REMEDY}"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeUnavailableError(
            f"{path} is writable by others (mode {stat.S_IMODE(found.st_mode):04o}), who could put "
            f"code there that you would run. {_REMEDY}, or run chmod go-w on it"
        )


def _caches_of_user() -> Path:
    chosen = os.environ.get("XDG_CACHE_HOME")
    # The standard of the XDG says to ignore a relative one.
    if chosen and Path(chosen).is_absolute():
        return Path(chosen)
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
