"""Users can define rules of their own, and register them for operators of any package."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.library
from torch import Tensor

import torchop
from tests._support.common import is_defined, needs_native
from torchop import CustomOp

_numbers = itertools.count()


class Cost(torchop.Rule[Any]):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.told: list[str] = []

    def missing(self, op: Any) -> Any:
        return f"no cost of {op}"

    def attach(self, op: Any) -> None:
        self.told.append(f"attach {op.name().partition('::')[2]}")

    def detach(self, op: Any) -> None:
        self.told.append(f"detach {op.name().partition('::')[2]}")


@pytest.fixture
def name() -> str:
    return f"rule_{next(_numbers)}"


@pytest.fixture
def cost(name: str) -> Cost:
    return Cost(name)


@pytest.fixture
def op(namespace: str) -> CustomOp[..., Tensor]:
    return define(namespace)


def define(namespace: str, name: str = "scale", **options: Any) -> CustomOp[..., Tensor]:
    @torchop.custom_op(f"{namespace}::{name}", mutates_args=(), **options)
    def scale(x: Tensor, factor: float = 2.0, *, exact: bool = False) -> Tensor:
        return x * factor

    return scale


def of_scale(x: Any, factor: float, *, exact: bool) -> float:
    return 2.5


# --------------------------------------------------------------------------------------------------
# Registering and looking up


def test_a_rule_is_registered_in_four_ways(cost: Cost, op: Any) -> None:
    def register_by_attribute(fn: Any) -> Any:
        return getattr(op, f"register_{cost.name}")(fn)

    ways: list[Callable[[Any], Any]] = [
        register_by_attribute,
        lambda fn: op.register(cost.name, fn),
        lambda fn: cost.register(op, fn),
        lambda fn: torchop.get_rule(cost.name).register(op.name)(fn),
    ]
    for number, register in enumerate(ways):

        def function(x: Any, factor: Any, *, exact: Any, number: int = number) -> int:
            return number

        assert register(function) is function
        assert cost.lookup(op) is function, "the last one counts"
    assert op.register(cost.name)(of_scale) is of_scale, "as a decorator"


def test_an_operator_is_found_in_every_way_of_naming_it(cost: Cost, op: Any) -> None:
    packet = op.overload._overloadpacket
    for other in (op, op.name, op.overload, packet):
        assert not cost.has(other)
        assert cost.lookup(other).startswith("no cost of ")
    cost.register(op, of_scale)
    for other in (op, op.name, op.overload, packet):
        assert cost.has(other)
        assert cost.lookup(other) is of_scale


def test_a_rule_may_take_anything(name: str, op: Any) -> None:
    class Doubled(torchop.Rule[int]):
        def validate(self, op: Any, value: Any) -> int:
            if not isinstance(value, int):
                raise TypeError(f"{op}: expected an int, got {value!r}")
            return 2 * value

    doubled = Doubled(name)
    assert op.register(name, 3) == 3
    assert doubled.lookup(op) == 6
    with pytest.raises(TypeError, match=r"scale\.default: expected an int, got 'x'"):
        op.register(name, "x")
    assert doubled.lookup(op) == 6, "a refused value changes nothing"


def test_handle_repr_shows_registrations(cost: Cost, op: Any) -> None:
    assert cost.name.replace("_", " ") not in repr(op)
    cost.register(op, of_scale)
    assert repr(op).endswith(f"; {cost.name.replace('_', ' ')}>")


@needs_native
def test_registering_outdates_no_plan(cost: Cost, op: Any) -> None:
    op(torch.ones(1))
    assert op._definition.has_plan
    cost.register(op, of_scale)
    assert op._definition.has_plan
    assert torchop.explain(op, torch.ones(1)).native


# --------------------------------------------------------------------------------------------------
# Operators of other packages


def test_stock_operators_are_supported(cost: Cost, namespace: str) -> None:
    library = torch.library.Library(namespace, "DEF")
    library.define("scale(Tensor x, float factor=2.0, *, bool exact=False) -> Tensor")
    with pytest.raises(torchop.RuleSignatureError, match=r"\(x, factor, \*, exact\)"):
        cost.register(f"{namespace}::scale", lambda x: 1)
    cost.register(f"{namespace}::scale", of_scale)
    assert cost.lookup(getattr(torch.ops, namespace).scale.default) is of_scale
    cost.register("aten::neg", lambda x: 1)
    assert cost.lookup(torch.ops.aten.neg.default)(0) == 1
    with pytest.raises(torchop.OperatorNotFoundError, match="nothing does not exist"):
        cost.lookup(f"{namespace}::nothing")
    library._destroy()
    with pytest.raises(torchop.OperatorNotFoundError):
        cost.lookup(f"{namespace}::scale")
    library = torch.library.Library(namespace, "DEF")
    library.define("scale(Tensor x, float factor=2.0, *, bool exact=False) -> Tensor")
    assert not cost.has(f"{namespace}::scale"), "another operator of that name"
    cost.register(f"{namespace}::scale", of_scale)
    assert cost.told.count("detach scale") == 1
    library._destroy()


def test_closing_the_library_removes_the_registration(cost: Cost, op: Any) -> None:
    library = torchop.Library(op.name.partition("::")[0], "FRAGMENT")
    cost.register(op, of_scale)

    def by_library(x: Any, factor: Any, *, exact: Any) -> int:
        return 1

    cost.register(op, by_library, lib=library)
    assert cost.lookup(op) is by_library
    library.close()
    assert cost.lookup(op) is of_scale, "the one before is there again"
    assert cost.told == ["attach scale"]


def test_registration_does_not_keep_its_library_alive(cost: Cost, op: Any) -> None:
    library = torch.library.Library(op.name.partition("::")[0], "FRAGMENT")
    cost.register(op, of_scale, lib=library)
    alive = weakref.ref(library)
    del library
    gc.collect()
    assert alive() is None
    op.register_vmap("sequential")  # the next registration removes what the library registered
    assert not cost.has(op)
    assert cost.told == ["attach scale", "detach scale"]


# --------------------------------------------------------------------------------------------------
# Deregistering an operator


def test_rules_disappear_with_the_operator(cost: Cost, namespace: str) -> None:
    old = define(namespace)
    cost.register(old, of_scale)
    cost.register(old, of_scale)
    new = define(namespace)
    assert not cost.has(new)
    for ask in (cost.has, cost.lookup, lambda op: cost.register(op, of_scale)):
        with pytest.raises(torchop.OperatorGoneError, match="replaced"):
            ask(old)
    assert cost.told == ["attach scale", "detach scale"]

    with torchop.Library(namespace, "FRAGMENT") as library:
        inside = define(namespace, "inside", lib=library)
        cost.register(inside, of_scale)
    assert cost.told[2:] == ["attach inside", "detach inside"]
    assert cost._entries == {}


def test_value_that_attach_rejects_is_not_registered(name: str, op: Any) -> None:
    class Refusing(torchop.Rule[Any]):
        def attach(self, op: Any) -> None:
            raise RuntimeError("the other tool is full")

    refusing = Refusing(name)
    with pytest.raises(RuntimeError, match="is full"):
        op.register(name, of_scale)
    assert not refusing.has(op)


# --------------------------------------------------------------------------------------------------
# Names


@pytest.mark.parametrize("name", ["", "two words", "class", 3, "a-b"])
def test_the_name_of_a_rule_is_an_identifier(name: Any) -> None:
    with pytest.raises(ValueError, match="must be an identifier such as 'cost'"):
        torchop.Rule(name)


def test_the_name_of_a_rule_is_not_private() -> None:
    with pytest.raises(ValueError, match="must not start with an underscore"):
        torchop.Rule("_cost")


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"no rule 'zzz'\. The rules are .*inverse.*torchop.Rule first"
    ):
        torchop.get_rule("zzz")


@pytest.mark.parametrize("name", ["fake", "cuda", "schema", "inverse", "kernel"])
def test_the_name_of_a_rule_means_nothing_else(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' already has a meaning"):
        torchop.Rule(name)


def test_two_packages_cannot_use_one_name(cost: Cost) -> None:
    other: dict[str, Any] = {"__name__": "their._rules", "torchop": torchop}
    with pytest.raises(
        ValueError,
        match=rf"already, created at .*test_user_rule\.py:\d+.*such as 'rules_{cost.name}'",
    ):
        exec(f"torchop.Rule({cost.name!r})", other)
    assert torchop.get_rule(cost.name) is cost


def test_reloading_a_module_keeps_registrations(name: str, namespace: str) -> None:
    op = define(namespace)
    before = Cost(name)
    before.register(op, of_scale)
    again = Cost(name)
    assert torchop.get_rule(name) is again
    assert again.lookup(op) is of_scale
    define(namespace)
    assert again.told == ["detach scale"], "the rule that is there now is told"


def test_the_class_form_knows_every_rule(cost: Cost, namespace: str) -> None:
    members = {
        "forward": staticmethod(lambda x: x.clone()),
        "schema": "(Tensor x) -> Tensor",
        cost.name: staticmethod(lambda x: 7),
    }
    op = torchop.operator(f"{namespace}::copy")(type("copy", (), members))
    assert cost.lookup(op)(0) == 7


# --------------------------------------------------------------------------------------------------
# Operators derived from another operator


class Share(Cost):
    """A rule that computes its values for the operators that are derived from another operator."""

    def missing(self, op: Any) -> Any:
        return None

    def replaced(self, op: Any) -> None:
        self.told.append(f"replaced {op.name().partition('::')[2]}")

    def validate(self, op: Any, value: Any) -> Any:
        return value

    def of_derived(self, op: Any, kind: str, origin: Any, value: Any) -> Any:
        if kind in ("backward_kernel", "mutable", value):
            return NotImplemented
        return f"{value} of {kind}"


@pytest.fixture
def share(name: str) -> Share:
    return Share(name)


def kinds(op: Any) -> dict[str, Any]:
    def backward(grad: Tensor, x: Tensor) -> Tensor:
        return grad.clone()

    op.register_autograd(backward_kernel=backward)
    op.derive_autograd()
    base = op.name
    return {
        "inplace": op.derive_inplace(),
        "out": op.derive_out(),
        "training": f"{base}__training",
        "backward": f"{base}__backward",
        "backward_kernel": f"{base}__backward_kernel",
    }


def functional(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, n: int = 1) -> Tensor:
        return x * n

    return op


@pytest.mark.parametrize("is_first", [True, False])
def test_rule_decides_the_values_of_derived_operators(
    share: Share, namespace: str, is_first: bool
) -> None:
    op = functional(namespace)
    if is_first:
        share.register(op, "all")
    derived = kinds(op)
    if not is_first:
        assert not any(map(share.has, derived.values()))
        share.register(op, "all")
    found = {kind: share.lookup(each) for kind, each in derived.items()}
    expected: dict[str, Any] = {kind: f"all of {kind}" for kind in derived}
    assert found == {**expected, "backward_kernel": None}
    assert not share.has(derived["backward_kernel"])
    names = ["op", "op_", "op.out", "op__training", "op__backward"]
    assert sorted(share.told) == sorted(f"attach {each}" for each in names)
    assert Share.origin(derived["out"].overload) == (op.overload, "out")
    assert Share.origin(op.overload) is None


def test_derived_operators_follow_each_registration(share: Share, namespace: str) -> None:
    op = functional(namespace)
    form = op.derive_inplace()
    with torchop.Library(namespace, "FRAGMENT") as library:
        share.register(op, "a", lib=library)
        # For the registered value "inplace", this rule returns no value for the in-place form.
        share.register(op, "inplace", lib=library)
        assert not share.has(form)
        share.register(op, "b", lib=library)
        assert share.lookup(form) == "b of inplace"
        assert share.told == [
            *("attach op", "attach op_"),
            *("replaced op", "detach op_"),
            *("replaced op", "attach op_"),
        ]
        share.told.clear()
    assert share.told == ["detach op", "detach op_"]
    assert not share.has(form)


def test_registration_for_a_derived_operator_takes_precedence(share: Share, namespace: str) -> None:
    op = functional(namespace)
    form = op.derive_inplace()
    share.register(op, "a")
    with torchop.Library(namespace, "FRAGMENT") as library:
        share.register(form, "own", lib=library)
        share.register(op, "b")
        assert share.lookup(form) == "own"
    assert share.lookup(form) == "b of inplace"
    assert share.told[2:] == ["replaced op_", "replaced op", "replaced op_"]


def test_deregistering_a_derived_operator_removes_its_value(share: Share, namespace: str) -> None:
    op = functional(namespace)
    share.register(op, "a")
    with torchop.Library(namespace, "FRAGMENT") as library:
        form = op.derive_inplace(lib=library)
        overload = form.overload
        assert share.told == ["attach op", "attach op_"]
    assert share.told[2:] == ["detach op_"]
    assert Share.origin(overload) is None
    op.derive_out()
    op._definition.deregister("over")
    assert sorted(share.told[3:]) == ["attach op.out", "detach op", "detach op.out"]


def test_value_that_a_derived_operator_rejects_is_not_registered(name: str, namespace: str) -> None:
    class Refusing(Share):
        def attach(self, op: Any) -> None:
            super().attach(op)
            if op.name().endswith("_"):
                raise RuntimeError("not here")

    rule = Refusing(name)
    op = functional(namespace)
    form = op.derive_inplace()
    with pytest.raises(RuntimeError, match="not here"):
        rule.register(op, "a")
    assert rule.told == ["attach op", "attach op_", "detach op"]
    assert not rule.has(op)
    assert not rule.has(form)


class RaisingInDetach(Share):
    def detach(self, op: Any) -> None:
        super().detach(op)
        raise RuntimeError("not now")


def test_a_library_closes_although_a_rule_raises_for_each_of_its_operators(
    name: str, namespace: str
) -> None:
    rule = RaisingInDetach(name)
    library = torchop.Library(namespace, "DEF")
    ops = []
    for each in ("f", "g", "h"):
        op = torchop.custom_op(
            f"{namespace}::{each}",
            lambda x: x + 1,
            schema="(Tensor x) -> Tensor",
            mutates_args=(),
            lib=library,
        )
        rule.register(op, "a")
        ops.append(op)
    with pytest.raises(RuntimeError, match="not now"):
        library.close()
    assert sorted(rule.told[3:]) == ["detach f", "detach g", "detach h"]
    for op in ops:
        with pytest.raises(torchop.OperatorGoneError):
            op(torch.ones(1))
        assert not is_defined(op.name)


@pytest.mark.filterwarnings("ignore::torchop.RedefinitionWarning")
def test_an_operator_is_deregistered_although_a_rule_raises(name: str, namespace: str) -> None:
    rule = RaisingInDetach(name)
    rule.register(functional(namespace), "a")
    with pytest.raises(RuntimeError, match="not now"):
        functional(namespace)
    again = functional(namespace)
    assert not rule.has(again)
    assert rule.told == ["attach op", "detach op"]
