"""Compute a digest of functions, and of the code and constants that they use.

torchop adds a digest (a hash) of each fake kernel and backward formula to the cache keys of
compiled graphs. The results of such a function become part of the graph and depend on every
function that it calls. This module finds the called functions by the names in the code, without
data-flow analysis. So a digest may include code that is never called, but it does not miss a
function that is called through a local variable.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import hashlib
import importlib.util
import itertools
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import PurePath
from typing import Any, NamedTuple

import torch

from torchop._compat.classes import CustomOpDef, OpOverload, OpOverloadPacket
from torchop._compat.torch_ops import OpNamespace
from torchop._core.definition import Definition
from torchop._schema.signatures import closure_of, names_in, package_of

_OPERATORS = (OpOverload, OpOverloadPacket, CustomOpDef, Definition)
_CONSTANTS = (
    *(str, bytes, int, float, complex, type(None), type(...), slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_SETS, _MAPPINGS = (set, frozenset), (dict, types.MappingProxyType)
_HOLDERS = (
    *(list, tuple, *_SETS, *_MAPPINGS, types.SimpleNamespace, property, staticmethod, classmethod),
    *(types.MethodType, functools.partial),
)
# Wrappers of functools, Triton and Numba store the function that they wrap in these attributes.
_WRAPPED = ("__wrapped__", "fn", "func", "py_func", "dispatcher", "args", "keywords")
# Do not read the code of these packages, because the cache keys already contain their versions.
_VERSIONED = {torch.__name__, __name__.partition(".")[0], *sys.stdlib_module_names}


class CodeDigest:
    """A hash of values that is the same in two processes if code and constants are the same.

    When an object such as a function or class is added, only a number for the object is hashed at
    first. The description of the object is hashed later, together with the same number. So objects
    may refer to each other in cycles, and a long chain of calls does not cause deep recursion.

    `sources` holds the code objects of all user functions that were read.
    """

    def __init__(self, seed: str) -> None:
        self.sources: list[types.CodeType] = []
        self._hash = hashlib.sha256(seed.encode())
        # Maps the ids of all added objects to references. These keep the objects alive, so that no
        # other object gets the same id.
        self._references: dict[int, _Reference] = {}
        # The package of the object that is being described, i.e. hashed.
        self._package: str | None = None
        self._installed: dict[str, bool] = {}
        self._unimported: dict[str, _Unimported] = {}

    def digest(self) -> bytes:
        described = 0
        while described < len(self._references):  # describing an object may add references
            for reference in list(self._references.values())[described:]:
                described += 1
                self._describe(reference)
        self._package = None
        return self._hash.digest()

    def add(self, value: Any) -> None:
        """Add a value to the hash, along with the code and constants that it uses."""
        if isinstance(value, types.CodeType):
            self.add((value.co_code, value.co_names, value.co_consts))
        elif isinstance(value, enum.Enum):
            self._write(f"{_spell(type(value))}.{value.name}")
            self.add(value.value)
            self.add(type(value))
        elif isinstance(value, _CONSTANTS):
            self._write(repr(value))
        elif isinstance(value, _OPERATORS):
            self.add_operator(value)
        elif type(value) is tuple:
            self._write(f"tuple of {len(value)}")
            for item in value:
                self.add(item)
        else:
            self._refer(value)

    def add_registered(self, value: object) -> None:
        """Add a value that a user registered. Its code is read even if its package is installed."""
        package, self._package = self._package, None
        self.add(value)
        self._package = package

    def add_operator(self, operator: Any) -> None:
        """Add an operator that the code refers to. Subclasses override this to add its rules."""

    def add_called(self, namespaces: set[str], names: set[str]) -> None:
        """Add the operators that a piece of code may call. Subclasses override this.

        `namespaces` holds the names in the code that may be namespaces of operators, and `names`
        the names that may be operators.
        """

    def _write(self, text: str) -> None:
        self._hash.update(text.encode("utf-8", "surrogatepass") + b"\0")

    def _refer(self, value: Any) -> None:
        reference = self._references.get(id(value))
        if reference is None:
            package = _package_name(value)
            is_read = package not in _VERSIONED and self._is_followed(package)
            number = len(self._references)
            reference = _Reference(number, value, package if is_read else self._package, is_read)
            self._references[id(value)] = reference
        self._write(f"{reference.number} {_spell(value)}")

    def _is_followed(self, package: str) -> bool:
        """Return whether to include the code of `package`, which is used by other code.

        The code of `package` is included if it is used by code of the same package, or if `package`
        is not installed in site-packages.
        """
        if self._package in (None, package):
            return True
        if package not in self._installed:
            self._installed[package] = _is_installed(package)
        return not self._installed[package]

    def _describe(self, reference: _Reference) -> None:
        value, self._package = reference.value, reference.package
        self._write(f"{reference.number}:")
        if not reference.is_read:  # add the package's version, because the code is not read
            self._write(str(getattr(sys.modules.get(_package_name(value)), "__version__", "")))
        if isinstance(value, types.FunctionType):
            self._describe_function(value, reference.is_read)
        elif isinstance(value, _HOLDERS):
            self.add(_held_by(value))
            if reference.is_read:
                self.add(type(value))
        elif not reference.is_read:
            self._add_stable({n: v for n, v in _attributes(value).items() if n in _WRAPPED})
        elif isinstance(value, type):
            self.add(value.__bases__)
            self._add_stable({n: v for n, v in vars(value).items() if _is_member(n, v)})
        elif isinstance(value, _Unimported):
            self.add(value.code)
            self._add_names(value.code, [], value.parent)
        else:
            self.add(type(value))
            self._add_stable(_attributes(value))

    def _describe_function(self, function: types.FunctionType, is_read: bool) -> None:
        around = closure_of(function)
        if not is_read:
            # This may be a wrapper with the user's function in its closure, so add the closure.
            # Skip containers in the closure, because they may be caches that change between calls.
            around = {n: v for n, v in around.items() if not isinstance(v, (list, *_SETS))}
            if package_of(function) in ("torch", "torchop"):
                around = {n: v for n, v in around.items() if not isinstance(v, _MAPPINGS)}
        self._add_stable(around)
        self._add_stable(vars(function))
        self.add(function.__defaults__)
        self.add(_pairs(function.__kwdefaults__ or {}))
        if is_read:
            code, variables = function.__code__, function.__globals__
            self.sources.append(code)
            self.add(code)
            parent = str(variables.get("__package__") or "")
            annotations = map(_names_in_annotation, function.__annotations__.values())
            self._add_names(code, [around, variables], parent, *annotations)

    def _add_names(
        self,
        code: types.CodeType,
        scopes: list[Mapping[str, Any]],
        parent: str,
        *more: Iterable[str],
    ) -> None:
        """Add the values of all global variables and module attributes that some code uses.

        The names in the code and in `more` are looked up in the dictionaries `scopes`, such as the
        globals of the module. `parent` is the package that contains the module, for resolving
        relative imports.
        """
        names = {name for name in _names(code).union(*more) if name[:2] != "__"}
        namespaces = set(names)
        for name in _imported(code, parent):
            package = name.partition(".")[0]
            if package in _VERSIONED or not self._is_followed(package):
                continue
            if isinstance(module := sys.modules.get(name), types.ModuleType):
                scopes.append(vars(module))
            elif (found := self._unimported.get(name) or _find_unimported(name)) is not None:
                self._unimported[name] = found
                self.add(found)
        seen = set(map(id, scopes))
        for scope in scopes:
            for name in sorted(names & scope.keys()):
                value = scope[name]
                if isinstance(value, OpNamespace):
                    namespaces.add(value.name)
                elif isinstance(value, types.ModuleType):
                    package = _package_name(value)
                    is_read = package not in _VERSIONED and self._is_followed(package)
                    if is_read and id(vars(value)) not in seen:
                        seen.add(id(vars(value)))
                        scopes.append(vars(value))
                elif isinstance(value, str):
                    namespaces.add(value)
            self._add_stable({name: scope[name] for name in names & scope.keys()})
        self.add_called(namespaces, names)

    def _add_stable(self, values: Mapping[str, object]) -> None:
        """Add only those values that are the same in every process.

        Skip objects of other packages, because they may differ between processes. Skip variables
        that are None as well, because they are often caches that the code fills on first use.
        """
        for name, value in sorted(values.items()):
            if isinstance(value, types.ModuleType) or value is None:
                continue
            package = _package_name(value)
            is_read = package not in _VERSIONED and self._is_followed(package)
            if is_read or _is_stable(value):
                self._write(name)
                self.add(value)


class _Reference(NamedTuple):
    """An object whose number is in the hash already, but whose description is added later.

    `package` is the object's own package if the object's code is read. Otherwise, `package` is the
    package of the code that uses the object.
    """

    number: int
    value: Any
    package: str | None
    is_read: bool


class _Unimported:
    """A module that may be imported later. Its code is read without importing it."""

    def __init__(self, name: str, code: types.CodeType) -> None:
        self.name = name
        self.code = code
        is_package = PurePath(code.co_filename).stem == "__init__"
        self.parent = name if is_package else name.rpartition(".")[0]


def _is_stable(value: object) -> bool:
    stable = (*_CONSTANTS, *_OPERATORS, *_HOLDERS, type, types.FunctionType)
    callables = (types.BuiltinFunctionType, types.MethodDescriptorType)
    return isinstance(value, (*stable, *callables)) or any(
        n in _attributes(value) for n in _WRAPPED
    )


def _is_member(name: str, value: object) -> bool:
    functions = (types.FunctionType, staticmethod, classmethod, property)
    return name[:2] != "__" or isinstance(value, functions)


def _package_name(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return package_of(value)
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0]
    if isinstance(value, _Unimported):
        return value.name.partition(".")[0]
    cls = value if isinstance(value, type) else type(value)
    return str(cls.__module__).partition(".")[0]


def _spell(value: Any) -> str:
    named = value if isinstance(_attribute(value, "__qualname__"), str) else type(value)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def _attributes(value: Any) -> dict[str, Any]:
    found = {}
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(vars(cls).get(name), types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # unset
                    found[name] = vars(cls)[name].__get__(value)
    attributes = _attribute(value, "__dict__")
    return found | attributes if type(attributes) is dict else found


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute of an object, or None if reading it raises.

    With a custom `__getattr__`, this may be any exception, for example a KeyError.
    """
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _held_by(value: Any) -> Any:
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, functools.partial):
        return value.func, value.args, _pairs(value.keywords)
    if isinstance(value, types.SimpleNamespace):
        return _pairs(vars(value))
    if isinstance(value, _MAPPINGS):
        return _pairs(value)
    return tuple(sorted(value, key=_order) if isinstance(value, _SETS) else value)


