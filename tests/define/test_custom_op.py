import functools
import re

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import on_both

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


def test_decorator_and_call_define_the_same(namespace):
    decorated = torchop.custom_op(f"{namespace}::one", mutates_args=())(first)
    called = torchop.custom_op(f"{namespace}::two", first, mutates_args=())
    for op in (decorated, called):
        assert isinstance(op, torchop.CustomOp)
        assert op(T).tolist() == [1, 1]
        assert str(op.schema).endswith("(Tensor x) -> Tensor")


def test_overloads_are_defined_by_their_names(namespace):
    plain = torchop.custom_op(f"{namespace}::op", first, mutates_args=())
    assert packet(namespace)(T).tolist() == [1, 1]  # creates the packet, before `op.two` exists
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
def test_tags_are_the_given_ones_and_pt2_compliant(namespace, options, expected):
    op = torchop.custom_op(f"{namespace}::op", first, mutates_args=(), **options)
    assert set(op.tags) == expected
    assert len(op.tags) == len(expected)


# --------------------------------------------------------------------------------------------------
# Definitions that fail


def keyword_tensor(x: Tensor, *, y: Tensor) -> Tensor:
    return x + y


def two_tensors(x: Tensor, y: Tensor) -> Tensor:
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
    "a schema that repeats a name": (
        None,
        two_tensors,
        {"schema": "(Tensor x, Tensor x) -> Tensor"},
        ValueError,
    ),
    "a schema of another function": (None, first, {"schema": "() -> Tensor"}, ValueError),
    "an unknown device type": (None, first, {"device_types": "toaster"}, RuntimeError),
    "a device object": (None, first, {"device_types": torch.device("cpu")}, TypeError),
    "no device argument": (None, without_tensors, {"device_types": "cpu"}, ValueError),
    "a keyword-only tensor": (None, keyword_tensor, {}, NotImplementedError),
    "tags as a string": (None, first, {"tags": "pointwise"}, TypeError),
    "tags that are none": (None, first, {"tags": [3]}, TypeError),
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


def test_errors_of_user_code_are_raised_unchanged(namespace):
    def names():
        yield "x"
        raise ValueError("cannot read the file")

    with pytest.raises(ValueError, match=r"^cannot read the file$"):
        torchop.custom_op(f"{namespace}::op", first, mutates_args=names())


def test_error_of_a_nested_definition_names_the_nested_operator(namespace):
    def names():
        yield torchop.custom_op(f"{namespace}::inner", first, mutates_args="x")

    with pytest.raises(torchop.SchemaError, match=f"^{namespace}::inner: mutates_args='x': "):
        torchop.custom_op(f"{namespace}::op", first, mutates_args=names())


# --------------------------------------------------------------------------------------------------
# Missing arguments of custom_op

FIRST = {
    "bare": lambda library: library(scale),
    "nothing": lambda library: library(),
    "no mutates_args": lambda library: library("mylib::scale"),
    "no name": lambda library: library(mutates_args=()),
    "no mutates_args, in a call": lambda library: library("mylib::scale", scale),
}


