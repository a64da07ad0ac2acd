from typing import List, Optional

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import on_both
from tests._support.devices import TYPE
from tests.rules.support import adding_one as define
from tests.rules.support import assert_only_torchop_rejects

FLOAT = torch.ones(2)


def in_autocast(call, dtype=torch.bfloat16):
    with torch.autocast(TYPE, dtype=dtype):
        return call()


def test_inputs_are_cast_inside_the_region_only(namespace):
    op = define(namespace)
    op.register_autocast(TYPE, torch.bfloat16)
    assert in_autocast(lambda: op(FLOAT)).dtype is torch.bfloat16
    assert op(FLOAT).dtype is torch.float32


def test_registering_again_replaces_the_dtype(namespace):
    def scenario(library, namespace):
        op = define(namespace, library)
        op.register_autocast(TYPE, torch.bfloat16)
        op.register_autocast(TYPE, torch.float16)
        return in_autocast(lambda: op(FLOAT)).dtype

    both = on_both(scenario, namespace)
    assert both.ours is torch.float16
    assert both.stock is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_are_not_cast(namespace, dtype):
    seen = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        seen.append((x.dtype, y.dtype))
        return x.clone()

    op.register_autocast(TYPE, torch.bfloat16)
    in_autocast(lambda: op(FLOAT, torch.ones(2, dtype=dtype)))
    assert seen == [(torch.bfloat16, dtype)]


def test_tensors_of_another_device_are_not_cast(namespace):
    op = define(namespace)
    op.register_fake(lambda x: torch.empty_like(x))
    op.register_autocast(TYPE, torch.bfloat16)
    assert in_autocast(lambda: op(FLOAT.to("meta"))).dtype is torch.float32


def test_tensors_in_lists_and_optional_tensors_are_cast(namespace):
    seen = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(
        xs: List[Tensor], ys: List[Optional[Tensor]], z: Optional[Tensor], n: List[int]
    ) -> Tensor:
        seen.append([x.dtype for x in xs] + [None if y is None else y.dtype for y in ys] + [z, n])
        return xs[0].clone()

    op.register_autocast(TYPE, torch.bfloat16)
    in_autocast(lambda: op([FLOAT, FLOAT], [None, FLOAT], None, [1, 2]))
    assert seen == [[torch.bfloat16, torch.bfloat16, None, torch.bfloat16, None, [1, 2]]]


def test_keyword_only_arguments_are_passed_on(namespace):
    def scenario(library, namespace):
        @library.custom_op(f"{namespace}::op", mutates_args=())
        def op(x: Tensor, *, scale: float = 1.0) -> Tensor:
            return x * scale

        op.register_autocast(TYPE, torch.bfloat16)
        return in_autocast(lambda: op(FLOAT, scale=3.0)).tolist()

    both = on_both(scenario, namespace)
    assert both.ours == [3, 3]
    assert isinstance(both.stock, AssertionError)


def test_mutation_reaches_the_tensor_of_the_caller(namespace):
    def scenario(library, namespace):
        @library.custom_op(f"{namespace}::op", mutates_args=("x", "ys"))
        def op(x: Tensor, ys: List[Tensor], z: Tensor) -> None:
            x.add_(z)
            ys[0].add_(z)

        op.register_autocast(TYPE, torch.bfloat16)
        x, y = torch.zeros(2), torch.zeros(2)
        in_autocast(lambda: op(x, [y], FLOAT))
        return x.tolist(), y.tolist()

    both = on_both(scenario, namespace)
    assert both.ours == ([1, 1], [1, 1])
    assert both.stock == ([0, 0], [0, 0])


def test_kernel_runs_with_autocast_off(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return torch.mm(x.float(), x.float())

    square = torch.ones(2, 2)
    # Without an autocast rule, autocast stays on inside the kernel, so `mm` returns bfloat16.
    assert in_autocast(lambda: op(square)).dtype is torch.bfloat16
    op.register_autocast(TYPE, torch.bfloat16)
    assert in_autocast(lambda: op(square)).dtype is torch.float32


def test_gradients_have_the_dtype_of_the_input(namespace):
    op = define(namespace)
    op.register_autograd(lambda ctx, grad: grad * 2)
    op.register_autocast(TYPE, torch.bfloat16)
    x = torch.ones(2, requires_grad=True)
    in_autocast(lambda: op(x)).sum().backward()
    assert x.grad.dtype is torch.float32
    assert x.grad.tolist() == [2, 2]


def test_device_type_without_autocast_is_refused(namespace):
    with pytest.raises(ValueError, match="'meta' does not support autocast"):
        define(namespace).register_autocast("meta", torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, "bfloat16", None])
def test_non_floating_point_dtype_is_rejected(namespace, dtype):
    assert_only_torchop_rejects(
        namespace,
        lambda library, namespace: define(namespace, library).register_autocast(TYPE, dtype),
        ValueError,
        "cast_inputs as a floating-point torch.dtype",
    )


def test_the_device_and_the_dtype_are_required_as_in_torch_library(namespace):
    def scenario(library, namespace):
        op = define(namespace, library)
        errors = []
        for arguments in ((), (TYPE,), (torch.bfloat16,)):
            with pytest.raises(TypeError, match=r"missing .* 'cast_inputs'") as caught:
                op.register_autocast(*arguments)
            errors.append(caught.type)
        return errors

    both = on_both(scenario, namespace)
    assert both.ours == both.stock == [TypeError] * 3


def test_rule_for_an_operator_of_a_library(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x + 1, "CompositeExplicitAutograd")
        op = getattr(torch.ops, namespace).op
        torchop.register_autocast(op, TYPE, torch.bfloat16, lib=library)
        assert in_autocast(lambda: op(FLOAT)).dtype is torch.bfloat16
        torchop.register_autocast(op, TYPE, torch.float16, lib=library)
        assert in_autocast(lambda: op(FLOAT)).dtype is torch.float16
