"""A key for compile caches that changes when a rule does.

PyTorch's caches of compiled graphs, which last from one process to the next, know an operator by
its name. After an edit to a fake kernel or a formula they hand out what was compiled with the old
one. PyTorch lets a program put a tag of its own into the keys; this makes one of the rules.
"""

from __future__ import annotations

import hashlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torchop._resolve import own_definitions
from torchop._rules.autograd import AutogradRule
from torchop._rules.effect import EffectRule
from torchop._rules.fake import FakeRule


def cache_key_tag() -> str:
    """Returns a digest of what compilers bake into a graph: schemas, fake kernels and formulas.

    Put it into `torch.compiler.config.cache_key_tag` after your operators are defined; a graph that
    was compiled with other rules is then compiled again. Kernels do not count, because a compiled
    graph calls them. Functions that a rule calls are not followed.

    Example:
        >>> import torch, torchop
        >>> torch.compiler.config.cache_key_tag = torchop.cache_key_tag()
        >>> torch.compiler.config.cache_key_tag = ""

    The idea of a tag is `torch.compiler.config.cache_key_tag`.
    """
    digest = hashlib.sha256()
    for name, definition in sorted(own_definitions().items()):
        formula = definition.rule(AutogradRule)
        functions = (definition.rule(FakeRule).function, formula.backward, formula.setup_context)
        effect = definition.rule(EffectRule).effect
        parts = (name, definition.schema.written, str(definition.tags), str(effect))
        digest.update("\0".join(parts).encode())
        for function in functions:
            for part in _describe(function):
                digest.update(b"\0" + part)
    return digest.hexdigest()


def _describe(function: Callable[..., Any] | None) -> Iterator[bytes]:
    """What a function does, as far as its own code tells."""
    if function is None:
        return
    plain = inspect.unwrap(function)
    yield getattr(plain, "__qualname__", type(plain).__qualname__).encode()
    if isinstance(plain, types.FunctionType):
        yield from _describe_code(plain.__code__)
        yield repr((plain.__defaults__, plain.__kwdefaults__)).encode()


def _describe_code(code: types.CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr(code.co_names).encode()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _describe_code(constant)
        else:
            yield repr(constant).encode()
