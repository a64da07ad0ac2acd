"""Properties of device types that torchop looks up in PyTorch. Uses private names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests.integration.device import standin
from torchop._compat import devices
from torchop.testing import process_state
from torchop.testing._check.report import environment
from torchop.testing._snapshot import overlap


def test_the_table_has_a_line_for_any_type():
    accelerator = devices.accelerator()
    assert accelerator is devices.traits("standin")
    assert accelerator.type == "standin"
    assert accelerator.device_count() == devices.accelerator_count() == 2
    assert devices.accelerators(2) == [torch.device("standin", index) for index in (0, 1)]
    x = torch.ones(1, device="standin")
    assert not devices.are_captured([x])
    with standin.capture():
        assert devices.are_captured([torch.ones(1), x])
        assert not devices.are_captured([torch.ones(1), torch.ones(1, device="meta")])
    state = torch.standin.get_rng_state(1)
    assert accelerator.size_of_state(torch.device("standin", 1)) == state.numel()
    cpu = devices.traits("cpu")
    assert (cpu.type, cpu.is_capturing()) == ("cpu", False)


@pytest.mark.needs_torch("2.12", "torch.Stream.is_capturing")
def test_a_device_module_without_captures(monkeypatch):
    monkeypatch.delattr(torch.standin, "is_current_stream_capturing")
    is_capturing = devices.traits.__wrapped__("standin").is_capturing
    assert not is_capturing()
    with standin.capture():
        assert is_capturing()


def test_unused_device_type_is_not_queried(monkeypatch):
    monkeypatch.setattr(torch.standin, "is_initialized", lambda: False)
    unused = devices.traits.__wrapped__("standin")
    assert (unused.is_in_use(), unused.device_count()) == (False, 0)
    assert process_state.device_module() is torch.standin
    monkeypatch.setattr(devices, "accelerator", lambda: unused)
    assert process_state.device_module() is None


def test_a_program_can_be_traced_for_cuda_without_such_a_device():
    assert devices.traits("cuda").size_of_state(torch.device("cuda", 0)) == 16


def test_same_address_on_two_devices_is_different_memory():
    def storage(index: int) -> Any:
        device = torch.device("standin", index)
        return SimpleNamespace(device=device, nbytes=lambda: 8, data_ptr=lambda: 64)

    assert overlap(storage(0), storage(0))
    assert not overlap(storage(0), storage(1))


def test_reports_name_the_devices():
    assert "standin:0, standin:1" in environment()["devices"]


def test_checking_reads_nothing_while_a_graph_is_captured(namespace):
    def write(x: Tensor) -> Tensor:
        return x.add_(1).clone()

    op = torchop.custom_op(f"{namespace}::op", write, mutates_args=())
    x = torch.ones(2, device="standin:1")
    with torch.standin.device(1), torchop.testing.checking():
        with standin.capture():
            op(x)
        with pytest.raises(torchop.UndeclaredMutationError):
            op(x)
