"""Find and load compiled extensions, and check that the cache folder is private.

A user who can write to the cache folder, or rename a folder above it, could run code in this
process. Therefore the cache is used only if it belongs to the current user, and no other user can
write to it or to a folder above it. The folders of installed packages are trusted without a check.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, NoReturn

import torch

from torchop._core.cache_folder import REMEDY
from torchop._core.cache_folder import cache_folder as cache_folder
from torchop._errors import NativeUnavailableError
from torchop._native.extension.recipe import STEM, Recipe, names_in

MODULE = "torchop._native._call_path"
PREBUILT = Path(__file__).parents[1] / "prebuilt"
# The package that the wheel torchop-native installs. Search for it only in the folders that contain
# torchop and PyTorch. Do not import it, because the import might also search the working directory,
# which is not trusted.
WHEEL_PACKAGE = "torchop_native"
WHEEL = "torchop-native"
# The environment variable with the folder that is searched first for the extension.
CHOSEN = "TORCHOP_NATIVE_DIR"
WHEEL_FOLDERS = (Path(__file__).parents[3], Path(torch.__file__).parents[1])


class UnusableFileError(ImportError):
    """Raised if the dynamic linker cannot load the file."""


class Place(NamedTuple):
    name: str  # the name of the folder in messages
    folder: Path | None  # None if the user has no cache folder
    file: Path | None  # the extension, or None if it does not exist or is not trusted
    problem: str | None  # why the folder is missing or not trusted

    def miss(self) -> str:
        if self.problem is not None:
            return f"{self.name}: {self.problem}"
        return f"{self.name} ({self.folder}) has {keys_in(self.folder) or 'no extension'}"

    def remedy(self) -> str | None:
        """Return advice on getting a usable file from TORCHOP_NATIVE_DIR or the wheel, or None."""
        if self.name == CHOSEN:
            return f"`python -m torchop build --out {self.folder}` compiles it"
        if self.name == WHEEL:
            return "`python -m torchop build --wheel` writes the wheel that fits"
        return None


def places(recipe: Recipe) -> list[Place]:
    """Search all folders, in order of preference, for an extension with the recipe's key."""
    trusted = [("package", PREBUILT)]
    wheels = [folder / WHEEL_PACKAGE for folder in dict.fromkeys(WHEEL_FOLDERS)]
    installed = [folder for folder in wheels if folder.is_dir()]
    trusted += [(WHEEL, folder) for folder in installed]
    chosen = os.environ.get(CHOSEN)
    if chosen:
        trusted.insert(0, (CHOSEN, Path(chosen).absolute()))
    places = [_place(name, folder, recipe) for name, folder in trusted]
    return [*places, *([] if installed else _wheel_elsewhere()), _in_cache(recipe)]


def _wheel_elsewhere() -> list[Place]:
    """Return the wheel's package if it is installed in another folder of `sys.path`.

    torchop does not load this package, but reports it, so that the user can find out why the wheel
    is ignored.
    """
    try:
        spec = importlib.util.find_spec(WHEEL_PACKAGE)  # does not import a top-level package
    except (ImportError, ValueError):
        return []
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        return []
    folder = Path(next(iter(folders)))
    beside = " or ".join(map(str, dict.fromkeys(WHEEL_FOLDERS)))
    problem = f"{folder} has {keys_in(folder) or 'no extension'}, and is not installed in {beside}"
    return [Place(WHEEL, folder, None, problem)]


def _place(name: str, folder: Path, recipe: Recipe) -> Place:
    file = folder / recipe.file_name
    return Place(name, folder, file if file.is_file() else None, None)


def _in_cache(recipe: Recipe) -> Place:
    folder = None
    try:
        folder = cache_folder()
        place = _place("cache", folder, recipe)
        if place.file is not None:
            check_folders_above(folder)
            check_private(folder)
    except (NativeUnavailableError, OSError) as error:
        return Place("cache", folder, None, str(error))
    return place


def keys_in(folder: Path | None) -> str:
    names = [] if folder is None else names_in(folder)
    keys = [
        name[len(STEM) : -len(".so")]
        for name in names
        if name.startswith(STEM) and name.endswith(".so")
    ]
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(keys[:3]) + more


def make_cache_folder() -> Path:
    path = cache_folder()
    check_folders_above(path)
    try:
        for folder in [*reversed(path.parents), path]:
            # Create each folder separately. The folders above the cache must be private too, but
            # `parents=True` would create them without this mode.
            if not folder.is_dir():
                folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise NativeUnavailableError(
            f"the cache folder {path} cannot be created: {error.strerror}. {REMEDY}"
        ) from None
    check_private(path)
    if not os.access(path, os.W_OK | os.X_OK):
        raise NativeUnavailableError(f"the cache folder {path} is read-only. {REMEDY}")
    return path


def check_folders_above(path: Path) -> None:
    """Raise if another user could replace the cache by renaming a folder above it."""
    if not hasattr(os, "geteuid"):
        return
    # Check the root first and then downwards. If all parents of a folder passed the check, other
    # users cannot replace the folder after it was checked.
    for folder in reversed(path.parents):
        try:
            info = folder.lstat()
        except FileNotFoundError:
            return  # `make_cache_folder` will create it
        except OSError as error:
            raise NativeUnavailableError(
                f"the folder {folder}, above the cache, cannot be checked: {error.strerror}. "
                f"{REMEDY}"
            ) from None
        if info.st_uid not in (0, os.geteuid()):
            _refuse(f"{folder}, above the cache, belongs to another user (number {info.st_uid})")
        others = info.st_mode & stat.S_IWOTH or (
            info.st_mode & stat.S_IWGRP and not _is_users_own_group(info.st_gid)
        )
        if others and not info.st_mode & stat.S_ISVTX:
            mode = f"mode {stat.S_IMODE(info.st_mode):04o}, not sticky"
            _refuse(f"{folder}, above the cache, is writable by others ({mode})")


def check_private(path: Path) -> None:
    # Use `lstat`, which does not follow symbolic links: a link must be rejected, because its target
    # could change after the check.
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise NativeUnavailableError(
            f"{path} is not a folder (a symbolic link?), so its target may change. {REMEDY}"
        )
    if not hasattr(os, "geteuid"):
        return  # on Windows, the cache is in the user's profile, which is private
    if info.st_uid != os.geteuid():
        _refuse(f"{path} belongs to another user (number {info.st_uid})")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"mode {stat.S_IMODE(info.st_mode):04o}"
        _refuse(f"{path} is writable by others ({mode})", ", or run chmod go-w on it")


def _refuse(problem: str, remedy: str = "") -> NoReturn:
    raise NativeUnavailableError(
        f"{problem}, who could add code that your programs would run. {REMEDY}{remedy}"
    )


@functools.cache
def _is_users_own_group(number: int) -> bool:
    """Return whether a group has the same name as the user, and no other members.

    Some Linux distributions let such a group write to the user's folders.
    """
    import grp  # missing on some platforms
    import pwd

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}


def load(file: Path) -> ModuleType:
    """Load the extension from a file. If the file is loaded already, return the existing module.

    Raises UnusableFileError if the dynamic linker cannot load the file, and ImportError if the
    extension rejects this build of PyTorch.
    """
    loaded = sys.modules.get(MODULE)
    if loaded is not None and loaded.__file__ == str(file):
        return loaded  # the extension cannot be initialized twice
    spec = importlib.util.spec_from_file_location(MODULE, file)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError as error:
        if error.path is None:  # raised by the extension itself
            raise
        raise UnusableFileError(str(error)) from None
    spec.loader.exec_module(module)
    sys.modules[MODULE] = module
    return module
