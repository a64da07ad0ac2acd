from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.opaque_types import Constant, Reference
from torchop import ArgumentError


@dataclasses.dataclass
class Both:
    reference: Reference
    constant: Constant


def reference(x: Tensor, cfg: Reference) -> Tensor:
    return x * cfg.number


def constant(x: Tensor, cfg: Constant) -> Tensor:
    return x * cfg.number


def both(x: Tensor, cfg: Both) -> Tensor:
    return x * cfg.reference.number * cfg.constant.number


OBJECTS: dict[str, tuple[Any, Any, int]] = {
    "reference": (reference, Reference(6), 6),
    "constant": (constant, Constant(6), 6),
    "both": (both, Both(Reference(2), Constant(3)), 6),
}


@pytest.mark.parametrize("what", list(OBJECTS))
def test_objects_reach_the_kernel(namespace: str, what: str) -> None:
    function, value, factor = OBJECTS[what]
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    op.register_fake(lambda x, cfg: torch.empty_like(x))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, value: op(x, value) + 1, fullgraph=True, backend="aot_eager")
    assert op(torch.ones(1), value).item() == factor
    assert compiled(torch.ones(1), value).item() == factor + 1


@pytest.mark.parametrize("what", ["reference", "constant"])
def test_an_object_of_another_class_is_refused(namespace: str, what: str) -> None:
    function, _, _ = OBJECTS[what]
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    with pytest.raises(ArgumentError, match=rf"cfg: expected .*{what.title()}, got .*Both"):
        op(torch.ones(1), Both(Reference(2), Constant(3)))
    with pytest.raises(ArgumentError, match=r"argument 'cfg': expected .*, got str"):
        op.overload(torch.ones(1), "6")


@dataclasses.dataclass
class Scaled:
    values: Tensor
    cfg: Reference | None


def test_fake_kernels_return_objects_that_are_arguments(namespace: str) -> None:
    def scale(x: Tensor, cfg: Reference, keep: bool) -> Scaled:
        return Scaled(x * cfg.number, cfg if keep else None)

    op = torchop.custom_op(f"{namespace}::op", scale, mutates_args=())
    op.register_fake(lambda x, cfg, keep: Scaled(torch.empty_like(x), cfg if keep else None))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, cfg: op(x, cfg, True), fullgraph=True, backend="aot_eager")
    cfg = Reference(2)
    assert compiled(torch.ones(1), cfg).cfg is op(torch.ones(1), cfg, True).cfg is cfg
    assert op(torch.ones(1), cfg, False).cfg is None
