import dataclasses
import itertools
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


# --------------------------------------------------------------------------------------------------
# Policies

POLICIES = ("low_precision", "float32", "promote")
REGIONS = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def pair_of(namespace, *registration, returns=None):
    """Define an operator that returns both of its arguments, so a call shows their dtypes."""

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, y + 1

    op.register_fake(lambda x, y: (x.clone(), y.clone()))
    op.register_autograd(lambda ctx, gx, gy: (gx, gy))
    op.register_autocast(*registration)
    return op


def cast_by_policy(policy, region, dtypes):
    """Return the dtypes to which a policy casts, as ATen's lists define it."""
    cast = {dtype for dtype in dtypes if dtype is not torch.float64}
    widest = torch.float32 if len(cast) > 1 else next(iter(cast), None)
    to = {"low_precision": region, "float32": torch.float32, "promote": widest}[policy]
    return [to if dtype in cast else dtype for dtype in dtypes]


@pytest.mark.filterwarnings("ignore:bf16 and fp16 are mixed")
@pytest.mark.parametrize(("backend", "step"), [(None, 1), ("aot_eager", 7), ("inductor", 13)])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_cast_as_atens_lists(namespace, policy, backend, step):
    op = pair_of(namespace, policy)
    called = op if backend is None else torch.compile(lambda x, y: op(x, y), backend=backend)
    for region, *dtypes in list(itertools.product(REGIONS, DTYPES, DTYPES))[1::step]:
        torch.compiler.reset()
        inputs = [torch.ones(2, dtype=dtype, requires_grad=True) for dtype in dtypes]
        with torch.autocast(TYPE, dtype=region):
            results = called(*inputs)
            with torch.autocast(TYPE, enabled=False):
                outside = called(*inputs)
        assert [result.dtype for result in results] == cast_by_policy(policy, region, dtypes)
        assert [result.dtype for result in outside] == dtypes
        sum(result.double().sum() for result in (*results, *outside)).backward()
        for each in inputs:
            assert each.grad.dtype is each.dtype
            assert each.grad.tolist() == [2, 2]


@pytest.mark.skipif(TYPE != "cpu", reason="ATen has other lists for other devices")
@pytest.mark.parametrize(
    ("policy", "function"),
    [
        ("low_precision", lambda x, y: torch.mm(x[None], y[:, None])),
        ("float32", lambda x, y: torch.nn.functional.mse_loss(x, y)),
        ("promote", lambda x, y: torch.cat([x, y])),
    ],
)
def test_policies_agree_with_functions_of_aten(namespace, policy, function):
    op = pair_of(namespace, policy)
    for region in REGIONS:
        for dtypes in itertools.product((torch.float32, region), repeat=2):
            inputs = [torch.ones(2, dtype=dtype) for dtype in dtypes]
            with torch.autocast(TYPE, dtype=region):
                expected, results = function(*inputs).dtype, op(*inputs)
            assert [result.dtype for result in results] == [expected] * 2


def test_a_policy_for_one_device(namespace):
    op = pair_of(namespace, TYPE, "low_precision")
    assert in_autocast(lambda: op(FLOAT, FLOAT))[0].dtype is torch.bfloat16
    op.register_autocast(TYPE, torch.float16)
    assert in_autocast(lambda: op(FLOAT, FLOAT))[0].dtype is torch.float16
    op.register_autocast("float32")
    assert in_autocast(lambda: op(FLOAT.half(), FLOAT))[0].dtype is torch.float32
    assert "autocast to float32" in repr(op)


def test_policies_cast_structures_and_lists(namespace):
    @dataclasses.dataclass
    class Pair:
        x: Tensor
        y: list[Tensor]

    seen = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=("out",))
    def op(
        pair: Pair, index: Tensor, maybe: list[Tensor | None], out: Tensor, z: Tensor | None
    ) -> Tensor:
        tensors = (pair.x, *pair.y, index, maybe[1], out, z)
        seen.append([tensor.dtype for tensor in tensors])
        return pair.x + 1

    op.register_autocast("promote")
    half = FLOAT.bfloat16()
    in_autocast(lambda: op(Pair(half, [half]), FLOAT.int(), [None, half], FLOAT, half))
    in_autocast(lambda: op(Pair(half, [FLOAT]), FLOAT.int(), [None, half], FLOAT, half))
    assert seen[0] == [*[torch.bfloat16] * 2, torch.int32, torch.bfloat16, torch.float32] + [
        torch.bfloat16
    ]
    assert seen[1] == [*[torch.float32] * 2, torch.int32, *[torch.float32] * 3]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("form", ["class", "library"])
def test_policies_in_other_forms(namespace, form, policy):
    if form == "class":

        @torchop.operator(f"{namespace}::op")
        class op:
            autocast = policy

            @staticmethod
            def forward(x: Tensor) -> Tensor:
                return x + 1
    else:
        torchop.define(f"{namespace}::op", "(Tensor x) -> Tensor")
        torchop.impl(f"{namespace}::op", "default", lambda x: x + 1)
        torchop.register_autocast(f"{namespace}::op", policy)
        op = getattr(torch.ops, namespace).op
    for dtype in (torch.float32, torch.bfloat16):
        result = in_autocast(lambda dtype=dtype: op(FLOAT.to(dtype)))
        assert [result.dtype] == cast_by_policy(policy, torch.bfloat16, [dtype])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_training_with_a_gradient_scaler(namespace, policy, compiled):
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.to(x.dtype)

    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=())
    op.register_fake(kernel)
    op.register_autocast(policy)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        assert grad.dtype is x.dtype
        return grad @ w.to(grad.dtype).t(), x.t() @ grad

    op.register_autograd(backward, setup_context=setup_context)
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(4, 4), torch.randn(8, 4)

    def model(x):
        return op(layer(x), layer.weight)

    function = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(TYPE, init_scale=64.0)
    before = layer.weight.detach().clone()
    exact = torch.autograd.grad((layer(x) @ layer.weight).square().sum(), layer.weight)[0]
    with torch.autocast(TYPE, dtype=torch.bfloat16):
        loss = function(x).float().square().sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert layer.weight.grad.dtype is torch.float32
    torch.testing.assert_close(layer.weight.grad, exact, rtol=5e-2, atol=5e-1)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize("value", ["lower_precision", "", "cuda"])
def test_an_unknown_policy_is_rejected(namespace, value):
    op = define(namespace)
    with pytest.raises(ValueError, match=r"a policy \(low_precision, float32, promote\)"):
        op.register_autocast(TYPE, value)
    with pytest.raises(TypeError, match="or only a policy, as in"):
        op.register_autocast(value)
