"""Getting the native call path: find the extension, or have it compiled.

Nothing waits for the compiler, except where the user asks for that with TORCHOP_NATIVE=require.
Until the extension is there, and if it never is, operators work through PyTorch's dispatcher.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torchop._errors import NativeUnavailableError
from torchop._native.extension import child, files, worker
from torchop._native.extension.obtain import Extension, OnReady
from torchop._native.extension.obtain import Status as Status
from torchop._native.extension.obtain import mode as mode
from torchop._native.extension.recipe import Recipe, find_compiler, make_recipe

_extension = Extension()
if hasattr(os, "register_at_fork"):  # there is no forking on Windows
    os.register_at_fork(after_in_child=_extension.after_fork)


def obtain(on_ready: OnReady) -> None:
    """Gets the native call path for this process: see `Extension.obtain`."""
    _extension.obtain(on_ready)


def status() -> Status:
    """How far this process got with the native call path.

    Example:
        >>> import torchop
        >>> torchop.native.status().mode in ("auto", "0", "require", "prebuilt")
        True
    """
    return _extension.status()


def why_missing() -> str:
    """Why calls go through the dispatcher, where the extension is not there."""
    state = status()
    reason = "TORCHOP_NATIVE=0 turns it off" if state.state == "off" else state.reason
    return f"the native call path is not there ({reason or state.state})"


def earlier_failure(recipe: Recipe) -> str | None:
    """When and why the last build for a key failed, within the last day; None if none did."""
    try:
        file = files.cache_folder() / recipe.file_name(find_compiler())
        seconds = worker.failure_record(file).stat().st_mtime
    except (NativeUnavailableError, OSError):
        return None
    failure = worker.remembered_failure(file)
    when = time.strftime("%Y-%m-%d at %H:%M:%S", time.localtime(seconds))
    return None if failure is None else f"on {when}: {failure}"


def build(out: Path | None = None, *, force: bool = False, source: Path | None = None) -> Path:
    """Compiles the extension, also where that failed before, and waits for it; returns its file.

    The file goes into the user's cache if `out` is None; one that is there stays, without `force`.
    """
    recipe = make_recipe(source)
    if out is None:
        folder = files.make_cache_folder()
    else:
        folder = out.absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NativeUnavailableError(
                f"the folder {folder} cannot be made: {error.strerror}"
            ) from None
    try:
        file = folder / recipe.file_name(find_compiler())
    except NativeUnavailableError:
        builds = files.builds_in(folder, recipe)
        if force or not builds:
            raise
        file = builds[0]
    if out is None and os.path.lexists(file):
        files.check_private(file)
    stale = worker.identity(file)
    if stale is not None and not force:
        return file
    child.wait(child.start(recipe, folder, stale=stale, in_cache=out is None, retry=True))
    return file
