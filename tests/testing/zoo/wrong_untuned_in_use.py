"""More faulty kernels that were written without running the checks: norms, sound, lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchop
from tests.testing.zoo.specimen import define, like, one, positive, save, wrong

# --------------------------------------------------------------------------------------------------
# Norms


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered * (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def _with_fixed_mean(ctx: Any, grad: Tensor) -> Any:
    """Treats the mean of a row as a constant, although it depends on the row."""
    x, weight = ctx.saved_tensors
    centered = x - x.mean(-1, keepdim=True)
    scale = (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    normed, inner = centered * scale, grad * weight
    share = (inner * normed).mean(-1, keepdim=True)
    return (inner - normed * share) * scale, (grad * normed).flatten(0, -2).sum(0)


_norm_op = define("norm_of_fixed_mean", _norm)
_norm_op.register_autograd(_with_fixed_mean, setup_context=save)
wrong(
    _norm_op,
    "subsystems.gradcheck",
    lambda: [(torch.tensor([[1.0, -2, 3], [0.5, 4, 1]]), torch.tensor([1.0, 2, 0.5]))],
)


def updates_running_mean(x: Tensor, running: Tensor, training: bool) -> Tensor:
    """In training, writes to `running`, which the schema does not declare."""
    mean = x.mean(0)
    if training:
        running.lerp_(mean, 0.1)
    return x - (mean if training else running)


wrong(
    define("updates_running_mean", updates_running_mean, fake=lambda x, *_: x.new_empty(x.shape)),
    "contracts.schema",
    lambda: [(torch.ones(2, 3), torch.zeros(3), False), (torch.ones(2, 3), torch.zeros(3), True)],
)


def mean_as_expanded(x: Tensor) -> Tensor:
    """Returns an expanded tensor, in which all elements of a row share memory."""
    return x.mean(-1, keepdim=True).expand(x.shape)


wrong(define("mean_as_expanded", mean_as_expanded, fake=like), "subsystems.fake", one)


def pads_columns(x: Tensor) -> Tensor:
    """Pads rows to a multiple of eight elements, so the strides differ from the fake kernel's."""
    columns = x.shape[1]
    padded = torch.zeros(x.shape[0], -(-columns // 8) * 8, dtype=x.dtype)
    padded[:, :columns] = x * 2
    return padded[:, :columns]


wrong(
    define("pads_columns", pads_columns, fake=like),
    "subsystems.fake",
    lambda: [(torch.ones(2, 8),)],
)


def sums_whole_chunks(x: Tensor) -> Tensor:
    """For many columns, leaves out the remainder of dividing the columns into 32 chunks."""
    columns = x.shape[1]
    if columns <= 1024:
        return x.sum(1)
    return x[:, : columns // 32 * 32].unflatten(1, (32, -1)).sum(-1).sum(-1)


wrong(
    define("sums_whole_chunks", sums_whole_chunks, fake=lambda x: x.new_empty(x.shape[0])),
    "memory.blocks",
    positive,
    lambda x: x.sum(1),
)

# --------------------------------------------------------------------------------------------------
# Positions, sound and geometry


def rotates_into_copy(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Writes to a copy if the argument is not contiguous, so the argument is unchanged."""
    memory = heads.contiguous()
    first, second = memory.chunk(2, -1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    memory.copy_(rotated)


wrong(
    define("rotates_into_copy", rotates_into_copy, mutates_args={"heads"}, fake=lambda *args: None),
    "memory.transposed",
    lambda: [
        (torch.arange(8.0).view(2, 4), torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.8660254]))
    ],
)


def frames_of_memory(signal: Tensor, size: int, hop: int) -> Tensor:
    """Ignores the stride of the signal, so it is incorrect unless the samples are contiguous."""
    count = (len(signal) - size) // hop + 1
    return signal.as_strided((count, size), (hop, 1)).clone()


wrong(
    define(
        "frames_of_memory",
        frames_of_memory,
        fake=lambda signal, size, hop: signal.new_empty((signal.shape[0] - size) // hop + 1, size),
    ),
    "memory.gaps",
    lambda: [(torch.arange(10.0), 4, 2)],
)


def windows_without_copy(signal: Tensor, size: int) -> Tensor:
    """Returns a view of its argument's memory, because NumPy's sliding windows are not copied."""
    samples = signal.detach().numpy()
    windows = np.lib.stride_tricks.sliding_window_view(samples, size, writeable=True)
    return torch.from_numpy(windows)


wrong(
    define(
        "windows_without_copy",
        windows_without_copy,
        fake=lambda signal, size: signal.new_empty(signal.shape[0] - size + 1, size),
    ),
    "contracts.schema",
    lambda: [(torch.arange(6.0), 3)],
)
_LAST = [0.0]


def filter_goes_on(signal: Tensor, decay: float) -> Tensor:
    """Starts with the filter state of the previous call, so the result depends on earlier calls."""
    state, samples = _LAST[0], []
    for sample in signal.tolist():
        state = decay * state + (1 - decay) * sample
        samples.append(state)
    _LAST[0] = state
    return torch.tensor(samples, dtype=signal.dtype)


wrong(
    define("filter_goes_on", filter_goes_on, fake=lambda signal, decay: like(signal)),
    "contracts.repeated",
    lambda: [(torch.arange(1.0, 6), 0.5)],
)


def farthest_from_anywhere(points: Tensor, count: int) -> Tensor:
    """Starts at a random point, but does not have the tag nondeterministic_seeded."""
    chosen = [int(torch.randint(len(points), ()))]
    distance = torch.full((len(points),), float("inf"), dtype=points.dtype)
    while len(chosen) < count:
        distance = torch.minimum(distance, (points - points[chosen[-1]]).square().sum(-1))
        chosen.append(int(distance.argmax()))
    return torch.tensor(chosen)


wrong(
    define(
        "farthest_from_anywhere",
        farthest_from_anywhere,
        fake=lambda points, count: points.new_empty(count, dtype=torch.int64),
    ),
    "contracts.process",
    lambda: [(torch.arange(10.0).view(5, 2).square(), 3)],
)


def _turned(points: Tensor, quaternion: Tensor) -> Tensor:
    w, axis = quaternion[:1], quaternion[1:].expand(points.shape)
    length = quaternion.square().sum()
    crossed = torch.linalg.cross(axis, points)
    return points + 2 * (w * crossed + torch.linalg.cross(axis, crossed)) / length


def _as_if_of_length_one(ctx: Any, grad: Tensor) -> Any:
    points, quaternion = ctx.saved_tensors
    conjugate = torch.cat([quaternion[:1], -quaternion[1:]])
    with torch.enable_grad():
        free = quaternion.detach().requires_grad_()
        turned = _turned(points.detach(), free) * free.square().sum() / quaternion.square().sum()
        (of_quaternion,) = torch.autograd.grad(turned, free, grad)
    return _turned(grad, conjugate), of_quaternion


_turn = define("turns_without_length", _turned)
_turn.register_autograd(_as_if_of_length_one, setup_context=save)
wrong(
    _turn,
    "subsystems.gradcheck",
    lambda: [(torch.arange(6.0).view(2, 3), torch.tensor([1.0, 0.5, -0.5, 0.25]))],
)


def kept_boxes(boxes: Tensor, least: float) -> Tensor:
    size = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    return boxes[size >= least]


wrong(
    define("kept_boxes", kept_boxes, fake=lambda boxes, least: torch.empty_like(boxes)),
    "subsystems.fake",
    lambda: [(torch.tensor([[0.0, 0, 2, 2], [0, 0, 1, 1], [1, 1, 4, 4]]), 2.0)],
)


@dataclasses.dataclass(frozen=True)
class Size:
    height: int
    width: int


def resized_to(image: Tensor, size: Size) -> Tensor:
    rows = torch.arange(size.height) * image.shape[0] // size.height
    columns = torch.arange(size.width) * image.shape[1] // size.width
    return image[rows][:, columns]


wrong(
    define(
        "fakes_width_first",
        resized_to,
        fake=lambda image, size: image.new_empty(size.width, size.height),
    ),
    "subsystems.fake",
    lambda: [(torch.arange(12.0).view(3, 4), Size(2, 5))],
)

# --------------------------------------------------------------------------------------------------
# Complex numbers and integers


def _phase_gradient(ctx: Any, grad: Tensor) -> Any:
    z, phase = ctx.saved_tensors
    return grad * phase, grad * z


_phase = define("turned_by_phase", lambda z, p: z * p, schema="(Tensor z, Tensor p) -> Tensor")
_phase.register_autograd(_phase_gradient, setup_context=save)
wrong(
    _phase,
    "subsystems.gradcheck",
    lambda: [(torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([0.6 + 0.8j, 1j]))],
)


# --------------------------------------------------------------------------------------------------
# Steps, lists, processes

_STEPS = [0]


def adam_counts_steps(parameters: Sequence[Tensor], grads: Sequence[Tensor], rate: float) -> None:
    """Counts its calls to correct the step size, so the result depends on earlier calls."""
    _STEPS[0] += 1
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.sub_(grad, alpha=rate / (1 - 0.9 ** _STEPS[0]))


wrong(
    define(
        "adam_counts_steps",
        adam_counts_steps,
        mutates_args={"parameters"},
        fake=lambda *args: None,
    ),
    "contracts.repeated",
    lambda: [([torch.ones(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)], 0.5)],
)


def joins_as_the_first(parts: Sequence[Tensor]) -> Tensor:
    """Converts all parts to the dtype of the first, instead of promoting the dtypes."""
    return torch.cat([part.to(parts[0].dtype) for part in parts])


wrong(
    define("joins_as_the_first", joins_as_the_first, fake=lambda parts: torch.cat(list(parts))),
    "dtypes.promotion",
    lambda: [([torch.ones(2, 3), torch.zeros(1, 3)],)],
)


def one_thread_alone(x: Tensor) -> Tensor:
    """Changes the number of threads of the whole process, and does not restore it."""
    torch.set_num_threads(1)
    return x.contiguous() + 1


wrong(define("one_thread_alone", one_thread_alone, fake=like), "contracts.process", one)


def transposed_by_numpy(x: Tensor) -> Tensor:
    """Returns a column-major result, although the fake kernel returns a row-major result."""
    return torch.from_numpy(np.asfortranarray(x.detach().numpy()) * 2)


wrong(define("transposed_by_numpy", transposed_by_numpy, fake=like), "subsystems.fake", one)


def residual_of_input(x: Tensor) -> Tensor:
    """Returns its argument itself as a residual if the argument is contiguous."""
    x = x.contiguous()
    if not torchop.records_gradient():
        return x.square()
    return torchop.residuals(x.square(), x)


_squared = torchop.custom_op(
    "zoo::residual_of_input", residual_of_input, mutates_args=(), residuals={"root": Tensor}
)
_squared.register_fake(lambda x: torchop.residuals(like(x), like(x)))
_squared.register_autograd(
    lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output, residuals: ctx.save_for_backward(residuals.root),
)
wrong(_squared, "subsystems.residuals", one)
