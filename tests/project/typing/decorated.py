"""With the mypy plugin, `torchop.operator` as a decorator of a class has a precise type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import torchop

x = torch.ones(3)


class Sharing:
    @staticmethod
    def fake(pic: Tensor, box: Sequence[int], *, pad: bool = False) -> Tensor: ...


@torchop.operator("typed::decorated")
class crop(Sharing):
    tags = torch.Tag.core

    @staticmethod
    def forward(pic: Tensor, box: Sequence[int], *, pad: bool = False) -> Tensor: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return crop(grad, ctx.box)


@torchop.operator("typed::devices", lib=None)
class devices:
    @staticmethod
    def signature(pic: Tensor, n: int = 3) -> list[Tensor]: ...

    @staticmethod
    def cpu(pic: Tensor, n: int) -> list[Tensor]: ...


@torchop.operator("typed::schema")
class schema:
    schema = "(Tensor x) -> Tensor"

    @staticmethod
    def cpu(x: Tensor) -> Tensor: ...


def right() -> None:
    assert_type(crop(x, [1], pad=True), Tensor)
    assert_type(crop(box=(1, 2), pic=x), Tensor)
    assert_type(devices(x, 4), list[Tensor])
    schema(x, anything=3)
    assert_type(crop.name, str)
    crop.register_kernel("cuda", crop)
    torchop.register_vmap(crop, lambda info, in_dims, pic, box, pad: (pic, 0))
    torchop.inverse([crop, devices])(x)
    torchop.opcheck(crop, (x, [1]))


def wrong() -> None:
    crop(x)  # ERROR: an argument is missing
    crop(x, ["1"])  # ERROR: an argument has the wrong type
    crop(x, [1], True)  # ERROR: a keyword-only argument is passed by position
    number: int = crop(x, [1])  # ERROR: the result is a tensor
    print(number)
    devices(x, "4")  # ERROR: an argument has the wrong type
    print(devices(x).shape)  # ERROR: the result is a list
    crop.nothing()  # ERROR: a handle has no such method
