"""Check that accelerators agree with the CPU, and that calls can be captured into graphs."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torchop._compat import devices
from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks.gradients import trainable_example
from torchop.testing._check.sizes import each_resized, sizes
from torchop.testing._check.subject import Subject


def runs_on_devices(call: Call, devices: Sequence[str]) -> None:
    """Check that an operator returns the same results on each of the devices as on the CPU."""
    on_cpu = call.example.map(torch.Tensor.cpu)
    expected = call.again(on_cpu)
    for before, device in itertools.pairwise(("cpu", *devices)):
        what = f"on {device}, after the same call on {before}"
        moved = on_cpu.map(operator.methodcaller("to", device))
        try:
            actual = probes.mapped(probes.outcome(call.op, *moved), torch.Tensor.cpu)
        except NotImplementedError:
            raise
        except Exception as error:
            raise AssertionError(
                f"{what}, it raises {error!r}. If the kernel caches tensors, use the device as a "
                "part of the key."
            ) from error
        probes.assert_same(actual, expected, what)


def replays_as_captured(call: Call, device_type: str, others: Sequence[Any] = ()) -> None:
    """Check that replaying a captured graph returns the same bits as an ordinary call.

    Replay the graph with the captured values, and then with other values in the same tensors. If
    tensors require grad, capture the backward pass too, and compare the gradients as well.

    Between capture and replay, call the operator with each of the arguments in `others`. These
    calls must not invalidate memory that the graph uses.
    """
    device = torch.device(device_type, torch.accelerator.current_device_index())
    to_device = operator.methodcaller("to", device)
    op, example = call.op, call.example.map(to_device)
    static = example.copy()
    trains = any(tensor.requires_grad for tensor in example.tensors)
    run, what = (_gradients, "formula") if trains else (probes.outcome, "kernel")
    with torch.no_grad():
        for _ in range(2):  # warm up, so that lazy initialization is not captured
            run(op, *example.copy())
        try:
            with captured(device_type) as replay:
                results = run(op, *static)
        except Exception as error:
            # An error during capture invalidates the graph, so leaving the block raises a second
            # error. Report the original error instead.
            cause = error.__context__ if "due to a previous error" in str(error) else None
            raise AssertionError(
                f"the {what} cannot be captured into a graph: {cause or error!r}. Do not "
                "synchronize or read values of tensors. Otherwise define the operator with the tag "
                "torch.Tag.cudagraph_unsafe, and compilers leave it out of graphs."
            ) from None
        for other in others:
            with contextlib.suppress(Exception):  # even failed calls must not change later results
                run(op, *probes.mapped(other, to_device))
        for which, values in (("the same", example), ("other", call.other_values())):
            try:
                expected = run(op, *values.map(to_device).copy())
            except Exception:
                continue  # the operator refuses these values
            for tensor, value in zip(static.tensors, values.tensors, strict=True):
                tensor.copy_(value)
            replay()
            torch.accelerator.synchronize()
            words = f"a replay of the {what} with {which} values"
            probes.assert_same(results, expected, words, rtol=0, atol=0)


def _gradients(op: Any, args: Any, kwargs: Any) -> list[Any]:
    with torch.enable_grad():
        return [*probes.gradients(*probes.as_function(op, *probes.requiring_grad((args, kwargs))))]


@contextlib.contextmanager
def captured(device_type: str) -> Iterator[Callable[[], None]]:
    graph = _graph_type(device_type)()
    if type(graph) is getattr(torch.accelerator, "Graph", None):
        stream = torch.Stream(device_type)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream, graph:
            yield graph.replay
    else:
        with torch.get_device_module(device_type).graph(graph):
            yield graph.replay


def _graph_type(device_type: str) -> Any:
    """Return the graph class of a device module, such as `torch.cuda.CUDAGraph`.

    If the module has no such class, fall back to `torch.accelerator.Graph`, which was added in
    PyTorch 2.13. Return None if neither exists.
    """
    of_module = getattr(torch.get_device_module(device_type), f"{device_type.upper()}Graph", None)
    return of_module or getattr(torch.accelerator, "Graph", None)


def _accelerator_of(subject: Subject) -> str:
    if not torch.accelerator.is_available():
        raise CannotCheck("no accelerator is available")
    device = devices.accelerator_type()
    if not subject.is_for(device):
        raise CannotCheck(f"no kernel for {device}")
    return device


def accelerator(subject: Subject, details: Details) -> Iterator[Case]:
    """Does the accelerator agree with the CPU?"""
    device = _accelerator_of(subject)
    if not subject.is_for("cpu"):
        raise CannotCheck("no kernel for the CPU to compare with")
    subject.needs_fixed_results()
    places = [f"{device}:{index}" for index in range(torch.accelerator.device_count())]
    for example in subject.accepted():
        options = {"devices": places[:2]}
        yield Case("the example", example, probe=runs_on_devices, options=options)


def capture(subject: Subject, details: Details) -> Iterator[Case]:
    """Does replaying a captured graph return the same bits as a call, for other values too?"""
    device = _accelerator_of(subject)
    if _graph_type(device) is None:
        raise CannotCheck(f"this PyTorch does not support graphs on {device}")
    if torch.Tag.cudagraph_unsafe in subject.op.tags:
        raise CannotCheck("it has the tag cudagraph_unsafe")
    subject.needs_fixed_results()
    trainable = trainable_example(subject)
    for example in [*subject.accepted(), *([] if trainable is None else [trainable])]:
        # Make larger calls between capture and replay. They may make the kernel reallocate its
        # workspace, although the graph still uses the old memory.
        changes = [{size: 2 * size + 1} for size in sizes(example)[:2] if size]
        larger = [tuple(other) for _, other in each_resized(example, *changes)]
        options = {"device_type": device, "others": larger}
        yield Case("the example", example, probe=replays_as_captured, options=options)
