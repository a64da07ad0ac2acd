"""Requirements for every rule that torchop ships.

The test of each file in `_rules/user` has a table `VALUES`, which maps each rule of the file to a
value that can be registered for an operator with the schema `(Tensor x) -> Tensor`.

Uses private names.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from torchop._define.members import ATTRIBUTES, MEMBERS, is_device_type
from torchop._define.registrations import Registrations
from torchop._rules import user

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "index.md"
PREFIX = "register_"
TABLE = [
    name.removeprefix(PREFIX)
    for name, function in vars(Registrations).items()
    if name.startswith(PREFIX) and function.__module__.startswith(f"{user.__name__}.")
]
MODULES = {
    module.name: importlib.import_module(f"{user.__name__}.{module.name}")
    for module in pkgutil.iter_modules(user.__path__)
}
VALUES: dict[str, Any] = {}
for name in MODULES:
    if importlib.util.find_spec(f"{__package__}.test_{name}") is not None:
        VALUES |= getattr(importlib.import_module(f"{__package__}.test_{name}"), "VALUES", {})


def rules_of(module: ModuleType) -> list[str]:
    return [value.name for value in vars(module).values() if isinstance(value, torchop.Rule)]


def listed(text: str) -> list[str]:
    section = text.partition("\n## Rules outside the dispatcher\n")[2]
    return re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", section.partition("\n## ")[0], re.MULTILINE)


# --------------------------------------------------------------------------------------------------
# Lists of all rules


def test_the_table_has_the_rules_of_all_files() -> None:
    made = {name: rules_of(module) for name, module in MODULES.items()}
    assert [name for name, rules in made.items() if not rules] == [], "a file without a rule"
    assert sorted(TABLE) == sorted(rule for rules in made.values() for rule in rules)


def test_the_reference_has_the_table() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    assert listed(text) == TABLE
    others = [name for name in TABLE if name != "examples"]
    assert listed(text.replace("| `examples` |", "| examples |")) == others


def test_every_rule_has_a_value_in_the_test_of_its_file() -> None:
    assert sorted(VALUES) == sorted(TABLE)


def test_torchop_has_the_functions_that_files_declare() -> None:
    declared = {
        name: getattr(module, name)
        for module in MODULES.values()
        for name in getattr(module, "__all__", ())
    }
    public = {name: getattr(torchop, name) for name in torchop.__all__}
    assert declared == {
        name: value
        for name, value in public.items()
        if getattr(value, "__module__", "").startswith(f"{user.__name__}.")
    }


# --------------------------------------------------------------------------------------------------
# Each rule


@pytest.fixture
def op(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.clone()

    return op


@pytest.mark.parametrize("rule", TABLE)
def test_rule_name_has_no_other_meaning(rule: str) -> None:
    # The rule `examples` is in MEMBERS, because an operator's class can define it together with the
    # member `valid`.
    assert rule not in MEMBERS or rule == "examples"
    assert rule not in ATTRIBUTES
    assert not is_device_type(rule)


@pytest.mark.parametrize("rule", TABLE)
def test_the_method_is_documented_and_typed(rule: str) -> None:
    method = getattr(torchop.CustomOp, PREFIX + rule)
    assert inspect.isfunction(method)
    assert method.__name__ == PREFIX + rule
    doc = inspect.getdoc(method) or ""
    assert re.match(r"Register .*\.\n\n", doc), doc
    parameters = inspect.signature(method).parameters.values()
    assert "lib" in inspect.signature(method).parameters
    for parameter in parameters:
        assert parameter.annotation is not parameter.empty
        assert re.search(rf"^    {parameter.name}: ", doc, re.MULTILINE), parameter.name


@pytest.mark.parametrize("rule", TABLE)
def test_handle_registers_the_rule_and_shows_it(op: Any, rule: str) -> None:
    assert not torchop.get_rule(rule).has(op)
    assert getattr(op, PREFIX + rule)(VALUES[rule]) is VALUES[rule]
    assert torchop.get_rule(rule).has(op)
    assert repr(op).endswith(f"; {rule.replace('_', ' ')}>")
    op._definition.deregister("over")
    with pytest.raises(torchop.OperatorGoneError, match="over"):
        getattr(op, PREFIX + rule)(VALUES[rule])
    with pytest.raises(torchop.OperatorGoneError, match="over"):
        getattr(op, PREFIX + rule)(None)


@pytest.mark.parametrize("rule", TABLE)
def test_the_method_is_a_decorator_for_functions(op: Any, rule: str) -> None:
    if callable(VALUES[rule]):
        assert getattr(op, PREFIX + rule)(None)(VALUES[rule]) is VALUES[rule]
        assert torchop.get_rule(rule).has(op)


@pytest.mark.parametrize("rule", TABLE)
def test_rule_is_a_class_member(namespace: str, rule: str) -> None:
    value = VALUES[rule]
    members = {
        "schema": "(Tensor x) -> Tensor",
        "forward": staticmethod(torch.clone),
        rule: staticmethod(value) if callable(value) else value,
    }
    op = torchop.operator(f"{namespace}::op")(type("op", (), members))
    assert torchop.get_rule(rule).has(op)


@pytest.mark.parametrize("rule", TABLE)
def test_rule_works_for_stock_operators(namespace: str, rule: str) -> None:
    torchop.define(f"{namespace}::op", "(Tensor x) -> Tensor")
    with torchop.Library(namespace, "FRAGMENT") as library:
        torchop.get_rule(rule).register(f"{namespace}::op", VALUES[rule], lib=library)
        assert torchop.get_rule(rule).has(f"{namespace}::op")
    assert not torchop.get_rule(rule).has(f"{namespace}::op")


@pytest.mark.parametrize("rule", TABLE)
def test_invalid_value_is_rejected(op: Any, rule: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{op.name}: "):
        op.register(rule, 3.5)
    assert not torchop.get_rule(rule).has(op)


@pytest.mark.parametrize("rule", TABLE)
def test_operator_without_value_has_a_default_or_raises(op: Any, rule: str) -> None:
    words = rule.replace("_", " ")
    with contextlib.suppress(torchop.MissingRuleError):
        assert torchop.get_rule(rule).lookup(op) is not None
        return
    expected = rf"{op.name}(\.default)?(: no {words} is registered| has no {words})"
    with pytest.raises(torchop.MissingRuleError, match=expected):
        torchop.get_rule(rule).lookup(op)
