"""Save structures for the backward pass.

Autograd must own saved tensors, so we pass the tensors to `ctx.save_for_backward`. The rest of the
value becomes a *template* with placeholders for the tensors, stored as an attribute of `ctx`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_TENSOR = object()
_TEMPLATES = "_torchop_templates"


# Values of these types are saved unchanged. Most saved values have one of these types, so
# `_template` checks for them first.
_PLAIN = frozenset({NoneType, bool, int, float, str, torch.dtype, torch.device})
# Maps dataclasses to their field names. Weak keys allow the classes to be freed.
_names: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()


class _Object(NamedTuple):
    cls: type
    names: Sequence[str]
    fields: Sequence[Any]


def save(ctx: Any, values: Iterable[Any]) -> None:
    """Save values, including structures such as dataclasses, to be returned by `saved`."""
    tensors: list[Any] = []
    templates = [_template(value, tensors) for value in values]
    is_plain = all(template is _TENSOR for template in templates)
    setattr(ctx, _TEMPLATES, None if is_plain else templates)
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> tuple[Any, ...]:
    """Return the values that were passed to `save`, or to `ctx.save_for_backward`."""
    tensors = ctx.saved_tensors
    templates = getattr(ctx, _TEMPLATES, None)
    if templates is None:
        return tuple(tensors)
    rest = iter(tensors)
    return tuple([_filled(template, rest) for template in templates])


def _template(value: Any, tensors: list[Tensor]) -> Any:
    cls = type(value)
    if cls in _PLAIN:
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TENSOR
    names: Sequence[str] | None = _names.get(cls)
    if cls is list or cls is tuple:
        return cls([_template(item, tensors) for item in value])
    if cls is dict:
        return {key: _template(item, tensors) for key, item in value.items()}
    if names is None and dataclasses.is_dataclass(cls):
        names = _names[cls] = tuple(field.name for field in dataclasses.fields(cls))
    elif isinstance(value, tuple):
        names = getattr(value, "_fields", None)
    if names is None:
        return value
    return _Object(cls, names, [_template(getattr(value, name), tensors) for name in names])


def _filled(template: Any, tensors: Iterator[Tensor]) -> Any:
    cls = type(template)
    if template is _TENSOR:
        return next(tensors)
    if cls is _Object:
        fields = [_filled(field, tensors) for field in template.fields]
        if issubclass(template.cls, tuple):
            return template.cls(*fields)
        # Skip the class's __init__, which may validate the fields again. They were already valid
        # when they were saved.
        value: Any = object.__new__(template.cls)
        for name, field in zip(template.names, fields, strict=True):
            object.__setattr__(value, name, field)
        return value
    if cls is list or cls is tuple:
        return cls([_filled(item, tensors) for item in template])
    if cls is dict:
        return {key: _filled(item, tensors) for key, item in template.items()}
    return template
