"""`torchop.testing.check` finds faults of operators on a device. Uses private names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.devices import BACKEND
from tests._support.releases import OUT
from tests.integration.device import target
from tests.integration.device.target import FIRST, SECOND
from torchop.extend import Schema
from torchop.testing import CheckReport, check, probes
from torchop.testing import _snapshot as snapshot
from torchop.testing._check.checks.accelerator import captured
from torchop.testing._contents import check_outputs
from torchop.testing.process_state import process_state, restored

needs_graphs = pytest.mark.needs_torch(
    "2.0" if target.TYPE == "cuda" else "2.12", "torch.accelerator.Graph"
)
needs_two_devices = pytest.mark.skipif(target.COUNT < 2, reason="needs two devices")


def run(op: Any, *only: str, device: str = SECOND) -> CheckReport:
    x = torch.arange(6.0, device=device).view(2, 3) / 4 + 0.5
    return check(op, (x,), only=only or None, raise_exception=False)


def define(namespace: str, function: Any) -> Any:
    op = torchop.custom_op(
        f"{namespace}::on_device", function, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device))
    return op


def failed(report: CheckReport) -> dict[str, str]:
    return {failure.check: failure.message for failure in report.failures}


def test_opcheck_finds_formulas_on_every_device(namespace: str) -> None:
    op = define(namespace, lambda x: x * 1)
    op.register_autograd(lambda ctx, grad: grad)
    x = torch.ones(2, device=SECOND, requires_grad=True)
    one = "test_autograd_registration"
    assert torchop.opcheck(op, (x,), test_utils=one) == {one: "SUCCESS"}


@target.needs_accelerator
@pytest.mark.needs_torch("2.13", "torch.Tag.out")
def test_opcheck_does_not_change_the_devices_generators(namespace: str) -> None:
    drawn = []

    def fill(x: Tensor, *, out: Tensor) -> Tensor:
        drawn.append(out.uniform_().tolist())
        return out

    library = torchop.Library(namespace, "FRAGMENT")
    library.define("fill(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=OUT)
    library.impl("fill", fill, BACKEND)
    op = getattr(torch.ops, namespace).fill.default
    x, module = torch.ones(2, device=SECOND), target.module()
    before = module.get_rng_state(SECOND)
    check_outputs(Schema(op._schema), op, (x,), {"out": torch.empty_like(x)})
    assert drawn == drawn[:1] * 3
    assert module.get_rng_state(SECOND).tolist() == before.tolist()


def test_a_right_operator_passes(namespace: str) -> None:
    op = define(namespace, lambda x: (x * x).contiguous())
    op.register_autograd(
        lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    op.register_vmap(lambda info, in_dims, x: (op(x), in_dims[0]))
    families = ("memory", "contracts", "gradcheck", "gradgradcheck", "saved", "func", "vmap")
    report = run(op, *families, "autograd_registration")
    assert failed(report) == {}
    passed = {result.check for result in report.results if result.outcome == "passed"}
    assert {"contracts.kept", "contracts.process", "contracts.leaks"} <= passed
    assert {"subsystems.gradcheck", "subsystems.saved", "subsystems.func"} <= passed


def test_the_sum_of_gradients_stays_on_the_device() -> None:
    x = torch.ones(3, device=SECOND)
    with target.host_waits() as waits:
        total = probes.weighted_sum([x])
    assert total.device == x.device
    assert waits == []


def test_kernel_that_keeps_an_argument(namespace: str) -> None:
    kept: dict[str, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        kept["x"] = x
        return x * 2

    message = failed(run(define(namespace, keep), "contracts.kept"))["contracts.kept"]
    assert "the memory of argument 'x' is not released" in message


@target.needs_accelerator
def test_memory_that_stays_on_the_device(namespace: str) -> None:
    kept: list[Tensor] = []
    kernels: list[int] = []

    def leak(x: Tensor) -> Tensor:
        if len(kept) < 4096:
            kept.append(torch.empty(1000, device=x.device))
        else:  # if the test fails, the kernel must not use up the memory
            kernels.append(1)
        return x * 2

    message = failed(run(define(namespace, leak), "contracts.leaks"))["contracts.leaks"]
    assert "bytes on the device" in message


def _other_device(x: Tensor) -> Tensor:
    torch.accelerator.set_device_index(1 - torch.accelerator.current_device_index())
    return x * 2


def _other_stream(x: Tensor) -> Tensor:
    torch.accelerator.set_stream(torch.Stream(FIRST))
    return x * 2


def _draws(x: Tensor) -> Tensor:
    torch.rand(1, device=x.device)
    return x * 2


@needs_two_devices
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_other_device, "changes torch.accelerator.current_device_index() from 0 to 1"),
        (_other_stream, "changes torch.accelerator.current_stream()"),
        (_draws, "changes torch.get_rng_state() of the accelerator"),
    ],
)
def test_device_state_changed_by_a_call_is_reported_and_restored(
    namespace: str, function: Any, said: str
) -> None:
    before = process_state()
    message = failed(run(define(namespace, function), "contracts.process"))["contracts.process"]
    assert said in message
    assert process_state() == before


@needs_two_devices
def test_checking_restores_the_current_device() -> None:
    before = process_state()
    with restored():
        _other_stream(torch.ones(1, device=SECOND))
        _other_device(torch.ones(1, device=SECOND))
        _draws(torch.ones(1, device=SECOND))
        assert process_state() != before
    assert process_state() == before


# --------------------------------------------------------------------------------------------------
# Graphs


def _grows(kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a kernel that caches a buffer, and replaces the buffer if it is too small.

    A graph that was captured with the old buffer would then use freed memory.
    """

    def kernel(x: Tensor) -> Tensor:
        if not kept or kept[0].numel() < x.numel():
            kept[:] = [torch.empty(x.numel(), device=x.device)]
        buffer = kept[0][: x.numel()].view(x.shape)
        return buffer.copy_(x) * 2

    return kernel


