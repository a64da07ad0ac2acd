"""Read and restore process state that a call could change, such as the default dtype.

The programs that `check` prints to reproduce failures import this module and `probes`.
"""

from __future__ import annotations

import contextlib
import ctypes
import decimal
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
    # Convert the keys to bytes, because bytes compare faster than lists, and this state is read
    # twice for each call.
    kind, keys, *rest = _numpy_random().get_state()
    return kind, keys.tobytes(), *rest


def _set_numpy_state(state: Any) -> None:
    kind, keys, *rest = state
    _numpy_random().set_state((kind, sys.modules["numpy"].frombuffer(keys, "uint32"), *rest))


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _is_flushing() -> bool:
    """Test whether this thread flushes denormals to zero, because PyTorch has no getter for it."""
    return sys.float_info.min * _HALF == 0.0


_HALF = 0.5  # a variable, because Python folds products of constants at compile time


@functools.cache
def _function_of_c(name: str) -> Any:
    with contextlib.suppress(OSError, AttributeError, TypeError):
        return getattr(ctypes.CDLL(None), name)
    return None


def _rounding_mode() -> int:
    """Return the rounding mode of this thread from C, since Python has no getter for it."""
    function = _function_of_c("fegetround")
    return 0 if function is None else function()


def device_module() -> Any:
    """Return PyTorch's module for the accelerator in use, such as `torch.cuda`, or None.

    Return None if there is no accelerator, or if the process has not initialized it. Reading the
    state of an unused accelerator would initialize it.
    """
    accelerator = devices.accelerator()
    if accelerator is None or not accelerator.is_in_use():
        return None
    return torch.get_device_module(accelerator.type)


def _each_device(function: Callable[[int], Any]) -> list[Any]:
    with contextlib.suppress(NotImplementedError):
        return [function(index) for index in range(torch.accelerator.device_count())]
    return []


def _set_streams(streams: list[torch.Stream]) -> None:
    index = torch.accelerator.current_device_index()
    for stream in streams:
        torch.accelerator.set_stream(stream)  # also changes the current device
    torch.accelerator.set_device_index(index)


def _attribute(module: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return a getter and a setter for a variable of a module."""
    return functools.partial(getattr, module, name), functools.partial(setattr, module, name)


def _affinity() -> Any:
    """Return the CPUs on which this thread may run, or None if the system does not report them."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _decimal_context() -> tuple[int, str]:
    """Return the settings of this thread's decimal context, but not the flags set by operations."""
    context = decimal.getcontext()
    return context.prec, context.rounding


def _set_decimal_context(settings: tuple[int, str]) -> None:
    context = decimal.getcontext()
    context.prec, context.rounding = settings


def _signal_handlers() -> list[tuple[int, Any]]:
    # signal.valid_signals() is slower, because it creates an enum member for each signal.
    return [(number, signal.getsignal(number)) for number in range(1, signal.NSIG)]


def _set_signal_handlers(handlers: list[tuple[int, Any]]) -> None:
    for number, handler in handlers:
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


def set_environment(variables: Mapping[str, str]) -> None:
    for added in os.environ.keys() - variables.keys():
        del os.environ[added]
    os.environ.update(variables)


# Maps each piece of process state to a getter and a setter. The setter is None for state that
# `fork_rng` or the check itself restores.
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
    "torch.get_autocast_dtype('cpu')": (
        functools.partial(torch.get_autocast_dtype, "cpu"),
        functools.partial(torch.set_autocast_dtype, "cpu"),
    ),
    "torch.is_autocast_cache_enabled()": (
        torch.is_autocast_cache_enabled,
        torch.set_autocast_cache_enabled,
    ),
    "torch.is_anomaly_enabled()": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch.is_warn_always_enabled()": (torch.is_warn_always_enabled, torch.set_warn_always),
    "torch.backends.cudnn.benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "torch.backends.cudnn.deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "torch.backends.mkldnn.enabled": (
        functools.partial(getattr, torch.backends.mkldnn, "enabled"),
        torch.backends.mkldnn.set_flags,
    ),
    "torch.backends.cuda.flash_sdp_enabled()": (
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.enable_flash_sdp,
    ),
    "torch.backends.cuda.math_sdp_enabled()": (
        torch.backends.cuda.math_sdp_enabled,
        torch.backends.cuda.enable_math_sdp,
    ),
    "torch.backends.mha.get_fastpath_enabled()": (
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
    ),
    "torch.backends.opt_einsum.enabled": _attribute(torch.backends.opt_einsum, "enabled"),
    "sys.getrecursionlimit()": (sys.getrecursionlimit, sys.setrecursionlimit),
    "gc.get_threshold()": (gc.get_threshold, lambda limits: gc.set_threshold(*limits)),
    "logging.root.level": (lambda: logging.root.level, logging.root.setLevel),
    "decimal.getcontext()": (_decimal_context, _set_decimal_context),
    "os.sched_getaffinity(0)": (_affinity, lambda cpus: os.sched_setaffinity(0, cpus)),
    "gc.isenabled()": (gc.isenabled, lambda was_on: gc.enable() if was_on else gc.disable()),
    "locale.setlocale(LC_ALL)": (
        functools.partial(locale.setlocale, locale.LC_ALL),
        functools.partial(locale.setlocale, locale.LC_ALL),
    ),
    # Warning filters are not restored here, because a module that is imported during a call may add
    # filters for the rest of the process. Checks that add filters remove these filters themselves.
    "warnings.filters": (lambda: [*warnings.filters], None),
    "sys.path": (lambda: [*sys.path], None),  # not restored for the same reason
    "signal.getsignal()": (_signal_handlers, _set_signal_handlers),
    "os.getcwd()": (os.getcwd, os.chdir),
    "os.environ": (lambda: dict(os.environ), set_environment),
    "random.getstate()": (random.getstate, random.setstate),
    "torch.get_rng_state()": (lambda: torch.get_rng_state().view(torch.int64).tolist(), None),
    "numpy.random.get_state()": (_numpy_state, _set_numpy_state),
    "numpy.geterr()": (
        lambda: sys.modules["numpy"].geterr(),
        lambda state: sys.modules["numpy"].seterr(**state),
    ),
}


