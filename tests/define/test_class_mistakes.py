"""A mistake in an operator's class raises an error, and leaves no operator defined."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop


def forward(x: Tensor) -> Tensor:
    return x.clone()


def make(**members: Any) -> type:
    return types.new_class("sample", (), exec_body=lambda body: body.update(members))


KERNEL = {"forward": staticmethod(forward)}

MISTAKES = {
    "unknown": (
        {**KERNEL, "fakes": staticmethod(forward)},
        r"class sample has the member 'fakes', which is neither a rule nor a device type "
        r"\(did you mean 'fake'\?\)\. Names of helpers must start with an underscore",
    ),
    "unknown, near an attribute": ({**KERNEL, "mutate_args": ()}, "did you mean 'mutates_args'"),
    "unknown, near a rule": ({**KERNEL, "inverted": 3}, "did you mean 'inverse'"),
    "unknown, near nothing": ({**KERNEL, "zzz": 1}, r"nor a device type\. Names"),
    "a method": (
        {"forward": forward},
        r"has a method 'forward', but an operator has no instances: write @staticmethod",
    ),
    "a class method": ({"forward": classmethod(forward)}, "has a classmethod 'forward'"),
    "a property": ({**KERNEL, "fake": property(forward)}, "has a property 'fake'"),
    "not a function": (
        {**KERNEL, "fake": 3},
        "member 'fake', which must be a static function, or a dict with a declaration: .*; got 3",
    ),
    "not a kernel": ({**KERNEL, "cpu": "c"}, "'cpu', which must be a static function; got 'c'"),
    "not a dtype": (
        {**KERNEL, "autocast": "half"},
        "'autocast', which must be a dtype, a policy",
    ),
    "not a dict": ({**KERNEL, "torch_dispatch": forward.__name__}, "a dict of functions by mode"),
    "not a form": ({**KERNEL, "out": 3}, "'out', which must be True, or the name"),
    "no kernel": (
        {"fake": staticmethod(forward)},
        r"has no kernel: it needs the member 'forward', for every device, or one named",
    ),
    "no signature": (
        {"cpu": staticmethod(forward)},
        r"has kernels for cpu, but no signature.*'signature'.*'schema'",
    ),
    "two signatures": (
        {**KERNEL, "signature": staticmethod(forward)},
        "has both 'forward' and 'signature'",
    ),
    "half a formula": (
        {**KERNEL, "setup_context": staticmethod(forward)},
        "'setup_context' without 'backward'",
    ),
    "valid alone": ({**KERNEL, "valid": staticmethod(bool)}, "'valid' without 'examples'"),
    "contiguous alone": (
        {**KERNEL, "contiguous_grads": True},
        "'contiguous_grads' without 'backward' or 'backward_kernel'",
    ),
    "not contiguous": (
        {**KERNEL, "backward": staticmethod(forward), "contiguous_grads": 1},
        "'contiguous_grads', which must be True, for a backward that gets contiguous gradients",
    ),
    "contiguous, derived": (
        {**KERNEL, "backward": torchop.derived, "contiguous_grads": True},
        "'contiguous_grads' with a derived 'backward'",
    ),
    "devices": ({**KERNEL, "device_types": "cpu"}, "'device_types'.*such as 'cpu'"),
}


@pytest.mark.parametrize(("members", "message"), MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_in_a_class_names_the_member(
    namespace: str, members: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        torchop.operator(f"{namespace}::sample")(make(**members))
    assert not hasattr(getattr(torch.ops, namespace), "sample")


LATE_MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a fake kernel": (
        {"fake": staticmethod(lambda: None)},
        torchop.RuleSignatureError,
        "fake kernel is called with",
    ),
    "an own rule": (
        {"inverse": staticmethod(lambda: None)},
        torchop.RuleSignatureError,
        r"inverse is called with \(output\)",
    ),
    "a checkpoint policy": (
        {"checkpoint_policy": "keep"},
        torchop.RuleSignatureError,
        "'save', 'recompute'",
    ),
    "a name": ({"inplace": True, "out": "nowhere"}, torchop.OperatorNameError, "namespace::name"),
    "autocast": ({"autocast": {"cpu": torch.int8}}, ValueError, "floating-point"),
    "an effect": ({"effects": "all"}, ValueError, "EffectType"),
}


@pytest.mark.parametrize(
    ("members", "error", "message"), LATE_MISTAKES.values(), ids=list(LATE_MISTAKES)
)
def test_a_registration_that_fails_frees_the_name(
    namespace: str, members: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        torchop.operator(f"{namespace}::sample")(make(**KERNEL, **members))
    for name in ("sample", "sample_"):
        assert not hasattr(getattr(torch.ops, namespace), name)
    again = torchop.operator(f"{namespace}::sample")(make(**KERNEL, inplace=True))
    assert torch.equal(again(torch.ones(1)), torch.ones(1))


def test_only_classes_can_be_decorated(namespace: str) -> None:
    with pytest.raises(TypeError, match=r"must decorate a class.*use torchop\.custom_op"):
        torchop.operator(f"{namespace}::sample")(forward)  # type: ignore[call-overload]
    with pytest.raises(torchop.OperatorNameError, match="must be a string, got type"):
        torchop.operator(make(**KERNEL))  # type: ignore[arg-type]
