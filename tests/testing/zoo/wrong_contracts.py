"""Faulty operators that write to undeclared arguments, store arguments, leak, or keep state."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.testing.zoo.specimen import define, like, one, two, wrong


def writes_undeclared(x: Tensor) -> Tensor:
    return x.div_(x.abs().sum() + 1).clone().contiguous()


wrong(define("writes_undeclared", writes_undeclared, fake=like), "contracts.schema", one)


def writes_if_contiguous(x: Tensor) -> Tensor:
    """Writes to the argument if it is contiguous, because `contiguous` then does not copy."""
    values = x.contiguous().numpy()
    values *= 2
    return torch.from_numpy(values.copy())


wrong(define("writes_if_contiguous", writes_if_contiguous, fake=like), "contracts.schema", one)


def shares_by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy())


wrong(
    define("shares_by_numpy", shares_by_numpy, fake=lambda x: torch.empty_like(x)),
    "contracts.schema",
    one,
)

_buffers: dict[Any, Tensor] = {}


def returns_kept_buffer(x: Tensor) -> Tensor:
    buffer = _buffers.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype))
    return buffer.copy_(x)[:]


wrong(define("returns_kept_buffer", returns_kept_buffer, fake=like), "contracts.schema", one)


# --------------------------------------------------------------------------------------------------
# Writes that change more than the values of an argument


def swaps_storage(state: Tensor, new: Tensor) -> None:
    state.set_(new + 1)


def assigns_data(states: list[Tensor], new: Tensor) -> None:
    for state in states:
        state.data = new + 1


def resizes_storage(state: Tensor, new: Tensor) -> None:
    state.resize_(2 * new.numel()).fill_(3)


def _nothing(*args: Any) -> None:
    return None


wrong(
    define("swaps_storage", swaps_storage, mutates_args=("state",), fake=_nothing),
    "memory.contiguous",
    two,
)
wrong(
    define("assigns_data", assigns_data, mutates_args=("states",), fake=_nothing),
    "memory.transposed",
    lambda: [([t], t + 1) for (t,) in one()],
)
wrong(
    define("resizes_storage", resizes_storage, mutates_args=("state",), fake=_nothing),
    "contracts.schema",
    two,
)


@torch.library.custom_op("zoo::stock_swaps_storage", mutates_args=("state",))
def stock_swaps_storage(state: Tensor, new: Tensor) -> None:
    state.set_(new + 1)


stock_swaps_storage.register_fake(_nothing)
wrong("zoo::stock_swaps_storage", "memory.contiguous", two)

# --------------------------------------------------------------------------------------------------
# Changed metadata of arguments, stored arguments, and state


def reshapes_in_place(x: Tensor) -> Tensor:
    result = (x + x).contiguous()
    x.unsqueeze_(0)
    return result.contiguous()


wrong(define("reshapes_in_place", reshapes_in_place, fake=like), "contracts.schema", one)

_calls = [0]


def counts_calls(x: Tensor) -> Tensor:
    _calls[0] += 1
    return x * _calls[0]


wrong(define("counts_calls", counts_calls, fake=like), "contracts.repeated", one)

_own = random.Random(0)


def draws_unseeded(x: Tensor) -> Tensor:
    return x + _own.random()


wrong(define("draws_unseeded", draws_unseeded, fake=like), "contracts.repeated", one)

_first: dict[Any, Tensor] = {}


def caches_by_shape(x: Tensor) -> Tensor:
    """Caches a sum by shape. The sum depends on the values, so later results are incorrect."""
    scale = _first.get("scale")
    if scale is None or _first["shape"].tolist() != list(x.shape):
        _first["shape"] = torch.tensor(x.shape)
        scale = _first["scale"] = x.abs().sum()
    return (x / (scale + 1)).contiguous()


wrong(define("caches_by_shape", caches_by_shape, fake=like), "contracts.state", one)

_running: list[float] = [0.0]


def keeps_running_mean(x: Tensor) -> Tensor:
    """Subtracts the largest mean of all calls so far, so the result depends on earlier calls."""
    mean = float(x.mean()) if x.numel() else 0.0
    _running[0] = max(_running[0], mean)
    return x - _running[0]


wrong(define("keeps_running_mean", keeps_running_mean, fake=like), "contracts.state", one)

_last: dict[str, Tensor] = {}


def keeps_input(x: Tensor) -> Tensor:
    _last["input"] = x.detach()
    return (x + x).contiguous()


wrong(define("keeps_input", keeps_input, fake=None), "contracts.kept", one)

_log: list[Any] = []


def logs_calls(x: Tensor) -> Tensor:
    _log.append({"shape": tuple(x.shape)})
    return (x + x).contiguous()


wrong(define("logs_calls", logs_calls, fake=like), "contracts.leaks", one)

_tape: list[Tensor] = []


def keeps_copies(x: Tensor) -> Tensor:
    _tape.append(x.clone())
    return (x + x).contiguous()


wrong(define("keeps_copies", keeps_copies, fake=like), "contracts.leaks", one)

_lock = threading.RLock()


def never_releases(x: Tensor) -> Tensor:
    """Never releases a lock. The lock is reentrant, so only a call in another thread deadlocks."""
    _lock.acquire()
    return (x + x).contiguous()


wrong(define("never_releases", never_releases, fake=like), "subsystems.threads", one)

_scratch: dict[str, Tensor] = {}


def shares_scratch(x: Tensor, y: Tensor) -> Tensor:
    mine = threading.get_ident()
    _scratch["sum"] = (x + y).clone()
    _scratch["owner"] = torch.tensor(mine)
    time.sleep(0.002)
    other = int(_scratch["owner"]) != mine
    return (_scratch["sum"] + float(other)).contiguous()


wrong(define("shares_scratch", shares_scratch, fake=like), "subsystems.threads", two)

# --------------------------------------------------------------------------------------------------
# State of the process


def sets_default_dtype(x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return (x + x).contiguous()


wrong(define("sets_default_dtype", sets_default_dtype, fake=like), "contracts.process", one)


def turns_gradients_off(x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    return (x + x).contiguous()


wrong(define("turns_gradients_off", turns_gradients_off, fake=like), "contracts.process", one)


def draws_without_tag(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape).to(x.dtype)


wrong(define("draws_without_tag", draws_without_tag, fake=like), "contracts.process", one)


def seeds_numpy(x: Tensor) -> Tensor:
    np.random.seed(0)
    return x + float(np.random.rand())


wrong(define("seeds_numpy", seeds_numpy, fake=like), "contracts.process", one)


def forks(x: Tensor) -> Tensor:
    os.fork()
    return (x + x).contiguous()


wrong(define("forks", forks, fake=like), "contracts.process", one)
