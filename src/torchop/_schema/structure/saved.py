"""Save structures for the backward.

Autograd must own saved tensors, so they are passed to `ctx.save_for_backward`. A *template* is a
value with placeholders in place of its tensors. It is stored as an attribute of `ctx`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

_TENSOR = object()
_TEMPLATES = "_torchop_templates"


class _Object(NamedTuple):
    cls: type
    fields: dict[str, Any]


def save(ctx: Any, values: Iterable[Any]) -> None:
    """Save values, which may be structures, for `saved`."""
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
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TENSOR
    if isinstance(value, dict):
        return {key: _template(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_template(item, tensors) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _Object(type(value), _template(value._asdict(), tensors))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _Object(type(value), _template(fields, tensors))
    return value


def _filled(template: Any, tensors: Iterator[Tensor]) -> Any:
    if template is _TENSOR:
        return next(tensors)
    if type(template) is _Object:
        fields = _filled(template.fields, tensors)
        if issubclass(template.cls, tuple):
            return template.cls(**fields)
        # Skip __init__, because it may check the values. The object was valid when it was saved.
        value: Any = object.__new__(template.cls)
        for name, field in fields.items():
            object.__setattr__(value, name, field)
        return value
    if isinstance(template, dict):
        return {key: _filled(item, tensors) for key, item in template.items()}
    if type(template) in (list, tuple):
        return type(template)(_filled(item, tensors) for item in template)
    return template
