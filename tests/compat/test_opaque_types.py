"""Opaque types, which have other names in other releases of PyTorch. Uses private names."""

from __future__ import annotations

import pytest
from torch._library import opaque_object

from torchop._compat import opaque_types


class NoCustomClass:
    """A class that is not registered with PyTorch."""


def test_the_deprecated_name_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    older = opaque_object.is_opaque_type  # deprecated in favor of is_custom_class
    is_custom = getattr(opaque_object, "is_custom_class", older)
    monkeypatch.setattr(opaque_object, "is_custom_class", is_custom, raising=False)
    monkeypatch.delattr(opaque_object, "is_opaque_type")
    assert opaque_types.custom_class_name(NoCustomClass) is None
