from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchop


class Tracing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_attributes_of_custom_op(namespace: str) -> None:
    written: list[float] = []

    @torchop.operator(f"{namespace}::fill")
    class fill:
        mutates_args = ("x",)

        @staticmethod
        def forward(x: Tensor) -> None:
            x.fill_(1)

    @torchop.operator(f"{namespace}::log")
    class log:
        effects = "ordered"

        @staticmethod
        def forward(x: Tensor) -> None:
            written.append(x.sum().item())

    x = torch.zeros(2)
    fill(x)
    log(x)
    assert (fill.schema.is_mutable, written) == (True, [2.0])
    assert "effect ORDERED" in repr(log)


def test_other_forms_and_torch_dispatch(namespace: str) -> None:
    @torchop.operator(f"{namespace}::negate")
    class negate:
        inplace = True
        out = f"{namespace}::negate_into"
        autocast = torch.bfloat16

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return -x

        @staticmethod
        def _in_trace(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
            return torch.full_like(args[0], 7)

        torch_dispatch = {Tracing: _in_trace}  # noqa: RUF012  (never mutated)

    x = torch.ones(1)
    assert negate.inplace is not None
    assert negate.out is not None
    assert (negate.inplace.name, negate.out.name) == (
        f"{namespace}::negate_",
        f"{namespace}::negate_into",
    )
    assert negate.inplace(x) is x
    assert torch.equal(x, torch.tensor([-1.0]))
    with Tracing():
        assert torch.equal(negate(x), torch.tensor([7.0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert negate(x).dtype is torch.bfloat16
    for device_type in torch._C._autocast_supported_devices():
        key = "Autocast" + torch._C._dispatch_key_for_device(device_type)
        assert torch._C._dispatch_has_kernel_for_dispatch_key(negate.name, key), key


def test_rules_without_writing_them(namespace: str) -> None:
    @torchop.operator(f"{namespace}::curve")
    class curve:
        fake = {"like": "x"}  # noqa: RUF012  (never mutated)
        vmap = "sequential"
        backward = torchop.derived
        compile = "inline"

        @staticmethod
        def forward(x: Tensor, factor: float = 2.0) -> Tensor:
            return x.sin() * factor

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            x, ctx.factor = inputs
            ctx.save_for_forward(x)

        @staticmethod
        def jvp(ctx: Any, x: Tensor, factor: None) -> Tensor:
            return ctx.saved_tensors[0].cos() * x * ctx.factor

    x = torch.randn(3, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(curve(x).sum(), x)[0], x.cos() * 2.0)
    torch.testing.assert_close(torch.vmap(curve)(torch.ones(2, 3)), curve(torch.ones(2, 3)))
    _, tangent = torch.func.jvp(curve, (x.detach(),), (torch.ones(3),))
    torch.testing.assert_close(tangent, x.detach().cos() * 2.0)
    assert curve(torch.empty(4, device="meta")).shape == (4,)
    described = repr(curve)
    assert "autograd derived, jvp" in described
    assert "vmap (sequential)" in described


def test_closing_the_library_deregisters_the_operator(namespace: str) -> None:
    with torchop.Library(namespace, "DEF") as library:

        @torchop.operator(f"{namespace}::negate", lib=library)
        class negate:
            inplace = True

            @staticmethod
            def forward(x: Tensor) -> Tensor:
                return -x

        in_place = negate.inplace
        assert in_place is not None
    for op in (negate, in_place):
        with pytest.raises(torchop.OperatorGoneError, match="library"):
            op(torch.ones(1))
