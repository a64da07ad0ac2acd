from __future__ import annotations

import pytest
import torch

from tests._support.common import counting, needs_native
from tests._support.devices import TYPE

pytestmark = needs_native

T = torch.zeros(2)


def test_kernel_is_honoured_after_calls(op):
    for amount in (5.0, 6.0):
        op(T)
        op.register_kernel(TYPE, lambda x, amount=amount: x + amount)
        with counting(op) as calls:
            assert op(T).tolist() == [amount, amount]
            assert op.overload(T).tolist() == [amount, amount]
        assert calls == {"native": 2}


def test_switched_off_kernel_is_not_run_and_calls_stay_native(op):
    op.register_kernel(TYPE, lambda x: x + 5)
    assert op(T).tolist() == [5, 5]
    with counting(op) as calls:
        with op.set_kernel_enabled(TYPE, enabled=False):
            assert op(T).tolist() == [1, 1]
            with op.set_kernel_enabled(TYPE, enabled=True):
                assert op(T).tolist() == [5, 5]
            assert op(T).tolist() == [1, 1]
        assert op(T).tolist() == [5, 5]
    assert calls == {"native": 4}


def test_formula_is_honoured_after_calls(op):
    x = T.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no autograd formula"):
        op(x).sum().backward()
    for factor in (5.0, 6.0, 7.0):
        op.register_autograd(lambda ctx, grad, factor=factor: grad * factor)
        for _ in range(2):
            x.grad = None
            op(x).sum().backward()
            assert x.grad.tolist() == [factor, factor]
    with counting(op) as calls:
        op(x)
    assert calls == {"native": 1}


def test_autocast_rule_is_honoured_after_calls(op):
    with torch.autocast(TYPE, torch.bfloat16):
        with counting(op) as calls:
            assert op(T).dtype == torch.float32
        assert calls == {"native": 1}
        op.register_autocast(TYPE, torch.bfloat16)
        with counting(op) as calls:
            assert op(T).dtype == torch.bfloat16
            assert op.overload(T).dtype == torch.bfloat16
        # The autocast rule casts the input and calls the operator again, in a native call.
        assert calls == {"autocast": 2, "native": 2}
    with counting(op) as calls:
        assert op(T).dtype == torch.float32
    assert calls == {"native": 1}


def test_vmap_rule_is_honoured_after_calls(op):
    op(T)
    op.register_vmap(lambda info, dims, x: (torch.full_like(x, 9), dims[0]))
    assert torch.vmap(op)(torch.zeros(3, 2)).tolist() == [[9, 9]] * 3
    with counting(op) as calls:
        assert op(T).tolist() == [1, 1]
    assert calls == {"native": 1}


def test_fake_kernel_is_honoured_after_calls(op):
    op(T)
    op.register_fake(lambda x: x.new_empty(3))
    assert op(T.to("meta")).shape == (3,)
    op.register_fake(lambda x: x.new_empty(4))
    assert op(T.to("meta")).shape == (4,)
    assert op(T).tolist() == [1, 1]


def test_torch_dispatch_rule_is_honoured_after_calls(op):
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    op(T)
    op.register_torch_dispatch(Mode, lambda mode, func, types, args, kwargs: args[0] + 40)
    with Mode(), counting(op) as calls:
        assert op(T).tolist() == [40, 40]
    assert calls == {"mode": 1}
    assert op(T).tolist() == [1, 1]


def test_refused_registration_leaves_calls_native(op):
    op(T)
    with pytest.raises(RuntimeError):
        op.register_kernel("toaster", lambda x: x)
    with pytest.raises(TypeError):
        op.register_autograd("non-differentiable")
    with counting(op) as calls:
        assert op(T).tolist() == [1, 1]
    assert calls == {"native": 1}
