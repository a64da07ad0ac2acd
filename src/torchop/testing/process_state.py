"""What a call could change in the process: how it is read, seeded, and put back.

The programs that `check` prints import it, as they do `probes`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchop._compat import devices


def _numpy_random() -> Any:
    return sys.modules["numpy"].random


def _numpy_state() -> Any:
    kind, keys, *rest = _numpy_random().get_state()
    return kind, keys.tolist(), *rest


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _is_flushing() -> bool:
    """Whether denormal numbers are zero in this thread, for which PyTorch has no function."""
    return sys.float_info.min * _HALF == 0.0


_HALF = 0.5  # a name, as Python would multiply two constants when it compiles


@functools.cache
def _function_of_c(name: str) -> Any:
    """A function of the C library; None where there is none."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        return getattr(ctypes.CDLL(None), name)
    return None


def _rounding_mode() -> int:
    """How this thread rounds floating-point numbers, for which Python has no function."""
    function = _function_of_c("fegetround")
    return 0 if function is None else function()


def device_module() -> Any:
    """PyTorch's module for the accelerator, such as `torch.cuda`; None if there is none in use.

    An accelerator that nobody has used is not asked, because that would start it.
    """
    accelerator = devices.accelerator()
    if accelerator is None or not accelerator.is_in_use():
        return None
    return torch.get_device_module(accelerator.type)


def _each_device(function: Callable[[int], Any]) -> list[Any]:
    """What a function says of each device of the accelerator; nothing if that cannot be asked."""
    with contextlib.suppress(NotImplementedError):
        return [function(index) for index in range(torch.accelerator.device_count())]
    return []


def _set_streams(streams: list[torch.Stream]) -> None:
    index = torch.accelerator.current_device_index()
    for stream in streams:
        torch.accelerator.set_stream(stream)  # which makes its device the current one
    torch.accelerator.set_device_index(index)


def _signal_handlers() -> list[tuple[int, Any]]:
    # Python names the signals that are valid by making an enumeration of them, each time.
    return [(number, signal.getsignal(number)) for number in range(1, signal.NSIG)]


def _set_signal_handlers(handlers: list[tuple[int, Any]]) -> None:
    for number, handler in handlers:
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


def set_environment(variables: Mapping[str, str]) -> None:
    """Makes these the environment variables, and removes all others."""
    for added in os.environ.keys() - variables.keys():
        del os.environ[added]
    os.environ.update(variables)


# How each state is read, and how it is put back where that is not left to `fork_rng`.
_STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]] = {
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.get_default_device()": (torch.get_default_device, _set_default_device),
    "torch.is_grad_enabled()": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.is_inference_mode_enabled()": (torch.is_inference_mode_enabled, None),
    "torch.is_autocast_enabled('cpu')": (
        functools.partial(torch.is_autocast_enabled, "cpu"),
        functools.partial(torch.set_autocast_enabled, "cpu"),
    ),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "torch.get_deterministic_debug_mode()": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "torch.get_float32_matmul_precision()": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "torch.set_flush_denormal()": (_is_flushing, torch.set_flush_denormal),
    "fegetround()": (_rounding_mode, lambda mode: _function_of_c("fesetround")(mode)),
    "gc.isenabled()": (gc.isenabled, lambda was_on: gc.enable() if was_on else gc.disable()),
    "locale.setlocale(LC_ALL)": (
        functools.partial(locale.setlocale, locale.LC_ALL),
        functools.partial(locale.setlocale, locale.LC_ALL),
    ),
    # What is imported meanwhile adds some for good; checks put theirs back.
    "warnings.filters": (lambda: [*warnings.filters], None),
    "signal.getsignal()": (_signal_handlers, _set_signal_handlers),
    "os.getcwd()": (os.getcwd, os.chdir),
    "os.environ": (lambda: dict(os.environ), set_environment),
    "random.getstate()": (random.getstate, random.setstate),
    "torch.get_rng_state()": (lambda: torch.get_rng_state().view(torch.int64).tolist(), None),
    "numpy.random.get_state()": (_numpy_state, lambda state: _numpy_random().set_state(state)),
    "numpy.geterr()": (
        lambda: sys.modules["numpy"].geterr(),
        lambda state: sys.modules["numpy"].seterr(**state),
    ),
}


