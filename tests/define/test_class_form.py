"""An operator defined by a class equals one defined by custom_op and registration functions."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native
from tests._support.devices import TYPE
from torchop import CustomOp


def define_crop(namespace: str) -> CustomOp[..., Tensor]:
    @torchop.operator(f"{namespace}::crop")
    class crop:
        """Crop a signal to a range."""

        tags = torch.Tag.needs_fixed_stride_order
        autocast = {"cpu": torch.bfloat16}  # noqa: RUF012  (never mutated)
        out = True

        @staticmethod
        def forward(x: Tensor, box: Sequence[int], factor: float = 2.0) -> Tensor:
            return torch.from_numpy(x.detach().numpy()[box[0] : box[1]] * np.float32(factor))

        @staticmethod
        def fake(x: Tensor, box: Sequence[int], factor: float = 2.0) -> Tensor:
            return x.new_empty(box[1] - box[0])

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            x, ctx.box, ctx.factor = inputs
            ctx.size = x.shape[0]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            start, end = ctx.box
            return (
                torch.nn.functional.pad(grad * ctx.factor, (start, ctx.size - end)),
                None,
                None,
            )

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor, box: Any, factor: float) -> Any:
            rows = x.movedim(in_dims[0], 0)
            return torch.stack([crop(row, box, factor) for row in rows]), 0

        @staticmethod
        def right_inverse(output: Tensor, box: Sequence[int], factor: float) -> Tensor:
            return torch.cat([output.new_zeros(box[0]), output / factor])

        @staticmethod
        def examples() -> Any:
            yield torch.randn(5, requires_grad=True), [1, 3]
            yield {"x": torch.randn(5), "box": [0, 5], "factor": 3.0}

    return crop


def test_the_result_is_an_ordinary_handle_with_the_identity_of_the_class(namespace: str) -> None:
    crop = define_crop(namespace)
    assert isinstance(crop, CustomOp)
    assert crop.__name__ == "crop"
    assert crop.__qualname__ == "define_crop.<locals>.crop"
    assert crop.__module__ == __name__
    assert crop.__doc__ == "Crop a signal to a range."
    assert list(inspect.signature(crop).parameters) == ["x", "box", "factor"]
    assert str(crop.schema) == (
        f"{namespace}::crop(Tensor x, SymInt[] box, float factor=2.) -> Tensor"
    )
    assert torch.Tag.needs_fixed_stride_order in crop.tags
    assert "right inverse" in repr(crop)
    assert copy.deepcopy(crop) is crop
    assert pickle.loads(pickle.dumps(crop)) is crop


def test_every_member_is_registered(namespace: str) -> None:
    crop = define_crop(namespace)
    x = torch.arange(5.0, requires_grad=True)
    expected = torch.tensor([2.0, 4.0])
    assert torch.equal(crop(x, [1, 3]), expected)
    assert torch.equal(getattr(torch.ops, namespace).crop(x, [1, 3]), expected)
    crop(x, [1, 3]).sum().backward()
    assert torch.equal(x.grad, torch.tensor([0.0, 2.0, 2.0, 0.0, 0.0]))
    assert torch.equal(torch.vmap(lambda x: crop(x, [1, 3]))(x.detach()[None]), expected[None])
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="BFloat16"):
        # NumPy has no bfloat16, so this error shows that autocast has converted the input.
        crop(x, [1, 3])
    buffer = torch.empty(2)
    assert crop.out is not None
    assert crop.out(x.detach(), [1, 3], out=buffer) is buffer
    assert torch.equal(buffer, expected)
    assert crop.inplace is None
    assert torch.equal(
        torchop.right_inverse(crop)(expected, box=[1, 3]), torch.tensor([0.0, 1.0, 2.0])
    )


def test_opcheck_uses_the_examples(namespace: str) -> None:
    crop = define_crop(namespace)
    assert set(torchop.opcheck(crop).values()) == {"SUCCESS"}
    (first, nothing), (none, second) = crop.examples()
    assert (first[1], nothing, none, second["factor"]) == ([1, 3], {}, (), 3.0)


def test_valid_is_registered_with_the_examples(namespace: str) -> None:
    @torchop.operator(f"{namespace}::root")
    class root:
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sqrt()

        @staticmethod
        def fake(x: Tensor) -> Tensor:
            return torch.empty_like(x)

        @staticmethod
        def examples() -> Any:
            yield (torch.ones(3),)

        @staticmethod
        def valid(x: Tensor) -> bool:
            return x.dtype is torch.float32

    (result,) = torchop.testing.check(root, only="dtypes.accepted").results
    assert result.details["dtypes"]["float64"] == "excluded"


def test_a_handle_is_loaded_from_a_pickle_by_importing_its_module(
    namespace: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ops_of_a_class.py").write_text(
        "import torch, torchop\n"
        f"@torchop.operator('{namespace}::double')\n"
        "class double:\n"
        "    @staticmethod\n"
        "    def forward(x: torch.Tensor) -> torch.Tensor:\n"
        "        return x * 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import ops_of_a_class  # type: ignore[import-not-found]

    pickled = pickle.dumps(ops_of_a_class.double)
    ops_of_a_class.double._definition.deregister("gone")
    del sys.modules["ops_of_a_class"]
    assert torch.equal(pickle.loads(pickled)(torch.ones(1)), torch.tensor([2.0]))


@needs_native
def test_kernels_of_devices_with_a_signature(namespace: str) -> None:
    @torchop.operator(f"{namespace}::negate")
    class negate:
        @staticmethod
        def signature(x: Tensor, *, twice: bool = False) -> Tensor:
            """Negate."""
            raise AssertionError("a signature is not run")

        vars()[TYPE] = staticmethod(lambda x, *, twice: x.clone() if twice else -x)

        @staticmethod
        def meta(x: Tensor, *, twice: bool) -> Tensor:
            return torch.empty_like(x)

    assert str(negate.schema) == f"{namespace}::negate(Tensor x, *, bool twice=False) -> Tensor"
    assert negate.__doc__ == "Negate."
    assert torch.equal(negate(torch.ones(1)), -torch.ones(1))
    assert torch.equal(negate(torch.ones(1), twice=True), torch.ones(1))
    assert negate(torch.ones(1, device="meta")).is_meta
    assert torchop.explain(negate, torch.ones(1)).native
    with (
        negate.set_kernel_enabled(TYPE, False),
        pytest.raises(torchop.MissingKernelError, match=rf"kernels for {TYPE}, meta only"),
    ):
        negate(torch.ones(1))


def test_kernels_of_devices_with_a_schema(namespace: str) -> None:
    @torchop.operator(f"{namespace}::negate")
    class negate:
        schema = "(Tensor x, int n=2) -> Tensor"
        vars()[TYPE] = staticmethod(lambda x, n=2: -x * n)

    assert torch.equal(negate(torch.ones(1)), torch.tensor([-2.0]))
    assert negate._definition.declaration.site is not None
    assert negate._definition.declaration.site.file == __file__
    assert repr(negate).endswith(f"; kernels for {TYPE}>"), "and for nothing else"


def test_a_kernel_of_a_device_and_the_default_kernel(namespace: str) -> None:
    @torchop.operator(f"{namespace}::which")
    class which:
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x + 1

        vars()[TYPE] = staticmethod(lambda x: x + 2)

    assert torch.equal(which(torch.zeros(1)), torch.tensor([2.0]))
    with which.set_kernel_enabled(TYPE, False):
        assert torch.equal(which(torch.zeros(1)), torch.tensor([1.0]))


def test_forward_may_be_any_callable(namespace: str) -> None:
    def scaled(factor: float, x: Tensor) -> Tensor:
        return x * factor

    @torchop.operator(f"{namespace}::double")
    class double:
        schema = "(Tensor x) -> Tensor"
        forward = functools.partial(scaled, 2.0)
        fake = torch.empty_like

    assert double.__name__ == "double"
    assert torch.equal(double(torch.ones(1)), torch.tensor([2.0]))


def test_redefining_the_same_class_does_not_warn(namespace: str) -> None:
    before = define_crop(namespace)
    after = define_crop(namespace)
    assert after is not before
    assert torchop.get_rule("right_inverse").has(after)


def test_an_operator_is_no_base_class(namespace: str) -> None:
    crop = define_crop(namespace)
    with pytest.raises(TypeError, match=r"::crop is an operator, not a class.*plain class"):

        class larger(crop):  # type: ignore[misc,valid-type]
            pass
