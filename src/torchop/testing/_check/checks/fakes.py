"""Checks of fake kernels, and of the dispatch keys for which autograd kernels are registered."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import devices, fake_tensors, optests, tracing
from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck, Example, reason
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks.gradients import requiring_grad
from torchop.testing._check.checks.results import succeeds
from torchop.testing._check.sizes import each_resized, sizes, sizes_changed
from torchop.testing._check.subject import Subject
from torchop.testing._check.variants import VARIANTS

# --------------------------------------------------------------------------------------------------
# Fake kernels


def describes_results(call: Call, symbols: bool = False) -> None:
    """Check that the results of the fake kernel have the same metadata as the real results.

    If `symbols` is true, pass fake tensors with symbolic sizes to the fake kernel.
    """
    succeeds(call)
    mode, (args, kwargs) = _with_fake_tensors(call.example, symbols)
    given = probes.tensors_of((args, kwargs))
    before = [(tensor.shape, tensor.stride()) for tensor in given if probes.has_strides(tensor)]
    results: list[Any] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        results.append(call.op(*args, **kwargs))
        return results[0]

    with mode:
        try:
            actual = probes.outcome(call.op, args, kwargs, noted)
        except fake_tensors.UnsupportedOperatorException as error:
            raise AssertionError(
                f"{error.func.name()} has no fake kernel, so compilers cannot determine the shapes "
                "and dtypes of its results. Register one with register_fake."
            ) from error
    if symbols:
        fake_tensors.check_symbols(mode, actual)
    whose = "the fake kernel with symbolic sizes" if symbols else "the fake kernel"
    assert_same_metadata(actual, call.record.outcome, "result", whose)
    fake, real = _structure(results[0]), _structure(call.record.result)
    if fake != real:
        raise AssertionError(f"the kernel returns {real}, but {whose} returns {fake}.")
    if call.schema.is_functional:
        _share_nothing(call, probes.tensors_of(results), given, before, whose)


def _structure(result: Any) -> str:
    """Describe how a result is nested, and which of its items are None."""
    if isinstance(result, (list, tuple)):
        items = ", ".join(map(_structure, result))
        return f"[{items}]" if isinstance(result, list) else f"({items})"
    return "None" if result is None else "a tensor" if isinstance(result, Tensor) else "a value"


def _share_nothing(
    call: Call, results: Sequence[Tensor], given: Sequence[Tensor], before: Any, whose: str
) -> None:
    """Check that the fake kernel returns new tensors, and does not change its arguments.

    If results share memory with each other or with arguments, compilers treat them as views.
    """
    if before != [(t.shape, t.stride()) for t in given if probes.has_strides(t)]:
        raise AssertionError(f"{whose} changes the shape or the strides of an argument.")
    owners: dict[int, str] = {}
    named = [
        *zip(call.names, given, strict=True),
        *((f"result {index}", result) for index, result in enumerate(results)),
    ]
    for name, tensor in named:
        if not probes.has_strides(tensor):
            continue
        owner = owners.setdefault(tracing.functional_storage(tensor), name)
        if owner != name and name.startswith("result"):
            raise AssertionError(
                f"{name} of {whose} shares memory with {owner}, but the schema declares a "
                "new tensor. Make each result of the fake kernel with torch.empty or empty_like."
            )


class WrongMetadata(Exception):  # noqa: N818  (not raised: the cause of an AssertionError)
    """The `__cause__` of an AssertionError about wrong metadata.

    Reports put failures with equal causes into one group.
    """


def assert_same_metadata(
    fakes: Sequence[Any], reals: Sequence[Any], what: str, whose: str = "the fake kernel"
) -> None:
    if len(fakes) != len(reals):
        raise AssertionError(f"{whose} returns {len(fakes)} {what}s, but the kernel {len(reals)}.")
    for index, (fake, real) in enumerate(zip(fakes, reals, strict=True)):
        if isinstance(real, float | str) and isinstance(fake, float | str):
            if fake != real and not (fake != fake and real != real):
                raise AssertionError(
                    f"{what} {index} is {real!r} from the kernel, but {fake!r} from {whose}. "
                    "Compiled programs use the number of the fake kernel. Return a tensor instead."
                )
            continue
        if not isinstance(real, Tensor):
            is_size = isinstance(real, int) and isinstance(fake, int | torch.SymInt)
            if is_size and fake_tensors.number_of(fake) not in (None, real):
                raise AssertionError(
                    f"{what} {index} is {real} from the kernel, but {fake} from {whose}. If it "
                    "depends on data, return torchop.get_ctx().new_dynamic_size()."
                )
            continue
        for name, described, actual in _metadata(fake, real):
            if described != actual:
                advice = _advice_on_strides(real) if "stride" in name else ""
                raise AssertionError(
                    f"{what} {index} has {name} {actual} from the kernel, but {described} from "
                    f"{whose}.{advice}"
                ) from WrongMetadata(f"{what} {index}: {name.split()[-1]}")


def _with_fake_tensors(example: Example, symbols: bool) -> Any:
    mode = fake_tensors.new_fake_mode()
    if symbols:
        return mode, tuple(example.map(mode.from_tensor))
    try:
        with mode:  # raises for some sparse layouts
            return mode, tuple(example.map(lambda t: mode.from_tensor(t, static_shapes=True)))
    except Exception as error:
        layouts = ", ".join(sorted({str(t.layout) for t in example.tensors}))
        raise NotImplementedError(
            f"PyTorch has no fake tensors with layout {layouts}: {reason(error)}"
        ) from None


def _metadata(fake: Tensor, real: Tensor) -> Iterator[tuple[str, Any, Any]]:
    """Yield `(name, fake value, real value)` for each metadata property that must agree."""
    yield "dtype", fake.dtype, real.dtype
    yield "layout", fake.layout, real.layout
    yield "device", fake.device.type, real.device.type
    yield "number of dimensions", fake.dim(), real.dim()
    pairs = list(zip(fake.shape, real.shape, strict=False))
    for dim, (symbol, size) in enumerate(pairs):
        yield f"in dimension {dim} the size", _known(symbol, size), size
    if real.layout is not torch.strided or not real.numel() or real.is_neg() or real.is_conj():
        return
    for dim, (symbol, stride) in enumerate(zip(fake.stride(), real.stride(), strict=False)):
        if real.shape[dim] > 1:
            yield f"in dimension {dim} the stride", _known(symbol, stride), stride


def _known(symbol: Any, number: int) -> int:
    hint = fake_tensors.number_of(symbol)
    return number if hint is None else hint


def _advice_on_strides(real: Tensor) -> str:
    if not real.is_contiguous():
        return " Return these strides from the fake kernel, or a contiguous tensor from the kernel."
    return (
        " If the kernel returns a contiguous tensor for all arguments, create the fake result with "
        "x.new_empty(...), or with torch.empty_like(x, memory_format=torch.contiguous_format)."
    )


def fakes_beside_scalars(call: Call, device: str) -> None:
    """Check the device of fake results when 0-dim tensors are on the CPU and others on `device`.

    PyTorch's own operators accept this combination and return results on `device`, so the fake
    kernel must not take the device from a 0-dim tensor.
    """
    with fake_tensors.new_fake_mode():

        def moved(tensor: Tensor, but_scalars: bool) -> Tensor:
            place = "cpu" if but_scalars and not tensor.dim() else device
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place
            )

        def results(but_scalars: bool) -> list[Tensor]:
            args, kwargs = call.example.map(lambda t: moved(t, but_scalars))
            return probes.tensors_of(probes.leaves(call.op(*args, **kwargs)))

        try:
            pairs = list(zip(results(True), results(False), strict=True))
        except Exception as error:
            raise CannotCheck(f"the fake kernel refuses it: {reason(error)}") from None
    for index, (result, other) in enumerate(pairs):
        if result.dim() and result.device.type == "cpu" and other.device.type == device:
            scalars = [n for n, t in zip(call.names, call.tensors, strict=True) if not t.dim()]
            raise AssertionError(
                f"result {index} of the fake kernel is on cpu if {' and '.join(scalars)} is on "
                f"cpu and all others are on {device}. Take the device of a tensor with dimensions."
            )


def fakes_on_the_device(call: Call, device: str) -> None:
    """Check that the fake kernel returns floating-point tensors on the device of the arguments.

    Fake tensors have no memory, so `device` need not exist. Call the fake kernel twice, and make
    `device` the default device in the second call. If a result is on `device` only in the second
    call, the fake kernel has created it without `device=`, which is a bug. If a result is on
    another device in both calls, assume that the author chose that device on purpose.
    """
    with fake_tensors.new_fake_mode():
        args, kwargs = call.example.map(
            lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
        )
        try:
            results = probes.tensors_of(probes.leaves(call.op(*args, **kwargs)))
            with optests.default_device_of_fake(call.op.name(), device):
                others = probes.tensors_of(probes.leaves(call.op(*args, **kwargs)))
        except RuntimeError as error:
            if "not linked with support for" in str(error):
                raise NotImplementedError(f"this PyTorch does not support {device}") from None
            raise
    for index, (result, other) in enumerate(zip(results, others, strict=True)):
        is_left = result.device.type != device and other.device.type == device
        if result.is_floating_point() and is_left:
            raise AssertionError(
                f"result {index} of the fake kernel is on {result.device} for arguments on "
                f"{device}. Make it with device=x.device, or x.new_empty(...)."
            )


# --------------------------------------------------------------------------------------------------
# Autograd keys


def registers_autograd(call: Call) -> None:
    """Check that results do not require grad if the operator has no autograd kernel.

    If a result requires grad, autograd has recorded the PyTorch functions inside the kernel.
    Compilers and transforms cannot see these functions, so they would miss the gradient.
    """
    args, kwargs = call.example.copy()
    try:
        with optests.without_autograd_fallback():
            results = probes.tensors_of(probes.leaves(call.op(*args, **kwargs)))
    except Exception as error:
        raise CannotCheck(f"tensors that require grad are refused: {reason(error)}") from None
    for index, result in enumerate(results):
        if result.requires_grad:
            raise AssertionError(
                f"result {index} requires grad, but no kernel is registered at an autograd key. "
                "Autograd records the kernel itself, which compilers and transforms cannot see. "
                "Use register_autograd."
            )


# --------------------------------------------------------------------------------------------------
# Each of these functions yields the cases of one check (the calls that it makes). Reports print the
# first line of the docstring as the question that the check answers.


def accepted(subject: Subject, details: Details) -> Iterator[Case]:
    """Does the fake kernel return the right dtypes for all dtypes that the operator accepts?"""
    table: dict[str, str] = details.setdefault("dtypes", {})
    for case in subject.cases(VARIANTS["dtypes"]):
        name = case.label.removeprefix("in ")
        try:
            error = subject.call(case).record.error
            dtypes = probes.tensors_of(subject.call(case).record.outcome)
            names = ", ".join(str(t.dtype).removeprefix("torch.") for t in dtypes)
            table[name] = f"refused ({type(error).__name__})" if error else f"-> {names}"
        except CannotCheck:
            table[name] = "excluded"
        if subject.fake_problem is None:
            yield case


def fake_symbols(subject: Subject, details: Details) -> Iterator[Case]:
    """Does the fake kernel return the right metadata for symbolic sizes?"""
    subject.needs_fake()
    options = {"symbols": True}
    for example in subject.accepted():
        if subject.problem_of_fake(example) is not None:
            continue  # PyTorch has no fake tensors with this layout
        present = [n for n in sizes(example) if n > 1]
        if present:
            yield Case("symbolic sizes", example, probe=describes_results, options=options)
        changes = [dict.fromkeys(present, 1)]
        first = subject.first_calls[subject.place(example)].record.outcome
        if any(isinstance(result, int) for result in first):
            changes += [{size: new} for size in present for new in (2, size + 1)]
        for change, other in each_resized(example, *changes):
            label = f"symbolic sizes, {sizes_changed(change)}"
            yield Case(label, other, None, "size", describes_results, options)


def fake_devices(subject: Subject, details: Details) -> Iterator[Case]:
    """Does the fake kernel return results on the device of the arguments?"""
    subject.needs_fake()
    device, kernels = devices.accelerator_type(), set(subject.operator.kernels)
    if kernels == {"cpu"} or not (kernels or subject.is_for(device)):
        raise CannotCheck("all kernels are for the CPU")
    for example in subject.strided("fake tensors on another device must be strided,")[:1]:
        if any(tensor.is_floating_point() for tensor in example.tensors):
            label, options = f"arguments on {device}", {"device": device}
            yield Case(label, example, probe=fakes_on_the_device, options=options)
    with contextlib.suppress(CannotCheck):  # no call has a tensor that can lose its dimensions
        for case in (*subject.cases(VARIANTS["plain"]), *subject.cases(VARIANTS["zero_dim"])):
            dims = {tensor.dim() for tensor in case.arguments().tensors}
            if 0 in dims and len(dims) > 1:
                label = f"{case.label}, tensors without dimensions on cpu, others on {device}"
                options = {"device": device}
                yield dataclasses.replace(
                    case, label=label, probe=fakes_beside_scalars, options=options
                )


def autograd_registration(subject: Subject, details: Details) -> Iterator[Case]:
    """Is the formula registered at an autograd key?"""
    if subject.has_autograd_kernel:
        raise CannotCheck("a kernel is registered at an autograd key")
    if subject.schema.is_mutable:
        raise CannotCheck("the operator writes arguments")
    for example in subject.accepted():
        tracked = requiring_grad(example)
        if any(t.requires_grad for t in tracked.tensors):
            yield Case("the example, requiring grad", tracked, probe=registers_autograd)
