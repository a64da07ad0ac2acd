"""The state of a process that calls have to leave alone, and putting it back after a call."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


def process_state() -> dict[str, Any]:
    """What calls could change for all that runs after them, by name."""
    numpy = sys.modules.get("numpy")
    state: dict[str, Any] = {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
        "torch.is_autocast_enabled('cpu')": torch.is_autocast_enabled("cpu"),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.get_deterministic_debug_mode()": torch.get_deterministic_debug_mode(),
        "os.getcwd()": os.getcwd(),
        "os.environ": dict(os.environ),
        "random.getstate()": random.getstate(),
        "torch.get_rng_state()": torch.get_rng_state().tolist(),
    }
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy.random.get_state()"] = kind, keys.tolist(), *rest
    return state


def seed_all(seed: int) -> None:
    """Seeds the generators that `process_state` looks at."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """A block after which the process is as it was, whatever the operator did in it."""
    before = process_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        after = process_state()
        for name in before:
            if after[name] != before[name]:
                # PyTorch refuses some: a default device that was set within itself.
                with contextlib.suppress(Exception):
                    _put_back(name, before[name])


def _put_back(name: str, value: Any) -> None:
    match name:
        case "torch.get_default_dtype()":
            torch.set_default_dtype(value)
        case "torch.get_default_device()":
            torch.set_default_device(None if value.type == "cpu" else value)
        case "torch.is_grad_enabled()":
            torch.set_grad_enabled(value)
        case "torch.is_autocast_enabled('cpu')":
            torch.set_autocast_enabled("cpu", value)
        case "torch.get_num_threads()":
            torch.set_num_threads(value)
        case "torch.get_deterministic_debug_mode()":
            torch.set_deterministic_debug_mode(value)
        case "os.getcwd()":
            os.chdir(value)
        case "random.getstate()":
            random.setstate(value)
        case "numpy.random.get_state()":
            sys.modules["numpy"].random.set_state(value)
        case "os.environ":
            for added in os.environ.keys() - value.keys():
                del os.environ[added]
            os.environ.update(value)
