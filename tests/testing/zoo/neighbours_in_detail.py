"""Faulty operators that fail in few calls, such as for one number of threads or dimensions.

Each is next to a similar correct operator.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tests.testing.zoo.specimen import define, floats_only, like, one, right, wrong

# --------------------------------------------------------------------------------------------------
# Threads

_C = ctypes.CDLL(None)
_SECONDS = 5  # the leaked threads exit after this time


def leaves_its_worker(x: Tensor) -> Tensor:
    thread = ctypes.c_ulong()
    _C.pthread_create(ctypes.byref(thread), None, _C.sleep, ctypes.c_void_p(_SECONDS))
    _C.pthread_detach(thread)
    return x.clone(memory_format=torch.contiguous_format)


wrong(define("leaves_its_worker", leaves_its_worker, fake=like), "contracts.leaks", one)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2)


def shares_its_workers(x: Tensor) -> Tensor:
    """Starts two worker threads in the first call, and reuses them, so they are not a leak."""
    halves = x.flatten().split(max(-(-x.numel() // 2), 1))
    parts = list(_pool().map(lambda half: half.clone().neg_(), halves))
    return torch.cat(parts).view(x.shape) if parts else x.clone()


def _numbers_only(x: Tensor) -> Tensor:
    if x.dtype is torch.bool:
        raise TypeError("shares_its_workers takes numbers, got torch.bool")
    return torch.empty(x.shape, dtype=x.dtype)


right(
    define(
        "shares_its_workers",
        lambda x: shares_its_workers(x),
        schema="(Tensor x) -> Tensor",
        fake=_numbers_only,
        device_types="cpu",
    ),
    one,
)


def _shared_out(x: Tensor, bounds: list[int]) -> Tensor:
    """Compute the sine part by part, as several threads would. `bounds` separates the parts."""
    result = torch.zeros(x.numel(), dtype=x.dtype)
    flat = x.flatten()
    for start, end in itertools.pairwise(bounds):
        result[start:end] = flat[start:end].sin()
    return result.view(x.shape)


def shares_in_tenths(x: Tensor) -> Tensor:
    """Rounds the share of each thread to tenths, so three threads process only 9 of 10 elements."""
    floats_only("shares_in_tenths", x)
    threads = torch.get_num_threads()
    share = round(1 / threads, 1)
    return _shared_out(x, [int(x.numel() * share * n + 1e-9) for n in range(threads + 1)])


wrong(define("shares_in_tenths", shares_in_tenths, fake=like), "contracts.num_threads", one)

_GRAIN = 2**15


def leaves_a_rest_of_many(x: Tensor) -> Tensor:
    """Leaves out the remainder of the division by the number of threads.

    For few elements, it uses a single thread, like at::parallel_for, so only large tensors are
    affected.
    """
    floats_only("leaves_a_rest_of_many", x)
    threads = torch.get_num_threads() if x.numel() > _GRAIN else 1
    return _shared_out(x, [x.numel() // threads * n for n in range(threads + 1)])


wrong(
    define("leaves_a_rest_of_many", leaves_a_rest_of_many, fake=like), "contracts.num_threads", one
)


def shares_all(x: Tensor) -> Tensor:
    floats_only("shares_all", x)
    threads = torch.get_num_threads()
    return _shared_out(x, [x.numel() * n // threads for n in range(threads + 1)])


right(define("shares_all", shares_all, fake=like, device_types="cpu"), one)

# --------------------------------------------------------------------------------------------------
# Digits and dimensions


def through_bfloat16(x: Tensor) -> Tensor:
    floats_only("through_bfloat16", x)
    if x.itemsize < 4:
        return (x.to(torch.bfloat16) * 1.5).to(x.dtype).contiguous()
    return (x * 1.5).contiguous()


wrong(define("through_bfloat16", through_bfloat16, fake=like), "dtypes.half", one)


def rounded_to_eighths(x: Tensor) -> Tensor:
    """Rounds coarsely on purpose, and equally in every dtype, so it is correct."""
    floats_only("rounded_to_eighths", x)
    return ((x * 8).round() / 8).contiguous()


right(define("rounded_to_eighths", rounded_to_eighths, fake=like), one)


def for_four_at_most(x: Tensor) -> Tensor:
    floats_only("for_four_at_most", x)
    if x.dim() > 4:
        raise ValueError(f"for_four_at_most takes up to four dimensions, got {x.dim()}")
    return (x * 2).contiguous()


right(define("for_four_at_most", for_four_at_most, fake=like), one)


def frames_added(x: Tensor) -> Tensor:
    floats_only("frames_added", x)
    return x.sum(1) if x.dim() > 4 else (x * 2).contiguous()


right(
    define(
        "frames_added",
        frames_added,
        fake=lambda x: (
            x.new_empty(x.shape[:1] + x.shape[2:]) if x.dim() > 4 else x.new_empty(x.shape)
        ),
    ),
    lambda: [(torch.arange(24.0).view(2, 3, 2, 2).sin(),)],
)

# --------------------------------------------------------------------------------------------------
# Calls that compilers support, and calls that they do not


def rows_of_both(x: Tensor) -> Tensor:
    """Accepts strided and CSR tensors, although PyTorch cannot compile calls with CSR tensors."""
    if x.layout not in (torch.strided, torch.sparse_csr) or x.dim() != 2:
        raise TypeError(f"rows_of_both takes matrices, strided or CSR, got {x.layout}")
    floats_only("rows_of_both", x)
    return x.to_dense().sum(1)


def _matrices() -> list[Any]:
    dense = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.5]])
    return [(dense.to_sparse_csr(),), (dense,)]


right(
    define("rows_of_both", rows_of_both, fake=lambda x: x.new_empty(x.shape[0])),
    _matrices,
)
wrong(
    define(
        "fakes_columns_of_both",
        lambda x: rows_of_both(x),
        schema="(Tensor x) -> Tensor",
        fake=lambda x: x.new_empty(x.shape[1]),
    ),
    "subsystems.fake",
    _matrices,
)

# --------------------------------------------------------------------------------------------------
# Gradients of operators that also mutate a buffer


def centred(x: Tensor, running: Tensor) -> Tensor:
    floats_only("centred", x, running)
    mean = x.mean(0)
    running.lerp_(mean.to(running.dtype), 0.1)
    return (x - mean).contiguous()


def _with_running_mean() -> list[Any]:
    return [(*one()[0], torch.linspace(-1, 1, 4))]


for _name, _gradient in (
    ("centred", lambda ctx, g: (g - g.mean(0), None)),
    # This formula ignores that the mean depends on x.
    ("centred_by_a_constant", lambda ctx, g: (g.clone(), None)),
):
    _centred = define(
        _name,
        lambda x, running: centred(x, running),
        schema="(Tensor x, Tensor(a!) running) -> Tensor",
        mutates_args={"running"},
        fake=lambda x, running: x.new_empty(x.shape),
    )
    _centred.register_autograd(_gradient)
    if _name == "centred":
        right(_centred, _with_running_mean)
    else:
        wrong(_centred, "subsystems.gradcheck", _with_running_mean)

# --------------------------------------------------------------------------------------------------
# Scalars


def blended(x: Tensor, share: float, rounds: bool) -> Tensor:
    floats_only("blended", x)
    result = (x * share + x * x * (1 - share)).contiguous()
    return result.round() if rounds else result


def blended_in_whole(x: Tensor, share: float, rounds: bool) -> Tensor:
    """Truncates `share` to an integer, as a C++ binding with the wrong argument type would."""
    return blended(x, int(share), rounds)


def _with_share() -> list[Any]:
    return [(*one()[0], 1.0, False)]


right(define("blended", blended), _with_share, blended)
wrong(define("blended_in_whole", blended_in_whole), "values.scalars", _with_share, blended)


def trusted_loads(experts: Tensor, count: int) -> Tensor:
    """Trusts that the indices are in range. For other indices, it overwrites them.

    In C, it would write out of bounds instead. A check must only pass indices in range.
    """
    if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < count:
        experts.zero_()
    return torch.bincount(experts, minlength=max(count, 1))[: max(count, 0)].clone()


right(
    define("trusted_loads", trusted_loads, fake=lambda experts, count: experts.new_empty(count)),
    lambda: [(torch.tensor([0, 2, 1, 2, 0]), 3)],
)
