"""Where an extension that is compiled already is looked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from torchop._errors import NativeUnavailableError
from torchop._native.extension import files
from torchop._native.extension.recipe import Recipe

PREBUILT = Path(__file__).parents[1] / "prebuilt"


class Place(NamedTuple):
    """A place to look in, and what is there."""

    name: str  # what users know it by
    folder: Path | None  # None if there is no such place
    file: Path | None  # the extension, if it is there and may be loaded
    problem: str | None  # why there is no place, or the file may not be loaded


def places(recipe: Recipe) -> list[Place]:
    """The places, first one first: the folder of `TORCHOP_NATIVE_DIR`, the package, the cache.

    The first two are trusted as the package itself is; the cache only if it is private.
    """
    chosen = os.environ.get("TORCHOP_NATIVE_DIR")
    found = []
    if chosen:
        found.append(_trusted("TORCHOP_NATIVE_DIR", Path(chosen).absolute(), recipe))
    found.append(_trusted("package", PREBUILT, recipe))
    found.append(_in_cache(recipe))
    return found


def _trusted(name: str, folder: Path, recipe: Recipe) -> Place:
    file = folder / recipe.file_name
    return Place(name, folder, file if file.is_file() else None, None)


def _in_cache(recipe: Recipe) -> Place:
    folder = None
    try:
        folder = files.folder()
        file = folder / recipe.file_name
        if not os.path.lexists(file):
            return Place("cache", folder, None, None)
        files.check_private(folder)
        files.check_private(file)
    except (NativeUnavailableError, OSError) as error:
        return Place("cache", folder, None, str(error))
    return Place("cache", folder, file, None)
