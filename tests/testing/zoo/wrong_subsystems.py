"""Faulty operators: the fake kernel, the gradient, or a rule for a transform is incorrect."""

from __future__ import annotations

import random
from typing import Annotated, Any

import torch
from torch import Tensor

import torchop
from tests.testing.zoo.specimen import (
    define,
    like,
    one,
    positive,
    rows_and_weights,
    save,
    two,
    wrong,
)
from tests.testing.zoo.wrong_memory import LIBRARY

# --------------------------------------------------------------------------------------------------
# Fake kernels


def _sin(x: Tensor) -> Tensor:
    return x.contiguous().sin()


def _named(name: str, function: Any = _sin, schema: str = "(Tensor x) -> Tensor", **o: Any) -> Any:
    return define(name, function, schema=schema, **o)


wrong(_named("fakes_strides_of_input", fake=lambda x: torch.empty_like(x)), "subsystems.fake", one)
wrong(_named("has_no_fake", fake=None), "subsystems.fake", one)


def _channels(x: Tensor) -> Tensor:
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.empty_like(x)
    return like(x)


wrong(
    _named("fakes_one_layout", fake=_channels),
    "subsystems.fake",
    lambda: [(torch.randn(2, 3, 4, 5),)],
)


def _at_least_one(x: Tensor) -> Tensor:
    return x.new_empty([max(n, 1) for n in x.shape])


wrong(_named("fakes_empty", fake=_at_least_one), "subsystems.fake", one)


def _reads_data(x: Tensor) -> Tensor:
    assert float(x.sum()) > -1e9
    return like(x)


wrong(_named("fakes_by_data", fake=_reads_data), "subsystems.fake", one)


def _specialises(x: Tensor) -> Tensor:
    rows = int(x.shape[0])
    return x.new_empty([rows, *x.shape[1:]])


wrong(_named("specialises", fake=_specialises), "subsystems.export_dynamic", one)


def _symbolic(x: Tensor) -> Tensor:
    if isinstance(x.shape[0], int):
        return like(x)
    return x.new_empty([x.shape[0] + 1, *x.shape[1:]])


wrong(_named("fakes_symbols", fake=_symbolic), "subsystems.fake_symbols", one)

# --------------------------------------------------------------------------------------------------
# Gradients


def _exp(x: Tensor) -> Tensor:
    return x.exp()


def _differentiable(
    name: str, backward: Any, function: Any = _exp, schema: str = "", **o: Any
) -> Any:
    op = _named(name, function, schema or "(Tensor x) -> Tensor", **o)
    op.register_autograd(backward, setup_context=save)
    return op


wrong(
    _differentiable("has_wrong_sign", lambda ctx, g: -g * ctx.saved_tensors[0].exp()),
    "subsystems.gradcheck",
    one,
)


