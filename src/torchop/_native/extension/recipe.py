"""The sources, the flags and the compiler of the extension, and the key of its file.

The file is named after the key alone, and the key holds everything that decides whether a process
can load it: the PyTorch build, the C++ and Python ABIs, the platform, the sources and the flags.
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
# The fields of `THPFunction` (torch/csrc/autograd/python_function.h) in PyTorch 2.11 to 2.15: those
# that the extension fills or reads, and those that it may ignore. A release with any other field
# sends gradients to the dispatcher, because a new field may have to be filled.
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
# Whether the extension says that it needs the global interpreter lock: on every Python on which it
# was not tried without, because later ones count references in other ways.
NEEDS_LOCK = sys.version_info[:2] not in ((3, 13), (3, 14))


class Recipe(NamedTuple):
    """The sources of the extension, and the key of the file that they compile to here."""

    source: Path
    key: str

    @property
    def file_name(self) -> str:
        return f"{STEM}{self.key}.so"


def make_recipe(source: Path | None = None) -> Recipe:
    """Return the recipe for this PyTorch and this Python.

    The key is readable, so that a listing of the cache shows why a file is not the one wanted. It
    holds no folder and no compiler, so a file that was compiled elsewhere can be used. Flags in
    `$CXX` are part of the key: what they change, such as the processor, may not suit others.
    """
    source = source or CSRC
    # Not Path.glob, which compiles a regular expression for it.
    names = [name for name in names_in(source) if name.endswith((".cpp", ".h"))]
    if not any(name.endswith(".cpp") for name in names):
        raise NativeUnavailableError(
            f"there are no C++ sources in {source}. Reinstall torchop: its wheel contains them"
        )
    contents = hashlib.sha256()
    for name in names:
        with open(os.path.join(source, name), "rb", buffering=0) as file:
            text = file.read()
        for part in (name.encode(), text):
            # With its length, so that a line that moves from one file to the next changes the hash.
            contents.update(len(part).to_bytes(8, "little"))
            contents.update(part)
    flags = [*compile_flags(), *link_flags(), *_flags_of_user()]
    contents.update("\0".join(flags).encode("utf-8", "surrogateescape"))
    # Two builds of PyTorch's sources may have one version, and differ in what the headers declare.
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
    """The names of the files in a folder; none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def lock_problem() -> str | None:
    """Why this process should not load the extension unasked; None if it may.

    Python turns the global interpreter lock on, for the whole process, for an extension that does
    not declare that it can do without. It is on all the same with PYTHON_GIL=1, or for another one.
    """
    may_load = not NEEDS_LOCK or getattr(sys, "_is_gil_enabled", lambda: True)()  # since 3.13
    return None if may_load else "this Python runs without the GIL, which native calls still need"


def compile_flags() -> list[str]:
    """The flags of the compiler that do not depend on where things are installed."""
    flags = [
        # Required by the headers of torch 2.13. Those of 2.11 need C++17 and compile with C++20.
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        # Otherwise ATen/ExpandUtils.h, which the headers of autograd include, includes every
        # operator of PyTorch through ATen/Functions.h.
        "-DAT_PER_OPERATOR_HEADERS",
        # `python_error` takes the GIL. By default that instantiates pybind11's registry of types,
        # which the extension does not use.
        "-DPYBIND11_SIMPLE_GIL_MANAGEMENT",
        f"-DTORCHOP_KNOWS_NODES={int(unknown_nodes() is None)}",
        f"-DTORCHOP_NEEDS_GIL={int(NEEDS_LOCK)}",
    ]
    if not torch.version.debug:
        # PyTorch's headers compile debugging checks in without it, some of which call functions
        # that a release of PyTorch does not have.
        flags.append("-DNDEBUG")
    return flags


