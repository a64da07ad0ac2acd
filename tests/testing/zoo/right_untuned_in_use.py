"""More correct kernels that were written without running the checks: norms, sound, boxes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchop
from tests.testing.zoo.specimen import define, floats_only, like, right

# --------------------------------------------------------------------------------------------------
# Norms and positions


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    floats_only("layer_norm", x, weight, bias)
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    centered = exact - exact.mean(-1, keepdim=True)
    scale = (centered.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (centered * scale * weight + bias).to(x.dtype).contiguous()


def _gradient_of_norm(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    centered = x - x.mean(-1, keepdim=True)
    scale = (centered.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
    normed, inner = centered * scale, grad * weight
    share = (inner * normed).mean(-1, keepdim=True)
    of_x = (inner - inner.mean(-1, keepdim=True) - normed * share) * scale
    return of_x, (grad * normed).sum_to_size(weight.shape), grad.sum_to_size(ctx.bias), None


def _save_norm(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.bias, ctx.eps = inputs[2].shape, inputs[3]


_layer_norm = define("layer_norm", layer_norm)
_layer_norm.register_autograd(_gradient_of_norm, setup_context=_save_norm)
right(
    _layer_norm,
    lambda: [
        (
            torch.tensor([[1.0, -2, 3], [0.5, 4, 1]]),
            torch.tensor([1.0, 2, 0.5]),
            torch.tensor([0.0, 1, -1]),
            1e-5,
        )
    ],
)


def channels_normed(image: Tensor, groups: int) -> Tensor:
    floats_only("channels_normed", image)
    if image.dim() < 2 or groups < 1 or image.shape[1] % groups:
        raise ValueError("channels_normed takes images whose channels make whole groups")
    parts = image.detach().double().numpy().reshape(image.shape[0], groups, -1)
    if not parts.size:
        return like(image)
    normed = (parts - parts.mean(-1, keepdims=True)) / np.sqrt(parts.var(-1, keepdims=True) + 1e-5)
    return torch.from_numpy(normed.reshape(image.shape)).to(image.dtype)


right(
    define("channels_normed", channels_normed, fake=like),
    lambda: [(torch.arange(48.0).view(2, 4, 2, 3).sin(), 2)],
)


def pairs_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of neighbouring elements by an angle."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


_pairs_turned = define("pairs_turned", pairs_turned)
_pairs_turned.register_autograd(
    lambda ctx, grad: (pairs_turned(grad, ctx.saved_tensors[0], -ctx.saved_tensors[1]), None, None),
    # The tables of cosines and sines need no gradient.
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
)
right(
    _pairs_turned,
    lambda: [
        (
            torch.arange(8.0).view(2, 4).requires_grad_(),
            torch.tensor([1.0, 0.6]),
            torch.tensor([0.0, 0.8]),
        )
    ],
)


def turned_in_place(query: Tensor, keys: Tensor, positions: Tensor, table: Tensor) -> None:
    for heads in (query, keys):
        cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
        first, second = heads.clone().chunk(2, -1)
        heads.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))


right(
    define(
        "turned_in_place",
        turned_in_place,
        mutates_args={"query", "keys"},
        fake=lambda *args: None,
    ),
    lambda: [
        (
            torch.arange(16.0).view(2, 2, 4),
            torch.arange(8.0).view(2, 1, 4),
            torch.tensor([0, 2]),
            torch.arange(12.0).view(3, 4).cos(),
        )
    ],
)


def distance_buckets(distance: Tensor, both: bool, count: int, farthest: int) -> Tensor:
    """Map distances to buckets. Half of the buckets hold one distance, the others grow in size."""
    if distance.is_floating_point() or distance.dtype is torch.bool:
        raise TypeError("distance_buckets takes integers")
    distance = distance.to(torch.int64)
    if both:
        count //= 2
        base, distance = (distance > 0).to(torch.int64) * count, distance.abs()
    else:
        base, distance = torch.zeros_like(distance), (-distance).clamp(min=0)
    exact = count // 2
    far = (distance.clamp(min=1).double() / exact).log() / math.log(farthest / exact)
    return base + torch.where(
        distance < exact, distance, (exact + (far * (count - exact)).long()).clamp(max=count - 1)
    )


right(
    define(
        "distance_buckets",
        distance_buckets,
        fake=lambda distance, *others: torch.empty_like(distance, dtype=torch.int64),
    ),
    lambda: [(torch.tensor([[-40, -3, 0], [1, 9, 200]]), True, 32, 128)],
)

# --------------------------------------------------------------------------------------------------
# Sound and geometry


def frame_energies(signal: Tensor, size: int, hop: int) -> Tensor:
    floats_only("frame_energies", signal)
    if signal.dim() != 1 or size < 1 or hop < 1 or len(signal) < size:
        raise ValueError("frame_energies takes a signal of at least one frame")
    frames = np.lib.stride_tricks.sliding_window_view(signal.detach().double().numpy(), size)[::hop]
    energies = np.abs(np.fft.rfft(frames * np.hanning(size + 2)[1:-1], axis=-1)) ** 2
    return torch.from_numpy(energies).to(signal.dtype)


right(
    define(
        "frame_energies",
        frame_energies,
        fake=lambda signal, size, hop: signal.new_empty(
            (signal.shape[0] - size) // hop + 1, size // 2 + 1
        ),
    ),
    lambda: [(torch.arange(10.0).sin(), 4, 2)],
)


def overlapped_frames(frames: Tensor, hop: int) -> Tensor:
    """Add overlapping frames, each of which starts `hop` samples after the previous one."""
    if frames.dim() != 2 or not 1 <= hop <= frames.shape[1]:
        raise ValueError("overlapped_frames takes a matrix of frames that touch")
    count, size = frames.shape
    signal = frames.new_zeros(max(count - 1, 0) * hop + size if count else 0)
    for frame, values in enumerate(frames):
        signal[frame * hop : frame * hop + size] += values
    return signal


def _fake_overlapped(frames: Tensor, hop: int) -> Tensor:
    count, size = frames.shape
    return frames.new_empty((count - 1) * hop + size if count else 0)


_overlapped = define("overlapped_frames", overlapped_frames, fake=_fake_overlapped)
_overlapped.register_autograd(
    lambda ctx, grad: (
        (grad.unfold(0, ctx.shape[1], ctx.hop) if ctx.shape[0] else grad.view(ctx.shape)).clone(),
        None,
    ),
    setup_context=lambda ctx, inputs, output: (
        setattr(ctx, "shape", inputs[0].shape),
        setattr(ctx, "hop", inputs[1]),
    )[0],
)
right(_overlapped, lambda: [(torch.arange(12.0).view(3, 4), 2)])


def filtered(signal: Tensor, forward: Tensor, back: Tensor) -> Tensor:
    """Apply a recursive linear filter, computed in double precision."""
    floats_only("filtered", signal, forward, back)
    samples, ahead, behind = (t.double().tolist() for t in (signal, forward, back))
    result: list[float] = []
    for n in range(len(samples)):
        value = sum(c * samples[n - k] for k, c in enumerate(ahead) if k <= n)
        value -= sum(c * result[n - 1 - k] for k, c in enumerate(behind) if k < n)
        result.append(value)
    return torch.tensor(result, dtype=signal.dtype)


right(
    define("filtered", filtered, fake=lambda signal, *others: like(signal)),
    lambda: [(torch.arange(6.0).cos(), torch.tensor([0.5, 0.25]), torch.tensor([-0.5]))],
)


def farthest_points(points: Tensor, count: int) -> Tensor:
    floats_only("farthest_points", points)
    if not 1 <= count <= len(points):
        raise ValueError(f"there are no {count} among {len(points)} points")
    chosen = torch.zeros(count, dtype=torch.int64)
    distance = torch.full((len(points),), float("inf"), dtype=torch.float64)
    for n in range(1, count):
        step = (points.double() - points[chosen[n - 1]].double()).square().sum(-1)
        distance = torch.minimum(distance, step)
        chosen[n] = distance.argmax()
    return chosen


right(
    define(
        "farthest_points",
        farthest_points,
        fake=lambda points, count: points.new_empty(count, dtype=torch.int64),
    ),
    lambda: [(torch.arange(10.0).view(5, 2).square(), 3)],
)


def overlaps_of_boxes(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union for each pair of boxes."""
    floats_only("overlaps_of_boxes", first, second)
    low = torch.maximum(first[:, None, :2], second[:, :2])
    high = torch.minimum(first[:, None, 2:], second[:, 2:])
    inside = (high - low).clamp(min=0).prod(-1)
    sizes = [(boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (first, second)]
    return inside / (sizes[0][:, None] + sizes[1] - inside).clamp(min=1e-6)


right(
    define(
        "overlaps_of_boxes",
        overlaps_of_boxes,
        fake=lambda first, second: first.new_empty(
            first.shape[0],
            second.shape[0],
            dtype=torch.promote_types(first.dtype, second.dtype),
        ),
    ),
    lambda: [
        (
            torch.tensor([[0.0, 0, 2, 2], [1, 1, 3, 4]]),
            torch.tensor([[1.0, 1, 2, 2], [0, 0, 4, 4], [5, 5, 6, 6]]),
        )
    ],
)


def best_boxes(boxes: Tensor, scores: Tensor, most: float) -> Tensor:
    """Return the boxes that remain after non-maximum suppression."""
    floats_only("best_boxes", boxes, scores)
    order = scores.argsort(descending=True, stable=True).tolist()
    shares = overlaps_of_boxes(boxes, boxes)
    kept: list[int] = []
    for place in order:
        if all(float(shares[place, other]) <= most for other in kept):
            kept.append(place)
    return torch.tensor(kept, dtype=torch.int64)


def _fake_best(boxes: Tensor, scores: Tensor, most: float) -> Tensor:
    return boxes.new_empty(torchop.get_ctx().new_dynamic_size(), dtype=torch.int64)


right(
    define("best_boxes", best_boxes, fake=_fake_best),
    lambda: [
        (
            torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.5], [3, 3, 4, 4]]),
            torch.tensor([0.5, 0.9, 0.1]),
            0.5,
        )
    ],
)


def quaternions_turn(points: Tensor, quaternion: Tensor) -> Tensor:
    w, axis = quaternion[:1], quaternion[1:].expand(points.shape)
    crossed = torch.linalg.cross(axis, points)
    length = quaternion.square().sum()
    return points + 2 * (w * crossed + torch.linalg.cross(axis, crossed)) / length


_quaternions = define("quaternions_turn", quaternions_turn)
_quaternions.derive_autograd()
right(
    _quaternions,
    lambda: [(torch.arange(6.0).view(2, 3), torch.tensor([1.0, 0.5, -0.5, 0.25]))],
)
