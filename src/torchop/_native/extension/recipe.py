"""Determine the sources, flags and compiler of the extension, and the key in the file name.

The key identifies everything that a compiled file depends on, such as the PyTorch build, the
platform and the C++ sources. A process loads a file only if the key in the file's name is the key
that the process itself computes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from torchop._errors import NativeUnavailableError, short_repr

CSRC = Path(__file__).parents[1] / "csrc"
STEM = "_call_path-"
# The fields of `THPFunction`, PyTorch's struct for a Python autograd node
# (torch/csrc/autograd/python_function.h), in PyTorch 2.11 to 2.15. Native calls fill in this
# struct. The extension uses the fields in the first list, and may ignore the fields in the second
# list. If a release has another field, native calls might need to set it, so on such a release the
# dispatcher records all gradients.
_USED_FIELDS = (
    "needs_input_grad to_save non_differentiable dirty_tensors pure_view output_info input_info "
    "saved_variables is_variable_input saved_for_forward cdata"
)
_OTHER_FIELDS = (
    "needs_input_grad_bits materialize_grads materialize_non_diff_grads boxed_grads_call "
    "compiled_autograd_backward_state compiled_autograd_symints has_freed_buffers "
    "clear_saved_tensors_on_access saved_tensors_accessed_and_cleared output_grad_dtypes"
)
_COMPILERS = ("c++", "g++", "clang++")
# Whether the extension needs the GIL. In free-threaded Python, reference counting differs between
# releases, so the extension runs without the GIL only on the releases that it was tested on.
NEEDS_LOCK = sys.version_info[:2] not in ((3, 13), (3, 14))


class Recipe(NamedTuple):
    source: Path
    key: str

    @property
    def file_name(self) -> str:
        return f"{STEM}{self.key}.so"


def make_recipe(source: Path | None = None) -> Recipe:
    """Return the recipe for this PyTorch and this Python.

    The key does not depend on paths or on the compiler, so a file can be compiled on another
    machine. It does depend on the flags in `$CXX`, because they may select a processor.
    """
    source = source or CSRC
    # `Path.glob` would compile a regular expression, which slows down the start of programs.
    names = [name for name in names_in(source) if name.endswith((".cpp", ".h"))]
    if not any(name.endswith(".cpp") for name in names):
        raise NativeUnavailableError(
            f"the folder {source} contains no C++ sources. Reinstall torchop"
        )
    contents = hashlib.sha256()
    for name in names:
        with open(os.path.join(source, name), "rb", buffering=0) as file:
            text = file.read()
        for part in (name.encode(), text):
            # Hash the length of each part too. Otherwise moving a line from the end of one file to
            # the start of the next would not change the hash.
            contents.update(len(part).to_bytes(8, "little"))
            contents.update(part)
    flags = [*compile_flags(), *link_flags(), *_flags_of_user()]
    contents.update("\0".join(flags).encode("utf-8", "surrogateescape"))
    # Two source builds of PyTorch with the same version may have different headers, so include the
    # commit.
    commit = (torch.version.git_version or "unknown")[:12]
    parts = [
        f"torch{torch.__version__}",
        f"git{commit}",
        f"abi{int(torch.compiled_with_cxx11_abi())}",
        _python_and_platform(),
        contents.hexdigest()[:16],
    ]
    return Recipe(source, "-".join(parts))


def names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def lock_problem() -> str | None:
    """Return a message if loading the extension would turn the GIL on, otherwise None.

    Free-threaded Python turns the GIL on for the whole process when it loads an extension that
    needs the GIL. If the GIL is already on, loading such an extension changes nothing.
    """
    may_load = not NEEDS_LOCK or getattr(sys, "_is_gil_enabled", lambda: True)()  # since 3.13
    return None if may_load else "native calls need the GIL, and this Python runs without it"


def compile_flags() -> list[str]:
    """Return the compiler flags without paths.

    The flags are part of the key, and the key must not depend on paths.
    """
    flags = [
        # The headers of PyTorch 2.13 need C++20. The headers of 2.11 compile with it too.
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        # Without this flag, the autograd headers would include the headers of all operators
        # (through ATen/ExpandUtils.h and ATen/Functions.h), which are slow to compile.
        "-DAT_PER_OPERATOR_HEADERS",
        # Without this flag, the class `python_error` in PyTorch would acquire the GIL through
        # pybind11, which would create pybind11's type registry.
        "-DPYBIND11_SIMPLE_GIL_MANAGEMENT",
        f"-DTORCHOP_KNOWS_NODES={int(unknown_nodes() is None)}",
        f"-DTORCHOP_NEEDS_GIL={int(NEEDS_LOCK)}",
    ]
    if not torch.version.debug:
        # Turn off debug assertions in PyTorch's headers, because they call functions that release
        # builds do not export.
        flags.append("-DNDEBUG")
    return flags


def unknown_nodes() -> str | None:
    """Return why native calls cannot record gradients with this PyTorch, or None if they can.

    Native calls (calls without the dispatcher) fill in the struct of an autograd node, so the
    extension must know all fields.
    """
    fields = node_fields()
    if fields is None:
        # Without headers, only a prebuilt extension can be loaded.
        return None
    used = set(_USED_FIELDS.split())
    added, missing = sorted(fields - used - set(_OTHER_FIELDS.split())), sorted(used - fields)
    if not added and not missing:
        return None
    changes = [f"the new field {name}" for name in added] + [f"no field {name}" for name in missing]
    return (
        f"the autograd nodes of PyTorch {torch.__version__} have {', '.join(changes)}, which this "
        "version of torchop does not support"
    )


@functools.cache
def node_fields() -> frozenset[str] | None:
    """Return the fields of `THPFunction` in PyTorch's header, or None if there is no header."""
    file = os.path.join(_headers(), "torch", "csrc", "autograd", "python_function.h")
    try:
        with open(file, encoding="utf-8") as header:
            text = header.read()
    except OSError:
        return None
    struct = text.partition("struct THPFunction {")[2].partition("\n};")[0]
    lines = (line.partition("//")[0].strip() for line in struct.splitlines())
    declared = (line[:-1].partition("=")[0] for line in lines if line.endswith(";"))
    return frozenset(words.split()[-1].lstrip("*&") for words in declared)