def unknown_nodes() -> str | None:
    """Return why calls that record a gradient use the dispatcher; None if they are native.

    They are native if the struct of the nodes has exactly the fields that the extension fills or
    may ignore. The key of the extension contains the answer through `compile_flags`.
    """
    fields = node_fields()
    if fields is None:
        return None  # a prebuilt file has the flags of a machine that had the header
    used = set(_USED_FIELDS.split())
    added, missing = sorted(fields - used - set(_OTHER_FIELDS.split())), sorted(used - fields)
    if not added and not missing:
        return None
    changes = [f"the new field {name}" for name in added] + [f"no field {name}" for name in missing]
    return (
        f"the autograd nodes of PyTorch {torch.__version__} have {', '.join(changes)}, so this "
        "version of torchop does not know how to fill them"
    )


@functools.cache
def node_fields() -> frozenset[str] | None:
    """The fields of nodes that are Python objects, by PyTorch's header; None if that is missing."""
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
    """The flags of the linker that do not depend on where things are installed.

    There is no run path: PyTorch is loaded before the extension is, and has to be this very one.
    """
    shared = (
        ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    )
    return [*shared, "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]


def include_flags() -> list[str]:
    """Where PyTorch's and Python's headers are, as system headers: their warnings are not ours."""
    import sysconfig  # half a millisecond, which only programs that compile should take

    headers = _headers()
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").is_file():
        raise NativeUnavailableError(
            f"the headers of Python are not installed: there is no {python / 'Python.h'}. They "
            "come with a package such as python3-dev or python3-devel"
        )
    if not headers.is_dir():
        raise NativeUnavailableError(
            f"the headers of PyTorch are not installed: there is no {headers}"
        )
    folders = [headers, headers / "torch" / "csrc" / "api" / "include", python]
    return [flag for folder in folders for flag in ("-isystem", str(folder))]


def library_flags() -> list[str]:
    """Where PyTorch's libraries are, and the C++ library that they use.

    Some compilers link that from an archive. The extension would then have one of its own, whose
    streams and exceptions are not those of PyTorch, and calls between the two crash.
    """
    return [f"-L{Path(torch.__file__).parent / 'lib'}", *_cpp_library()]


def _cpp_library() -> list[str]:
    """The C++ library that PyTorch has loaded, where the system tells it."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            found = re.search(r" (/.*/libstdc\+\+\.so[.0-9]*)$", maps.read(), re.MULTILINE)
    except OSError:
        return []
    return [found[1]] if found and os.path.exists(found[1]) else []


def find_compiler() -> list[str]:
    """Return the command of the C++ compiler: `$CXX`, or the first of the usual ones.

    `$CXX` may hold more than one word, as in `ccache g++`. The working directory is not searched,
    even if the PATH contains it, because other users' files may be there.

    Raises:
        NativeUnavailableError: there is no compiler, or `$CXX` names none.
    """
    if sys.platform == "win32":
        # Microsoft's compiler made PyTorch there, and what g++ makes does not link with that.
        raise NativeUnavailableError("it can be compiled on Linux and macOS only")
    words = _words_of_cxx()
    if words:
        path = _which(words[0])
        if path is None:
            raise NativeUnavailableError(
                f"the compiler {short_repr(words[0])}, which the environment variable CXX names, "
                "is not installed"
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
    import shlex  # half a millisecond, which few programs need

    try:
        return shlex.split(text)
    except ValueError as error:
        raise NativeUnavailableError(
            f"the environment variable CXX is not a command: {error}"
        ) from None


def _flags_of_user() -> list[str]:
    return [word for word in _words_of_cxx() if word.startswith("-")]


def _which(program: str) -> str | None:
    """The path of a program; a relative folder in the PATH is not searched."""
    folders = filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep))
    path_of_program = shutil.which(program, path=os.pathsep.join(folders))
    return path_of_program and os.path.abspath(path_of_program)


def _python_and_platform() -> str:
    # Such as "cpython-311-x86_64-linux-gnu". The import system knows it already; to ask sysconfig
    # would cost every program several milliseconds.
    tag = importlib.machinery.EXTENSION_SUFFIXES[0].lstrip(".").rpartition(".")[0]
    machine = platform.machine()  # macOS leaves it out
    return tag if machine in tag else f"{tag}-{machine}"
