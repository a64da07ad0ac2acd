"""Derived formulas with random numbers on a device, and during graph capture.

Uses private names.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.cudagraphs import get_device_node_mapping
from torch.fx.experimental.proxy_tensor import make_fx

import torchop
from tests._support.common import needs_native
from tests.integration.device import standin
from tests.rules.autograd.derived.support import derived
from torchop import GradientError, _hooks
from torchop._compat import devices
from torchop._rules.autograd.derived import replay
from torchop._rules.autograd.derived.replay import ambient_state


def draws_on_another_device(x: Tensor) -> Tensor:
    return x * torch.rand(8, device="standin:1").to(x.device)


def restores_another_device(x: Tensor) -> Tensor:
    state = torch.standin.get_rng_state("standin:1")
    noise = torch.rand(8, device="standin:1").to(x.device)
    torch.standin.set_rng_state(state, "standin:1")
    return x * noise


def draws(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("device", ["cpu", "standin:0", "standin:1"])
@pytest.mark.parametrize("body", [draws_on_another_device, restores_another_device, draws])
def test_backward_restores_random_state_of_every_device(namespace, device, native, body):
    op = derived(f"{namespace}::f", body)
    x = torch.ones(8, device=device).requires_grad_()
    for _ in range(2):  # twice, because the first call that records a gradient is never native
        with torchop.native.disabled() if not native else torch.enable_grad():
            result = op(x)
        torch.rand(8, device="standin:1")
        state = torch.standin.get_rng_state("standin:1")
        gradient = torch.autograd.grad(result, x, torch.ones(8, device=device))[0]
        assert torch.equal(gradient.cpu(), result.detach().cpu())
        assert torch.equal(torch.standin.get_rng_state("standin:1"), state)


@needs_native
def test_plain_state_contains_all_devices():
    values = torch.ones(2), torch.ones(2, device="standin:1")
    packed = _hooks.extension.pack_plain(values, None, 2)
    assert torch.equal(packed, replay._of_all_devices(values, 2, False).packed)
    assert _hooks.extension.pack_plain(values, packed, 2) is packed
    # The packed state does not depend on the arguments, so other arguments reuse it.
    assert _hooks.extension.pack_plain(values[:1], packed, 2) is packed
    for device in ("cpu", "standin:0", "standin:1"):
        torch.rand(1, device=device)
        again = _hooks.extension.pack_plain(values, packed, 2)
        assert torch.equal(again, replay._of_all_devices(values, 2, False).packed)
        assert not torch.equal(again, packed)
        packed = again


@needs_native
def test_other_states_are_packed_in_python(side_stream, monkeypatch):
    values = (torch.ones(2, device="standin:1"),)
    # With a count of 1, only the first device is in use, although the tensor is on the second.
    assert _hooks.extension.pack_plain(values, None, 1) is None
    assert _hooks.extension.pack_plain(values, None, 0) is None
    with torch.autocast("standin", torch.bfloat16):
        assert _hooks.extension.pack_plain(values, None, 2) is None
    with standin.capture():
        assert _hooks.extension.pack_plain(values, None, 2) is None
    state = ambient_state(values)
    lacking = devices.traits("standin")._replace(get_rng_state=None)
    monkeypatch.setattr(devices, "traits", lambda device_type: lacking)
    assert ambient_state(values) is not state
    assert replay.replayed(None, state.packed[:0], values, lambda: 3) == 3


@needs_native
@pytest.mark.parametrize("body", [draws_on_another_device, draws])
def test_replay_in_the_current_state_restores_the_generators(namespace, body, monkeypatch):
    op = derived(f"{namespace}::f", body)
    x = torch.ones(8, device="standin:0").requires_grad_()
    op(x)
    # Remove the Python function, to show that plain states are packed without it, in C++.
    monkeypatch.setattr(replay, "_of_all_devices", None)
    torch.manual_seed(0)
    result = op(x)
    torch.manual_seed(0)
    states = [torch.standin.get_rng_state(device) for device in ("standin:0", "standin:1")]
    (gradient,) = torch.autograd.grad(result, x, torch.ones_like(x))
    assert torch.equal(gradient.cpu(), result.detach().cpu())
    for device, state in zip(("standin:0", "standin:1"), states, strict=True):
        assert torch.equal(torch.standin.get_rng_state(device), state)


def draws_on_device(x: Tensor, device: torch.device) -> Tensor:
    return x * torch.rand(8, device=device).to(x.device)


def test_a_graph_replays_the_generator_of_a_device_that_is_an_argument(namespace):
    op = derived(f"{namespace}::f", draws_on_device)
    op.register_fake(lambda x, device: torch.empty_like(x))
    there = torch.device("standin", 1)
    x = torch.ones(8, requires_grad=True)
    result = compiled(lambda x: op(x, there))(x)
    torch.rand(8, device=there)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(gradient, result.detach())


def test_autocast_of_another_device_is_restored(namespace):
    dtypes = []

    def multiplies_on_another_device(x: Tensor) -> Tensor:
        there = x.to("standin:1")
        product = there @ there
        dtypes.append(product.dtype)
        return product.to(x)

    op = derived(f"{namespace}::f", multiplies_on_another_device)
    x = torch.eye(2, requires_grad=True)
    for _ in range(2):
        with torch.autocast("standin", torch.bfloat16):
            result = op(x)
        dtypes.clear()
        torch.autograd.grad(result.sum(), x)
        assert set(dtypes) == {torch.bfloat16}


def sine(x: Tensor) -> Tensor:
    return x.sin() * 2


@pytest.fixture
def side_stream():
    """Run the test on a side stream.

    PyTorch refuses to capture the backward of calls that ran on the default stream.
    """
    with torch.standin.stream(torch.Stream("standin")):
        yield


@pytest.mark.parametrize("captured", ["both", "forward", "backward"])
def test_a_body_without_random_numbers_can_be_captured(namespace, captured, side_stream):
    op = derived(f"{namespace}::f", sine)
    x = torch.ones(8, device="standin").requires_grad_()
    grad = torch.ones(8, device="standin")
    for _ in range(2):
        torch.rand(8, device="standin")
        with standin.capture() if captured != "backward" else torch.enable_grad():
            result = op(x)
        with standin.capture() if captured != "forward" else torch.enable_grad():
            (gradient,) = torch.autograd.grad(result, x, grad)
        torch.testing.assert_close(gradient.cpu(), 2 * x.detach().cpu().cos())


def inner_noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("nested", [False, True])
def test_random_numbers_in_a_capture_are_refused(namespace, native, nested, side_stream):
    inner = torchop.custom_op(f"{namespace}::inner", inner_noise, mutates_args=())

    def body(x: Tensor) -> Tensor:
        return x * (inner(x) if nested else torch.rand_like(x))

    op = derived(f"{namespace}::f", body)
    x = torch.ones(8, device="standin").requires_grad_()
    message = rf"^{namespace}::f: the body draws .* aten.rand_like.* A graph is being captured "
    result = op(x)
    with torchop.native.disabled() if not native else torch.enable_grad():
        for _ in range(2):
            with standin.capture(), pytest.raises(GradientError, match=message):
                op(x)
    with standin.capture(), pytest.raises(GradientError, match=message):
        torch.autograd.grad(result, x, torch.ones(8, device="standin"))
    with standin.capture(), torch.no_grad():
        op(x)  # allowed, because without a gradient nothing needs the random numbers again


# --------------------------------------------------------------------------------------------------
# Compiled graphs with CUDA graphs


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.fixture
def for_cuda_graphs():
    with torch._inductor.config.patch("triton.cudagraphs", True):
        yield


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
def test_graph_for_cuda_graphs_has_no_cpu_tensors(namespace, cuda_graphs, tagged, tracing_mode):
    tags = (torch.Tag.nondeterministic_seeded,) * tagged
    op = derived(f"{namespace}::f", sine, tags=tags)
    op.register_fake(like="x")
    x = torch.ones(8, device="standin").requires_grad_()

    def train(x):
        return torch.autograd.grad(op(x), x, torch.ones_like(x))

    with torch._inductor.config.patch("triton.cudagraphs", cuda_graphs):
        graph = make_fx(train, tracing_mode=tracing_mode)(x)
    assert f"{namespace}.f__training.default" in {str(node.target) for node in graph.graph.nodes}
    # Inductor does not use CUDA graphs for a graph with CPU tensors, so there must be none here,
    # unless CUDA graphs are off or the tag makes the graph save random states.
    devices = {device.type for device in get_device_node_mapping(graph)}
    assert devices == ({"standin"} if cuda_graphs and not tagged else {"standin", "cpu"})
    (gradient,) = graph(x)
    torch.testing.assert_close(gradient.cpu(), 2 * x.detach().cpu().cos())


def test_compiled_training_for_cuda_graphs(namespace, for_cuda_graphs):
    op = derived(f"{namespace}::f", sine)
    op.register_fake(like="x")
    x = torch.ones(8, device="standin").requires_grad_()
    result = compiled(op)(x)
    (gradient,) = torch.autograd.grad(result, x, torch.ones(8, device="standin"))
    torch.testing.assert_close(gradient.cpu(), 2 * x.detach().cpu().cos())


@pytest.mark.parametrize("body", [draws, restores_another_device])
def test_random_numbers_that_cuda_graphs_would_lose_are_refused(namespace, for_cuda_graphs, body):
    x = torch.ones(8, device="standin").requires_grad_()
    op = derived(f"{namespace}::f", body)
    op.register_fake(like="x")
    message = (
        rf"^{namespace}::f: the body draws random numbers .* torch.Tag.nondeterministic_seeded"
    )
    with pytest.raises(GradientError, match=message):
        compiled(op)(x)
    op = derived(f"{namespace}::tagged", body, tags=torch.Tag.nondeterministic_seeded)
    op.register_fake(like="x")
    result = compiled(op)(x)
    torch.rand(8, device="standin:1")
    (gradient,) = torch.autograd.grad(result, x, torch.ones(8, device="standin"))
    # A graph saves only the random states of the devices of its arguments.
    if body is draws:
        assert torch.equal(gradient.cpu(), result.detach().cpu())


def test_settings_that_cuda_graphs_would_lose_are_refused(namespace, for_cuda_graphs):
    op = derived(f"{namespace}::f", sine)
    op.register_fake(like="x")
    x = torch.ones(8, device="standin").requires_grad_()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(GradientError, match="the graph does not record that autocast"):
            compiled(op)(x)
    finally:
        torch.set_default_dtype(torch.float32)
