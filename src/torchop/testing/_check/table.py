"""The table of all checks. To add a check, add a row to `CHECKS`.

Every check is named after its family, followed by a dot and a name within the family, for example
`"memory.transposed"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchop._rules.providers.provider import Provider
from torchop.testing._check.calls import Call, CannotCheck, Refused
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks import (
    accelerator,
    agreement,
    contexts,
    digits,
    fakes,
    gradient_cases,
    gradients,
    incoming_gradients,
    later_calls,
    leaking,
    process,
    programs,
    providers,
    residuals,
    results,
)
from torchop.testing._check.sizes import ODD
from torchop.testing._check.subject import Subject
from torchop.testing._check.variants import VARIANTS

# Returns the keyword arguments of a probe for one call, or raises CannotCheck if the probe cannot
# be used for this call.
Options = Callable[[Subject, Case, Call], dict[str, Any]]
# Yields the cases of a check, and may add details to the result of the check.
Cases = Callable[[Subject, Details], Iterator[Case]]


@dataclass(frozen=True)
class CheckKind:
    """One row of the table: a check that applies to any operator.

    `question` appears in reports and in the documentation. `probe` is the default for cases that do
    not specify a probe. `of_kernel` decides whether to repeat the check for the kernel of a
    provider. Checks with `is_costly` compile programs, so they run last. With `takes_refused`, the
    probe runs even if the call raises an exception.
    """

    name: str
    question: str
    cases: Cases
    probe: Callable[..., object] | None = None
    options: Options = lambda subject, case, call: {}
    of_kernel: Callable[[Provider], object] = lambda provider: False
    is_costly: bool = False
    takes_refused: bool = False

    @property
    def is_of_providers(self) -> bool:
        return self.name.startswith("providers.")


def _of(
    name: str, options: dict[str, Any], variants: str, question: str, **more: Any
) -> tuple[CheckKind, ...]:
    """Return a tuple with a single check that runs a probe on the calls from several variants.

    `variants` contains the names of the variants, separated by spaces.
    """

    def cases(subject: Subject, details: Details) -> Iterator[Case]:
        problem = None
        for variant in variants.split():
            try:
                yield from subject.cases(VARIANTS[variant])
            except CannotCheck as error:
                problem = problem or error
        if problem is not None:
            raise problem

    return (CheckKind(name, question, cases, **options, **more),)


def _each(family: str, options: dict[str, Any], **questions: str) -> tuple[CheckKind, ...]:
    """Return a separate check for each variant.

    The keywords in `questions` are the names of the variants. Their values are the questions that
    the checks answer.
    """
    items = questions.items()
    return tuple(c for name, text in items for c in _of(f"{family}.{name}", options, name, text))


def alone(family: str, *functions: Cases, **options: Any) -> tuple[CheckKind, ...]:
    """Return a check for each of several functions that yield cases.

    The name of the function becomes the last part of the check's name, and the first line of its
    docstring becomes the question that the check answers.
    """
    # `python -OO` strips docstrings, so `__doc__` may be None.
    questions = [(each.__doc__ or "").partition("\n")[0] for each in functions]
    names = [f"{family}.{each.__name__}" for each in functions]
    rows = zip(names, questions, functions, strict=True)
    return tuple(CheckKind(*row, **options) for row in rows)


# --------------------------------------------------------------------------------------------------
# Options of probes


def _compared(subject: Subject, case: Case, call: Call) -> dict[str, Any]:
    try:
        options = subject.expectation(call.example, case.label)
    except Refused as error:
        if case.group == "plain":
            raise ValueError(f"{error} The operator accepts this example.") from None
        raise
    if "expected" not in options and case.group == "layout":
        subject.share_expected(call, case.example)
    return options


def _in_blocks(subject: Subject, case: Case, call: Call) -> dict[str, Any]:
    options = _compared(subject, case, call)
    if subject.is_random:
        return options
    if any(ODD in tensor.shape for tensor in call.tensors):
        options["odd"] = ODD
    if "expected" not in options:
        predicted = results.repeated_results(subject, call)
        if predicted is not None:
            options["repeated_to"], options["expected"] = predicted
            options["what"] += ", compared with the results for a small size, repeated"
    return options


def _with_reference(subject: Subject, case: Case, call: Call) -> dict[str, Any]:
    if subject.reference is None:
        raise CannotCheck("no reference was passed")
    return _compared(subject, case, call)


def _unchanged(subject: Subject, case: Case, call: Call) -> dict[str, Any]:
    subject.needs_fixed_results()
    return {"example": tuple(case.example)}


def _reproducible(subject: Subject, case: Case, call: Call) -> dict[str, Any]:
    subject.needs_fixed_results()
    return {}


def _tolerant(subject: Subject, case: Case, call: Call) -> dict[str, Any]:
    subject.needs_fixed_results()
    return subject.tolerances


def _labelled(subject: Subject, case: Case, call: Call) -> dict[str, Any]:
    subject.needs_fixed_results()
    return {"what": case.label}


def _of_threads(subject: Subject, case: Case, call: Call) -> dict[str, Any]:
    # PyTorch splits a call among several threads only if it has more than 32,768 elements. Small
    # calls therefore run in a single thread, and must not depend on the number of threads at all.
    return {"draws": subject.is_random, "is_large": case.group == "size", **subject.tolerances}


def _describable(subject: Subject, case: Case, call: Call) -> dict[str, Any]:
    subject.needs_fake()
    return {}


_SAME = {"probe": results.same_as_contiguous, "options": _compared}
_RIGHT = {"probe": results.same_as_contiguous, "options": _with_reference}
_REFUSED = {"probe": results.same_or_refused, "options": _labelled, "takes_refused": True}
_WRITTEN = {"probe": results.writes_every_element, "options": _tolerant}
_SCHEMA = {"probe": results.keeps_its_schema}
_DOUBLE = {"probe": digits.agrees_with_double, "options": _tolerant}
_AGREES: dict[str, Any] = {
    "probe": agreement.agrees_with_reference,
    "options": providers.provider_options,
}
_FAKE = {"probe": fakes.describes_results}
_PROMOTED = {"probe": fakes.describes_results, "options": _describable}

_LAYOUTS = (
    "contiguous transposed gaps sliced offset channels_last odd_strides negative conjugate "
    "expanded expanded_last"
)
_SIZES = "empty single longer"
# A kernel may violate its schema for a single dtype or layout, so try nearly all variants. Leave
# out the slow variant "blocks". Also leave out variants whose arguments share memory, because a
# declared write to one argument then changes the others as well.
_ALL_VARIANTS = " ".join(
    name
    for name, each in VARIANTS.items()
    if each.group != "sharing" and name not in ("blocks", "tiles", "odd", "other_out")
)


def _always(provider: Provider) -> bool:
    return True


def _if_deterministic(provider: Provider) -> bool:
    return provider.deterministic


# --------------------------------------------------------------------------------------------------
# The table

CHECKS: tuple[CheckKind, ...] = (
    # The "contracts" checks run first, because calls in other checks may change state that the
    # operator keeps, such as a cache.
    *_of(
        "contracts.schema",
        _SCHEMA,
        _ALL_VARIANTS,
        "Does it write only declared arguments, and return fresh memory?",
        of_kernel=_always,
    ),
    *alone("contracts", process.repeated, later_calls.state, of_kernel=_if_deterministic),
    *alone("contracts", later_calls.written),
    *alone("contracts", process.kept, leaking.leaks, process.process, of_kernel=_always),
    *alone("contracts", process.environment, of_kernel=_if_deterministic),
    *_of(
        "contracts.num_threads",
        {"probe": results.ignores_num_threads, "options": _of_threads},
        "plain blocks",
        "Are results the same for any number of threads?",
        of_kernel=_always,
    ),
    *alone("contracts", digits.defaults),
    *_of(
        "memory.given",
        {**_SAME, "takes_refused": True},
        "given",
        "Is the result for the examples the same as for contiguous copies?",
    ),
    *_of(
        "memory.uninitialized",
        _WRITTEN,
        "plain",
        "Is every element of a result written?",
        of_kernel=_always,
    ),
    *_each(
        "memory",
        _SAME,
        contiguous="Does it stay within the memory of contiguous tensors?",
        transposed="Is the result the same for transposed tensors?",
        gaps="Is it the same for tensors with gaps between elements?",
        sliced="Is it the same for slices of larger tensors?",
        offset="Is it the same for tensors with a storage offset?",
        channels_last="Is it the same for channels-last tensors?",
        negative="Is it the same for negative views?",
        conjugate="Is it the same for conjugate views?",
    ),
    *_of(
        "memory.expanded",
        _SAME,
        "expanded expanded_last",
        "Is it the same for expanded tensors?",
    ),
    *_each(
        "memory",
        _SAME,
        empty="Is it right for tensors without elements?",
        single="Is it right for dimensions of size 1?",
        odd_strides="Does it ignore the strides of dimensions of size 1?",
        zero_dim="Is it right for tensors without dimensions?",
    ),
    *_of(
        "memory.declared",
        {"probe": results.has_declared_layouts},
        "undeclared",
        "Does the kernel get the layouts that the operator declares, also in inference mode?",
    ),
    *_each("memory", _REFUSED, written_expanded="Does it refuse to write expanded tensors?"),
    *_of(
        "memory.out",
        {"probe": results.resizes_outputs, "options": _unchanged, "takes_refused": True},
        "other_out",
        "Are `out=` arguments of another shape resized, or refused?",
    ),
    *_of(
        "memory.blocks",
        {"probe": results.right_in_blocks, "options": _in_blocks},
        "blocks tiles odd",
        "Is every element written, and right, if sizes exceed common block sizes?",
        of_kernel=_always,
    ),
    *alone("dtypes", fakes.accepted, probe=fakes.describes_results),
    *_each("dtypes", _PROMOTED, promotion="Does the fake kernel promote dtypes like the kernel?"),
    *_of(
        "dtypes.numbers",
        _DOUBLE,
        "precisions",
        "Are results as precise as the dtype?",
    ),
    *_of(
        "dtypes.half",
        {"probe": digits.keeps_digits_of_half, "options": _reproducible},
        "half_digits",
        "Are float16 results not rounded to bfloat16?",
    ),
    *_of(
        "dtypes.double",
        {"probe": digits.computes_in_double},
        "digits",
        "Are double results not rounded to float32 or bfloat16?",
    ),
    *alone("dtypes", digits.int64, digits.indices, digits.float_arguments),
    *_each(
        "values",
        _SAME,
        nan="Is the result for NaN the same in each layout?",
        inf="Is it the same for infinities?",
        zeros="Is it the same for zeros of both signs?",
        denormals="Is it the same for subnormal numbers?",
        extremes="Is it the same for the largest and smallest numbers of the dtype?",
    ),
    *_each(
        "values",
        _RIGHT,
        int8="Does it agree with the reference for the limits of 8-bit integers?",
        scalars="Does it agree with the reference for other scalars?",
    ),
    *alone("values", results.negative_dim),
    *_each(
        "sharing",
        _SAME,
        one="Is the result the same if two arguments are one tensor?",
        overlap="Is it the same if arguments overlap?",
    ),
    *_each(
        "sharing",
        _REFUSED,
        written="Is the result right if an argument overlaps a written one, or is that refused?",
    ),
    *alone("providers", providers.supports, of_kernel=_always),
    *alone("providers", providers.agrees, of_kernel=_always, **_AGREES),
    *alone("providers", providers.configs, of_kernel=lambda provider: len(provider.configs) > 1),
    *alone("providers", providers.gradients, of_kernel=_always),
    *alone("providers", providers.batch_invariant, of_kernel=lambda p: p.batch_invariant),
    *_of(
        "subsystems.fake",
        _FAKE,
        f"plain {_LAYOUTS} {_SIZES} uneven counts unequal block absent scalars zeros nan",
        "Does the fake kernel return the right metadata?",
        of_kernel=_always,
    ),
    *alone("subsystems", fakes.fake_symbols, fakes.fake_devices, fakes.autograd_registration),
    *alone(
        "subsystems",
        incoming_gradients.grad_strides,
        gradient_cases.gradcheck,
        gradients.gradgradcheck,
    ),
    *alone(
        "subsystems", gradients.forward_mode, incoming_gradients.needs_input_grad, gradients.saved
    ),
    *alone("subsystems", incoming_gradients.grad_memory),
    *alone("subsystems", residuals.residuals, contexts.vmap, contexts.vmap_random, contexts.func),
    *alone("subsystems", process.threads, of_kernel=_if_deterministic),
    *alone("subsystems", contexts.autocast, contexts.inference_mode),
    *alone("subsystems", contexts.subclasses, contexts.sharding, contexts.flops),
    *alone("subsystems", accelerator.accelerator, accelerator.capture),
    *alone("subsystems", contexts.vmap_compiled, programs.compiled, is_costly=True),
    *alone("subsystems", programs.compiled_autocast, programs.export_dynamic, is_costly=True),
)
