"""custom_op: its forms, and definitions that fail."""

import functools

import pytest
import torch
from torch import Tensor

import torchop
from tests.support import on_both

T = torch.zeros(2)
SCHEMA = "(Tensor x) -> Tensor"


def first(x: Tensor) -> Tensor:
    return x + 1


def packet(namespace):
    return getattr(torch.ops, namespace).op


def is_defined(namespace) -> bool:
    return torch._C._get_operation_overload(f"{namespace}::op", "") is not None


# --------------------------------------------------------------------------------------------------
# Forms


def test_decorator_and_call_make_the_same(namespace):
    decorated = torchop.custom_op(f"{namespace}::one", mutates_args=())(first)
    called = torchop.custom_op(f"{namespace}::two", first, mutates_args=())
    for op in (decorated, called):
        assert isinstance(op, torchop.CustomOp)
        assert op(T).tolist() == [1, 1]
        assert str(op.schema).endswith("(Tensor x) -> Tensor")


def test_overloads_are_defined_by_their_names(namespace):
    plain = torchop.custom_op(f"{namespace}::op", first, mutates_args=())
    assert packet(namespace)(T).tolist() == [1, 1]  # the packet exists now
    two = torchop.custom_op(
        f"{namespace}::op.two",
        lambda x, y: x + 5,
        mutates_args=(),
        schema="(Tensor x, Tensor y) -> Tensor",
    )
    assert plain.name == f"{namespace}::op"
    assert two.name == f"{namespace}::op.two"
    assert two.overload is packet(namespace).two
    assert packet(namespace)(T).tolist() == [1, 1]
    assert packet(namespace)(T, T).tolist() == [5, 5]


class Adder:
    def __init__(self, amount):
        self.amount = amount

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.amount

    def add(self, x: Tensor) -> Tensor:
        return x + self.amount


@pytest.mark.parametrize(
    "function",
    [Adder(3), Adder(3).add, functools.partial(torch.add, other=3), lambda x: x + 3],
    ids=["object", "method", "partial", "lambda"],
)
def test_anything_callable_may_be_an_operator(namespace, function):
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=(), schema=SCHEMA)
    assert op(T).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {torch.Tag.pt2_compliant_tag}),
        ({"tags": None}, {torch.Tag.pt2_compliant_tag}),
        ({"tags": torch.Tag.pointwise}, {torch.Tag.pt2_compliant_tag, torch.Tag.pointwise}),
        ({"tags": [torch.Tag.pointwise] * 2}, {torch.Tag.pt2_compliant_tag, torch.Tag.pointwise}),
    ],
)
def test_tags_are_those_given_and_the_one_for_compilers(namespace, options, expected):
    op = torchop.custom_op(f"{namespace}::op", first, mutates_args=(), **options)
    assert set(op.tags) == expected
    assert len(op.tags) == len(expected)


# --------------------------------------------------------------------------------------------------
# Definitions that fail


def keyword_tensor(x: Tensor, *, y: Tensor) -> Tensor:
    return x + y


def without_tensors(n: int) -> Tensor:
    return torch.zeros(n)


FAILURES = {
    "no function": ((), 3, {}, TypeError),
    "no name": ("op", first, {}, ValueError),
    "a reserved namespace": ("prim::op", first, {}, ValueError),
    "a name torch.ops cannot show": ("{ns}::name", first, {}, ValueError),
    "a mutated argument that is not there": (None, first, {"mutates_args": ("y",)}, ValueError),
    "a schema that does not parse": (None, first, {"schema": "(Tensor x"}, ValueError),
    "a schema with a name": (None, first, {"schema": "op(Tensor x) -> Tensor"}, ValueError),
    "a schema that is no string": (None, first, {"schema": 3}, ValueError),
    "a schema that mutates": (None, first, {"schema": "(Tensor(a!) x) -> Tensor"}, ValueError),
    "a schema of another function": (None, first, {"schema": "() -> Tensor"}, ValueError),
    "an unknown device type": (None, first, {"device_types": "toaster"}, RuntimeError),
    "a device object": (None, first, {"device_types": torch.device("cpu")}, TypeError),
    "no device argument": (None, without_tensors, {"device_types": "cpu"}, ValueError),
    "a keyword-only tensor": (None, keyword_tensor, {}, NotImplementedError),
    "tags as a string": (None, first, {"tags": "pointwise"}, ValueError),
    "tags that are none": (None, first, {"tags": [3]}, ValueError),
    "a library that is none": (None, first, {"lib": "library"}, TypeError),
}


@pytest.mark.parametrize(("name", "function", "options", "error"), FAILURES.values(), ids=FAILURES)
def test_failed_definition_leaves_nothing_and_the_name_free(
    namespace, name, function, options, error
):
    name = f"{namespace}::op" if name is None else name
    name = name.format(ns=namespace) if isinstance(name, str) else f"{namespace}::op"
    with pytest.raises(error):
        torchop.custom_op(name, function, **{"mutates_args": (), **options})
    assert not is_defined(namespace)
    assert f"{namespace}::op" not in torch._library.custom_ops.OPDEFS
    assert torchop.custom_op(f"{namespace}::op", first, mutates_args=())(T).tolist() == [1, 1]


def test_failed_definition_leaves_an_operator_behind_in_pytorch(namespace):
    def scenario(library, namespace):
        try:
            library.custom_op(
                f"{namespace}::op", without_tensors, mutates_args=(), device_types="cpu"
            )
        except ValueError:
            return is_defined(namespace)

    both = on_both(scenario, namespace)
    assert both.ours is False
    assert both.stock is True


def test_failed_definition_leaves_the_operator_that_it_would_have_replaced(namespace):
    op = torchop.custom_op(f"{namespace}::op", first, mutates_args=())
    with pytest.raises(ValueError, match="unsupported type"):

        @torchop.custom_op(f"{namespace}::op", mutates_args=())
        def _(x: dict) -> Tensor:
            return x

    assert op(T).tolist() == [1, 1]


def test_failure_while_rules_are_installed_leaves_nothing(namespace, monkeypatch):
    def fail(self):
        raise ZeroDivisionError

    monkeypatch.setattr("torchop._rules.mutation.rule.MutationRule.install", fail)
    with pytest.raises(ZeroDivisionError):
        torchop.custom_op(f"{namespace}::op", first, mutates_args=())
    monkeypatch.undo()
    assert not is_defined(namespace)
    assert torchop.custom_op(f"{namespace}::op", first, mutates_args=())(T).tolist() == [1, 1]
