"""Faulty operators that mishandle one argument, one result, or the state of the process."""

from __future__ import annotations

import signal
import threading
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.testing.zoo.specimen import define, like, one, product, right, two, wrong

# --------------------------------------------------------------------------------------------------
# Random numbers


def numbers_with_generator() -> list[Any]:
    return [(*one()[0], torch.Generator().manual_seed(5)), *one()]


def noise(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator) + x


def noise_of_its_own(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Ignores `generator`, and draws from the default generator instead."""
    return noise(x)


for name, function in (("noise_from", noise), ("noise_of_its_own", noise_of_its_own)):
    drawing = define(
        name,
        function,
        schema="(Tensor x, Generator? generator=None) -> Tensor",
        fake=like,
        tags=[torch.Tag.nondeterministic_seeded],
    )
    if function is noise:
        right(drawing, numbers_with_generator)
    else:
        wrong(drawing, "contracts.repeated", numbers_with_generator)

# --------------------------------------------------------------------------------------------------
# Arguments and results


def with_bias(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return x + torch.zeros_like(x) if bias is None else x + bias


def _fake_with_bias(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.empty_like(x) if bias is not None else x.new_empty(x.shape[:1])


wrong(
    define(
        "fakes_bias_alone",
        with_bias,
        schema="(Tensor x, Tensor? bias=None) -> Tensor",
        fake=_fake_with_bias,
    ),
    "subsystems.fake",
    two,
)


def float32_if_empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape) if x.numel() == 0 else -x.contiguous()


wrong(define("float32_if_empty", float32_if_empty, fake=like), "dtypes.accepted", one)


def rounds_factor(x: Tensor, factor: float) -> Tensor:
    return x * float(np.float32(factor))


wrong(define("rounds_factor", rounds_factor), "dtypes.float_arguments", lambda: [(*one()[0], 0.3)])

# --------------------------------------------------------------------------------------------------
# Gradients and batches


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def sine_and_cosine(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.cos()


_both = define("needs_both_gradients", sine_and_cosine)
_both.register_autograd(
    lambda ctx, a, b: a * ctx.saved_tensors[0].cos() - b * ctx.saved_tensors[0].sin(),
    setup_context=_keep,
)
wrong(_both, "subsystems.gradcheck", one)

_one_in_batch = define("doubles_a_batch_of_one", product)


def _batched(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
    x, y = (
        t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip((x, y), in_dims, strict=True)
    )
    return x * y * (2 if info.batch_size == 1 else 1), 0


_one_in_batch.register_vmap(_batched)
wrong(_one_in_batch, "subsystems.vmap", two)

# --------------------------------------------------------------------------------------------------
# State of the process


def silences_warnings(x: Tensor) -> Tensor:
    warnings.simplefilter("ignore")
    return x + 1


wrong(define("silences_warnings", silences_warnings), "contracts.process", one)


def takes_a_signal(x: Tensor) -> Tensor:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
    return x + 1


wrong(define("takes_a_signal", takes_a_signal), "contracts.process", one)


def leaves_a_rest(x: Tensor) -> Tensor:
    """Divides the elements equally among threads, and leaves out the remainder of this division."""
    flat, threads = x.flatten(), torch.get_num_threads()
    size = len(flat) // threads or len(flat)
    whole = flat[: threads * size].sin()
    return torch.cat([whole, torch.zeros_like(flat[len(whole) :])]).view(x.shape)


wrong(define("leaves_a_rest", leaves_a_rest, fake=like), "contracts.num_threads", one)
