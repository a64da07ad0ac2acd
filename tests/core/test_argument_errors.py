from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

import torchop

T = torch.ones(2)
KINDS = {
    "int": ("int v", torch.tensor(2.7)),
    "float": ("float v", torch.tensor(0.5)),
    "bool": ("bool v", torch.tensor(True)),
    "Scalar": ("Scalar v", torch.tensor(2)),
    "SymInt": ("SymInt v", torch.tensor(2)),
    "float?": ("float? v=None", torch.tensor(0.5)),
    "int[]": ("int[] v", [1, torch.tensor(2)]),
    "with a gradient": ("float v", torch.tensor(0.5, requires_grad=True)),
    "keyword-only": ("*, float v", torch.tensor(0.5)),
}


def define(namespace: str, parameter: str):
    def doubled(x, v):
        return x * 2

    def with_default(x, v=None):
        return x * 2

    def with_keyword(x, *, v):
        return x * 2

    function = {"*": with_keyword, "float?": with_default}.get(parameter.split(",")[0].split()[0])
    schema = f"(Tensor x, {parameter}) -> Tensor"
    function = function or doubled
    op = torchop.custom_op(f"{namespace}::op", function, schema=schema, mutates_args=())
    op.register_fake(lambda x, v=None: torch.empty_like(x))
    return op


@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize(("parameter", "value"), KINDS.values(), ids=KINDS)
def test_tensor_for_a_number_is_rejected(namespace, parameter, value, dispatched):
    op = define(namespace, parameter)
    disabled = torchop.native.disabled() if dispatched else contextlib.nullcontext()
    with disabled, pytest.raises(torchop.ArgumentError, match=rf"{namespace}::op.*\.item\(\)"):
        op(T, v=value)


@pytest.mark.parametrize("name", ["int", "float", "bool"])
@pytest.mark.parametrize("passed", ["by position", "by keyword"])
def test_tensor_for_a_number_is_rejected_in_compiled_code(namespace, name, passed):
    parameter, value = KINDS[name]
    op = define(namespace, parameter)
    call = (lambda x, v: op(x, v)) if passed == "by position" else (lambda x, v: op(x, v=v))
    # Dynamo raises Unsupported, unless it has already given up on this code in another test.
    rejected = (torch._dynamo.exc.Unsupported, torchop.ArgumentError)
    with pytest.raises(rejected, match=r"\.item\(\)"):
        torch.compile(call, backend="eager", fullgraph=True)(T, value)
    with pytest.raises(torchop.ArgumentError, match=r"\.item\(\)"):
        torch.compile(call, backend="eager")(T, value)


@pytest.mark.skipif(
    torchop.native.status().state == "off", reason="PyTorch converts the tensor before the kernel"
)
@pytest.mark.parametrize("overload", [False, True])
def test_tensor_for_a_number_is_rejected_by_torch_ops(namespace, overload):
    define(namespace, "int v")(T, 2)
    packet = getattr(torch.ops, namespace).op
    for _ in range(2):
        with pytest.raises(torchop.ArgumentError, match=r"\.item\(\)"):
            (packet.default if overload else packet)(T, torch.tensor(2.7))


def test_another_overload_may_take_the_tensor(namespace):
    numbers = torchop.custom_op(
        f"{namespace}::op",
        lambda x, v: x * v,
        schema="(Tensor x, int v) -> Tensor",
        mutates_args=(),
    )
    torchop.custom_op(
        f"{namespace}::op.tensors",
        lambda x, v: x * v,
        schema="(Tensor x, Tensor v) -> Tensor",
        mutates_args=(),
    )
    packet = getattr(torch.ops, namespace).op
    assert packet(T, torch.tensor(3)).tolist() == [3, 3]
    with pytest.raises(torchop.ArgumentError):
        numbers(T, torch.tensor(3))


def test_operators_of_the_low_level_convert_the_tensor_as_torch_library_does(namespace):
    with torchop.Library(namespace, "DEF") as library:
        library.define("op(Tensor x, int v) -> Tensor")
        library.impl("op", lambda x, v: x * v, "CompositeExplicitAutograd")
        for _ in range(3):
            assert getattr(torch.ops, namespace).op(T, torch.tensor(2)).tolist() == [2, 2]


@pytest.mark.parametrize("dispatched", [False, True])
def test_unknown_keyword_is_named_although_an_argument_is_missing(namespace, dispatched):
    @torchop.custom_op(f"{namespace}::scale", mutates_args=())
    def scale(x: Tensor, factor: float) -> Tensor:
        return x * factor

    expected = rf"'facter' for operator '{namespace}::scale' \(did you mean 'factor'\?\)"
    with torchop.native.disabled() if dispatched else contextlib.nullcontext():
        with pytest.raises(torchop.ArgumentError, match=expected):
            scale(T, facter=2.0)
        with pytest.raises(torchop.ArgumentError, match="missing value for argument 'x'"):
            scale(factor=2.0)


@pytest.mark.parametrize(
    ("declared", "value", "message"),
    [
        ("ScalarType", "float32", r"type 'torch\.dtype'.*Pass a dtype: value=torch\.float32"),
        ("ScalarType?", "wide", r"type 'Optional\[torch\.dtype\]'"),
        ("Layout", "strided", r"type 'torch\.layout'"),
        ("MemoryFormat?", "last", r"type 'Optional\[torch\.memory_format\]'"),
    ],
)
def test_types_that_are_stored_as_integers_have_their_python_names(
    namespace, declared, value, message
):
    op = torchop.custom_op(
        f"{namespace}::cast",
        lambda x, value: x.clone(),
        schema=f"(Tensor x, {declared} value) -> Tensor",
        mutates_args=(),
    )
    with pytest.raises(torchop.ArgumentError, match=message):
        op(torch.ones(1), value)


@pytest.mark.parametrize("dispatched", [False, True])
def test_argument_passed_twice_is_a_type_error(namespace, dispatched):
    op = define(namespace, "float? v=None")
    disabled = torchop.native.disabled() if dispatched else contextlib.nullcontext()
    message = rf"^{namespace}::op: Argument 'x' specified both"
    with disabled, pytest.raises(TypeError, match=message):
        op(T, x=T)
