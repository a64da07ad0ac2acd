"""Kernels that use torch.func or torch.export, called under a TorchDispatchMode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from tests._support.devices import TYPE


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Module(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


_KERNELS = {
    "vmap": lambda x: torch.func.vmap(torch.sin)(x),
    "jacrev": lambda x: torch.func.jacrev(lambda y: -y.cos())(x).diagonal().clone(),
    "export": lambda x: torch.export.export(_Module(), (x,)).module()(x).clone(),
}


def _define(namespace: str, kernel: Any, form: str) -> Any:
    qualname, schema = f"{namespace}::sine", "(Tensor x) -> Tensor"
    if form == "custom_op":
        torchop.custom_op(qualname, kernel, mutates_args=(), schema=schema)
    elif form == "register_kernel":
        op = torchop.custom_op(qualname, lambda x: x, mutates_args=(), schema=schema)
        op.register_kernel(TYPE, kernel)
    elif form == "impl":
        torchop.define(qualname, schema)
        torchop.impl(qualname, TYPE, kernel)
    else:
        library = torch.library if form == "torch.library" else torchop
        library.define(qualname, schema)
        library.impl(qualname, "CompositeExplicitAutograd", kernel)
    torchop.register_fake(qualname, lambda x: torch.empty_like(x))
    return getattr(torch.ops, namespace).sine.default


@pytest.mark.parametrize(
    ("form", "kernel"),
    [
        *((form, "vmap") for form in ("custom_op", "register_kernel", "impl", "every device")),
        ("custom_op", "jacrev"),
        ("custom_op", "export"),
    ],
)
def test_a_kernel_may_use_transforms_in_a_mode(namespace: str, kernel: str, form: str) -> None:
    op = _define(namespace, _KERNELS[kernel], form)
    x = torch.linspace(0, 1, 3)
    for _ in range(2):
        torch.testing.assert_close(op(x), x.sin())
        with _Mode():
            torch.testing.assert_close(op(x), x.sin())
        with _Mode(), _Mode():
            torch.testing.assert_close(op(x), x.sin())


@pytest.mark.parametrize(
    ("form", "kernel"), [("custom_op", "vmap"), ("impl", "jacrev"), ("custom_op", "export")]
)
def test_the_first_compiled_call_of_such_a_kernel_works(
    namespace: str, kernel: str, form: str
) -> None:
    op = _define(namespace, _KERNELS[kernel], form)
    compiled = torch.compile(lambda x: op(x) * 2, backend="aot_eager", fullgraph=True)
    x = torch.linspace(0, 1, 3)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), x.sin() * 2)


def test_such_a_kernel_fails_in_pytorch(namespace: str) -> None:
    op = _define(namespace, _KERNELS["vmap"], "torch.library")
    with _Mode(), pytest.raises(RuntimeError, match="inside of vmap"):
        op(torch.ones(3))
