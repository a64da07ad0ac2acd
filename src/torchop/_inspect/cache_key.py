"""Compute keys for compile caches that change whenever an operator's rules change.

An operator's rules are the functions and settings that affect compiled graphs, such as its fake
kernel and its backward formula. PyTorch's persistent caches of compiled graphs identify an operator
by name alone (pytorch/pytorch#144344), so after an edit of a fake kernel or backward formula, they
would still return the old graph. To prevent this, torchop adds a digest (a hash) of these rules to
the cache key of each graph that calls the operator.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterable
from pathlib import Path

import torchop
from torchop import Rule, get_rule
from torchop._compat import planned_outputs, registries, stock_kernels, torch_ops
from torchop._compat.classes import CustomOpDef, OpOverload, OpOverloadPacket
from torchop._core.definition import Definition
from torchop._core.registry import definitions_of, known_names, own_definitions
from torchop._core.user_rule import rule_names
from torchop._inspect.code_digest import CodeDigest
from torchop.extend import OpName


def cache_key_tag() -> str:
    """Return a digest of all rules that affect compiled graphs, such as fake kernels and formulas.

    Use it in the keys of your own caches. AOTAutograd's and Inductor's caches do not need it,
    because torchop already adds a digest of a graph's operators to the keys there. If you set
    `torch.compiler.config.cache_key_tag` to this digest, changing any operator recompiles all
    graphs.

    The digest covers the code and constants that a rule uses from its own package and from modules
    outside of `site-packages`, and the rules of operators that the rule calls. It covers neither
    the contents of tensors nor functions whose names are computed at run time. Kernels are not
    covered either, because a compiled graph only calls them, so their code can change without
    recompiling the graph. Operators with `compile="inline"` are different, because the graph
    contains the code of their kernels. For these operators, the digest also covers their kernels,
    the kernels of their providers, and the priority order of the providers.

    Example:
        >>> import torch, torchop
        >>> torch.compiler.config.cache_key_tag = torchop.cache_key_tag()
        >>> torch.compiler.config.cache_key_tag = ""

    Based on `torch.compiler.config.cache_key_tag`.
    """
    return identify(None)[0]


def identify(operators: Iterable[str] | None) -> tuple[str, list[types.CodeType]]:
    """Return a digest of the operators' rules, and the code objects that went into it.

    If `operators` is None, include all operators of torchop. If none of the operators has a rule
    that affects compiled graphs, the digest is the empty string.
    """
    digest = _Digest()
    for name in sorted(own_definitions() if operators is None else operators):
        digest.add_operator(name)
    return digest.text() if digest.has_rules else "", digest.sources


def digest_of_function(function: object) -> bytes:
    """Return a digest of a function with all code, constants and operators that it uses."""
    digest = _Digest()
    digest.add_registered(function)
    return digest.digest()


class _Digest(CodeDigest):
    """A digest of operators' rules. If a rule calls other operators, it includes their rules."""

    def __init__(self) -> None:
        super().__init__(torchop.__version__)
        self.has_rules = False
        self._added: set[str] = set()

    @functools.cached_property
    def _known(self) -> dict[str, dict[str, list[str]]]:
        """The names of operators with fake kernels or other rules, by namespace and base name.

        A base name omits the overload, so several operators may share one.
        """
        known: dict[str, dict[str, list[str]]] = {}
        for name in map(OpName.parse, known_names()):
            known.setdefault(name.namespace, {}).setdefault(name.name, []).append(str(name))
        return known

    def text(self) -> str:
        return hashlib.sha256(_own_code() + self.digest()).hexdigest()

    def add_operator(self, operator: str | OpOverload | OpOverloadPacket | CustomOpDef) -> None:
        """Add an operator's rules, and for a derived operator also the rules of the original."""
        if isinstance(operator, OpOverloadPacket):
            for overload in operator.overloads():
                self.add_operator(getattr(operator, overload))
            return
        qualname = _qualname(operator)
        self.add(qualname)
        name = OpName.parse(qualname)
        if name.namespace in _OF_PYTORCH or qualname in self._added:
            return
        self._added.add(qualname)
        # The operator may already be deregistered: rules that were registered without `lib=` for an
        # operator of another package outlive the operator. Another thread may also deregister it at
        # any time, so look up the overload only once.
        overload = torch_ops.live_overload(*name)
        if overload is None:
            return
        for definition in definitions_of(name):
            self._add_definition(overload, definition)
        # Also add the rules that were registered through torch.library.
        handle = registries.published_handle(qualname)
        registered = () if handle is None else stock_kernels.registered_functions(handle)
        functions = [function for role, function in registered if role != "kernel" and function]
        functions += registries.fake_functions(qualname)
        if functions:
            self.has_rules = True
            self.add_registered((qualname, *functions))

    def _add_definition(self, overload: OpOverload, definition: Definition) -> None:
        self.has_rules = True
        qualname = overload._name
        parts = [value for rule in definition.rules.values() for value in rule.cache_parts()]
        for rule in map(get_rule, rule_names()):
            # Unlike `lookup`, `_find` does not raise if another thread has just deregistered the
            # operator.
            if (value := rule._find(overload)) is not NotImplemented:
                parts += rule.cache_parts(value)
        parts += map(str, (definition.declaration.tags, planned_outputs.forms_in_graphs(qualname)))
        self.add_registered((qualname, definition.schema.written, *parts))
        if (origin := Rule.origin(overload)) is not None:
            self.add_operator(origin[0])

    def add_called(self, namespaces: set[str], names: set[str]) -> None:
        for namespace in sorted(namespaces & self._known.keys()):
            for local in sorted(names & self._known[namespace].keys()):
                for qualname in self._known[namespace][local]:
                    self.add_operator(qualname)


@functools.cache
def _own_code() -> bytes:
    """Return a digest of torchop's source code.

    The version number of torchop is not enough for a cache key, because the code may change without
    a new version, for example in a Git checkout.
    """
    files = sorted(Path(torchop.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()


_OF_PYTORCH = ("aten", "prims", "prim", "inductor", "_c10d_functional")


def _qualname(operator: str | OpOverload | CustomOpDef | Definition) -> str:
    if isinstance(operator, OpOverload):
        return operator._name
    return operator._qualname if isinstance(operator, CustomOpDef) else str(operator)
