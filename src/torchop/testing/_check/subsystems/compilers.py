"""Checks of compilers: the fake kernel, opcheck, torch.compile and torch.export."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from typing import Any

import torch

from torchop._compat import devices, fake_tensors, optests
from torchop.extend import Form
from torchop.testing import _samples, probes
from torchop.testing._check.compilable import (
    strided,
    with_fake_kernel,
    with_fake_tensors,
    with_programs,
)
from torchop.testing._check.integers import by_name, with_argument, with_other_scalars
from torchop.testing._check.kinds import CheckKind, Details, family
from torchop.testing._check.subject import Arrangement, CannotCheck, Case, Example, Subject, reason
from torchop.testing._check.subsystems.gradients import requiring_grad, trainable_example
from torchop.testing._check.variants import (
    BLOCKS,
    LAYOUTS,
    all_and_each,
    each_resized,
    in_layout,
    larger_sizes,
    sizes,
    sizes_changed,
)
from torchop.testing._opcheck import opcheck
from torchop.testing.process_state import seed_torch

# --------------------------------------------------------------------------------------------------
# Probes


def compiles_the_same(
    op: Any, args: Any, kwargs: Any, backend: str, dynamic: bool = False, gradients: bool = False
) -> None:
    """Several calls in one compiled program do the same as in eager mode, gradients included.

    `args` holds the calls, each with its arguments and keyword arguments.
    """

    places = probes.written_places(op)

    def program(calls: Any) -> list[Any]:
        results = []
        for call_args, call_kwargs in calls:
            results += probes.leaves(op(*call_args, **call_kwargs))
            results += probes.written(places, call_args, call_kwargs)
        return results

    def run(function: Any) -> list[Any]:
        seed_torch(0)
        calls = probes.copies(args)
        inputs = [tensor for tensor in probes.tensors_of(calls) if tensor.requires_grad]
        results = function(calls)
        if not gradients:
            return list(results)
        tensors = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        grads = torch.autograd.grad(probes.weighted_sum(tensors), inputs, allow_unused=True)
        return [*results, *grads]

    torch.compiler.reset()
    try:
        with optests.quick_inductor() as settings:
            compiled = torch.compile(
                program,
                backend=backend,
                dynamic=dynamic,
                fullgraph=True,
                options=settings if backend == "inductor" else None,
            )
            probes.assert_same(run(compiled), run(program), f"compiled with {backend}")
    finally:
        torch.compiler.reset()


def exports_the_same(op: Any, args: Any, kwargs: Any, dynamic: Any = ()) -> None:
    """A program that was exported, saved and loaded does the same as the call.

    Dimensions of the sizes in `dynamic` may have other sizes when the program runs.
    """
    function, originals = probes.on_tensors(op, args, kwargs)

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


def fakes_with_symbols(op: Any, args: Any, kwargs: Any) -> None:
    """With sizes that are symbols, the fake kernel returns the shape and strides of the results."""
    expected = probes.outcome_of_copies(op, args, kwargs)
    mode, fake_call = _samples.with_fake_tensors((args, kwargs))
    with mode:
        actual = probes.outcome(op, *fake_call)
    fake_tensors.check_symbols(mode, actual)
    if len(actual) != len(expected):
        raise AssertionError(
            f"the fake kernel returns {len(actual)} tensors, and the kernel {len(expected)}."
        )
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(other, torch.Tensor):
            is_size = isinstance(other, int) and isinstance(one, int | torch.SymInt)
            if is_size and fake_tensors.number_of(one) not in (None, other):
                raise AssertionError(
                    f"result {index} is {other}, but {one} of the fake kernel, which compilers "
                    "take for granted. If only data tells: torchop.get_ctx().new_dynamic_size()."
                )
            continue
        if (one.dtype, one.layout) != (other.dtype, other.layout):
            raise AssertionError(
                f"result {index} is of {other.dtype} and {other.layout}, but of {one.dtype} and "
                f"{one.layout} from the fake kernel."
            )
        is_strided = other.layout is torch.strided  # else there are no strides
        strides = (one.stride(), other.stride()) if is_strided else ((), ())
        for what, fake, real in (("size", one.shape, other.shape), ("stride", *strides)):
            for dim, (symbol, number) in enumerate(zip(fake, real, strict=True)):
                hint = fake_tensors.number_of(symbol)
                is_seen = what == "size" or (other.numel() and other.shape[dim] > 1)
                if hint is not None and is_seen and hint != number:
                    raise AssertionError(
                        f"result {index} has {what} {number} in dimension {dim}, but {hint} from "
                        "a fake kernel that gets symbols for sizes."
                        + (_CONTIGUOUS if what == "stride" else "")
                    )


_CONTIGUOUS = (
    ' A kernel whose result is contiguous: register_fake(like="x", '
    "memory_format=torch.contiguous_format)."
)


def fakes_on_the_device(op: Any, args: Any, kwargs: Any, device: str) -> None:
    """The fake kernel returns floating-point tensors on the device of its arguments.

    There need be no such device, as fake tensors have no memory. One that it makes for the host,
    whatever device is the default, is there on purpose.
    """
    with fake_tensors.new_fake_mode():
        moved = probes.mapped(
            (args, kwargs),
            lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device),
        )
        try:
            results = probes.tensors_of(probes.leaves(op(*moved[0], **moved[1])))
            with optests.default_device_of_fake(op.name(), device):
                others = probes.tensors_of(probes.leaves(op(*moved[0], **moved[1])))
        except RuntimeError as error:
            if "not linked with support for" in str(error):
                raise NotImplementedError(f"this PyTorch knows no {device}") from None
            raise
    for index, (result, other) in enumerate(zip(results, others, strict=True)):
        is_left = result.device.type != device and other.device.type == device
        if result.is_floating_point() and is_left:
            raise AssertionError(
                f"result {index} of the fake kernel is on {result.device} for arguments on "
                f"{device}. Make it with device=x.device, or x.new_empty(...)."
            )


# --------------------------------------------------------------------------------------------------
# Cases


def _opcheck(test: str, label: str, example: Example, arrange: Arrangement | None = None) -> Case:
    return Case(label, opcheck, example, arrange, {"test_utils": test})


def fake(subject: Subject, details: Details) -> Iterator[Case]:
    """Does the fake kernel describe what is returned, in every layout, with sizes 0 and 1?"""
    check = functools.partial(_opcheck, "test_faketensor")
    subject = with_fake_tensors(subject, details)
    for example in subject.accepted():
        yield check("the example", example)
        places = set(range(len(example.tensors)))
        for layout in LAYOUTS:
            written = subject.written_places(example) if layout == "expanded" else ()
            chosen = sorted(places.difference(written))
            for some in all_and_each(chosen):
                is_one = len(some) == 1
                which = subject.names(example)[some[0]] if is_one else "all tensors"
                yield check(f"{which} {layout}", example, in_layout(layout, some))
        present = sizes(example)
        changes = [{n: new} for n in present for new in (0, 1, n + 1) if n and new != n]
        if len(present) > 1:
            changes.append(dict.fromkeys(present, 1))
        changes += larger_sizes(example, BLOCKS[:1])
        for change, resized in each_resized(example, *changes, subject=subject):
            yield check(sizes_changed(change), resized)
        named = by_name(subject, example)
        for argument in subject.schema.arguments:
            is_given = named.kwargs.get(argument.name) is not None
            if is_given and argument.kind.startswith("Optional["):
                yield check(f"{argument.name}=None", with_argument(named, argument.name, None))
        for label, other in with_other_scalars(subject, example):
            yield check(label, other)


def fake_symbols(subject: Subject, details: Details) -> Iterator[Case]:
    """Does the fake kernel describe the same if sizes are symbols?"""
    if subject.fake_problem is not None:
        subject = with_fake_kernel(subject, details)
    for example in subject.accepted():
        present = [n for n in sizes(example) if n > 1]
        if present:
            yield Case("symbols for sizes", fakes_with_symbols, example)
        for _, single in each_resized(example, dict.fromkeys(present, 1), subject=subject):
            yield Case("tensors of one element", fakes_with_symbols, single)
        if any(isinstance(result, int) for result in subject.first_results(example)):
            changes = [{size: new} for size in present for new in (2, size + 1)]
            for change, resized in each_resized(example, *changes, subject=subject):
                yield Case(sizes_changed(change), fakes_with_symbols, resized)


def fake_devices(subject: Subject, details: Details) -> Iterator[Case]:
    """Does the fake kernel return results on the device of the arguments?"""
    subject = with_fake_kernel(subject, details)
    device, kernels = devices.accelerator_type(), set(subject.operator.kernels)
    if kernels == {"cpu"} or not (kernels or subject.is_for(device)):
        raise CannotCheck("its kernels are for the CPU alone")
    why = "fake tensors on another device are made of strided ones"
    for example in strided(subject, details, why).accepted(most=1):
        if any(tensor.is_floating_point() for tensor in example.tensors):
            label, options = f"arguments on {device}", {"device": device}
            yield Case(label, fakes_on_the_device, example, options=options)


def _stock(test: str, subject: Subject) -> Iterator[Case]:
    """One of opcheck's tests on each example, with gradients if there is a formula."""
    check = functools.partial(_opcheck, test)
    for original in subject.originals[:3]:
        values = by_name(subject, original).kwargs.values()
        draws = any(isinstance(value, torch.Generator) for value in values)
        if draws and test != "test_autograd_registration":
            raise CannotCheck("opcheck would pass one generator to two calls, which advance it")
        yield check("the example", original)
    gradients = trainable_example(subject)
    if test == "test_autograd_registration" and not subject.schema.is_mutable:
        # Also without a formula: gradients that flow through the kernel are what it looks for.
        with contextlib.suppress(Exception):
            tracked = requiring_grad(subject.accepted(most=1)[0])
            subject.op(*tracked.args, **tracked.kwargs)
            gradients = tracked
    if gradients is not None and not any(t.requires_grad for t in subject.originals[0].tensors):
        yield check("the example, requiring grad", gradients)


