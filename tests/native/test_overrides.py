"""If another library overrides a kernel of torchop, calls run the other library's kernel."""

from __future__ import annotations

import pytest
import torch

from tests._support.common import counting, needs_native
from tests._support.devices import AUTOGRAD, BACKEND, OTHER_BACKEND, TYPE

pytestmark = needs_native

T = torch.zeros(2)


# Includes CompositeExplicitAutograd, because `custom_op` registers the operator's function there.
KEYS = pytest.mark.parametrize("key", [BACKEND, "Autograd", AUTOGRAD, "CompositeExplicitAutograd"])


def override(op, key):
    guest = torch.library.Library(op.name.split("::")[0], "IMPL")
    guest.impl("op", lambda x: torch.full_like(x, 7), key, allow_override=True)
    return guest


@KEYS
@pytest.mark.parametrize("calls_before", [0, 1])
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_override_runs_and_removing_it_restores_our_kernel(op, key, calls_before):
    for _ in range(calls_before):
        op(T)
    guest = override(op, key)
    with counting(op) as calls:
        assert op(T).tolist() == [7, 7]
        assert op.overload(T).tolist() == [7, 7]
    assert "native" not in calls
    guest._destroy()
    assert op(T).tolist() == [1, 1]
    with counting(op) as calls:
        assert op(T).tolist() == [1, 1]
    assert calls == {"native": 1}


@KEYS
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_override_of_an_override_is_honoured(op, key):
    op(T)
    first = override(op, key)
    second = torch.library.Library(op.name.split("::")[0], "IMPL")
    second.impl("op", lambda x: torch.full_like(x, 8), key, allow_override=True)
    assert op(T).tolist() == [8, 8]
    first._destroy()
    assert op(T).tolist() == [8, 8]
    second._destroy()
    with counting(op) as calls:
        assert op(T).tolist() == [1, 1]
    assert calls == {"native": 1}


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_override_at_autograd_is_skipped_in_inference_mode(op):
    """Inference mode skips an override at Autograd, but `torch.no_grad` does not."""
    op(T)
    guest = override(op, "Autograd")
    with torch.inference_mode(), counting(op) as calls:
        # The tensor is created in inference mode, so it has no autograd keys.
        assert op(torch.zeros(2)).tolist() == [1, 1]
    assert calls == {"native": 1}
    with torch.no_grad():
        assert op(T).tolist() == [7, 7]
    guest._destroy()


def test_override_for_another_device_has_no_effect(op):
    op(T)
    guest = override(op, OTHER_BACKEND)
    with counting(op) as calls:
        assert op(T).tolist() == [1, 1]
    assert calls == {"native": 1}
    guest._destroy()


def test_the_same_function_registered_by_others_is_an_override(op):
    """torchop cannot recognize its own function, because PyTorch wraps the function of a kernel."""
    op(T)
    guest = torch.library.Library(op.name.split("::")[0], "IMPL")
    guest.impl("op", op.__wrapped__, BACKEND)
    with counting(op) as calls:
        assert op(T).tolist() == [1, 1]
    assert calls == {"kernel": 1}
    guest._destroy()


def test_fallthrough_at_a_backend_is_honoured(op):
    op.register_kernel(TYPE, lambda x: x + 3)
    assert op(T).tolist() == [3, 3]
    guest = torch.library.Library(op.name.split("::")[0], "IMPL")
    guest.impl("op", torch.library.fallthrough_kernel, AUTOGRAD)
    assert op(T).tolist() == [3, 3]
    guest._destroy()
    assert op(T).tolist() == [3, 3]
