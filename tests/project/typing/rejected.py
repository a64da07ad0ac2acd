"""Incorrect uses of torchop. Type checkers must report an error on each marked line."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

import torchop

x = torch.ones(3)


@torchop.custom_op("typed::scale", mutates_args=())
def scale(x: Tensor, factor: float = 2.0, *, inverse: bool = False) -> Tensor: ...


def crop(pic: Tensor, box: list[int]) -> Tensor: ...


crop_op = torchop.custom_op("typed::crop", crop, mutates_args=())


def calls() -> None:
    scale()  # ERROR: an argument is missing
    scale(x, "3")  # ERROR: an argument has the wrong type
    scale([1.0])  # ERROR: an argument has the wrong type
    scale(x, 3.0, True)  # ERROR: a keyword-only argument is passed by position
    scale(x, inverse=1.5)  # ERROR: an argument has the wrong type
    scale(x, scale=3.0)  # ERROR: there is no such argument
    scale(x, x=x)  # ERROR: an argument is passed twice
    crop_op(x)  # ERROR: an argument is missing
    crop_op(x, 1)  # ERROR: an argument has the wrong type
    crop_op(x, [1], [2])  # ERROR: there is one argument too many
    crop_op(x, [1]).no_such_method()  # ERROR: the result is a tensor
    number: int = scale(x)  # ERROR: the result is a tensor
    print(number)


def definitions() -> None:
    torchop.custom_op("typed::f", crop)  # ERROR: mutates_args is missing
    torchop.custom_op("typed::f", 3, mutates_args=())  # ERROR: not a function
    torchop.custom_op(3, crop, mutates_args=())  # ERROR: not a name
    torchop.custom_op("typed::f", crop, mutates_args=(), tags="core")  # ERROR: not a tag
    torchop.custom_op("typed::f", crop, mutates_args=(), tag=None)  # ERROR: no such argument
    torchop.custom_op("typed::f", crop, mutates_args=(), effects="all")  # ERROR: not an effect
    torchop.infer_schema(crop)  # ERROR: mutates_args is missing


class Crop:
    @staticmethod
    def forward(pic: Tensor, box: list[int]) -> Tensor: ...


class_crop = torchop.operator("typed::class_crop")(Crop)


def classes() -> None:
    class_crop(x)  # ERROR: an argument is missing
    class_crop(x, [1.5])  # ERROR: an argument has the wrong type
    class_crop(x, [1], 2)  # ERROR: there is one argument too many
    torchop.operator("typed::f")(crop)  # ERROR: not a class
    torchop.operator(Crop)  # ERROR: not a name
    torchop.operator("typed::f", mutates_args=())  # ERROR: that is an attribute of the class
    scale.register_cost(crop)  # ERROR: checkers know no rules of yours; write register("cost", ...)
    scale.register_inverse(3)  # ERROR: not a function
    torchop.inverse(3)  # ERROR: not an operator
    torchop.Rule(3)  # ERROR: not a name


@dataclasses.dataclass
class Config:
    weight: Tensor
    scale: float = 1.0


@torchop.custom_op("typed::structured", mutates_args=())
def structured(x: Tensor, config: Config, mode: Literal["a", "b"] = "a") -> tuple[Tensor, int]: ...


def structures() -> None:
    structured(x)  # ERROR: an argument is missing
    structured(x, {"weight": x})  # ERROR: an argument has the wrong type
    structured(x, Config("x"))  # ERROR: a field has the wrong type
    structured(x, Config(x), "c")  # ERROR: an argument has a value that is not allowed
    structured(x, Config(x))[1].numel()  # ERROR: the second result is an int


def registrations() -> None:
    @scale.register_kernel("cpu")
    def kernel(x: Tensor, n: int) -> bool: ...

    @scale.register_fake
    def fake(x: Tensor, n: int) -> bool: ...

    @torchop.register_vmap("typed::scale")
    def vmap(x: Tensor, n: int) -> bool: ...

    @torchop.impl("typed::scale", "cpu")
    def implementation(x: Tensor, n: int) -> bool: ...

    kernel(x)  # ERROR: the decorated function keeps its parameters
    fake(x, "1")  # ERROR: the decorated function keeps its parameters
    vmap(x, 1, 2)  # ERROR: the decorated function keeps its parameters
    implementation(x, m=1)  # ERROR: the decorated function keeps its parameters
    scale.register_kernel()  # ERROR: the device types are missing
    scale.register_kernel(3, crop)  # ERROR: not a device type
    scale.register_fake(3)  # ERROR: not a function
    scale.register_autograd(crop, 3)  # ERROR: setup_context is keyword-only
    scale.register_torch_dispatch(crop)  # ERROR: not a class
    torchop.register_kernel(scale)  # ERROR: the device types are missing
    torchop.register_fake(3, crop)  # ERROR: not an operator
    torchop.register_fake(scale, 3)  # ERROR: not a function
    torchop.register_autograd(scale, crop, context=None)  # ERROR: no such argument
    torchop.define("typed::sum")  # ERROR: the schema is missing
    torchop.impl("typed::sum", "cpu", 3)  # ERROR: not a function
    torchop.define("typed::sum", "(Tensor x) -> Tensor")(crop)  # ERROR: not a decorator
