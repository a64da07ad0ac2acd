"""Which operators a package registers, as far as that can be known."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torchop._compat import operators, registries, stock_kernels
from torchop._native import low_level, switch
from torchop._schema import naming
from torchop._schema.naming import OpName


class Registrant:
    """A module, or a package with all its modules, and the operators that it registers.

    PyTorch keeps no list of these. An operator belongs to the module if the function of its
    `custom_op`, one of its Python kernels or its fake kernel is defined there, or if the library
    that defined it was created there. Kernels can be read from the dispatcher only with the native
    call path, and operators that an extension in C++ defines cannot be recognized.
    """

    def __init__(self, module: ModuleType) -> None:
        self.name = module.__name__
        folders = getattr(module, "__path__", None)
        file = getattr(module, "__file__", None)
        self._folders = [os.path.join(os.path.realpath(folder), "") for folder in folders or ()]
        self._file = None if file is None or self._folders else os.path.realpath(file)

    def registers(self, op: OpName) -> bool:
        """Whether the operator is one of the module's."""
        return any(map(self._has_function, _functions(op))) or any(map(self._has_file, _files(op)))

    def why_nothing(self) -> str | None:
        """The message about a module that registers no operator; None if it registers some."""
        names = sorted(map(naming.parse, operators.defined_in_python()))
        if any(map(self.registers, names)):
            return None
        top = self.name.partition(".")[0]
        package = sys.modules.get(top)
        if package is not None and any(map(Registrant(package).registers, names)):
            hint = f"the package {top} has some: pass that package"
        else:
            import difflib  # only for this message

            namespaces = {op.namespace for op in names}
            near = difflib.get_close_matches(top, namespaces, n=1, cutoff=0.5) or ["mylib"]
            hint = (
                "for operators defined in C++ or by another module, pass their names, such as "
                f"'{near[0]}::*'"
            )
        return (
            f"record({self.name}): no registered operator has a function in this module or was "
            f"defined by it; {hint}."
        )

    def _has_function(self, function: Any) -> bool:
        module = _module_of(function)
        return module == self.name or (bool(self._folders) and module.startswith(f"{self.name}."))

    def _has_file(self, file: str) -> bool:
        path = os.path.realpath(file)
        return path == self._file or path.startswith(tuple(self._folders))


def modules_of(op: OpName) -> list[str]:
    """The modules that register an operator or a kernel of it, as far as that can be known.

    Without the program itself, `__main__`, which cannot be imported in another process.
    """
    files = set(_files(op))
    names = set(map(_module_of, _functions(op))) | {
        name for name, module in sys.modules.items() if getattr(module, "__file__", None) in files
    }
    return sorted(name for name in names & sys.modules.keys() if "__main__" not in name)


def _functions(op: OpName) -> Iterator[Callable[..., Any]]:
    """The Python functions of an operator that can be read: of `custom_op`, and its kernels."""
    function = registries.published_function(str(op))
    if function is not None:
        yield function
    native = switch.native_module()
    if native is None:
        return
    for backend in native.backends:
        kernel = native.python_kernel(op.packet, op.overload, backend)
        if kernel is not None:
            yield getattr(kernel, low_level.KERNEL_ATTRIBUTE, None) or stock_kernels.below_impl(
                kernel
            )


def _files(op: OpName) -> Iterator[str]:
    """The files in which an operator was defined, or got its fake kernel."""
    defined = operators.registration_site(op.packet, op.overload)
    for site in (defined, registries.fake_source(str(op)) or ""):
        place = re.match(r"(.+):\d+$", site)
        if place is not None:
            yield place.group(1)


def _module_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(inspect.unwrap(function), "__module__", ""))