def _uses_own_stream(streams: list[torch.Stream]) -> Callable[[Tensor], Tensor]:
    """Return a kernel that uses its own stream without waiting for the caller's stream."""

    def kernel(x: Tensor) -> Tensor:
        if not streams:
            streams.append(torch.Stream(x.device))
        with streams[0]:
            return x * 2

    return kernel


# Matches the error of the operation that broke the capture, not the later error at the end of the
# capture.
READS = r"\w+\(.*operation not permitted when stream is capturing"


def _reads(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x * 3


@target.needs_accelerator
@needs_graphs
@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        pytest.param(
            _grows([]), "memory that was given back", marks=target.only_on_the_standin
        ),  # on a GPU, the freed memory may not have been reused yet
        (_uses_own_stream([]), "a replay of the kernel with other values"),
        (_reads, f"the kernel cannot be captured into a graph: {READS}"),
    ],
)
def test_a_kernel_that_a_graph_breaks(
    namespace: str, kernel: Callable[[Tensor], Tensor], said: str
) -> None:
    report = run(define(namespace, kernel), "capture", "repeated", device=FIRST)
    assert failed(report).keys() == {"subsystems.capture"}
    assert re.search(said, failed(report)["subsystems.capture"])


def _backward_grows(kept: list[Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Return a formula that caches a buffer, and replaces the buffer if it is too small."""
    kernel = _grows(kept)
    return lambda ctx, grad: grad * kernel(ctx.saved_tensors[0])


def _backward_uses_own_stream(streams: list[torch.Stream]) -> Callable[[Any, Tensor], Tensor]:
    """Return a formula that uses its own stream without waiting for the caller's stream."""

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if not streams:  # once, because a new stream must allocate, which a capture forbids
            streams.append(torch.Stream(grad.device))
        with streams[0]:
            return grad * 2 * ctx.saved_tensors[0]

    return backward


def _backward_reads(ctx: Any, grad: Tensor) -> Tensor:
    return grad * 2 * ctx.saved_tensors[0] if grad.sum().item() else torch.zeros_like(grad)


@target.needs_accelerator
@needs_graphs
@pytest.mark.parametrize(
    ("backward", "said"),
    [
        pytest.param(
            _backward_grows([]), "memory that was given back", marks=target.only_on_the_standin
        ),
        # The formula may read the gradient before it has been computed, but not always, so accept
        # any message about a replay.
        (_backward_uses_own_stream([]), "a replay of the formula with"),
        (_backward_reads, f"the formula cannot be captured into a graph: {READS}"),
    ],
)
def test_a_formula_that_a_graph_breaks(
    namespace: str, backward: Callable[[Any, Tensor], Tensor], said: str
) -> None:
    op = define(namespace, lambda x: (x * x).contiguous())
    op.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
    )
    report = run(op, "capture", device=FIRST)
    assert failed(report).keys() == {"subsystems.capture"}
    assert re.search(said, failed(report)["subsystems.capture"])


@target.needs_accelerator
@needs_graphs
@pytest.mark.parametrize("is_derived", [False, True])
def test_a_backward_that_is_captured(namespace: str, is_derived: bool) -> None:
    op = define(namespace, lambda x: (x * x).contiguous())
    if is_derived:
        op.derive_autograd()
    else:
        op.register_autograd(
            lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
        )
    report = run(op, "capture")
    assert failed(report) == {}
    assert [(result.outcome, result.cases) for result in report.results] == [("passed", 2)]


@target.needs_accelerator
@needs_graphs
def test_a_kernel_that_is_captured(namespace: str) -> None:
    def add_(x: Tensor, y: Tensor) -> None:
        y.add_(x.cumsum(-1))

    schema = "(Tensor x, Tensor(a!) y) -> ()"
    mutable = torchop.custom_op(f"{namespace}::add_", add_, mutates_args=("y",), schema=schema)
    x = torch.arange(6.0, device=SECOND).view(2, 3)
    for report in (
        run(define(namespace, lambda x: (x * x).contiguous()), "capture"),
        check(mutable, (x, x.clone()), only="capture", raise_exception=False),
    ):
        assert [result.outcome for result in report.results] == ["passed"]


@target.only_on_the_standin
@needs_graphs
def test_a_capture_waits_for_the_work_before_it() -> None:
    with target.trace() as lines, captured("standin"):
        ran_on = target.current_place()
    assert ran_on != "0.0"
    assert f"{ran_on} waits for 0.0" in lines


@target.needs_accelerator
@needs_graphs
def test_kernel_that_declares_it_cannot_be_captured(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::reads",
        _reads,
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
        tags=torch.Tag.cudagraph_unsafe,
    )
    (result,) = run(op, "capture").results
    assert result.outcome == "cannot be done"
    assert "cudagraph_unsafe" in result.message


@target.needs_accelerator
@pytest.mark.parametrize(
    ("only", "device_types", "said"),
    [
        ("capture", "cpu", f"no kernel for {target.TYPE}"),
        ("subsystems.accelerator", "cpu", f"no kernel for {target.TYPE}"),
        ("subsystems.accelerator", target.TYPE, "no kernel for the CPU"),
    ],
)
def test_a_kernel_for_one_device_is_compared_with_no_other(
    namespace: str, only: str, device_types: str, said: str
) -> None:
    op = torchop.custom_op(
        f"{namespace}::one",
        lambda x: x * 2,
        mutates_args=(),
        device_types=device_types,
        schema="(Tensor x) -> Tensor",
    )
    (result,) = run(op, only, device="cpu" if device_types == "cpu" else SECOND).results
    assert result.outcome == "cannot be done"
    assert result.message.startswith(said)


def test_nothing_is_checked_on_an_accelerator_without_one(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    report = run(define(namespace, lambda x: x * 2), "capture", "subsystems.accelerator")
    said = {(result.outcome, result.message) for result in report.results}
    assert said == {("cannot be done", "no accelerator is available")}


@target.needs_accelerator
def test_the_results_of_the_cpu(namespace: str) -> None:
    op = define(namespace, lambda x: x * 2)
    (result,) = run(op, "subsystems.accelerator").results
    assert result.outcome == "passed"
    op.register_kernel("cpu")(lambda x: x * 3)
    message = failed(run(op, "subsystems.accelerator"))["subsystems.accelerator"]
    assert f"on {target.TYPE}" in message


@target.needs_accelerator
@pytest.mark.parametrize("kept_by", ["size", "type", "device"])
def test_kernel_that_caches_a_table(namespace: str, kept_by: str) -> None:
    tables: dict[Any, Tensor] = {}

    def adds_table(x: Tensor) -> Tensor:
        key = len(x), {"size": None, "type": x.device.type, "device": x.device}[kept_by]
        if key not in tables:
            tables[key] = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        return x + tables[key]

    report = run(define(namespace, adds_table), "subsystems.accelerator", device="cpu")
    # The kernel is correct if the key of its cache identifies the device. The type is enough if
    # there is only one device of that type.
    if kept_by == "device" or (kept_by == "type" and target.COUNT == 1):
        assert failed(report) == {}
        return
    places = (FIRST, "cpu") if kept_by == "size" else (SECOND, FIRST)
    message = failed(report)["subsystems.accelerator"]
    assert "on {}, after the same call on {}, it raises".format(*places) in message
    assert "use the device as a part of the key" in message


@target.needs_accelerator
def test_a_fake_kernel_for_the_cpu_alone(namespace: str) -> None:
    op = define(namespace, lambda x: x * 2)
    op.register_fake(lambda x: torch.empty(x.shape))
    message = failed(run(op, "fake_devices"))["subsystems.fake_devices"]
    assert f"for arguments on {target.TYPE}" in message


def test_memory_shared_through_dlpack(namespace: str) -> None:
    def shares(x: Tensor) -> Tensor:
        again = torch.empty(0, dtype=x.dtype, device=x.device)
        return again.set_(_wrapped(x.untyped_storage()), 0, x.shape, x.stride())

    message = failed(run(define(namespace, shares), "contracts.schema"))["contracts.schema"]
    assert "through NumPy or DLPack" in message or "alias" in message


def _wrapped(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a second storage for the same memory, made with DLPack."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(whole)).untyped_storage()


def test_a_copy_for_which_there_is_no_memory(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(storage: Any) -> Tensor:
        # Most devices do not raise torch.OutOfMemoryError.
        raise RuntimeError("a device: out of memory")

    op = define(namespace, lambda x: x * 2)
    monkeypatch.setattr(snapshot, "bytes_of", no_memory)
    x = torch.ones(2, device=SECOND)
    with torchop.testing.checking():
        assert torch.equal(op(x).cpu(), torch.full((2,), 2.0))
