"""The C++ compiler: `$CXX`, or the first one that is installed."""

from __future__ import annotations

import os
import shutil
import sys

from torchop._errors import NativeUnavailableError

_USUAL = ("c++", "g++", "clang++")


def find() -> list[str]:
    """The command of the compiler, such as `["/usr/bin/c++"]`.

    `$CXX` may hold more than one word, as in `ccache g++`.

    Raises:
        NativeUnavailableError: there is none.
    """
    if sys.platform == "win32":
        # A g++ there makes what PyTorch, which Microsoft's compiler made, cannot be linked with.
        raise NativeUnavailableError("it can be compiled on Linux and macOS only")
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        import shlex  # half a millisecond, and few programs get here

        command = shlex.split(chosen)
        found = shutil.which(command[0])
        if found is None:
            raise NativeUnavailableError(
                f"the compiler {command[0]!r}, which the environment variable CXX names, is not "
                "installed"
            )
        return [found, *command[1:]]
    for name in _USUAL:
        found = shutil.which(name)
        if found is not None:
            return [found]
    raise NativeUnavailableError(
        f"there is no C++ compiler: none of {', '.join(_USUAL)} is in the PATH, and CXX is not "
        "set. Install one with a package such as g++ or clang"
    )