def scale(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


@pytest.mark.parametrize("caller", ["custom_op", "triton_op"])
@pytest.mark.parametrize("call", FIRST.values(), ids=FIRST)
def test_decorator_without_arguments_raises_with_the_fix(call, caller):
    name = "crop" if call in (FIRST["nothing"], FIRST["no name"]) else "scale"
    shown = f'@torchop.{caller}("mylib::{name}", mutates_args=())'
    with pytest.raises(TypeError, match=re.escape(shown)):
        call(getattr(torchop, caller))


def test_function_in_place_of_the_name_raises_with_the_fix():
    with pytest.raises(
        torchop.OperatorNameError, match=r'pass it to the decorator.*\("mylib::scale", \.'
    ):
        torchop.custom_op(scale, mutates_args=())


class Holder:
    def method(self, x: Tensor) -> Tensor:
        return x.clone()

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x.clone()


@pytest.mark.parametrize("schema", [None, "(Tensor x) -> Tensor"])
def test_a_method_is_rejected_because_there_is_no_instance(namespace, schema):
    with pytest.raises(torchop.SchemaError, match=r"a method.*@staticmethod.*leave out 'self'"):
        torchop.custom_op(f"{namespace}::f", Holder.method, mutates_args=(), schema=schema)
    op = torchop.custom_op(f"{namespace}::f", Holder().method, mutates_args=(), schema=schema)
    assert op(torch.ones(1)).tolist() == [1]
    with pytest.raises(torchop.RuleSignatureError, match=r"a method.*@staticmethod"):
        op.register_fake(Holder.method)
    op.register_fake(Holder.of_class)


WRONG = {
    "tensor": ((1,), {}),
    "float": ((torch.ones(1), "2"), {}),
    "keyword": ((torch.ones(1),), {"factor": [1.0]}),
}


@pytest.mark.parametrize(("args", "kwargs"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("name", ["f", "f.over"])
def test_an_argument_of_the_wrong_type_is_an_argument_error(namespace, name, args, kwargs):
    def scenario(library, namespace):
        op = library.custom_op(f"{namespace}::{name}", scale, mutates_args=())
        return op(*args, **kwargs)

    ours = on_both(lambda library, space: scenario(torchop, space), namespace).ours
    assert type(ours) is torchop.ArgumentError
    assert isinstance(ours, TypeError)
    assert str(ours).startswith(f"{namespace}::f() Expected a value of type '")
    assert f"Schema: {namespace}::{name}(Tensor x, float factor=2.)" in str(ours)
    if name == "f":
        stock = on_both(scenario, f"{namespace}_both").stock
        assert type(stock) is RuntimeError
        assert isinstance(ours, type(stock))


@pytest.mark.parametrize("parameter", ["SymInt n", "SymInt? n"])
@pytest.mark.parametrize("number", [2**63, -(2**63) - 1])
def test_an_integer_that_is_too_large_is_rejected(namespace, parameter, number):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x, n: x + 1,
        mutates_args=(),
        schema=f"(Tensor x, {parameter}) -> Tensor",
    )
    with pytest.raises(torchop.ArgumentError, match=r" It does not fit in 64 bits\.$"):
        op(T, number)
    with pytest.raises(torchop.ArgumentError, match=r"found type 'str'.*-> Tensor\.$"):
        op(T, "two")


def test_none_in_a_list_of_tensors_is_named(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(xs: list[torch.Tensor]) -> torch.Tensor:
        return xs[0].clone()

    for xs in ([None], [torch.ones(1), None], [None, torch.ones(1)]):
        with pytest.raises(
            torchop.ArgumentError, match=r"Remove None from xs, or .*Tensor\?\[\]"
        ) as e:
            op(xs)
        assert "C++" not in str(e.value)
    with pytest.raises(torchop.ArgumentError) as caught:
        op([torch.ones(1), 3])
    assert "Leave None" not in str(caught.value)


MISTAKES = {
    "no name": lambda library, space: define(library, f"{space}::"),
    "a keyword": lambda library, space: define(library, f"{space}::class"),
    "no schema": lambda library, space: define(library, f"{space}::op", schema="Tensor x"),
    "an unknown type": lambda library, space: define(
        library, f"{space}::op", schema="(Foo x) -> Tensor"
    ),
    "a wrong default": lambda library, space: define(
        library, f"{space}::op", schema="(Tensor x=3) -> Tensor"
    ),
    "no tag": lambda library, space: define(library, f"{space}::op", tags=["core"]),
    "several overloads": lambda library, space: library.opcheck(torch.ops.aten.sin, (T,)),
}


def define(library, name, schema=SCHEMA, tags=()):
    library.custom_op(name, first, mutates_args=(), schema=schema, tags=tags)


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistake_raises_the_same_exception_class_as_pytorch(namespace, mistake):
    ours, stock = on_both(mistake, namespace)
    assert isinstance(stock, (RuntimeError, TypeError))
    assert isinstance(ours, type(stock))
