"""Keys for compile caches that change when a rule does.

PyTorch's caches of compiled graphs, which outlive a process, identify an operator by its name
alone. After an edit to a fake kernel or a formula they would return graphs that were compiled with
the old one. So the key of a graph also holds a digest of the rules of the operators in it, and a
program can put a digest of all of them into the tag that PyTorch adds to every key.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterable
from pathlib import Path

import torch

import torchop
from torchop import Rule, get_rule
from torchop._compat import planned_outputs, registries, stock_kernels
from torchop._compat.classes import CustomOpDef, OpOverload
from torchop._core.definition import Definition
from torchop._core.registry import definitions_of, own_definitions
from torchop._core.user_rule import rule_names
from torchop._schema.signatures import closure_of, names_in, package_of
from torchop.extend import OpName


def cache_key_tag() -> str:
    """Returns a digest of what compilers bake into graphs: schemas, fake kernels, formulas.

    The keys of graphs in the caches of AOT Autograd and Inductor hold such a digest of the
    operators in the graph by themselves, so programs do not need this for them. It is for caches of
    your own. In `torch.compiler.config.cache_key_tag`, it makes every graph be compiled again after
    a change of any operator.

    The digest does not depend on kernels, because a compiled graph calls them, except where it
    contains them (`compile="inline"`): then it depends on those of providers, and on the order in
    force. It depends on functions of the same package that a rule calls, on operators that it calls
    by their handle or as `torch.ops.ns.name`, and on numbers and strings that it reads from its
    module or from the function around it. It does not depend on what objects hold.

    Example:
        >>> import torch, torchop
        >>> torch.compiler.config.cache_key_tag = torchop.cache_key_tag()
        >>> torch.compiler.config.cache_key_tag = ""

    The idea of a tag is `torch.compiler.config.cache_key_tag`.
    """
    return identify(None)[0]


def identify(operators: Iterable[str] | None) -> tuple[str, list[types.CodeType]]:
    """A digest of the rules of operators, of all of ours if it is None, and the code of the rules.

    It is empty if compilers bake nothing of these operators into a graph.
    """
    digest = _Digest()
    for name in digest.own if operators is None else sorted(operators):
        digest.add_operator(name)
    return digest.text() if digest.has_rules else "", digest.sources


_NUMBERS_AND_TEXT = (str, bytes, int, float, complex, torch.dtype, type(None))


class _Digest:
    """Of values, as far as they are the same in every process.

    Attributes:
        has_rules: whether one of the operators has a rule that we know.
        sources: the code of authors that was read.
    """

    def __init__(self) -> None:
        self.has_rules = False
        self.sources: list[types.CodeType] = []
        self._hash = hashlib.sha256(torchop.__version__.encode())
        self._seen: set[object] = set()

    @functools.cached_property
    def own(self) -> list[str]:
        return sorted(own_definitions())

    def text(self) -> str:
        return hashlib.sha256(_own_code() + self._hash.digest()).hexdigest()

    def add_operator(self, qualname: str) -> None:
        """Adds the rules of an operator, and of the one that it was derived from."""
        name = OpName.parse(qualname)
        if name.namespace in _OF_PYTORCH or qualname in self._seen:
            return
        self._seen.add(qualname)
        for definition in definitions_of(name):
            self._add_definition(qualname, definition)
        # What torch.library's functions registered, for whomever.
        handle = registries.published_handle(qualname)
        registered = () if handle is None else stock_kernels.registered_functions(handle)
        functions = [function for role, function in registered if role != "kernel" and function]
        functions += registries.fake_functions(qualname)
        if functions:
            self.has_rules = True
            self.add([qualname, functions])

    def _add_definition(self, qualname: str, definition: Definition) -> None:
        self.has_rules = True
        parts = [value for rule in definition.rules.values() for value in rule.cache_parts()]
        for rule in map(get_rule, rule_names()):
            if rule.has(qualname):
                parts += rule.cache_parts(rule.lookup(qualname))
        parts += map(str, (definition.declaration.tags, planned_outputs.forms_in_graphs(qualname)))
        self.add([qualname, definition.schema.written, parts])
        if (origin := Rule.origin(definition.overload)) is not None:
            self.add_operator(origin[0]._name)

    def add(self, value: object) -> None:
        """Adds a value: what it says if that lasts, and what it calls."""
        if isinstance(value, functools.partial):
            self.add([value.func, value.args, sorted(value.keywords.items())])
        elif isinstance(value, types.MethodType):
            self.add([value.__func__, type(value.__self__).__qualname__])
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.CodeType):
            self.add([value.co_code, value.co_names, value.co_consts])
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.add(item)
        elif isinstance(value, (set, frozenset, dict)):
            # Sorted: the order of hashes differs from process to process.
            self.add(sorted(map(repr, value)))
        elif isinstance(value, _NUMBERS_AND_TEXT):
            self._write(repr(value))
        else:
            if isinstance(value, (OpOverload, CustomOpDef, Definition)):
                self.add_operator(_qualname(value))
            # The repr of an object may hold its address.
            self._write(type(value).__qualname__)

    def _add_function(self, function: types.FunctionType) -> None:
        self._write(function.__qualname__)
        if function in self._seen:
            return
        self._seen.add(function)
        self.add([function.__code__, function.__defaults__, getattr(function, "__wrapped__", None)])
        self.add([function.__kwdefaults__, *filter(_is_lasting, closure_of(function).values())])
        package = package_of(function)
        if package in (torchop.__name__, torch.__name__):
            return  # whose code or version is in the key
        self.sources.append(function.__code__)
        names = names_in(function.__code__)
        for name in sorted(names):
            value = function.__globals__.get(name)
            is_helper = isinstance(value, types.FunctionType) and package_of(value) == package
            if name[:2] != "__" and (is_helper or _is_constant(value) or _is_operator(value)):
                self.add([name, value])
        for qualname in self.own if "ops" in names else ():
            namespace, _, local = qualname.partition("::")
            if namespace in names and local.partition(".")[0] in names:
                self.add_operator(qualname)

    def _write(self, text: str) -> None:
        self._hash.update(text.encode() + b"\0")


@functools.cache
def _own_code() -> bytes:
    """Stands for what torchop makes of rules: whoever works on it changes that in one version."""
    files = sorted(Path(torchop.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()


_OF_PYTORCH = ("aten", "prims", "prim", "inductor", "_c10d_functional")


def _qualname(operator: OpOverload | CustomOpDef | Definition) -> str:
    if isinstance(operator, OpOverload):
        return operator._name
    return operator._qualname if isinstance(operator, CustomOpDef) else str(operator)


def _is_operator(value: object) -> bool:
    return isinstance(value, (OpOverload, CustomOpDef, Definition))


def _is_constant(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is not None and isinstance(value, _NUMBERS_AND_TEXT)


def _is_lasting(value: object) -> bool:
    """Whether a value around a function says the same in every process, and belongs to it."""
    functions = (types.FunctionType, types.MethodType, functools.partial)
    return isinstance(value, functions) or _is_constant(value) or _is_operator(value)
