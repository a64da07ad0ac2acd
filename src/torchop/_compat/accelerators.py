"""The accelerator of this process: the one type of device beside the CPU."""

from __future__ import annotations

from typing import Any

import torch

_current: Any = torch._C._accelerator_getAccelerator


def device_count() -> int:
    """The number of its devices; 0 without one, and until the program has used it."""
    accelerator = _current()
    if accelerator is None:
        return 0
    module: Any = torch.get_device_module(accelerator.type)
    is_started = getattr(module, "is_initialized", lambda: True)()
    return int(module.device_count()) if is_started else 0


def devices(count: int) -> list[torch.device]:
    """The first `count` of its devices."""
    return [torch.device(_current().type, index) for index in range(count)]
