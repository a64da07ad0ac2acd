"""The table of members: what it names is what the documentation names."""

from __future__ import annotations

import inspect

import pytest

import torchop
from torchop._define.members import ATTRIBUTES, MEMBERS, is_device_type, is_reserved, known_names


def test_every_member_and_attribute_is_documented() -> None:
    documented = inspect.getdoc(torchop.operator) or ""
    for name in (*MEMBERS, *ATTRIBUTES):
        assert f"`{name}`" in documented, name


def test_what_a_member_needs_is_a_member() -> None:
    needed = {name for member in MEMBERS.values() for name in member.needs}
    assert needed
    assert needed <= set(MEMBERS)


@pytest.mark.parametrize("name", ["cpu", "cuda", "meta", "xpu", "privateuseone"])
def test_device_types_are_members(name: str) -> None:
    assert is_device_type(name)
    assert is_reserved(name)


def test_other_names_are_no_device_types() -> None:
    assert not is_device_type("crop")
    assert not is_reserved("crop")


@pytest.mark.parametrize("name", ["fake", "schema", "kernel", "autograd", "inverse"])
def test_names_with_a_meaning_are_reserved(name: str) -> None:
    assert is_reserved(name)


def test_what_is_proposed_is_known() -> None:
    assert {"forward", "mutates_args", "inverse", "cuda"} <= set(known_names())