def _headers() -> Path:
    return Path(torch.__file__).parent / "include"


def link_flags() -> list[str]:
    """Return the linker flags without paths, because the flags are part of the key.

    No run path is set, because the extension must use the PyTorch that is already loaded.
    """
    shared = (
        ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    )
    return [*shared, "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]


def include_flags() -> list[str]:
    """Return the flags for the headers of PyTorch and Python.

    The compiler prints no warnings about these headers, because they are declared as system
    headers.
    """
    import sysconfig  # takes 0.5 ms, and is only needed to compile

    headers = _headers()
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").is_file():
        raise NativeUnavailableError(
            f"the headers of Python are not installed: {python / 'Python.h'} does not exist. "
            "Install a package such as python3-dev or python3-devel"
        )
    if not headers.is_dir():
        raise NativeUnavailableError(
            f"the headers of PyTorch are not installed: {headers} does not exist"
        )
    folders = [headers, headers / "torch" / "csrc" / "api" / "include", python]
    return [flag for folder in folders for flag in ("-isystem", str(folder))]


def library_flags() -> list[str]:
    """Return the flags for PyTorch's libraries, and for the C++ library that PyTorch has loaded.

    Some compilers link the C++ library statically by default. The extension would then have its own
    copy of the library, and would crash when it passes streams or exceptions to PyTorch.
    """
    return [f"-L{Path(torch.__file__).parent / 'lib'}", *_cpp_library()]


def _cpp_library() -> list[str]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            found = re.search(r" (/.*/libstdc\+\+\.so[.0-9]*)$", maps.read(), re.MULTILINE)
    except OSError:
        return []
    return [found[1]] if found and os.path.exists(found[1]) else []


def find_compiler() -> list[str]:
    """Return the command in `$CXX`, such as `ccache g++`, or the first installed compiler."""
    if sys.platform == "win32":
        # PyTorch for Windows is built with MSVC, which the flags here do not support.
        raise NativeUnavailableError("it can only be compiled on Linux and macOS")
    words = _words_of_cxx()
    if words:
        path = _which(words[0])
        if path is None:
            raise NativeUnavailableError(
                f"the compiler {short_repr(words[0])} in the environment variable CXX is not "
                "installed"
            )
        return [path, *words[1:]]
    for name in _COMPILERS:
        if path := _which(name):
            return [path]
    raise NativeUnavailableError(
        f"there is no C++ compiler: none of {', '.join(_COMPILERS)} is in the PATH, and CXX is not "
        "set. Install one with a package such as g++ or clang"
    )


def _words_of_cxx() -> list[str]:
    text = os.environ.get("CXX", "").strip()
    if not text:
        return []
    import shlex  # takes 0.5 ms, and is rarely needed

    try:
        return shlex.split(text)
    except ValueError as error:
        raise NativeUnavailableError(
            f"the environment variable CXX is not a command: {error}"
        ) from None


def _flags_of_user() -> list[str]:
    return [word for word in _words_of_cxx() if word.startswith("-")]


def _which(program: str) -> str | None:
    """Return the path of a program, ignoring relative folders in the PATH.

    A relative folder depends on the working directory, which may contain other users' files.
    """
    folders = filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep))
    path_of_program = shutil.which(program, path=os.pathsep.join(folders))
    return path_of_program and os.path.abspath(path_of_program)


def _python_and_platform() -> str:
    # The tag is, for example, "cpython-311-x86_64-linux-gnu". Reading it from sysconfig instead
    # would take several milliseconds.
    tag = importlib.machinery.EXTENSION_SUFFIXES[0].lstrip(".").rpartition(".")[0]
    machine = platform.machine()  # on macOS, it is not part of the tag
    return tag if machine in tag else f"{tag}-{machine}"
