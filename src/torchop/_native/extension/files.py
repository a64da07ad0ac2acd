"""Files of compiled extensions: where one is looked for, the user's cache, and loading one.

Whoever can write a file into the cache runs code in every program of the user, and so does whoever
can put another folder in its place. So the folder and what is loaded from it belong to the user,
nobody else may write there, and nobody else may rename a folder above it; otherwise, the cache is
not used. A file is checked and loaded through one descriptor: what is loaded is what was checked.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import stat
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, NoReturn

import torch

from torchop._core.cache_folder import REMEDY
from torchop._core.cache_folder import cache_folder as cache_folder
from torchop._errors import NativeUnavailableError
from torchop._native.extension import worker
from torchop._native.extension.recipe import STEM, Recipe, find_compiler, names_in

MODULE = "torchop._native._call_path"
PREBUILT = Path(__file__).parents[1] / "prebuilt"
# What the wheel torchop-native installs. It is looked for beside torchop and beside PyTorch, and
# not through the import system, which may search the working directory, where anybody's files are.
WHEEL_PACKAGE = "torchop_native"
WHEEL_FOLDERS = (Path(__file__).parents[3], Path(torch.__file__).parents[1])


class UnusableFileError(ImportError):
    """The file is not an extension that this process can load; one compiled anew may be."""


class Place(NamedTuple):
    """A place to look in, and a file that is there."""

    name: str  # what users know it by
    folder: Path | None  # None if there is no such place
    file: Path | None  # the extension, if it is there and may be loaded
    problem: str | None  # why there is no place, or the file may not be loaded

    def load(self) -> ModuleType:
        """Loads the file; see the function of this name."""
        assert self.file is not None
        return load(self.file, cached=self.name == "cache")

    def miss(self) -> str:
        """Why there is no file to load."""
        if self.problem is not None:
            return f"{self.name}: {self.problem}"
        return f"{self.name} ({self.folder}) has {keys_in(self.folder) or 'no extension'}"


def places(recipe: Recipe, *, any_build: bool = False) -> list[Place]:
    """The places in their order: `TORCHOP_NATIVE_DIR`, the package, the wheel, the cache.

    The cache is trusted only if it is private, and the others as the package itself is. From these,
    any build of the recipe will do. From the cache, that of the user's compiler; any, if there is
    no compiler or the caller says so. The wheel is a place only if it is installed.
    """
    trusted = [("package", PREBUILT)]
    wheels = (folder / WHEEL_PACKAGE for folder in dict.fromkeys(WHEEL_FOLDERS))
    trusted += [("torchop-native", folder) for folder in wheels if folder.is_dir()]
    folder = os.environ.get("TORCHOP_NATIVE_DIR")
    if folder:
        trusted.insert(0, ("TORCHOP_NATIVE_DIR", Path(folder).absolute()))
    searched = [
        Place(name, path, file, None)
        for name, path in trusted
        for file in builds_in(path, recipe) or (None,)
    ]
    return [*searched, _in_cache(recipe, any_build)]


def builds_in(folder: Path, recipe: Recipe) -> list[Path]:
    """The files in a folder that this program can load, by their names."""
    return [folder / name for name in names_in(folder) if recipe.fits(name)]


def keys_in(folder: Path | None) -> str:
    """The keys and builds of the first files in a folder, as a text."""
    names = [] if folder is None else names_in(folder)
    keys = [
        name[len(STEM) : -len(".so")]
        for name in names
        if name.startswith(STEM) and name.endswith(".so")
    ]
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return worker.printable(", ".join(keys[:3])) + more


def make_cache_folder() -> Path:
    """Makes the folder if there is none, for the user alone."""
    path = cache_folder()
    check_folders_above(path)
    try:
        for folder in [*reversed(path.parents), path]:
            # Also those above, whatever the umask: what is made here is nobody else's to write.
            if not folder.is_dir():
                folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise NativeUnavailableError(
            f"the cache folder {path} cannot be made: {error.strerror}. {REMEDY}"
        ) from None
    check_private(path)
    if not os.access(path, os.W_OK | os.X_OK):
        raise NativeUnavailableError(f"the cache folder {path} is read-only. {REMEDY}")
    return path


def check_folders_above(path: Path) -> None:
    """Checks that nobody else can rename a folder above the cache, and so replace the cache."""
    if not hasattr(os, "geteuid"):
        return
    for folder in reversed(path.parents):  # from the root: each is safe when the next is looked at
        try:
            info = folder.lstat()
        except FileNotFoundError:
            return  # it will be made, and then it is the user's
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
    """Checks that a folder, or a file in it, is no link, and that only the user can write to it."""
    # lstat: a link could be pointed somewhere else between the check and the use.
    _check_status(path, path.lstat())


def load(file: Path, *, cached: bool = False) -> ModuleType:
    """Loads the extension from a file; a second time, returns what it loaded the first time.

    It must have its digest, and in the cache be private. An exception of the extension itself,
    which may refuse this PyTorch, is raised as it is.
    """
    loaded = sys.modules.get(MODULE)
    if loaded is not None and loaded.__file__ == str(file):
        return loaded  # not every extension can be initialized twice
    try:
        descriptor = os.open(file, os.O_RDONLY | (getattr(os, "O_NOFOLLOW", 0) if cached else 0))
    except OSError as error:
        raise UnusableFileError(f"{file} cannot be opened: {error.strerror}") from None
    is_needed = False
    try:
        if cached:
            _check_status(file, os.fstat(descriptor))
        _check_contents(file, descriptor)
        path = f"/proc/self/fd/{descriptor}"
        if not os.path.exists(path):
            path = str(file)
        loader = ExtensionFileLoader(MODULE, path)
        spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
        assert spec is not None
        # The dynamic linker knows the library by this path from here on, also one in which Python
        # finds no module. So the descriptor stays open: under the same number, another file would
        # be taken for this one.
        is_needed = True
        try:
            module = importlib.util.module_from_spec(spec)
        except ImportError as error:
            # The import system names the path when the dynamic linker failed. An exception of the
            # extension itself has none.
            if error.path is None:
                raise
            raise UnusableFileError(str(error).replace(path, str(file))) from None
        spec.origin = module.__file__ = str(file)
        loader.exec_module(module)
    finally:
        if not is_needed:
            os.close(descriptor)
    sys.modules[MODULE] = module
    return module


def _check_contents(file: Path, descriptor: int) -> None:
    """Checks that the file is what the compiler made.

    The dynamic linker checks nothing: it maps the file, and the process dies when it touches a
    missing page, or runs what is not code.
    """
    expected = worker.expected_digest(file)
    if expected is None:
        raise UnusableFileError(
            f"{file} may be damaged: it has no digest. Copy {worker.digest_file(file).name}, which "
            "the build wrote beside it, too"
        )
    if worker.digest(descriptor) != expected:
        raise UnusableFileError(f"{file} is damaged: its digest is not that of the compiled file")


def _check_status(path: Path, info: os.stat_result) -> None:
    if not (stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode)):
        raise NativeUnavailableError(
            f"{path} is not a regular file or folder (a symbolic link?), so its target may change. "
            f"{REMEDY}"
        )
    if not hasattr(os, "geteuid"):
        return  # Windows, where modes say nothing, and a profile is private
    if info.st_uid != os.geteuid():
        _refuse(f"{path} belongs to another user (number {info.st_uid})")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"mode {stat.S_IMODE(info.st_mode):04o}"
        _refuse(f"{path} is writable by others ({mode})", ", or run chmod go-w on it")


def _refuse(problem: str, remedy: str = "") -> NoReturn:
    raise NativeUnavailableError(
        f"{problem}, who could put code there, and you would run it. {REMEDY}{remedy}"
    )


@functools.cache
def _is_users_own_group(number: int) -> bool:
    """Whether a group has the user's name and no other member, as Fedora and Debian make them.

    Their users make folders that the group may write to; that lets in nobody.
    """
    import grp  # needed for few folders, and not on every platform
    import pwd  # the same

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}


def _in_cache(recipe: Recipe, any_build: bool) -> Place:
    folder = None
    try:
        folder = cache_folder()
        file = build_in(folder, recipe, any_build=any_build)
        if file is not None:
            check_folders_above(folder)
            check_private(folder)
            check_private(file)
    except (NativeUnavailableError, OSError) as error:
        return Place("cache", folder, None, str(error))
    return Place("cache", folder, file, None)


def build_in(folder: Path, recipe: Recipe, *, any_build: bool = False) -> Path | None:
    """The build of the user's compiler in a folder; any, where there is none or `any_build` is set.

    It may be a link, which the caller has to refuse where others can write.
    """
    try:
        file = folder / recipe.file_name(find_compiler())
        if os.path.lexists(file):
            return file
    except NativeUnavailableError:
        any_build = True  # it will not be compiled
    return next(iter(builds_in(folder, recipe)), None) if any_build else None
