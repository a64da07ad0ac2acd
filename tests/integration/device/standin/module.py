from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType

import torch

Device = torch.device | str | int | None


def make_module(native: ModuleType) -> ModuleType:
    module = ModuleType("torch.standin")
    for function in (*_functions(native), *_random_numbers(native)):
        setattr(module, function.__name__, function)
    module.Stream, module.Event = torch.Stream, torch.Event
    module.current_stream = torch.accelerator.current_stream
    module.set_stream = torch.accelerator.set_stream
    module.current_device = torch.accelerator.current_device_index
    module.synchronize = torch.accelerator.synchronize
    for name in (
        "memory_stats",
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "reset_peak_memory_stats",
    ):
        setattr(module, name, getattr(torch.accelerator, name))
    return module


def _index(given: Device) -> int:
    index = given if isinstance(given, int) or given is None else torch.device(given).index
    return torch.accelerator.current_device_index() if index is None else index


def _functions(native: ModuleType) -> list[Callable[..., object]]:
    def is_available() -> bool:
        return True

    def is_initialized() -> bool:
        return True

    def _lazy_init() -> None:
        pass

    def _is_in_bad_fork() -> bool:
        return False

    def device_count() -> int:
        return native.device_count()

    def is_current_stream_capturing() -> bool:
        return native.is_capturing()

    def set_device(device: Device) -> None:
        torch.accelerator.set_device_index(_index(device))

    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @contextlib.contextmanager
    def device(device: Device) -> Iterator[None]:
        before = torch.accelerator.current_device_index()
        set_device(device)
        try:
            yield
        finally:
            set_device(before)

    @contextlib.contextmanager
    def stream(stream: torch.Stream) -> Iterator[None]:
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    return [
        is_available,
        is_initialized,
        _lazy_init,
        _is_in_bad_fork,
        device_count,
        is_current_stream_capturing,
        set_device,
        get_amp_supported_dtype,
        device,
        stream,
    ]


def _random_numbers(native: ModuleType) -> list[Callable[..., object]]:
    def generator(device: Device) -> torch.Generator:
        return native.default_generator(_index(device))

    def get_rng_state(device: Device = "standin") -> torch.Tensor:
        return generator(device).get_state()

    def set_rng_state(state: torch.Tensor, device: Device = "standin") -> None:
        generator(device).set_state(state)

    def manual_seed(seed: int) -> None:
        generator(None).manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for index in range(native.device_count()):
            generator(index).manual_seed(seed)

    return [get_rng_state, set_rng_state, manual_seed, manual_seed_all]
