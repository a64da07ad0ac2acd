"""Checks of an accelerator: it does what the CPU does, and what a call does in a graph."""

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
    """On one device after the other, the call does the same as on the CPU before."""
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
                f"{what}, it raises {error!r}. What a kernel keeps for later calls, such as a "
                "table by size, has to be kept by device, too."
            ) from error
        probes.assert_same(actual, expected, what)


def replays_as_captured(call: Call, device_type: str, others: Sequence[Any] = ()) -> None:
    """A graph that is captured of a call replays as the call, bit for bit, also with other values.

    Where tensors require grad, the graph has the backward, too, and gradients are compared.
    `others` are calls that are made in between, after which the graph has to find its memory.
    """
    device = torch.device(device_type, torch.accelerator.current_device_index())
    op, example = call.op, call.example.map(lambda tensor: tensor.to(device))
    static, tensors = example.copy(), example.tensors
    trains = any(tensor.requires_grad for tensor in tensors)
    run, what = (_gradients, "formula") if trains else (probes.outcome, "kernel")
    with torch.no_grad():
        for _ in range(2):  # what is made in the first calls is no part of the graph
            run(op, *example.copy())
        try:
            with captured(device_type) as replay:
                results = run(op, *static)
        except Exception as error:
            # What is refused breaks the graph, which raises another error in the end.
            cause = error.__context__ if "due to a previous error" in str(error) else None
            raise AssertionError(
                f"no graph can be captured of the {what}: {cause or error!r}. Wait for nothing "
                "there, and read no values of tensors; or define the operator with the tag "
                "torch.Tag.cudagraph_unsafe, so that compilers leave it out of graphs."
            ) from None
        for other in others:
            with contextlib.suppress(Exception):  # refused, which must change nothing either
                run(op, *probes.mapped(other, lambda tensor: tensor.to(device)))
        for which, values in (("the same", tensors), ("other", probes.other_values(tensors))):
            try:
                expected = run(op, *example.with_tensors(values).copy())
            except Exception:
                continue  # it refuses them
            for tensor, value in zip(static.tensors, values, strict=True):
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
    """A block that is captured into a graph, on a stream of its own; yields what replays it."""
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
    """The class of graphs: of the module of the device, or, since 2.13, of every accelerator."""
    of_module = getattr(torch.get_device_module(device_type), f"{device_type.upper()}Graph", None)
    return of_module or getattr(torch.accelerator, "Graph", None)


def _accelerator_of(subject: Subject) -> str:
    """The type of the accelerator, for which the operator has a kernel."""
    if not torch.accelerator.is_available():
        raise CannotCheck("there is no accelerator here")
    device = devices.accelerator_type()
    if not subject.is_for(device):
        raise CannotCheck(f"no kernel for {device}")
    return device


def accelerator(subject: Subject, details: Details) -> Iterator[Case]:
    """Does it do the same on the accelerator as on the CPU?"""
    device = _accelerator_of(subject)
    if not subject.is_for("cpu"):
        raise CannotCheck("no kernel for the CPU, which it could be compared with")
    subject.needs_fixed_results()
    places = [f"{device}:{index}" for index in range(torch.accelerator.device_count())]
    for example in subject.accepted():
        options = {"devices": places[:2]}
        yield Case("the example", example, probe=runs_on_devices, options=options)


def capture(subject: Subject, details: Details) -> Iterator[Case]:
    """Does a captured graph replay as the call and its backward, also with other values?"""
    device = _accelerator_of(subject)
    if _graph_type(device) is None:
        raise CannotCheck(f"this PyTorch captures no graphs on {device}")
    if torch.Tag.cudagraph_unsafe in subject.op.tags:
        raise CannotCheck("it has the tag cudagraph_unsafe, so compilers leave it out of graphs")
    subject.needs_fixed_results()
    trainable = trainable_example(subject)
    for example in [*subject.accepted(), *([] if trainable is None else [trainable])]:
        # Larger ones, for which a kernel may take other memory in place of what it has kept.
        changes = [{size: 2 * size + 1} for size in sizes(example)[:2] if size]
        larger = [tuple(other) for _, other in each_resized(example, *changes)]
        options = {"device_type": device, "others": larger}
        yield Case("the example", example, probe=replays_as_captured, options=options)
