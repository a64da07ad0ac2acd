"""Checks of compilers: the fake kernel, opcheck, torch.compile and torch.export."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from typing import Any

import torch

from torchop._compat.fake_tensors import new_fake_mode, number_of
from torchop._schema.forms import Form
from torchop.testing._check.kinds import CheckKind, Details
from torchop.testing._check.subject import CannotCheck, Case, Example, Subject, reason
from torchop.testing._check.subsystems.gradients import formula_problem
from torchop.testing._check.variants import LAYOUTS, lay_out, resized, sizes
from torchop.testing._opcheck import opcheck
from torchop.testing.probes import (
    assert_same,
    copies,
    leaves,
    mapped,
    outcome,
    tensors_of,
    weighted_sum,
    with_tensors,
    written,
    written_places,
)

# --------------------------------------------------------------------------------------------------
# Probes


def passes_opcheck(op: Any, args: Any, kwargs: Any, test: str) -> None:
    """One of the checks of `torch.library.opcheck`."""
    opcheck(op, args, kwargs, test_utils=test)


def compiles_the_same(
    op: Any, args: Any, kwargs: Any, backend: str, dynamic: bool = False, gradients: bool = False
) -> None:
    """Several calls in one compiled program do the same as in eager mode, gradients included.

    `args` holds the calls, each with its arguments and keyword arguments.
    """

    places = written_places(op)

    def program(calls: Any) -> list[Any]:
        results = []
        for call_args, call_kwargs in calls:
            results += leaves(op(*call_args, **call_kwargs))
            results += written(places, call_args, call_kwargs)
        return results

    def run(function: Any) -> list[Any]:
        torch.manual_seed(0)
        calls = copies(args)
        inputs = [tensor for tensor in tensors_of(calls) if tensor.requires_grad]
        results = function(calls)
        if not gradients:
            return list(results)
        tensors = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        grads = torch.autograd.grad(weighted_sum(tensors), inputs, allow_unused=True)
        return [*results, *grads]

    torch.compiler.reset()
    try:
        compiled = torch.compile(program, backend=backend, dynamic=dynamic, fullgraph=True)
        assert_same(run(compiled), run(program), f"compiled with {backend}")
    finally:
        torch.compiler.reset()


def exports_the_same(op: Any, args: Any, kwargs: Any, dynamic: Any = ()) -> None:
    """A program that was exported, saved and loaded does the same as the call.

    Dimensions of the sizes in `dynamic` may have other sizes when the program runs.
    """

    places = written_places(op)

    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> list[Any]:
            call_args, call_kwargs = with_tensors((args, kwargs), [t.clone() for t in tensors])
            results = leaves(op(*call_args, **call_kwargs))
            return results + written(places, call_args, call_kwargs)

    tensors = tuple(tensor.detach() for tensor in tensors_of((args, kwargs)))
    shapes = None
    if dynamic:
        auto = torch.export.Dim.DYNAMIC
        shapes = {
            "tensors": tuple(
                {d: auto for d, n in enumerate(t.shape) if n in dynamic} for t in tensors
            )
        }
    exported = torch.export.export(Module(), tensors, dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    reloaded = torch.export.load(file).module()
    torch.manual_seed(0)
    expected = Module()(*tensors)
    torch.manual_seed(0)
    assert_same(reloaded(*tensors), expected, "exported, saved and loaded")


def fakes_with_symbols(op: Any, args: Any, kwargs: Any) -> None:
    """With sizes that are symbols, the fake kernel returns the shape and strides of the results."""
    expected = outcome(op, *copies((args, kwargs)))
    mode = new_fake_mode()
    with mode:
        actual = outcome(op, *mapped((args, kwargs), mode.from_tensor))
    if len(actual) != len(expected):
        raise AssertionError(
            f"the fake kernel returns {len(actual)} tensors, and the kernel {len(expected)}."
        )
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(other, torch.Tensor):
            continue
        for what, fake, real in (
            ("size", one.shape, other.shape),
            ("stride", one.stride(), other.stride()),
        ):
            for dim, (symbol, number) in enumerate(zip(fake, real, strict=True)):
                hint = number_of(symbol)
                is_seen = what == "size" or (other.numel() and other.shape[dim] > 1)
                if hint is not None and is_seen and hint != number:
                    raise AssertionError(
                        f"result {index} has {what} {number} in dimension {dim}, but {hint} from "
                        "a fake kernel that gets symbols for sizes."
                    )


# --------------------------------------------------------------------------------------------------
# Cases


def _fake(subject: Subject, details: Details) -> Iterator[Case]:
    """The metadata of results, for every layout, and for sizes 0 and 1."""
    check = functools.partial(Case, probe=passes_opcheck, options={"test": "test_faketensor"})
    for example in subject.accepted():
        yield check("the example", example=example)
        places = set(range(len(example.tensors)))
        read_only = places - subject.written_places(example)
        for layout in LAYOUTS:
            chosen = read_only if layout == "expanded" else places
            for some in [chosen, *({p} for p in sorted(chosen) if len(chosen) > 1)]:
                arrange = functools.partial(lay_out, dict.fromkeys(some, layout))
                try:
                    arrange(example)
                except CannotCheck:
                    continue
                which = "all tensors" if some == chosen else f"tensor {min(some)}"
                yield check(f"{which} {layout}", example=example, arrange=arrange)
        for size in sizes(example):
            for new in (0, 1, size + 1):
                if new != size and (size or new == 0):
                    smaller = resized(example, {size: new})
                    yield check(f"dimensions of {size} with {new}", example=smaller)


def _symbols(subject: Subject, details: Details) -> Iterator[Case]:
    subject.needs_fake()
    for example in subject.accepted():
        if any(n > 1 for t in example.tensors for n in t.shape):
            yield Case("symbols for sizes", fakes_with_symbols, example)


def _stock(test: str, subject: Subject, details: Details) -> Iterator[Case]:
    """One of opcheck's tests on each example, with gradients if there is a formula."""
    if "aot" in test:
        subject.needs_fake()
        if "static" in test and subject.sizes_depend_on_data:
            raise CannotCheck("the sizes of its results depend on data, so they are never static")
    for original in subject.originals[:3]:
        yield Case("the example", passes_opcheck, original, options={"test": test})
    gradients = _trainable(subject)
    if gradients is not None and not any(t.requires_grad for t in subject.originals[0].tensors):
        yield Case("the example, requiring grad", passes_opcheck, gradients, options={"test": test})


