"""Find the modules that registered an operator, or a kernel, a fake kernel and so on for it.

PyTorch does not record which module made a registration, so this module looks at the operator's
functions instead. An operator belongs to each module that contains its `custom_op` function, its
fake kernel or one of its Python kernels, and to the module that created the library in which it is
defined. Operators that are registered from C++ belong to no module.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torchop._compat import dispatch, operators, registries, stock_kernels
from torchop._core.registry import defining_module, registration_site
from torchop._native import switch
from torchop._native.table.ours import KERNEL_ATTRIBUTE
from torchop.extend import Operator, OpName

# For each kind of rule, the prefix of the dispatch keys for which its kernels are registered.
_KEYS = {"fake": "Meta", "autograd": "Autograd", "vmap": "FuncTorchBatched", "autocast": "Autocast"}


def registers(module: str, op: OpName) -> bool:
    """Return whether a module, or any submodule of a package, registers an operator."""
    return any(name == module or name.startswith(f"{module}.") for name in _modules_of(op))


def no_operator_reason(module: str) -> str | None:
    names = sorted(map(OpName.parse, operators.defined_in_python()))
    if any(registers(module, op) for op in names):
        return None
    top = module.partition(".")[0]
    if any(registers(top, op) for op in names):
        hint = f"the package {top} has some: pass that package"
    else:
        import difflib  # slow import

        namespaces = {op.namespace for op in names}
        near = difflib.get_close_matches(top, namespaces, n=1, cutoff=0.5) or ["mylib"]
        hint = (
            "for operators defined in C++ or by another module, pass their names, such as "
            f"'{near[0]}::*'"
        )
    return (
        f"record({module}): no registered operator has a function in this module or was "
        f"defined by it; {hint}."
    )


def modules_of(op: OpName) -> list[str]:
    """Return the modules that register an operator or kernels for it.

    `__main__` is left out, because another process cannot import it.
    """
    names = _modules_of(op) & sys.modules.keys()
    return sorted(name for name in names if "__main__" not in name)


def _modules_of(op: OpName) -> set[str]:
    # Collect the Python files that define the operator or register its fake kernel. Skip C++ files,
    # which belong to no Python module.
    sites = registration_site(op), registries.fake_source(str(op))
    files = {site.rpartition(":")[0] for site in sites if site is not None and ".py:" in site}
    names = set(map(_module_of, functions_of(op)))
    if (module := defining_module(op)) is not None:
        names.add(module)
    newest = next(reversed(sys.modules))
    by_file = _modules_by_file(len(sys.modules), newest, id(sys.modules.get(newest)))
    for file in files:
        # The same file may be loaded as several modules that register different operators. If
        # `names` already contains some of these modules, they are the ones that register this
        # operator, so leave out the other modules.
        modules = set(by_file.get(file, ()))
        names |= modules & names or modules
    return names


@functools.lru_cache(maxsize=1)
def _modules_by_file(count: int, newest: str, identity: int) -> dict[str, list[str]]:
    """Map each file name to the modules that were loaded from the file.

    The result is cached, because callers need it for every operator and it takes a millisecond to
    compute. The arguments only form the cache key: they are the number of modules in `sys.modules`,
    and the name and id of the newest one, so importing a module invalidates the cache.
    """
    by_file: dict[str, list[str]] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            by_file.setdefault(file, []).append(name)
    return by_file


def functions_of(op: OpName) -> Iterator[Callable[..., Any]]:
    """Yield the function that `custom_op` decorated, and the operator's Python kernels."""
    function = registries.published_function(str(op))
    if function is not None:
        yield function
    native = switch.native_module()
    if native is None:
        return
    for backend in native.backends:
        kernel = native.python_kernel(op.packet, op.overload, backend)
        if kernel is not None:
            yield getattr(kernel, KERNEL_ATTRIBUTE, None) or stock_kernels.below_impl(kernel)


def _module_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(inspect.unwrap(function), "__module__", ""))


def in_dispatcher(operator: Operator) -> tuple[list[str], list[str]]:
    """Return the devices that the dispatcher has kernels for, and the names of registered rules.

    This reads the dispatcher instead of torchop's registry, because only the dispatcher has the
    kernels that other libraries registered.
    """
    table = dispatch.kernel_table(str(operator))
    keys = {key for key, text in table.items() if text.endswith("[kernel]")}
    kernels = [key for key in sorted(keys) if dispatch.device_of_key(key) is not None]
    if any(text.endswith("[default backend kernel]") for text in table.values()):
        kernels.append("every device")
    if any(text.endswith("[math kernel]") for text in table.values()):
        kernels.append("composite")
    if "[autograd kernel]" in table.get("AutogradCPU", ""):
        keys.add("Autograd")
    if registries.fake_source(str(operator)) is not None:
        keys.add("Meta")
    rules = [rule for rule, start in _KEYS.items() if any(key.startswith(start) for key in keys)]
    return kernels, rules


def is_defined_in_python(operator: Operator) -> bool:
    operator.overload  # noqa: B018  # raises if the operator does not exist
    return _is_python(operators.registration_site(operator.name.packet, operator.name.overload))


def python_kernel(operator: Operator, device_type: str) -> str | None:
    """Return where a device type's kernel was registered, or None if it is a C++ kernel."""
    operator.overload  # noqa: B018  # raises if the operator does not exist
    table = dispatch.kernel_table(str(operator))
    text = table.get(dispatch.dispatch_key_name(device_type), "no kernel")
    if "registered at" in text and not _is_python(text):
        return None
    return place_of(operator) or text


def _is_python(site: str) -> bool:
    # Code from `python -c` has the file name "<string>".
    return re.search(r"(\.py|>):\d+", site) is not None


def place_of(operator: Operator) -> str | None:
    """Return the file and line of an operator's function, or else of its registration."""
    site = registration_site(operator.name)
    return site if ":" in site else None
