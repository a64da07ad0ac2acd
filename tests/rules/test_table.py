"""Requirements for every compiled rule. Uses private names."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from tests.core.test_plan import REGISTRATIONS, define
from torchop import _rules
from torchop._core.definition import CompiledRule
from torchop._define.members import ATTRIBUTES, MEMBERS
from torchop._rules import RULES

TESTS = Path(__file__).parents[1]
# Some rules are named differently as a method than as a member of an operator's class: the method
# `register_kernel` registers the member `forward`.
MEMBERS_OF = {"kernel": "forward", "autograd": "backward", "effect": "effects", "layout": "layouts"}


def subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def test_the_table_has_the_rules_of_all_files() -> None:
    for module in pkgutil.walk_packages(_rules.__path__, f"{_rules.__name__}."):
        importlib.import_module(module.name)
    made = {rule for rule in subclasses(CompiledRule) if rule.__module__.startswith("torchop.")}
    assert set(RULES) == made
    assert len(RULES) == len(made)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_says_how_it_is_compiled_and_has_a_test(rule: type[CompiledRule[Any]]) -> None:
    assert rule.__doc__
    assert rule.compile is not CompiledRule.compile
    *rooms, file = rule.__module__.split(".")[1:]
    test = TESTS.joinpath(*(room.strip("_") for room in rooms), f"test_{file}.py")
    assert test.exists(), test


def test_every_rule_that_users_register_is_in_the_tests_of_plans() -> None:
    tested = {rule for rule, _ in REGISTRATIONS.values()}
    assert {rule.__name__ for rule in RULES if hasattr(rule, "register")} <= tested
    functions = {
        name.removeprefix("register_")
        for name in torchop.__all__
        if name.startswith("register_")
        and getattr(torchop, name).__module__.startswith(f"{_rules.__name__}.")
        and not getattr(torchop, name).__module__.startswith(f"{_rules.__name__}.user.")
    }
    assert functions == {*REGISTRATIONS, "jvp"}, "jvp is a part of what autograd registers"


@pytest.mark.parametrize("name", REGISTRATIONS)
def test_each_registration_has_a_function_a_method_and_a_member(name: str) -> None:
    assert f"register_{name}" in torchop.__all__
    assert callable(getattr(torchop.CustomOp, f"register_{name}"))
    assert MEMBERS_OF.get(name, name) in {*MEMBERS, *ATTRIBUTES}


@pytest.mark.parametrize(("rule", "register"), REGISTRATIONS.values(), ids=REGISTRATIONS)
def test_registrations_are_shown(namespace: str, rule: str, register: Any) -> None:
    op = define(namespace)
    (kind,) = [kind for kind in RULES if kind.__name__ == rule]
    before = op._definition.rule(kind).repr_text()
    register(op)
    text = op._definition.rule(kind).repr_text()
    assert text != before
    assert text in repr(op)


def returning(*args: Any, **kwargs: Any) -> Any: ...


@pytest.mark.parametrize(
    ("rule", "arguments"),
    [
        ("fake", ()),
        ("kernel", ("cpu",)),
        ("autograd", ()),
        ("jvp", ()),
        ("vmap", ()),
        ("torch_dispatch", (TorchDispatchMode,)),
    ],
)
def test_registrations_return_the_function(
    namespace: str, rule: str, arguments: tuple[Any, ...]
) -> None:
    op = define(namespace)
    method, function = (getattr(each, f"register_{rule}") for each in (op, torchop))
    assert method(*arguments, returning) is returning
    assert method(*arguments)(returning) is returning
    assert function(op, *arguments, returning) is returning
    assert function(op, *arguments)(returning) is returning