def _trainable(subject: Subject) -> Example | None:
    """The first example, requiring grad; None if the operator has no formula."""
    if subject.schema.is_mutable:
        return None
    try:
        if formula_problem(subject) is not None:
            return None
    except CannotCheck:
        return None
    example = subject.accepted(most=1)[0].map(_leaf)
    return example if any(t.requires_grad for t in example.tensors) else None


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_() if tensor.dtype.is_floating_point else tensor


def _calls(subject: Subject, gradients: bool) -> list[Example]:
    """The calls of one program: of an example, in several layouts."""
    calls: list[Example] = []
    for example in subject.accepted(most=2):
        calls.append(example)
        for layout in ("transposed", "sliced", "expanded"):
            places = set(range(len(example.tensors)))
            if layout == "expanded" or subject.schema.form is Form.OUT:
                places -= subject.written_places(example)  # Dynamo takes contiguous out= only
            try:
                variant = lay_out(dict.fromkeys(places, layout), example)
            except CannotCheck:
                continue
            if subject.refusal(variant) is None:
                calls.append(variant)
    if gradients:
        calls = [call.map(lambda t: _leaf(t.detach())) for call in calls]
    return calls


def _compile(backend: str, dynamic: bool, subject: Subject, details: Details) -> Iterator[Case]:
    """All calls in one program."""
    subject.needs_fake()
    gradients = _trainable(subject) is not None
    calls = _calls(subject, gradients)
    if not any(call.tensors for call in calls):
        raise CannotCheck("no argument is a tensor")
    options: dict[str, Any] = {"backend": backend, "dynamic": dynamic, "gradients": gradients}
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


def _export(dynamic: bool, subject: Subject, details: Details) -> Iterator[Case]:
    subject.needs_fake()
    if subject.is_random:
        raise CannotCheck("its results are random")
    for example in subject.accepted(most=1):
        if not example.tensors:
            continue
        options: Any = functools.partial(_open_sizes, subject) if dynamic else {}
        if dynamic and not _open_sizes(subject, example)["dynamic"]:
            continue
        yield Case("the example", exports_the_same, example, options=options)
    raise CannotCheck("no size may be another one" if dynamic else "there is no tensor")


def _open_sizes(subject: Subject, example: Example) -> dict[str, list[int]]:
    """The sizes of an example in place of which the kernel takes another one."""
    open_sizes = [
        size
        for size in sizes(example)
        if size > 1
        and all(subject.refusal(resized(example, {size: n})) is None for n in (size + 1, size + 2))
    ]
    return {"dynamic": open_sizes}


_STOCK = {
    "test_autograd_registration": "Is autograd support registered where PyTorch looks for it?",
    "test_aot_dispatch_static": "Does AOTAutograd compute the same, gradients included?",
    "test_aot_dispatch_dynamic": "The same with dynamic shapes?",
}

CHECKS = (
    CheckKind(
        "subsystems.fake",
        "Does the fake kernel describe what is returned, in every layout, with sizes 0 and 1?",
        _fake,
    ),
    CheckKind(
        "subsystems.fake_symbols",
        "Does the fake kernel describe the same if sizes are symbols?",
        _symbols,
    ),
    *(
        CheckKind(
            f"subsystems.{test.removeprefix('test_')}", question, functools.partial(_stock, test)
        )
        for test, question in _STOCK.items()
    ),
    CheckKind(
        "subsystems.export",
        "Does an exported program do the same, saved and loaded again?",
        functools.partial(_export, False),
        is_costly=True,
    ),
    CheckKind(
        "subsystems.export_dynamic",
        "Does an exported program leave sizes open, or does something specialise?",
        functools.partial(_export, True),
        is_costly=True,
    ),
    CheckKind(
        "subsystems.compile",
        "Does a compiled program do the same (aot_eager, static shapes)?",
        functools.partial(_compile, "aot_eager", False),
        is_costly=True,
    ),
    CheckKind(
        "subsystems.compile_dynamic",
        "Does a compiled program do the same (aot_eager, dynamic shapes)?",
        functools.partial(_compile, "aot_eager", True),
        is_costly=True,
    ),
    CheckKind(
        "subsystems.inductor",
        "Does a program compiled by Inductor do the same?",
        functools.partial(_compile, "inductor", False),
        is_costly=True,
    ),
)