# The same of an accelerator that is in use, of whatever type it is. The stream comes first, since
# to put one back changes the current device.
_DEVICE_STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]] = {
    "torch.accelerator.current_stream()": (
        lambda: _each_device(torch.accelerator.current_stream),
        _set_streams,
    ),
    "torch.accelerator.current_device_index()": (
        torch.accelerator.current_device_index,
        torch.accelerator.set_device_index,
    ),
    "get_rng_state() of the accelerator": (
        lambda: [s.tolist() for s in _each_device(device_module().get_rng_state)],
        None,
    ),
}
_ALL_STATES = {**_STATES, **_DEVICE_STATES}


def process_state(*, random_numbers: bool = True) -> dict[str, Any]:
    """The state of the process that a call could change for what runs after it, by name.

    Args:
        random_numbers: whether to read the states of generators too, which takes most of the time.
    """
    states = _STATES if device_module() is None else _ALL_STATES
    return {
        name: read()
        for name, (read, _) in states.items()
        if ("numpy" in sys.modules or not name.startswith("numpy."))
        and (random_numbers or "state()" not in name)
    }


def is_of_generator(name: str) -> bool:
    """Whether a state of `process_state` is that of a generator of random numbers."""
    return "state()" in name


def generator_states() -> dict[str, Any]:
    """The states of the generators of random numbers that others use too."""
    return {name: state for name, state in process_state().items() if is_of_generator(name)}


def seed_torch(seed: int) -> None:
    """Seeds PyTorch's generators as `torch.manual_seed` does, which would take most of a check.

    For each kind of device that the process has not used, it keeps the seed for the day that it
    does, together with the text of the stack. Where there is no such device, that day never comes.
    """
    if devices.accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seeds the generators that `process_state` looks at."""
    seed_torch(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        _numpy_random().seed(seed)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """A block after which the process is as it was, whatever the operator did in it."""
    before = process_state()
    accelerated: dict[str, Any] = {"devices": ()}
    accelerator = devices.accelerator()
    if accelerator is not None and (count := accelerator.device_count()):
        accelerated = {"devices": range(count), "device_type": accelerator.type}
    try:
        with torch.random.fork_rng(**accelerated):
            yield
    finally:
        after = process_state()
        for name, value in before.items():
            if after[name] != value and (put_back := _ALL_STATES[name][1]) is not None:
                # PyTorch refuses some: a default device that was set within itself.
                with contextlib.suppress(Exception):
                    put_back(value)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A block that shows no warnings, and in which PyTorch does not log what it raises."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


_forks = [0]


def _count_fork() -> None:
    _forks[0] += 1


if hasattr(os, "register_at_fork"):  # which Windows has not
    os.register_at_fork(after_in_parent=_count_fork)


def forks() -> int:
    """How often this process has forked."""
    return _forks[0]


def open_files() -> int:
    """How many files this process has open; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/dev/fd"))
    return 0


def threads() -> int:
    """How many threads this process has; where the system does not say, only those of Python."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return threading.active_count()


def device_bytes() -> int:
    """The bytes that tensors have on all devices of the accelerator; 0 where it does not say."""
    module = device_module()
    return sum(_each_device(module.memory_allocated)) if hasattr(module, "memory_allocated") else 0


def allocated_bytes() -> int:
    """The bytes that this process has from `malloc`; 0 where the C library does not say."""

    class Mallinfo(ctypes.Structure):
        _fields_ = [("numbers", ctypes.c_size_t * 10)]

    mallinfo2 = _function_of_c("mallinfo2")
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = Mallinfo
    numbers = mallinfo2().numbers
    return int(numbers[7] + numbers[4])  # uordblks, in blocks, and hblkhd, mapped beside them