def autograd_registration(subject: Subject, details: Details) -> Iterator[Case]:
    """Is autograd support registered where PyTorch looks for it?"""
    if not subject.devices <= {"cpu", "cuda", "xpu"}:
        raise CannotCheck("PyTorch's check of it knows CPU, CUDA and XPU alone")
    yield from _stock("test_autograd_registration", subject)


def aot_dispatch_static(subject: Subject, details: Details) -> Iterator[Case]:
    """Does AOTAutograd compute the same, gradients included?"""
    subject = with_fake_kernel(subject, details)
    if subject.sizes_depend_on_data:
        raise CannotCheck("the sizes of its results depend on data, so they are never static")
    yield from _stock("test_aot_dispatch_static", subject)


def aot_dispatch_dynamic(subject: Subject, details: Details) -> Iterator[Case]:
    """The same with dynamic shapes?"""
    subject = with_fake_kernel(subject, details)
    yield from _stock("test_aot_dispatch_dynamic", subject)


def _calls(subject: Subject) -> Iterator[Example]:
    """The calls of one program: of an example, in several layouts."""
    for example in subject.accepted(most=2):
        yield example
        for layout in ("transposed", "sliced", "expanded"):
            places = set(range(len(example.tensors)))
            if layout == "expanded" or subject.schema.form is Form.OUT:
                places -= subject.written_places(example)  # Dynamo takes contiguous out= only
            with contextlib.suppress(CannotCheck):
                variant = in_layout(layout, places)(example)
                if subject.refusal(variant) is None:
                    yield variant


