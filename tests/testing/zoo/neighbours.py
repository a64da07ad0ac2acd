"""Faulty operators, each next to a similar correct one.

The faults concern threads, files, integers, rows and state.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests._support.releases import of_form
from tests.testing.zoo.specimen import define, floats_only, like, one, right, two, wrong

_C = ctypes.CDLL(None)

# --------------------------------------------------------------------------------------------------
# Settings of the process


def turns_denormals_off(x: Tensor) -> Tensor:
    floats_only("turns_denormals_off", x)
    torch.set_flush_denormal(True)
    return x.contiguous() + 1


wrong(define("turns_denormals_off", turns_denormals_off, fake=like), "contracts.process", one)

# --------------------------------------------------------------------------------------------------
# Threads, files


_STATIC = ctypes.create_string_buffer(2**20)


def through_static_buffer(x: Tensor) -> Tensor:
    """Uses one buffer for all threads, so another thread may write to it while C code runs."""
    return _through(_STATIC, x)


def _through(buffer: Any, x: Tensor) -> Tensor:
    x = x.contiguous()
    size = min(x.nbytes, 2**20)
    result = x.clone()
    ctypes.memmove(buffer, x.data_ptr(), size)
    _C.usleep(50)
    ctypes.memmove(result.data_ptr(), buffer, size)
    return result


wrong(define("through_static_buffer", through_static_buffer, fake=like), "subsystems.threads", one)
_OWN = threading.local()


def through_own_buffer(x: Tensor) -> Tensor:
    if not hasattr(_OWN, "buffer"):
        _OWN.buffer = ctypes.create_string_buffer(2**20)
    return _through(_OWN.buffer, x)


right(define("through_own_buffer", through_own_buffer, fake=like), one)
_DESCRIPTORS: list[int] = []
# Close the leaked files before the process reaches its limit of open files. The number must be so
# large that none are closed while a check counts leaks.
_MOST_DESCRIPTORS = max(900, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1000)


def leaves_a_descriptor(x: Tensor) -> Tensor:
    floats_only("leaves_a_descriptor", x)
    _DESCRIPTORS.append(os.open(os.devnull, os.O_RDONLY))
    if len(_DESCRIPTORS) > _MOST_DESCRIPTORS:
        close_descriptors()
    return x.contiguous() + 1


def close_descriptors() -> None:
    while _DESCRIPTORS:
        os.close(_DESCRIPTORS.pop())


wrong(define("leaves_a_descriptor", leaves_a_descriptor, fake=like), "contracts.leaks", one)


def opens_and_closes(x: Tensor) -> Tensor:
    with open(os.devnull):
        return x * 2


right(define("opens_and_closes", opens_and_closes), one)

# --------------------------------------------------------------------------------------------------
# Integers


def repeated(x: Tensor, times: int) -> Tensor:
    return x.repeat(times, *[1] * (x.dim() - 1))


def _with_times() -> list[Any]:
    return [(torch.arange(6.0).view(3, 2), 2)]


wrong(
    define(
        "fakes_repeated_once",
        repeated,
        schema="(Tensor x, int times) -> Tensor",
        fake=lambda x, times: x.new_empty(x.shape[0] * max(times, 1), *x.shape[1:]),
    ),
    "subsystems.fake",
    _with_times,
)
right(define("repeated", repeated), _with_times)

# --------------------------------------------------------------------------------------------------
# Results that depend on the other rows of a batch


def ranked(x: Tensor) -> Tensor:
    """Ranks the rows, so the result for a row depends on the other rows. This is correct."""
    return x.argsort(dim=0, stable=True).contiguous()


right(
    define("ranked", ranked, fake=lambda x: torch.empty(x.shape, dtype=torch.long)),
    lambda: [(torch.arange(12.0).view(3, 4),)],
)

# --------------------------------------------------------------------------------------------------
# State that is kept between calls


@functools.cache
def _table(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.double).cos()


def times_table(x: Tensor) -> Tensor:
    """Caches a table by its size. This is correct, because the table depends only on the size."""
    if not x.is_floating_point() or not x.dim():
        raise TypeError("times_table takes floating-point tensors with a dimension")
    return x.contiguous() * _table(x.shape[-1]).to(x.dtype)


right(define("times_table", times_table, fake=like, device_types="cpu"), one)

# --------------------------------------------------------------------------------------------------
# Correct operators that a check could report by mistake: results on the CPU, lists, in-place forms,
# sparse arguments


def sum_for_host(x: Tensor) -> Tensor:
    return x.detach().double().sum().cpu()


right(
    define(
        "sum_for_host",
        sum_for_host,
        fake=lambda x: torch.empty((), dtype=torch.double, device="cpu"),
    ),
    one,
)


def momentum_step(
    params: Sequence[Tensor], grads: Sequence[Tensor], moments: Sequence[Tensor]
) -> None:
    for param, grad, moment in zip(params, grads, moments, strict=True):
        moment.mul_(0.9).add_(grad)
        param.sub_(0.1 * moment)


right(
    define("momentum_step", momentum_step, mutates_args={"params", "moments"}),
    lambda: [
        (
            [torch.ones(2, 3), torch.ones(4)],
            [torch.full((2, 3), 0.5), torch.arange(4.0)],
            [torch.zeros(2, 3), torch.ones(4)],
        )
    ],
)


def _size(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.size = inputs[1].shape


def add_twice_(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y, alpha=2)


_add_twice_ = define(
    "add_twice_",
    add_twice_,
    mutates_args={"x"},
    fake=None,
    **of_form("inplace", "(Tensor(a!) x, Tensor y) -> Tensor(a!)"),
)
_add_twice_.register_autograd(
    lambda ctx, g: (g, (2 * g).sum_to_size(ctx.size)), setup_context=_size
)
right(_add_twice_, two)


def sparse_row_sums(x: Tensor) -> Tensor:
    if x.layout is not torch.sparse_coo or not x.is_floating_point():
        raise TypeError("sparse_row_sums takes sparse tensors of floating-point numbers")
    return x.to_dense().sum(1)


right(
    define("sparse_row_sums", sparse_row_sums, fake=lambda x: x.to_dense().new_empty(x.shape[0])),
    lambda: [(torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.5]]).to_sparse(),)],
)