def _product(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def _mean_over_broadcast(ctx: Any, grad: Tensor) -> Any:
    x, y = ctx.saved_tensors

    def reduced(g: Tensor, like: Tensor) -> Tensor:
        dims = [d for d, (a, b) in enumerate(zip(g.shape, like.shape, strict=True)) if a != b]
        return g.mean(dims, keepdim=True) if dims else g

    return reduced(grad * y, x), reduced(grad * x, y)


_TWO = "(Tensor x, Tensor y) -> Tensor"
wrong(
    _differentiable("averages_broadcast", _mean_over_broadcast, _product, _TWO),
    "subsystems.gradcheck",
    two,
)
wrong(
    _differentiable(
        "forgets_second", lambda ctx, g: (g * ctx.saved_tensors[1], None), _product, _TWO
    ),
    "subsystems.gradcheck",
    two,
)


def _rows_times_weights(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def _mean_of_rows(ctx: Any, grad: Tensor) -> Any:
    x, y = ctx.saved_tensors
    return grad * y, (grad * x).mean(0) * max(len(x), 1)  # NaN if there are no rows


wrong(
    _differentiable("averages_no_rows", _mean_of_rows, _rows_times_weights, _TWO),
    "subsystems.gradcheck",
    rows_and_weights,
)


def _gradient_of_memory(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return grad * memory[: x.numel()].reshape(x.shape).exp()


wrong(_differentiable("differentiates_memory", _gradient_of_memory), "subsystems.gradcheck", one)


def _gradient_of_relu(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return torch.where(x > 1.0, grad, torch.zeros_like(grad))


wrong(
    _differentiable("has_wrong_threshold", _gradient_of_relu, lambda x: x.relu()),
    "subsystems.gradcheck",
    positive,
)


def _detached(ctx: Any, grad: Tensor) -> Tensor:
    return grad * ctx.saved_tensors[0].detach().exp()


wrong(_differentiable("detaches_saved", _detached), "subsystems.gradgradcheck", one)


def _cube(x: Tensor) -> Tensor:
    return x**3


_backward_of_cube = define(
    "backward_of_cube", lambda g, x: 3 * g * x**2, schema="(Tensor g, Tensor x) -> Tensor"
)
_backward_of_cube.register_autograd(
    lambda ctx, gg: (3 * gg * ctx.saved_tensors[1] ** 2, 3 * gg * ctx.saved_tensors[0]),
    setup_context=save,
)
wrong(
    _differentiable(
        "has_wrong_second_order",
        lambda ctx, g: _backward_of_cube(g, ctx.saved_tensors[0]),
        _cube,
    ),
    "subsystems.gradgradcheck",
    one,
)


def _with_jvp(name: str, jvp: Any) -> Any:
    op = _named(name, _exp)
    op.register_jvp(jvp, setup_context=lambda ctx, inputs, output: ctx.save_for_forward(output))
    return op


wrong(
    _with_jvp("has_wrong_tangent", lambda ctx, t: -t * ctx.saved_tensors[0]),
    "subsystems.forward_mode",
    one,
)

_noise = random.Random(0)
wrong(
    _differentiable(
        "differentiates_with_noise",
        lambda ctx, g: g * ctx.saved_tensors[0].exp() * (1 + 1e-7 * _noise.random()),
    ),
    "subsystems.gradcheck",
    one,
)


def _dropout(x: Tensor) -> Tensor:
    return x * float(_noise.random() > 0.5)


wrong(
    _differentiable("drops_by_own_numbers", lambda ctx, g: g * _noise.random(), _dropout),
    "contracts.repeated",
    one,
)


def _by_item(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad * x.exp() if float(x.detach().sum()) < 1e30 else grad


wrong(_differentiable("differentiates_by_data", _by_item), "subsystems.compiled", one)

# --------------------------------------------------------------------------------------------------
# Transforms


def _with_vmap(name: str, rule: Any, function: Any, schema: str, **options: Any) -> Any:
    op = _named(name, function, schema, **options)
    op.register_vmap(rule)
    return op


def _row_sums(x: Tensor) -> Tensor:
    return x.sum(0)


wrong(
    _with_vmap(
        "forgets_in_dim", lambda info, dims, x: (x.sum(1), 0), _row_sums, "(Tensor x) -> Tensor"
    ),
    "subsystems.vmap",
    one,
)
wrong(
    _with_vmap(
        "returns_wrong_dim",
        lambda info, dims, x: (x.movedim(dims[0], -1).cos(), 0),
        lambda x: x.cos(),
        "(Tensor x) -> Tensor",
    ),
    "subsystems.vmap",
    lambda: [(torch.randn(3, 3),)],
)


def _both_mapped(info: Any, dims: Any, x: Tensor, y: Tensor) -> Any:
    x = x.movedim(dims[0] or 0, -1)
    y = y.movedim(dims[1] or 0, -1)
    return x * y, x.dim() - 1


wrong(
    _with_vmap("forgets_unmapped", _both_mapped, _product, _TWO),
    "subsystems.vmap",
    lambda: [(torch.randn(3, 3), torch.randn(3, 3))],
)


def _noisy(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape)


def _one_draw(info: Any, dims: Any, x: Tensor) -> Any:
    x = x.movedim(dims[0], 0)
    return x + torch.randn(x.shape[1:]), 0


wrong(
    _with_vmap(
        "draws_once",
        _one_draw,
        _noisy,
        "(Tensor x) -> Tensor",
        tags=(torch.Tag.nondeterministic_seeded,),
    ),
    "subsystems.vmap_random",
    lambda: [(torch.zeros(3),)],
)

wrong(
    _with_vmap(
        "vmap_returns_input",
        lambda info, dims, x: (x, dims[0]),
        lambda x: x.clone(),
        "(Tensor x) -> Tensor",
    ),
    "subsystems.vmap",
    one,
)

_SCALES: dict[Any, float] = {}


def _by_shape(info: Any, dims: Any, x: Tensor) -> Any:
    """Hashes sizes, which raises in a compiler's trace, because symbolic sizes are not hashable."""
    return x.cos() * _SCALES.setdefault(tuple(x.shape), 1.0), dims[0]


wrong(
    _with_vmap("hashes_sizes_in_vmap", _by_shape, lambda x: x.cos(), "(Tensor x) -> Tensor"),
    "subsystems.vmap_compiled",
    one,
)

_mapped_by_item = _differentiable("maps_gradients_by_data", _by_item)
_mapped_by_item.register_vmap(lambda info, dims, x: (x.exp(), dims[0]))
wrong(_mapped_by_item, "subsystems.func", one)

# --------------------------------------------------------------------------------------------------
# Contexts


def scales_in_autocast(x: Tensor) -> Tensor:
    return x + x if torch.is_autocast_enabled("cpu") else x.clone().contiguous()


wrong(define("scales_in_autocast", scales_in_autocast, fake=like), "subsystems.autocast", one)


def _product(x: Tensor) -> Tensor:
    return torch.mm(x, x.t().contiguous())


wrong(
    define("product_of_fixed_dtype", _product, fake=lambda x: x.new_empty(x.shape[0], x.shape[0])),
    "subsystems.compiled_autocast",
    lambda: [(torch.randn(3, 4),)],
)


# A kernel that torch.library registers gets no copies in inference mode
def _running_sums(x: Annotated[Tensor, torchop.contiguous]) -> Tensor:
    return x.as_strided((x.numel(),), (1,)).cumsum(0)


wrong(
    define(
        "sums_through_torch_library",
        _running_sums,
        fake=lambda x: x.new_empty(x.numel(), dtype=torch.cumsum(x.view(-1), 0).dtype),
    ),
    "memory.declared",
    one,
)
torch.library.impl("zoo::sums_through_torch_library", "CPU", _running_sums)


def asks_for_inference(x: Tensor) -> Tensor:
    return x + x if torch.is_inference_mode_enabled() else x.clone().contiguous()


wrong(define("asks_for_inference", asks_for_inference, fake=like), "subsystems.inference_mode", one)


def knows_only_tensor(x: Tensor) -> Tensor:
    return (x + x).contiguous() if type(x) is Tensor else torch.zeros(x.shape, dtype=x.dtype)


wrong(define("knows_only_tensor", knows_only_tensor, fake=like), "subsystems.subclasses", one)


_largest = define(
    "reduces_by_sum",
    lambda x: x.amax(-1),
    schema="(Tensor x) -> Tensor",
    fake=lambda x: x.new_empty(x.shape[:-1]),
)
_largest.register_sharding("... d -> ...", reduce={"d": "sum"})
wrong(_largest, "subsystems.sharding", lambda: [(torch.randn(4, 6),)])


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad * ctx.saved_tensors[0]


LIBRARY.define("differentiates_below(Tensor x) -> Tensor")
LIBRARY.impl("differentiates_below", _Square.apply, "CPU")
torch.library.register_fake("zoo::differentiates_below", torch.empty_like, lib=LIBRARY)
wrong("zoo::differentiates_below", "subsystems.autograd_registration", one)
