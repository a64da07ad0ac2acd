"""The simulated device behaves as the other tests assume."""

from __future__ import annotations

import signal

import pytest
import torch

from tests._support.common import assert_clean
from tests._support.forking import run_forked
from tests.integration.device import standin

LOADED = "import torch\nfrom tests.integration.device import standin\nstandin.load()\n"


def test_tensors_move_there_and_back():
    x = torch.arange(6.0).reshape(2, 3)
    there = x.to("standin:1")
    assert there.device == torch.device("standin", 1)
    assert there.to("standin:0").device.index == 0
    assert torch.equal(there.cpu(), x)
    assert torch.equal(there.t().to("standin:0").cpu(), x.t())
    z = torch.view_as_complex(torch.arange(6.0).reshape(3, 2))
    assert torch.equal(z.to("standin").conj().cpu(), z.conj())


def test_a_tensor_that_grows_stays_on_its_device():
    x = torch.ones(2, device="standin:1")
    x.resize_(5000).fill_(3)
    assert x.untyped_storage().device == x.device
    assert x.untyped_storage().data_ptr() == x.data_ptr()
    assert (x + 1).unique().tolist() == [4]
    y = torch.empty(0, device="standin:1").set_(x.untyped_storage())
    assert y.device == x.device


def test_host_cannot_read_device_memory():
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
        "aten::nonzero",  # indexing with a mask calls `nonzero`
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


def test_allocator_counts_memory():
    before = [torch.accelerator.memory_allocated(device) for device in (0, 1)]
    x = torch.empty(5000, device="standin:1")
    assert torch.standin.memory_allocated(1) == before[1] + 20480  # five pages of 4096 bytes
    assert torch.accelerator.memory_allocated(0) == before[0]
    torch.accelerator.reset_peak_memory_stats(1)
    torch.empty(5000, device="standin:1")
    del x
    assert torch.accelerator.max_memory_allocated(1) == before[1] + 40960
    assert torch.accelerator.memory_allocated(1) == before[1]


def test_a_graph_replays_its_work_in_the_same_memory():
    x, pinned = torch.ones(3, device="standin:1"), torch.ones(3).pin_memory()
    with torch.standin.device(1), standin.capture() as graph:
        y = torch.cat([x, x.t() * 2])
        z = y.add_(1).reshape(2, 3).sum(0)
        pinned.copy_(z, non_blocking=True)
        # The kernel of `arange` resizes its output, which must also work in a replay.
        numbers = torch.arange(4, device="standin:1") * x[0]
    assert (y.tolist(), z.tolist(), pinned.tolist()) == ([2, 2, 2, 3, 3, 3], [5] * 3, [5] * 3)
    x.fill_(2)
    assert z.tolist() == [5] * 3
    for _ in range(2):
        graph.replay()
    assert (y.tolist(), z.tolist(), pinned.tolist()) == ([3, 3, 3, 5, 5, 5], [8] * 3, [8] * 3)
    assert numbers.tolist() == [0, 2, 4, 6]
    torch.manual_seed(0)
    with standin.capture() as graph:
        drawn = torch.rand(8, device="standin")
    before = drawn.tolist()
    graph.replay()
    assert drawn.tolist() != before


def test_capture_rejects_the_same_operations_as_cuda():
    x, host = torch.ones(2, device="standin"), torch.ones(2)
    event = torch.Event("standin")
    event.record(torch.accelerator.current_stream())
    torch.manual_seed(1)
    state = torch.standin.get_rng_state()
    with standin.capture():
        assert torch.standin.is_current_stream_capturing()
        x + 1
        with pytest.raises(RuntimeError, match="get_state during graph capture"):
            torch.standin.get_rng_state()
        with pytest.raises(RuntimeError, match="set_state during graph capture"):
            torch.standin.set_rng_state(state)
        torch.manual_seed(1)
        with pytest.raises(RuntimeError, match="only if new seed is the same"):
            torch.manual_seed(2)
        with pytest.raises(RuntimeError, match="dependency created on uncaptured work"):
            torch.accelerator.current_stream().wait_event(event)
        with pytest.raises(RuntimeError, match="is being captured already"), standin.capture():
            pass
    for forbidden in (
        lambda: x.sum().item(),
        lambda: x.cpu(),
        lambda: x.copy_(host, non_blocking=True),
        lambda: torch.accelerator.synchronize(),
        lambda: torch.accelerator.current_stream().query(),
        lambda: event.query(),
    ):
        with (  # after the error, ending the capture raises, too
            pytest.raises(RuntimeError, match="due to a previous error during capture"),
            standin.capture(),
            pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        ):
            forbidden()
    assert x.sum().item() == 2
    assert not torch.standin.is_current_stream_capturing()


