"""A key for compile caches that changes when a rule does.

PyTorch's caches of compiled graphs, which outlive a process, identify an operator by its name
alone. After an edit to a fake kernel or a formula they return graphs that were compiled with the
old one. PyTorch lets a program add a tag to the cache keys; this module computes one from the
rules.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterator

import torch

from torchop import get_rule
from torchop._core.registry import own_definitions
from torchop._core.user_rule import rule_names


def cache_key_tag() -> str:
    """Returns a digest of what compilers bake into graphs: schemas, fake kernels, formulas.

    Put it into `torch.compiler.config.cache_key_tag` after your operators are defined. A graph that
    was compiled with other rules is then compiled again. The digest does not depend on kernels,
    because a compiled graph calls them, except where it contains them (`compile="inline"`): then it
    depends on those of providers, and on the order in force, so set the tag again after a change of
    the order. It does not depend on functions that a rule calls, on
    values that it closes over, or on rules for operators of other packages.

    Example:
        >>> import torch, torchop
        >>> torch.compiler.config.cache_key_tag = torchop.cache_key_tag()
        >>> torch.compiler.config.cache_key_tag = ""

    The idea of a tag is `torch.compiler.config.cache_key_tag`.
    """
    digest = hashlib.sha256()
    for name, definition in sorted(own_definitions().items()):
        parts = [value for rule in definition.rules.values() for value in rule.cache_parts()]
        for rule in map(get_rule, rule_names()):
            if rule.has(name):
                parts += rule.cache_parts(rule.lookup(name))
        tags = str(definition.declaration.tags)
        for part in _stable_text([name, definition.schema.written, tags, parts]):
            digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _stable_text(value: object) -> Iterator[str]:
    """The parts of a value as text, as far as they are the same in every process."""
    if isinstance(value, functools.partial):
        yield from _stable_text([value.func, value.args, sorted(value.keywords.items())])
    elif isinstance(value, types.FunctionType):
        yield value.__qualname__
        yield from _stable_text([value.__code__, value.__defaults__, value.__kwdefaults__])
        yield from _stable_text(getattr(value, "__wrapped__", None))
    elif isinstance(value, types.CodeType):
        yield value.co_code.hex()
        yield from _stable_text([value.co_names, value.co_consts])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _stable_text(item)
    elif isinstance(value, (set, frozenset, dict)):
        # Sorted: the order of hashes differs from process to process.
        yield from sorted(repr(item) for item in value)
    elif isinstance(value, (str, bytes, int, float, complex, torch.dtype, type(None))):
        yield repr(value)
    else:
        # The repr of an object may hold its address.
        yield type(value).__qualname__
