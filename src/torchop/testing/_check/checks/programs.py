"""Checks of compiled and exported programs, which depend on the fake kernels of their operators."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck, Example, reason
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks.gradients import requiring_grad, trainable_example
from torchop.testing._check.sizes import each_resized, sizes
from torchop.testing._check.subject import Subject
from torchop.testing.process_state import seed_torch


def compiles_the_same(
    call: Call, gradients: bool = False, autocast: torch.dtype | None = None
) -> None:
    """Check that a call compiled with dynamic sizes agrees with eager mode.

    If `autocast` is given, both calls run in an autocast region with this dtype, but the backward
    pass runs outside of it.
    """
    device_type = call.tensors[-1].device.type
    places = probes.written_places(call.op)

    def program(args: Any, kwargs: Any) -> list[Any]:
        return [*probes.leaves(call.op(*args, **kwargs)), *probes.written(places, args, kwargs)]

    def run(function: Any) -> list[Any]:
        seed_torch(0)
        args, kwargs = call.example.copy()
        with torch.autocast(device_type, dtype=autocast, enabled=autocast is not None):
            results = list(function(args, kwargs))
        if not gradients:
            return results
        inputs = [tensor for tensor in probes.tensors_of((args, kwargs)) if tensor.requires_grad]
        tensors = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
        return [
            *results,
            *torch.autograd.grad(probes.weighted_sum(tensors), inputs, allow_unused=True),
        ]

    what = "compiled with dynamic sizes"
    tolerances: dict[str, Any] = {}
    try:
        expected = run(program)
    except Exception as error:
        if autocast is None:
            raise
        raise CannotCheck(f"eager mode raises under autocast: {reason(error)}") from None
    if autocast is not None:
        what += " in an autocast region"
        tolerances = probes.rounding(autocast, expected)
    torch.compiler.reset()
    try:
        compiled = torch.compile(program, backend="aot_eager", dynamic=True, fullgraph=True)
        probes.assert_same(run(compiled), expected, what, **tolerances)
    finally:
        torch.compiler.reset()


def exports_the_same(call: Call, dynamic: Any = ()) -> None:
    """Check that a program returns the same results after it is exported, saved and loaded.

    Export every dimension whose size is in `dynamic` as a dynamic dimension.
    """
    function, originals = probes.on_tensors(call.op, *call.example)

    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return function(*tensors)

    tensors = tuple(tensor.detach() for tensor in originals)
    auto = torch.export.Dim.DYNAMIC
    open_dims = tuple({d: auto for d, n in enumerate(t.shape) if n in dynamic} for t in tensors)
    shapes = {"tensors": open_dims} if dynamic else None
    exported = torch.export.export(Module(), tensors, dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    reloaded = torch.export.load(file).module()
    seed_torch(0)
    expected = function(*tensors)
    seed_torch(0)
    probes.assert_same(reloaded(*tensors), expected, "exported, saved and loaded")


# --------------------------------------------------------------------------------------------------
# Each of these functions yields the cases of one check (the calls that it makes). Reports print the
# first line of the docstring as the question that the check answers.


def compiled(subject: Subject, details: Details) -> Iterator[Case]:
    """Does a compiled program agree with eager mode, gradients included?"""
    yield from _compiled(subject)


def compiled_autocast(subject: Subject, details: Details) -> Iterator[Case]:
    """Does a compiled program agree with eager mode in an autocast region?"""
    for case in _compiled(subject):
        tensors = case.example.tensors
        device_type = tensors[-1].device.type
        if not torch.amp.is_autocast_available(device_type):
            raise CannotCheck(f"PyTorch has no autocast for {device_type}")
        if not any(t.dtype in (torch.float32, torch.float16, torch.bfloat16) for t in tensors):
            raise CannotCheck("autocast casts no argument")
        lower = torch.get_autocast_dtype(device_type)
        yield dataclasses.replace(case, options={**case.options, "autocast": lower})


def _compiled(subject: Subject) -> Iterator[Any]:
    subject.needs_fake()
    if subject.is_random:
        raise CannotCheck("results are random, and compiled programs draw other numbers")
    examples = subject.strided("compilers support strided tensors,")
    gradients = trainable_example(subject) is not None
    for example in examples[:2]:
        if example.tensors:
            tracked = requiring_grad(example) if gradients else example
            has_grad = any(t.requires_grad for t in tracked.tensors)
            options = {"gradients": True} if has_grad else {}
            yield Case("the example", tracked, probe=compiles_the_same, options=options)
    raise CannotCheck("no argument is a tensor")


def export_dynamic(subject: Subject, details: Details) -> Iterator[Case]:
    """Does an exported program keep sizes dynamic?"""
    subject.needs_fake()
    if subject.operator.schema.object_types:
        raise CannotCheck("torch.export cannot store objects of opaque types")
    subject.needs_fixed_results()
    for example in subject.strided("torch.export supports strided tensors,")[:1]:
        if example.tensors:
            options = {"dynamic": _open_sizes(subject, example)}
            yield Case(
                "the example", example, probe=exports_the_same, options=options, shrink=False
            )
    raise CannotCheck("no argument is a tensor")


def _open_sizes(subject: Subject, example: Example) -> list[int]:
    """Return the sizes that can grow by 1 or 2 without making the kernel raise."""

    def is_open(size: int) -> bool:
        resized = [e for _, e in each_resized(example, {size: size + 1}, {size: size + 2})]
        return len(resized) == 2 and all(subject.refusal(each) is None for each in resized)

    return [size for size in sizes(example) if size > 1 and is_open(size)]
