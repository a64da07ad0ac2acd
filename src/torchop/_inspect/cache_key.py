"""A key for compile caches that changes when a rule does.

PyTorch's caches of compiled graphs, which last from one process to the next, know an operator by
its name. After an edit to a fake kernel or a formula they hand out what was compiled with the old
one. PyTorch lets a program put a tag of its own into the keys; this makes one of the rules.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterator

import torch

from torchop._core.registry import own_definitions
from torchop._rules.user.checkpoint_policy import CHECKPOINT_POLICY


def cache_key_tag() -> str:
    """Returns a digest of what compilers bake into a graph: schemas, fake kernels, formulas.

    Put it into `torch.compiler.config.cache_key_tag` after your operators are defined; a graph that
    was compiled with other rules is then compiled again. Kernels do not count, because a compiled
    graph calls them. Functions that a rule calls, and values that it closes over, are not followed;
    neither are rules that were registered for operators of others.

    Example:
        >>> import torch, torchop
        >>> torch.compiler.config.cache_key_tag = torchop.cache_key_tag()
        >>> torch.compiler.config.cache_key_tag = ""

    The idea of a tag is `torch.compiler.config.cache_key_tag`.
    """
    digest = hashlib.sha256()
    for name, definition in sorted(own_definitions().items()):
        values = [value for rule in definition.rules.values() for value in rule.cache_key_parts()]
        if CHECKPOINT_POLICY.has(name):
            values.append(CHECKPOINT_POLICY.lookup(name).given)
        tags = str(definition.declaration.tags)
        for part in _describe([name, definition.schema.written, tags, values]):
            digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _describe(value: object) -> Iterator[str]:
    """What a value is made of, as far as that is the same in every process."""
    if isinstance(value, functools.partial):
        yield from _describe([value.func, value.args, sorted(value.keywords.items())])
    elif isinstance(value, types.FunctionType):
        yield value.__qualname__
        yield from _describe([value.__code__, value.__defaults__, value.__kwdefaults__])
        yield from _describe(getattr(value, "__wrapped__", None))
    elif isinstance(value, types.CodeType):
        yield value.co_code.hex()
        yield from _describe([value.co_names, value.co_consts])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _describe(item)
    elif isinstance(value, (set, frozenset, dict)):
        # In an order of its own: that of hashes differs from process to process.
        yield from sorted(repr(item) for item in value)
    elif isinstance(value, (str, bytes, int, float, complex, torch.dtype, type(None))):
        yield repr(value)
    else:
        # The repr of an object may hold its address.
        yield type(value).__qualname__
