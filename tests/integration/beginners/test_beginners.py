"""Error messages for mistakes of beginners name the operator, the cause and the fix."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import torchop

# Importing each of these modules registers its mistakes.
from tests.integration.beginners import (  # noqa: F401
    calling,
    compiling,
    defining,
    gradients,
    kernels,
    registering,
    transforms,
)
from tests.integration.beginners.mistake import MISTAKES, compiled, multiply_of, scale_of

LONGEST = 400
INTERNAL = re.compile(
    r"_torchop|torchop\._|/torchop/|GeneratedBackward|\b_[a-z]+\.py\b|0x[0-9a-f]{6}"
)


class Message(NamedTuple):
    """The class of an exception or warning, and its message, including the exception's notes."""

    kind: type[BaseException]
    text: str


# Extracts torchop's message from the message of a compiler's exception, in which PyTorch 2.15
# quotes it.
_IN_A_COMPILER = re.compile(
    r"^\s*(?:torchop\.)?(\w+Error): (.*?)(?=^\s*Hint:|^Set |^ For more details|\Z)", re.M | re.S
)


def message_of(make: Callable[[str], Any], namespace: str) -> Message:
    """Make the mistake, and return the exception, or the warning if nothing was raised."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("ignore")
        for kind in (torchop.RedefinitionWarning, torchop.SchemaWarning):
            warnings.simplefilter("always", kind)
        try:
            make(namespace)
        except Exception as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            if type(error).__module__.startswith("torch._dynamo"):
                inner = _IN_A_COMPILER.search(text.replace("\\n", "\n").replace("\\'", "'"))
                assert inner is not None, text
                return Message(getattr(torchop, inner[1]), inner[2])
            return Message(
                type(error), text.partition("\nThe error above occurred when calling")[0]
            )
    assert len(warned) == 1, "accepted in silence"
    return Message(warned[0].category, str(warned[0].message))


def explanation(text: str) -> str:
    """Return a message without its code examples, which are indented."""
    lines = text.strip().splitlines()
    return "\n".join(line for line in lines if line and not line.startswith("  "))


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_names_the_operator_the_cause_and_the_fix(name: str, namespace: str) -> None:
    make, kind, cause, fix = MISTAKES[name]
    message = message_of(make, namespace)
    assert issubclass(message.kind, kind), message
    assert cause.replace("{n}", namespace) in message.text
    assert fix.replace("{n}", namespace) in message.text
    # The message must name the operator or the function. If neither exists, the message shows an
    # example with a made-up name.
    assert re.search(rf"\b{namespace}::|{name}\.<locals>|mylib::|'out'", message.text), message.text
    assert len(explanation(message.text)) < LONGEST, message.text
    assert not INTERNAL.search(message.text), message.text


def test_these_are_the_mistakes_of_a_beginner() -> None:
    assert len(MISTAKES) >= 52


def test_missing_error_for_a_mistake_is_detected(namespace: str) -> None:
    with pytest.raises(AssertionError, match="accepted in silence"):
        message_of(scale_of, namespace)


def test_unusual_but_valid_code_works(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::f", mutates_args=())
    def f(x: Tensor, sizes: list[int] = [], weight: Tensor = None) -> Tensor:  # type: ignore[assignment]  # noqa: B006
        sizes.append(len(sizes))
        return x * len(sizes) if weight is None else x * weight

    for _ in range(2):  # twice, because each call must get a new list as the default
        assert f(torch.ones(1)) == 1
    assert f(torch.ones(1), weight=torch.full((1,), 3.0)) == 3
    assert scale_of(namespace)(torch.ones(1), np.float32(3)) == 3  # type: ignore[comparison-overlap]

    # A kernel whose result is a list may be a generator.
    @torchop.custom_op(f"{namespace}::listed", mutates_args=())
    def listed(x: Tensor) -> list[Tensor]:
        yield x + 1

    assert [int(y) for y in listed(torch.ones(1))] == [2]
    # The formula may return a gradient of a different dtype and a broadcast shape, because autograd
    # casts gradients and sums them.
    x = torch.ones(1, 3, requires_grad=True)
    multiply = multiply_of(namespace)
    multiply.register_autograd(lambda ctx, grad: (grad.double(), None))
    multiply(x, torch.ones(2, 3)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2.0, 2.0, 2.0]]
    # vmap works without a vmap rule, because torchop then calls the operator once for each element.
    assert torch.vmap(scale_of(f"{namespace}_vmap"))(torch.ones(2, 3)).sum() == 12


def test_inductor_names_the_operator_of_a_wrong_fake_kernel(namespace: str) -> None:
    # torchop adds this check to the compiled program. `opcheck` finds the same mistake earlier.
    scale = scale_of(namespace)
    scale.register_fake(lambda x, factor: x.new_empty(3))
    message = f"{namespace}::scale: the kernel returned a tensor with another .* Make both agree"
    with pytest.raises(RuntimeError, match=message):
        compiled(scale, torch.ones(2, 3), "inductor")
    with pytest.raises(
        torchop.testing.OpCheckError, match="Make the fake kernel return the same metadata"
    ):
        torchop.opcheck(scale, (torch.ones(2, 3),))
