"""Check that a call takes the path that `explain` reports. Uses private names."""

from __future__ import annotations

import contextlib

import torch

import torchop
from tests._support.common import counting
from torchop._native.reasons import Reason

T = torch.zeros(2)


def needing_grad():
    return T.clone().requires_grad_()


def check(op, reason, *args, times=1, **kwargs):
    """Check that `explain` gives this reason, and that a call increments the reason's counter."""
    with counting(op) as explained:
        explanation = torchop.explain(op, *args, **kwargs)
    assert explained == {}  # `explain` does not call the operator
    for words in reason.text.split("{why}"):
        assert words in explanation.reason
    assert explanation.native is (reason is Reason.NATIVE)
    assert explanation.op == op.name
    # `explain` lists kernels, unless the call has no tensors and therefore no device key.
    assert explanation.kernels or "CPU" not in explanation.keys
    with counting(op) as calls, contextlib.suppress(Exception):
        op(*args, **kwargs)
    assert calls.get(reason.name.lower()) == times, calls
    return explanation