def _compile(backend: str, dynamic: bool, subject: Subject, details: Details) -> Iterator[Case]:
    """All calls in one program."""
    subject = with_programs(subject, details)
    gradients = trainable_example(subject) is not None
    calls = list(_calls(subject))
    if gradients:
        calls = [requiring_grad(call) for call in calls]
    if not any(call.tensors for call in calls):
        raise CannotCheck("no argument is a tensor")
    options = {"backend": backend, "dynamic": dynamic, "gradients": gradients}
    details["calls in one program"] = len(calls)
    together = Example(tuple(tuple(call) for call in calls), {})
    if subject.is_random:
        raise CannotCheck("its results are random, and compilers draw other numbers")
    arrange = functools.partial(_accepted, subject)
    yield Case("all layouts", compiles_the_same, together, arrange, options, calls=False)


def _accepted(subject: Subject, calls: Example) -> Example:
    """Calls, none of which the operator refuses: smaller ones may be other than they should be."""
    for args, kwargs in calls.args:
        error = subject.refusal(Example(args, kwargs))
        if error is not None:
            raise CannotCheck(reason(error))
    return calls


def export(subject: Subject, details: Details) -> Iterator[Case]:
    """Does an exported program do the same, saved and loaded again?"""
    subject = with_fake_kernel(subject, details)
    subject.needs_fixed_results()
    for example in subject.accepted(most=1):
        if example.tensors:
            yield Case("the example", exports_the_same, example)
    raise CannotCheck("there is no tensor")


def export_dynamic(subject: Subject, details: Details) -> Iterator[Case]:
    """Does an exported program leave sizes open, or does something specialise?"""
    subject = with_fake_kernel(subject, details)
    subject.needs_fixed_results()
    options = functools.partial(_open_sizes, subject)
    for example in subject.accepted(most=1):
        if options(example)["dynamic"]:
            yield Case("the example", exports_the_same, example, options=options)
    raise CannotCheck("no size may be another one")


def _open_sizes(subject: Subject, example: Example) -> dict[str, list[int]]:
    """The sizes of an example in place of which the kernel takes another one."""

    def is_open(size: int) -> bool:
        changes = {size: size + 1}, {size: size + 2}
        resized = [e for _, e in each_resized(example, *changes, subject=subject)]
        return len(resized) == 2 and all(subject.refusal(each) is None for each in resized)

    return {"dynamic": [size for size in sizes(example) if size > 1 and is_open(size)]}


_SAME = "Does a compiled program do the same"
_COMPILERS = (
    ("subsystems.compile", "aot_eager", False, f"{_SAME} (aot_eager, static shapes)?"),
    ("subsystems.compile_dynamic", "aot_eager", True, f"{_SAME} (aot_eager, dynamic shapes)?"),
    ("subsystems.inductor", "inductor", False, "Does a program compiled by Inductor do the same?"),
)
CHECKS = (
    *family("subsystems", fake, fake_symbols, fake_devices),
    *family("subsystems", autograd_registration, aot_dispatch_static, aot_dispatch_dynamic),
    *family("subsystems", export, export_dynamic, is_costly=True),
    *(
        CheckKind(name, question, functools.partial(_compile, backend, dynamic), is_costly=True)
        for name, backend, dynamic, question in _COMPILERS
    ),
)
