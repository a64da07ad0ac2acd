"""Programs with memory limits, graphs, streams and modes, as scenarios for `arms.py`.

Each scenario runs with native calls, through the dispatcher, and with torch.library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests._support.common import needs_native
from tests.integration.device import arms, standin, target
from tests.integration.device.arms import error_of
from tests.integration.device.target import FIRST, SECOND, TYPE
from tests.integration.device.test_calls import Define, ones, scale, side_stream

pytestmark = [
    needs_native,
    target.needs_accelerator,
    # PyTorch 2.11 warns if a formula moves a gradient to another device.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]


@functools.cache
def first_side_stream() -> torch.Stream:
    """Return the same stream in all three runs, because new streams have different numbers."""
    return torch.Stream(FIRST)


# --------------------------------------------------------------------------------------------------
# Memory and graph capture, on the simulated device only


def out_of_memory_in_the_kernel(define: Define) -> Any:
    op = scale(define)
    x, large = ones(), torch.ones(5000, device=SECOND)
    op(x)
    with standin.memory_limit(8192):
        error = error_of(lambda: op(large))
        inside = op(x)
    assert isinstance(error, torch.OutOfMemoryError)
    return [error, inside, op(large)[:2]]


def out_of_memory_in_backward(define: Define) -> Any:
    op = scale(define)
    x = torch.ones(5000, device=SECOND, requires_grad=True)
    op(x)
    y = op(x)
    grad = torch.ones_like(y)
    with standin.memory_limit(8192):
        error = error_of(lambda: torch.autograd.grad(y, x, grad, retain_graph=True))
    assert isinstance(error, torch.OutOfMemoryError)
    return [error, torch.autograd.grad(y, x, grad)[0][:2], op(x)[:2]]


def a_captured_call(define: Define) -> Any:
    op = scale(define)
    x = ones(FIRST)
    op(x)
    with torch.standin.stream(first_side_stream()):
        with standin.capture() as graph:
            y = op(op(x), 3.0)
        refused = error_of(standin.capture()(lambda: op(x).sum().item()))
    results = [y.clone(), refused]
    x.fill_(5)
    for _ in range(2):
        graph.replay()
    return [*results, y]


def a_captured_training_step(define: Define) -> Any:
    op = scale(define)
    with torch.standin.stream(first_side_stream()):
        x = ones(FIRST, requires_grad=True)
        for _ in range(2):
            torch.autograd.grad(op(x * x), x, torch.ones_like(x))
        with standin.capture() as graph:
            (gradient,) = torch.autograd.grad(op(x * x), x, torch.ones_like(x))
        before = gradient.clone()
        with torch.no_grad():
            x.fill_(3)
        graph.replay()
    return [before, gradient]


def a_captured_step_of_an_optimizer(define: Define) -> Any:
    op = scale(define)
    with torch.standin.stream(first_side_stream()):
        x, weight = ones(FIRST), ones(FIRST, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.25)

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            op(x * weight).sum().backward()
            optimizer.step()

        for _ in range(2):
            step()
        with standin.capture() as graph:
            step()
        after = [weight.clone()]
        for number in (2, 3):
            x.fill_(number)
            graph.replay()
            after.append(weight.clone())
    return [after, weight.grad]


def a_kernel_for_the_cpu_alone(define: Define) -> Any:
    op = scale(define, device_types="cpu")
    x = ones(requires_grad=True)
    y = op(x)
    y.sum().backward()
    return [op(ones()), y, x.grad]


# --------------------------------------------------------------------------------------------------
# On any accelerator


def a_graph_across_devices(define: Define) -> Any:
    op = scale(define)
    x, y = ones(FIRST, requires_grad=True), ones(SECOND, requires_grad=True)
    for _ in range(2):
        x.grad = y.grad = None
        (op(op(x).to(SECOND), 3.0) * op(y)).sum().backward()
    return [x.grad, y.grad]


def a_graph_across_streams(define: Define) -> Any:
    op = scale(define)
    results = []
    for _ in range(2):
        x = ones(requires_grad=True)
        with target.module().device(SECOND), target.module().stream(side_stream()):
            y = op(x)
        op(y).sum().backward()
        results += [y, x.grad]
    return results


def a_graph_across_the_host(define: Define) -> Any:
    op = scale(define)
    x, weight = torch.ones(2, requires_grad=True), ones(requires_grad=True)
    op(op(x).to(SECOND) * weight).sum().backward()
    return [x.grad, weight.grad]


def results_on_another_device(define: Define) -> Any:
    @define("moved", mutates_args=())
    def moved(x: Tensor) -> Tensor:
        return x.to(SECOND, copy=True) * 2

    moved.register_autograd(lambda ctx, grad: grad.to(FIRST) * 2)
    x = ones(FIRST, requires_grad=True)
    for _ in range(2):
        y = moved(x)
        y.sum().backward()
    return [y, x.grad]


def hooks(define: Define) -> Any:
    op = scale(define)
    x = ones(requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        target.note(f"pack at {target.current_place()}")
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        target.note(f"unpack at {target.current_place()}")
        return tensor

    x.register_hook(lambda grad: target.note(f"hook at {target.current_place()}"))
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = op(x)
        assert y.grad_fn is not None
        y.grad_fn.register_hook(lambda *grads: target.note(f"node at {target.current_place()}"))
        y.sum().backward()
    return [x.grad]


def saved_on_the_host(define: Define) -> Any:
    op = scale(define)
    results = []
    for pinned in (False, True):
        x = ones(requires_grad=True)
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            y = torch.utils.checkpoint.checkpoint(lambda x: op(op(x).sin()), x, use_reentrant=False)
        y.sum().backward()
        results.append(x.grad)
    return results


def pinned_memory(define: Define) -> Any:
    @define("upload", mutates_args=("host",))
    def upload(x: Tensor, host: Tensor) -> Tensor:
        y = x + host.to(x.device, non_blocking=True)
        host.copy_(y, non_blocking=True)
        return y

    host = torch.ones(2).pin_memory()
    results = [upload(ones(), host), upload(ones(), host)]
    torch.accelerator.synchronize(SECOND)
    return [*results, host]


def memory_that_another_stream_uses(define: Define) -> Any:
    @define("shared", mutates_args=())
    def shared(x: Tensor) -> Tensor:
        event = torch.Event(x.device)
        event.record(torch.accelerator.current_stream(x.device))
        side_stream().wait_event(event)
        x.record_stream(side_stream())
        return x + 1

    return [shared(ones()), shared(ones())]


def a_kernel_that_waits(define: Define) -> Any:
    @define("largest", mutates_args=())
    def largest(x: Tensor) -> float:
        return x.max().item()

    return [largest(ones()), largest(ones() * 2)]


def a_kernel_that_draws(define: Define) -> Any:
    @define("noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
    def noise(x: Tensor) -> Tensor:
        return x + torch.rand(2, device=x.device)

    drawn = [noise(ones()), noise(ones(FIRST))]
    state = target.module().get_rng_state(SECOND)
    again = noise(ones())
    target.module().set_rng_state(state, SECOND)
    return [*drawn, again, noise(ones())]


def a_kernel_that_is_switched_off(define: Define) -> Any:
    @define("where", mutates_args=())
    def where(x: Tensor) -> Tensor:
        return x + 1

    where.register_kernel(TYPE)(lambda x: x + 2)
    results = [where(ones()), where(ones("cpu"))]
    with where.set_kernel_enabled(TYPE, enabled=False):
        results.append(where(ones()))
    return [*results, where(ones())]


def kernels_for_two_types(define: Define) -> Any:
    op = scale(define, device_types=["cpu", TYPE])
    return [op(ones()), op(ones("cpu")), op(ones(FIRST))]


def a_kernel_for_the_device_alone(define: Define) -> Any:
    op = scale(define, device_types=TYPE)
    return [op(ones()), isinstance(error_of(lambda: op(ones("cpu"))), NotImplementedError)]


def lists_of_several_devices(define: Define) -> Any:
    @define("each", mutates_args=())
    def each(xs: list[Tensor]) -> list[Tensor]:
        return [x * 2 for x in xs]

    return [each([ones(), ones()]), each([ones(FIRST), ones()]), each([ones(), ones("cpu")])]


def the_default_device_of_the_process(define: Define) -> Any:
    @define("filled", mutates_args=())
    def filled(x: Tensor) -> Tensor:
        return x + torch.ones(2).to(x.device)

    torch.set_default_device(SECOND)
    try:
        inside = [filled(torch.ones(2)), filled(ones("cpu"))]
    finally:
        torch.set_default_device(None)
    return [*inside, filled(ones())]


def deterministic_algorithms(define: Define) -> Any:
    @define("unwritten", mutates_args=())
    def unwritten(x: Tensor) -> Tensor:
        return torch.empty_like(x).isnan()

    torch.use_deterministic_algorithms(True)
    try:
        return [unwritten(ones()), unwritten(ones())]
    finally:
        torch.use_deterministic_algorithms(False)


def inference_mode(define: Define) -> Any:
    op = scale(define)
    x = ones(requires_grad=True)
    with torch.inference_mode():
        made = ones()
        inside = [op(made), op(x)]
    with torch.no_grad():
        inside.append(op(x))
    return [*inside, error_of(lambda: op(x).mul_(made).sum().backward())]


def fake_tensors(define: Define) -> Any:
    op = scale(define)
    with FakeTensorMode() as mode:
        fake = op(mode.from_tensor(ones()))
    return [str(fake.device), tuple(fake.shape), op(ones())]


def a_mode_for_devices(define: Define) -> Any:
    op = scale(define)
    with torch.device(FIRST):
        return [op(ones()), op(torch.ones(2)), op(ones("cpu"))]


ON_THE_STANDIN = (
    out_of_memory_in_the_kernel,
    out_of_memory_in_backward,
    a_captured_call,
    a_captured_training_step,
    a_captured_step_of_an_optimizer,
    a_kernel_for_the_cpu_alone,
)
ANYWHERE = (
    a_graph_across_devices,
    a_graph_across_streams,
    a_graph_across_the_host,
    results_on_another_device,
    hooks,
    saved_on_the_host,
    pinned_memory,
    memory_that_another_stream_uses,
    a_kernel_that_waits,
    a_kernel_that_draws,
    a_kernel_that_is_switched_off,
    kernels_for_two_types,
    a_kernel_for_the_device_alone,
    lists_of_several_devices,
    the_default_device_of_the_process,
    deterministic_algorithms,
    inference_mode,
    fake_tensors,
    a_mode_for_devices,
)
# In these scenarios no call is native, because the first uses the backend's fallback, and the
# second passes tensors on devices of several types.
NEVER_NATIVE = (a_kernel_for_the_cpu_alone, pinned_memory)
LACKING = {pinned_memory: pytest.mark.needs_torch("2.13", "stock counts what its kernel writes")}


@pytest.mark.parametrize(
    "scenario",
    [
        *(pytest.param(s, id=s.__name__, marks=target.only_on_the_standin) for s in ON_THE_STANDIN),
        *(pytest.param(s, id=s.__name__, marks=LACKING.get(s, ())) for s in ANYWHERE),
    ],
)
def test_native_dispatched_and_stock_runs_agree(
    namespace: str, scenario: Callable[[Define], Any]
) -> None:
    native, dispatched, stock = (
        run(scenario, namespace) for run in (arms.native, arms.dispatched, arms.stock)
    )
    assert native.outcome == dispatched.outcome
    assert native.outcome == stock.outcome
    assert native.trace == dispatched.trace
    assert native.waits() == stock.waits()
    assert bool(native.calls["native"]) is (scenario not in NEVER_NATIVE)
