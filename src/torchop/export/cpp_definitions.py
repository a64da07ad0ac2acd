"""cpp_definitions: defines the operators of a package in C++, for a process without Python."""

from __future__ import annotations

import json
import os

import torchop
from torchop._inspect.registrant import is_defined_in_python, python_kernel
from torchop.export.programs import contents_of_package
from torchop.extend import Operator

_SOURCE = """\
// The operators that {package} calls, for a process without Python.
// Made by torchop.export.cpp_definitions.
#include <torch/library.h>
{blocks}"""
_BLOCK = """
TORCH_LIBRARY_FRAGMENT({namespace}, m) {{
{definitions}
}}
"""


def cpp_definitions(path: str | os.PathLike[str]) -> str:
    """Returns C++ code that defines the operators of a package, where no Python defines them.

    A process without Python has to load a library with this code, and the libraries with the
    kernels, before the package. Where Python runs, do not load this code, because the operators are
    defined already. Load the libraries with the kernels before you call this function.

    Args:
        path: a package of AOTInductor.

    Returns:
        A source file. It defines the operators that the package calls and that Python defined.

    Raises:
        MissingKernelError: an operator that the package calls has no kernel in C++ for the device
            of the package; names both.
        OperatorNotFoundError: an operator that the package calls is not registered in this process.
        zipfile.BadZipFile: the file is no archive.

    Example:
        >>> import torchop, torchop.export
        >>> torch.ops.load_library("kernels.so")  # doctest: +SKIP
        >>> source = torchop.export.cpp_definitions("model.pt2")  # doctest: +SKIP
        >>> pathlib.Path("definitions.cpp").write_text(source)  # doctest: +SKIP
    """
    operators, device = contents_of_package(path)
    definitions: dict[str, list[str]] = {}
    for op in (Operator(name, "cpp_definitions") for name in operators):
        site = python_kernel(op, device)
        if site is not None:
            raise torchop.MissingKernelError(
                f"{op}: the package calls it on {device}, for which it has no kernel in C++ (see "
                f"{site}), so no process without Python can run the package. Register one with "
                f"TORCH_LIBRARY_IMPL({op.name.namespace}, ...), and load its library here, with "
                "torch.ops.load_library, before you call cpp_definitions."
            )
        if is_defined_in_python(op):
            schema = str(op.overload._schema).partition("::")[2]
            line = f"  m.def({json.dumps(schema)});"
            definitions.setdefault(op.name.namespace, []).append(line)
    blocks = (
        _BLOCK.format(namespace=namespace, definitions="\n".join(lines))
        for namespace, lines in definitions.items()
    )
    return _SOURCE.format(package=os.path.basename(path), blocks="".join(blocks))
