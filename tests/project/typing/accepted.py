"""Uses of torchop that type checkers must accept, with the expected types."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import assert_type, reveal_type

import torchop

# --------------------------------------------------------------------------------------------------
# Defining operators


@torchop.custom_op("typed::scale", mutates_args=())
def scale(x: Tensor, factor: float = 2.0, *, inverse: bool = False) -> Tensor: ...


@torchop.custom_op("typed::split", mutates_args=(), device_types="cpu", schema="(Tensor x) -> int")
def split(x: Tensor) -> tuple[list[Tensor], int]: ...


@torchop.custom_op("typed::fill", mutates_args={"x"}, tags=[torch.Tag.core], lib=None)
def fill(x: Tensor, value: int | None = None) -> None: ...


@torchop.custom_op("typed::gate", mutates_args=(), compile={"inductor": "inline"})
def gate(x: Tensor) -> Tensor: ...


@torchop.custom_op("typed::normalize", mutates_args=())
def normalize(x: Tensor) -> Annotated[Tensor, torchop.Residuals(norm=Tensor | None)]:
    return torchop.residuals(x, x)


@torchop.triton_op("typed::launch", mutates_args=())
def launch(x: Tensor, n: int) -> Tensor: ...


assert_type(gate(torch.ones(3)), Tensor)
assert_type(launch(torch.ones(3), n=2), Tensor)


@torchop.custom_op("typed::log", mutates_args=(), effects="ordered")
def log(x: Tensor) -> None: ...


log.register_effect("none")
log.register_effect(torchop.EffectType.ORDERED)


def crop(pic: Tensor, box: list[int]) -> Tensor: ...


crop_op = torchop.custom_op("typed::crop", crop, mutates_args="unknown")

# The test compares each revealed type with the text after `# IS:`, and ignores default values.
reveal_type(scale)  # IS: CustomOp[[x: Tensor, factor: float=, *, inverse: bool=], Tensor]
reveal_type(split)  # IS: CustomOp[[x: Tensor], tuple[list[Tensor], int]]
reveal_type(normalize)  # IS: CustomOp[[x: Tensor], Tensor]
reveal_type(fill)  # IS: CustomOp[[x: Tensor, value: int | None=], None]
reveal_type(crop_op)  # IS: CustomOp[[pic: Tensor, box: list[int]], Tensor]


class Crop:
    @staticmethod
    def forward(pic: Tensor, box: Sequence[int], *, pad: bool = False) -> Tensor: ...
    @staticmethod
    def fake(pic: Tensor, box: Sequence[int], *, pad: bool = False) -> Tensor: ...


class Sharing:
    tags = torch.Tag.core

    @staticmethod
    def signature(pic: Tensor, box: Sequence[int]) -> Tensor: ...


class DevicesOnly(Sharing):
    @staticmethod
    def cpu(pic: Tensor, box: Sequence[int]) -> Tensor: ...


class BySchema:
    schema = "(Tensor x) -> Tensor"

    @staticmethod
    def cpu(x: Tensor) -> Tensor: ...


class_crop = torchop.operator("typed::class_crop")(Crop)
devices_only = torchop.operator("typed::devices", lib=None)(DevicesOnly)
reveal_type(class_crop)  # IS: CustomOp[[pic: Tensor, box: Sequence[int], *, pad: bool=], Tensor]
reveal_type(devices_only)  # IS: CustomOp[[pic: Tensor, box: Sequence[int]], Tensor]
assert_type(torchop.operator("typed::schema")(BySchema), torchop.CustomOp[..., Any])

x = torch.ones(3)
assert_type(class_crop(x, [1], pad=True), Tensor)
assert_type(scale(x), Tensor)
assert_type(scale(x, 3.0, inverse=True), Tensor)
assert_type(scale(factor=1, x=x), Tensor)
assert_type(split(x), tuple[list[Tensor], int])
assert_type(crop_op(x, box=[1, 2]), Tensor)
fill(x, 3)
fill(x, value=None)

# Lambdas in place of functions, as in the README.
crop_op.register_fake(lambda pic, box: pic.new_empty(box))
crop_op.register_fake(shape=lambda pic, box: (box[1] - box[0],))
crop_op.register_autograd(
    lambda ctx, grad: (grad, None), setup_context=lambda ctx, inputs, output: None
)
crop_op.register_vmap(lambda info, in_dims, pic, box: (pic, 0))
crop_op.register_kernel("cpu", lambda pic, box: pic)
crop_op.register_examples(lambda: [(torch.ones(3), [0, 1])])

# These modules are used without being imported, because torchop imports them when they are
# accessed.
assert_type(torchop.testing.check(scale, (x,)).ok, bool)
assert_type(torchop.export.load("model.pt2"), torch.export.ExportedProgram)
assert_type(torchop.compat.__name__, str)

handle: torchop.CustomOpDef = scale
assert_type(scale.name, str)

# --------------------------------------------------------------------------------------------------
# User-defined rules


class Cost(torchop.Rule[float]):
    def validate(self, op: torch._ops.OpOverload[..., Any], value: Any) -> float:
        return float(value)

    def missing(self, op: torch._ops.OpOverload[..., Any]) -> float:
        return 0.0


cost = Cost("cost")
assert_type(cost.lookup(scale), float)
assert_type(cost.has("aten::sin"), bool)
assert_type(cost.register(scale, 1.0), float)
assert_type(scale.register("cost", 1), int)
assert_type(torchop.get_rule("cost"), torchop.Rule[Any])
torchop.inverse([scale, "aten::exp", torch.ops.aten.sin.default])(x)
torchop.right_inverse(scale)(x, factor=2.0)
assert_type(scale.register_checkpoint_policy("save"), str)
torchop.opcheck(scale)


@scale.register_inverse
def unscale(output: Tensor, factor: float, *, inverse: bool) -> Tensor: ...


@scale.register_flop_formula(get_raw=True)
def flops(x: Tensor, factor: float, *, inverse: bool) -> int: ...


@scale.register("cost")
def rule_function(x: Tensor, n: int) -> bool: ...


assert_type(unscale(x, 2.0, inverse=True), Tensor)
assert_type(flops(x, 2.0, inverse=True), int)
assert_type(rule_function(x, 1), bool)

# --------------------------------------------------------------------------------------------------
# The functional, in-place and out= forms of an operator


@torchop.out_op("typed::sin", like="x", inplace=True)
def sin(x: Tensor, *, out: Tensor) -> None: ...


@torchop.out_op("typed::split", allocate=lambda x, n: (x.new_empty(n), x.new_empty(n)))
def halves(x: Tensor, n: int = 1, *, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]: ...


def half(x: Tensor, *, rounded: bool = False, out: Tensor) -> Tensor: ...


half_op = torchop.out_op("typed::half", half, like="x")
reveal_type(sin)  # IS: OperatorFamily[[x: Tensor, *, out: Tensor], Any]
reveal_type(half_op.out)  # IS: CustomOp[[x: Tensor, *, rounded: bool=, out: Tensor], Tensor]
assert_type(sin.inplace, torchop.CustomOp[..., Any] | Any)
sin.inplace(x)
sin(x, out=x)
sin(x=x, out=None)
assert_type(half_op(x, rounded=True), Tensor)
assert_type(half_op(x, out=x), Tensor)
assert_type(half_op.functional(x), Tensor)
assert_type(halves(x, 3), tuple[Tensor, Tensor])
assert_type(halves(n=1, x=x, low=x, high=x), tuple[Tensor, Tensor])
assert_type(scale.derive_out(outputs=["y"]), torchop.CustomOp[..., Any])
scale_or_out = torchop.maybe_out(scale, scale.derive_out())
assert_type(scale_or_out(x, 3.0, out=x), Tensor)
torchop.maybe_out("typed::scale", "typed::scale.out")

# --------------------------------------------------------------------------------------------------
# A function that is decorated to register a rule keeps its type


class Masked(Tensor):
    pass


def kernel(x: Tensor, factor: float, *, inverse: bool) -> Tensor: ...
def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]: ...
def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None: ...
def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor) -> tuple[Tensor, int]: ...
def dispatch(masked: Masked, func: Any, types: Any, args: Any, kwargs: Any) -> int: ...


def returns_tensor() -> Tensor: ...


def methods(masked: Masked) -> None:
    @scale.register_kernel("cpu")
    def method_kernel(x: Tensor, n: int) -> bool: ...

    @scale.register_kernel(["cpu", None])
    def method_kernels(x: Tensor, n: int) -> bool: ...

    @scale.register_fake
    def method_fake(x: Tensor, n: int) -> bool: ...

    @scale.register_fake()
    def method_fake_factory(x: Tensor, n: int) -> bool: ...

    @scale.register_autograd
    def method_autograd(x: Tensor, n: int) -> bool: ...

    @scale.register_autograd(setup_context=setup_context)
    def method_autograd_factory(x: Tensor, n: int) -> bool: ...

    @scale.register_jvp(setup_context=setup_context)
    def method_jvp(x: Tensor, n: int) -> bool: ...

    @scale.register_vmap
    def method_vmap(x: Tensor, n: int) -> bool: ...

    @scale.register_vmap()
    def method_vmap_factory(x: Tensor, n: int) -> bool: ...

    @scale.register_torch_dispatch(Masked)
    def method_dispatch(x: Tensor, n: int) -> bool: ...

    assert_type(method_kernel(x, 1), bool)
    assert_type(method_kernels(x, 1), bool)
    assert_type(method_fake(x, n=1), bool)
    assert_type(method_fake_factory(x, n=1), bool)
    assert_type(method_autograd(x, 1), bool)
    assert_type(method_autograd_factory(x, 1), bool)
    assert_type(method_jvp(x, 1), bool)
    assert_type(method_vmap(x, 1), bool)
    assert_type(method_vmap_factory(x, 1), bool)
    assert_type(method_dispatch(x, 1), bool)

    assert_type(scale.register_kernel("cpu", kernel)(x, 1.0, inverse=True), Tensor)
    assert_type(scale.register_fake(kernel)(x, 1.0, inverse=True), Tensor)
    assert_type(
        scale.register_autograd(backward, setup_context=setup_context)(None, x),
        tuple[Tensor, None],
    )
    assert_type(scale.register_vmap(vmap)(None, (), x), tuple[Tensor, int])
    assert_type(scale.register_torch_dispatch(Masked, dispatch)(masked, 0, 0, 0, 0), int)

    scale.register_fake(like="x", dtype=torch.bool)
    scale.register_fake(shape=lambda x: (x.shape[0], 2))
    split.register_fake(like=("x", None), shape=[None, lambda x: x.shape], dtype=("x", None))
    scale.register_vmap("sequential")
    scale.register_autograd(backward, setup_context=setup_context, jvp=backward)


def functions(masked: Masked) -> None:
    torchop.register_fake("typed::scale", like="x", lib=None)
    torchop.register_vmap("typed::scale", "sequential", lib=None)

    @torchop.register_jvp("typed::scale", lib=None)
    def function_jvp(x: Tensor, n: int) -> bool: ...

    assert_type(function_jvp(x, 1), bool)

    @torchop.register_kernel(scale, "cpu")
    def function_kernel(x: Tensor, n: int) -> bool: ...

    @torchop.register_fake("typed::scale", allow_override=False)
    def function_fake(x: Tensor, n: int) -> bool: ...

    @torchop.register_autograd(scale.overload, setup_context=setup_context)
    def function_autograd(x: Tensor, n: int) -> bool: ...

    @torchop.register_vmap("typed::scale", lib=None)
    def function_vmap(x: Tensor, n: int) -> bool: ...

    @torchop.register_torch_dispatch("typed::scale", Masked)
    def function_dispatch(x: Tensor, n: int) -> bool: ...

    assert_type(function_kernel(x, 1), bool)
    assert_type(function_fake(x, 1), bool)
    assert_type(function_autograd(x, 1), bool)
    assert_type(function_vmap(x, 1), bool)
    assert_type(function_dispatch(x, 1), bool)

    assert_type(torchop.register_kernel(scale, None, kernel)(x, 1.0, inverse=True), Tensor)
    assert_type(torchop.register_fake(scale, kernel)(x, 1.0, inverse=True), Tensor)
    assert_type(torchop.register_autograd(scale, backward)(None, x), tuple[Tensor, None])
    assert_type(torchop.register_vmap(scale, vmap)(None, (), x), tuple[Tensor, int])
    assert_type(torchop.register_torch_dispatch(scale, Masked, dispatch)(masked, 0, 0, 0, 0), int)


# --------------------------------------------------------------------------------------------------
# Structured arguments and results


@dataclasses.dataclass(frozen=True)
class Config:
    weight: Tensor
    scale: float = 1.0


class Found(NamedTuple):
    values: Tensor
    rest: Tensor | None


@torchop.custom_op("typed::structured", mutates_args=())
def structured(
    x: Tensor, config: Config, mode: Literal["a", "b"] = "a", *, by: float = 1.0
) -> Found: ...


@structured.register_fake
def structured_fake(
    x: Tensor, config: Config, mode: Literal["a", "b"] = "a", *, by: float = 1.0
) -> Found:
    return Found(x, None)


assert_type(structured(x, Config(x, 2.0)), Found)
assert_type(structured(x, config=Config(x), mode="b", by=2.0).rest, Tensor | None)
assert_type(structured.source, str | None)


@torchop.testing.checking()
def checked(x: Tensor) -> int:
    with torchop.testing.checking():
        return len(x)


assert_type(checked(x), int)


def low_level() -> None:
    library = torchop.Library("typed", "FRAGMENT")
    with library as entered:
        assert_type(entered, torchop.Library)
    assert_type(torchop.infer_schema(crop, mutates_args=()), str)
    assert_type(library.define("sum(Tensor x) -> Tensor"), str)

    torchop.define("typed::sum", "(Tensor x) -> Tensor", lib=library)

    @torchop.impl("typed::sum", "cpu")
    def implementation(x: Tensor, n: int) -> bool: ...

    @torchop.impl(library, "sum", "CPU")
    def older_implementation(x: Tensor, n: int) -> bool: ...

    @torchop.define(library, "mean(Tensor x) -> Tensor")
    def older_definition(x: Tensor, n: int) -> bool: ...

    assert_type(implementation(x, 1), bool)
    assert_type(older_implementation(x, 1), bool)
    assert_type(older_definition(x, 1), bool)
    assert_type(torchop.impl("typed::sum", ("cpu", "cuda"), returns_tensor)(), Tensor)