# Getters and setters for accelerator state, which apply only if the process uses an accelerator.
# Streams come before the device index, because setting a stream also changes the current device.
_DEVICE_STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]] = {
    "torch.accelerator.current_stream()": (
        lambda: _each_device(torch.accelerator.current_stream),
        _set_streams,
    ),
    "torch.accelerator.current_device_index()": (
        torch.accelerator.current_device_index,
        torch.accelerator.set_device_index,
    ),
    "torch.get_rng_state() of the accelerator": (
        lambda: [s.tolist() for s in _each_device(device_module().get_rng_state)],
        None,
    ),
}
_ALL_STATES = {**_STATES, **_DEVICE_STATES}


def process_state(*, random_numbers: bool = True) -> dict[str, Any]:
    """Return the process state that a call could change, as a dict from names to values.

    With `random_numbers=False`, leave out the states of random number generators, which are slow to
    read.
    """
    states = _STATES if device_module() is None else _ALL_STATES
    return {
        name: read()
        for name, (read, _) in states.items()
        if ("numpy" in sys.modules or not name.startswith("numpy."))
        and (random_numbers or not is_of_generator(name))
    }


def is_of_generator(name: str) -> bool:
    """Return whether a key of `process_state` refers to a random number generator."""
    return "state()" in name


def generator_states() -> dict[str, Any]:
    return {name: state for name, state in process_state().items() if is_of_generator(name)}


def seed_torch(seed: int) -> None:
    """Seed PyTorch's generators like `torch.manual_seed`, but faster if there is no accelerator.

    For each device type that is not initialized yet, `torch.manual_seed` queues the seed together
    with a formatted stack trace. Formatting these traces would dominate the run time of a check.
    """
    if devices.accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def seed_all(seed: int) -> None:
    seed_torch(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        _numpy_random().seed(seed)


@contextlib.contextmanager
def restored() -> Iterator[None]:
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
                # Best effort: PyTorch rejects some values, for example a default device that was
                # set inside a `with torch.device(...)` block.
                with contextlib.suppress(Exception):
                    put_back(value)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_parent=_count_fork)


def forks() -> int:
    return _forks[0]


def open_files() -> int:
    """Return the number of open files, or 0 if the operating system does not report it."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/dev/fd"))
    return 0


def threads() -> int:
    """Return the number of threads of this process (only Python threads if /proc is missing)."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return threading.active_count()


def device_bytes() -> int:
    """Return the number of bytes allocated on all devices of the accelerator, or 0 if unknown."""
    module = device_module()
    return sum(_each_device(module.memory_allocated)) if hasattr(module, "memory_allocated") else 0


def allocated_bytes() -> int:
    """Return the number of bytes allocated by `malloc`, or 0 if the C library lacks `mallinfo2`."""

    class Mallinfo(ctypes.Structure):
        _fields_ = [("numbers", ctypes.c_size_t * 10)]

    mallinfo2 = _function_of_c("mallinfo2")
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = Mallinfo
    numbers = mallinfo2().numbers
    return int(numbers[7] + numbers[4])  # uordblks (heap) and hblkhd (mmap)