def test_freeing_earlier_memory_does_not_raise_the_limit():
    earlier = torch.ones(5000, device="standin")
    with standin.memory_limit(8192):
        del earlier
        kept = torch.empty(1000, device="standin")  # one page
        for _ in range(3):
            torch.empty(1000, device="standin")  # a second page, which is freed at once
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1025, device="standin")
        del kept
        torch.empty(1025, device="standin")
    torch.empty(5000, device="standin")


def test_graph_keeps_only_its_pools_memory():
    x = torch.ones(2, device="standin")
    reserved = torch.accelerator.memory_reserved(0)
    with standin.capture() as graph:
        y = (x + 1) * 2
    # The pool has two pages of 4096 bytes: one for `y`, and one for `x + 1`, which was freed during
    # the capture but remains in the pool.
    assert torch.accelerator.memory_reserved(0) == reserved + 8192
    with standin.capture(pool=graph.pool()) as second:
        z = y + x
    assert second.pool() == graph.pool()
    x.fill_(3)
    graph.replay()
    second.replay()
    assert z.tolist() == [11, 11]
    del y, z, graph, second
    assert torch.accelerator.memory_reserved(0) == reserved
    with standin.capture() as graph:
        x + 1
    del x
    with pytest.raises(RuntimeError, match="memory that was given back after it was captured"):
        graph.replay()


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
    both = torch.zeros(2, 2, device="standin")
    both[:, 1].fill_(3)
    assert both.tolist() == [[0, 3], [0, 3]]


def test_the_fallback_can_be_left_out_from_the_start():
    program = LOADED + "x = torch.empty(2).to('standin')\nx + 1"
    assert run_forked(program).returncode == 0
    done = run_forked(program, STANDIN_FALLBACK="0")
    assert "Could not run 'aten::add" in done.stderr


GREENLETS = """
import greenlet
main, is_prepared = greenlet.getcurrent(), False

def kernel(x):
    if is_prepared:
        main.switch()
    return x + 1

library = DEFINED_BY.Library("greenlets", "FRAGMENT")
library.define("op(Tensor x) -> Tensor")
library.impl("op", kernel, "KEY")
op, x, results = torch.ops.greenlets.op, torch.ones(2, device="DEVICE"), []
op(x)
is_prepared = True
waiting = [greenlet.greenlet(lambda: results.append(op(x).tolist())) for _ in range(2)]
for one in waiting * 2:
    one.switch()
print(results)
"""


@pytest.mark.parametrize(
    ("defined_by", "key", "device", "survives"),
    [
        ("torchop", "PrivateUse1", "standin", True),
        ("torch.library", "CPU", "cpu", False),
        ("torch.library", "CPU", "standin", False),
    ],
)
def test_greenlets_in_the_fallback_behave_as_in_any_dispatched_call(
    defined_by, key, device, survives
):
    """Greenlets may leave their calls in a different order than they entered the calls.

    In dispatched calls, pybind11 then aborts the process. Native calls do not use pybind11, so they
    work.
    """
    pytest.importorskip("greenlet")
    program = LOADED + "import torchop\n" + GREENLETS
    for word, value in (("DEFINED_BY", defined_by), ("KEY", key), ("DEVICE", device)):
        program = program.replace(word, value)
    done = run_forked(program)
    if survives:
        assert assert_clean(done) == "[[2.0, 2.0], [2.0, 2.0]]\n"
    else:
        assert done.returncode == -signal.SIGABRT
        assert "loader_life_support" in done.stderr
