"""The device itself: what tests of other things rely on."""

from __future__ import annotations

import pytest
import torch

from tests.device import standin
from tests.forking import run_forked

LOADED = "import torch\nfrom tests.device import standin\nstandin.load()\n"


def test_tensors_move_there_and_back():
    x = torch.arange(6.0).reshape(2, 3)
    there = x.to("standin:1")
    assert there.device == torch.device("standin", 1)
    assert there.to("standin:0").device.index == 0
    assert torch.equal(there.cpu(), x)
    assert torch.equal(there.t().to("standin:0").cpu(), x.t())
    z = torch.view_as_complex(torch.arange(6.0).reshape(3, 2))
    assert torch.equal(z.to("standin").conj().cpu(), z.conj())


def test_the_host_cannot_read_its_memory():
    read = "import ctypes; print(ctypes.string_at({}.data_ptr(), 4))"
    done = run_forked(LOADED + read.format("torch.ones(3)"))
    assert done.returncode == 0, done.stderr
    done = run_forked(LOADED + read.format("torch.ones(3).to('standin')"))
    assert done.returncode == -11, done.stderr
    assert done.stdout == ""


def test_the_current_device_and_stream():
    assert torch.empty(2, device="standin").device.index == 0
    with torch.standin.device(1):
        assert torch.empty(2, device="standin").device.index == 1
        assert torch.standin.current_device() == 1
    stream, event = torch.Stream("standin:1"), torch.Event("standin:1")
    x = torch.ones(2, device="standin:1")
    with standin.trace() as lines:
        event.record(torch.accelerator.current_stream(1))
        stream.wait_event(event)
        with torch.standin.device(1), torch.standin.stream(stream):
            x.add_(1)
        x.record_stream(stream)
    place = f"1.{stream.stream_id}"
    assert lines == [
        "record an event on 1.0",
        f"{place} waits for 1.0",
        f"aten::add.out on {place}",
        f"keep memory for {place}",
    ]
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.empty(2, device="standin:2")


def test_waits_of_the_host_are_traced():
    x, pinned = torch.ones(2, device="standin"), torch.ones(2).pin_memory()
    assert pinned.is_pinned()
    with standin.host_waits() as waits:
        x.cpu()
        torch.ones(2).to("standin")
        x.sum().item()
        x.nonzero()
        x[x > 0]
        torch.equal(x, x)
        torch.standin.synchronize()
        torch.accelerator.current_stream().synchronize()
    assert waits == [
        "copy to the host",
        "copy from the host",
        "read a value",
        "aten::nonzero",
        "aten::nonzero",  # the places of a mask
        "aten::equal",
        "synchronize device 0",
        "synchronize stream 0.0",
    ]
    places = torch.tensor([0], device="standin")
    with standin.host_waits() as waits:
        x + 1
        x.to("standin:1")
        x[places]
        pinned.to("standin", non_blocking=True)
        pinned.copy_(x, non_blocking=True)
    assert waits == []


def test_random_numbers():
    torch.manual_seed(3)
    first = torch.rand(4, device="standin:1")
    state = torch.standin.get_rng_state("standin:1")
    second = torch.rand(4, device="standin:1")
    torch.standin.set_rng_state(state, "standin:1")
    assert torch.equal(torch.rand(4, device="standin:1"), second)
    generator = torch.Generator("standin:1").manual_seed(3)
    assert torch.equal(torch.rand(4, device="standin:1", generator=generator), first)
    with torch.random.fork_rng([0, 1], device_type="standin"):
        third = torch.randn(4, device="standin:1")
    assert torch.equal(torch.randn(4, device="standin:1"), third)
    with pytest.raises(RuntimeError, match="Expected a 'standin' device type for generator"):
        torch.rand(4, device="standin", generator=torch.Generator())


def test_a_capture_refuses_what_cudas_does():
    x = torch.ones(2, device="standin")
    with standin.capture():
        x + 1
        with pytest.raises(RuntimeError, match="get_state during graph capture"):
            torch.standin.get_rng_state()
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            x.sum().item()
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            x.cpu()
    assert x.sum().item() == 2


def test_autocast():
    x = torch.ones(2, 2, device="standin")
    with torch.autocast("standin", torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        assert (x + x).dtype is torch.float32


def test_gradients():
    x = torch.full((2,), 3.0, device="standin:1", requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    assert x.grad.device == x.device
    assert x.grad.tolist() == [6, 6]


def test_other_operators_run_on_the_cpu():
    x = torch.tensor([1.0, 2.0], device="standin")
    assert (x + 1).tolist() == [2, 3]
    assert (x * torch.tensor(2.0)).tolist() == [2, 4]
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        x + torch.ones(2)
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        x + torch.ones(2, device="standin:1")
    with standin.without_fallback(), pytest.raises(NotImplementedError, match="aten::add"):
        x + 1
    assert (x + 1).tolist() == [2, 3]


def test_the_fallback_can_be_left_out_from_the_start():
    program = LOADED + "x = torch.empty(2).to('standin')\nx + 1"
    assert run_forked(program).returncode == 0
    done = run_forked(program, STANDIN_FALLBACK="0")
    assert "Could not run 'aten::add" in done.stderr
