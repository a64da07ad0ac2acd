"""The object that custom_op returns can replace a `torch.library.CustomOpDef`."""

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

import torchop

T = torch.zeros(2)


def scale(x: Tensor, factor: float = 2.0, *, flag: bool = False) -> Tensor:
    return x * factor + 1


def define(namespace, **options):
    return torchop.custom_op(f"{namespace}::op", scale, mutates_args=(), **options)


def test_handle_is_a_custom_op_def_and_published_as_one(namespace):
    op = define(namespace)
    assert isinstance(op, torchop.CustomOpDef)
    assert isinstance(op, torch._library.custom_ops.CustomOpDef)
    assert torchop.CustomOpDef is torch.library.CustomOpDef
    assert OPDEFS[f"{namespace}::op"] is op


def test_custom_op_def_attributes_have_correct_values(namespace):
    op = define(namespace, tags=torch.Tag.pointwise)
    assert (op._namespace, op._name, op._qualname) == (namespace, "op", f"{namespace}::op")
    assert op._init_fn is scale
    assert op._opoverload is op.overload
    assert op._schema == "(Tensor x, float factor=2.0, *, bool flag=False) -> Tensor"
    assert torch.Tag.pointwise in op._tags
    assert isinstance(op._lib, torch.library.Library)
    assert op._backend_fns == {None: scale}
    assert op._disabled_kernel == set()
    assert op._abstract_fn is None
    assert op._backward_fn is None
    assert op._setup_context_fn is None
    assert op._vmap_fn is None
    assert op._autocast_dtype == {}
    assert op._torch_dispatch_fns == {}


def fake(x, factor, *, flag):
    return torch.empty_like(x)


def backward(ctx, grad):
    return grad * 3, None


def setup_context(ctx, inputs, keyword_only_inputs, output):
    pass


def vmap_rule(info, in_dims, x, factor, *, flag):
    return x + 4, in_dims[0]


def kernel(x, factor, *, flag):
    return x + 2


def dispatch_rule(mode, func, types, args, kwargs):
    return torch.full((1,), 5.0)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_attributes_follow_the_registrations(namespace):
    op = define(namespace)
    op.register_kernel("cpu", kernel)
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=setup_context)
    op.register_vmap(vmap_rule)
    op.register_autocast("cpu", torch.bfloat16)
    op.register_torch_dispatch(Mode, dispatch_rule)
    assert op._backend_fns == {None: scale, "cpu": kernel}
    assert op._abstract_fn is fake
    assert op._backward_fn is backward
    assert op._setup_context_fn is setup_context
    assert op._vmap_fn is vmap_rule
    assert op._autocast_dtype == {"cpu": torch.bfloat16}
    assert op._torch_dispatch_fns == {Mode: dispatch_rule}
    with op.set_kernel_enabled("cpu", enabled=False):
        assert op._disabled_kernel == {"cpu"}


WAYS = {"handle": lambda op: op, "name": lambda op: op.name, "overload": lambda op: op.overload}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_functions_of_torch_library_register_our_rules(namespace, way):
    op = define(namespace)
    named = way(op)
    definition = op._definition
    torch.library.register_kernel(named, "cpu", kernel)
    torch.library.register_fake(named, fake)
    torch.library.register_autograd(named, backward, setup_context=setup_context)
    torch.library.register_vmap(named, vmap_rule)
    torch.library.register_autocast(named, "cpu", torch.bfloat16)
    torch.library.register_torch_dispatch(named, Mode, dispatch_rule)
    assert op._definition is definition
    assert op._backend_fns["cpu"] is kernel
    x = torch.zeros(2, requires_grad=True)
    op(x).sum().backward()
    assert op(T).tolist() == [2, 2]
    assert op(T.to("meta")).is_meta
    assert x.grad.tolist() == [3, 3]
    assert torch.vmap(op)(T).tolist() == [4, 4]
    with torch.autocast("cpu"):
        assert op(T).dtype is torch.bfloat16
    with Mode():
        assert op(T).tolist() == [5]
    assert OPDEFS[f"{namespace}::op"] is op


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_our_checks_apply_to_functions_of_torch_library(namespace, way):
    named = way(define(namespace))
    with pytest.raises(torchop.RuleSignatureError):
        torch.library.register_fake(named, lambda: None)
    with pytest.raises(torchop.RuleSignatureError):
        torch.library.register_autograd(named, "non-differentiable")


def test_opcheck_of_torch_library_takes_the_handle(namespace):
    op = define(namespace)
    op.register_fake(fake)
    result = torch.library.opcheck(
        op, (torch.randn(3),), test_utils=("test_schema", "test_faketensor")
    )
    assert set(result.values()) == {"SUCCESS"}