def _pairs(values: Mapping[Any, Any]) -> tuple[tuple[Any, Any], ...]:
    return tuple(sorted(values.items(), key=lambda pair: _order(pair[0])))


def _order(value: object) -> str:
    """Return a sort key for an item of a set or dictionary that is stable across processes.

    Hashes cannot serve as sort keys, because they may differ between processes.
    """
    if isinstance(value, tuple):
        return ", ".join(map(_order, value))
    return repr(value) if isinstance(value, _CONSTANTS) else _spell(value)


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a piece of code uses.

    This includes strings that may be names, as in `getattr(module, "name")`.
    """
    texts = {each for each in code.co_consts if isinstance(each, str) and each.isidentifier()}
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return names_in(code).union(texts, *map(_names, inner))


def _names_in_annotation(annotation: object) -> set[str]:
    """Return the names in an annotation.

    A function may call methods of the classes that its annotations name, so its digest (the hash of
    its code) must include these classes too.
    """
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return set(re.findall(r"\w+", f"{text} {getattr(annotation, '__args__', '')}"))


def _imported(code: types.CodeType, parent: str) -> Iterator[str]:
    if dis.opmap["IMPORT_NAME"] in code.co_code[::2]:
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opname == "IMPORT_NAME":
                with contextlib.suppress(ImportError):  # a relative import beyond the top package
                    relative = f"{'.' * level.argval}{step.argval}"
                    name = importlib.util.resolve_name(relative, parent)
                    yield from itertools.accumulate(name.split("."), "{}.{}".format)
                    yield from (f"{name}.{each}" for each in names.argval or ())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imported(constant, parent)


def _find_unimported(name: str) -> _Unimported | None:
    """Find a module's code without importing the module or its package, or return None."""
    path, spec = None, None
    for prefix in itertools.accumulate(name.split("."), "{}.{}".format):
        if prefix in sys.modules:
            path = getattr(sys.modules[prefix], "__path__", None)
        else:
            spec = None if path is None and "." in prefix else PathFinder.find_spec(prefix, path)
            if spec is None:
                return None
            path = spec.submodule_search_locations
    loader: Any = getattr(spec, "loader", None)
    try:
        code = loader.get_code(name)
    except (AttributeError, ImportError, OSError, SyntaxError):
        return None
    return None if code is None else _Unimported(name, code)


def _is_installed(package: str) -> bool:
    module = sys.modules.get(package)
    spec = getattr(module, "__spec__", None) if module else PathFinder.find_spec(package)
    places = [getattr(module, "__file__", None) or getattr(spec, "origin", None)]
    places += getattr(spec, "submodule_search_locations", None) or ()
    folders = {part for place in places if place for part in PurePath(place).parts}
    return not folders.isdisjoint(("site-packages", "dist-packages"))
