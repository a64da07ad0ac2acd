"""The table of all checks: which probes run on the calls of which variants.

A check is a probe with some variants, or a function that yields its own calls. Names have the form
`family.check`, such as `"memory.transposed"`. To add a check, add a row to `CHECKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchop._rules.providers.provider import Provider
from torchop.testing._check.calls import Call, CannotCheck
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks import (
    accelerator,
    agreement,
    contexts,
    digits,
    fakes,
    gradients,
    incoming_gradients,
    process,
    providers,
    residuals,
    results,
)
from torchop.testing._check.subject import Subject
from torchop.testing._check.variants import VARIANTS

# Returns further arguments of a probe; raises CannotCheck if the probe does not apply.
Options = Callable[[Subject, Case, Call], dict[str, Any]]
# Yields the cases of a check, and may add details to the report. A CannotCheck that it raises, even
# at the end, matters only if it yielded no case.
Cases = Callable[[Subject, Details], Iterator[Case]]


@dataclass(frozen=True)
class CheckKind:
    """One check of any operator.

    Attributes:
        name: family and check, such as `"memory.transposed"`.
        question: the question that it answers, for the report.
        cases: yields the calls.
        probe: reads the records of the calls, unless a case has its own probe.
        options: further arguments of the probe.
        of_kernel: whether to repeat the check with the kernel of a provider.
        is_costly: whether it compiles programs; such checks run last.
        takes_refused: whether the probe also reads the records of calls that raised.
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
        """Whether it applies only to operators with providers."""
        return self.name.startswith("providers.")


def _of(
    name: str, options: dict[str, Any], variants: str, question: str, **more: Any
) -> tuple[CheckKind, ...]:
    """Return a check that runs the probe in `options` on the variants in a string."""

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
    """Return one check per variant, with its question."""
    items = questions.items()
    return tuple(c for name, text in items for c in _of(f"{family}.{name}", options, name, text))


def alone(family: str, *functions: Cases, **options: Any) -> tuple[CheckKind, ...]:
    """Return checks from functions that yield cases, and whose docstrings are the questions."""
    questions = [(each.__doc__ or "").partition("\n")[0] for each in functions]  # none with -OO
    names = [f"{family}.{each.__name__}" for each in functions]
    rows = zip(names, questions, functions, strict=True)
    return tuple(CheckKind(*row, **options) for row in rows)


# --------------------------------------------------------------------------------------------------
# Probes with their options


def _compared(subject: Subject, case: Case, call: Call) -> dict[str, Any]:
    """Return the options to compare with contiguous copies or with the reference."""
    options = subject.expectation(call.example, case.label)
    if "expected" not in options and case.group == "layout":
        subject.share_expected(call, case.example)
    return options


def _with_reference(subject: Subject, case: Case, call: Call) -> dict[str, Any]:
    if subject.reference is None:
        raise CannotCheck("no reference says what is right")
    return _compared(subject, case, call)


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
    # PyTorch starts another thread for each 32,768 elements: only large calls use several.
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
    "contiguous transposed gaps sliced offset unaligned channels_last odd_strides negative "
    "conjugate expanded"
)
_SIZES = "empty single longer"


def _always(provider: Provider) -> bool:
    return True


def _if_deterministic(provider: Provider) -> bool:
    return provider.deterministic


# --------------------------------------------------------------------------------------------------
# The table

CHECKS: tuple[CheckKind, ...] = (
    # Contracts first: the arguments of later calls may stay in the state of the operator.
    *_of(
        "contracts.schema",
        _SCHEMA,
        f"given plain {_LAYOUTS} {_SIZES} scalars",
        "Are only the named arguments written, and are outputs fresh, also through NumPy?",
        of_kernel=_always,
    ),
    *alone("contracts", process.repeated),
    *alone("contracts", process.state, of_kernel=_if_deterministic),
    *alone("contracts", process.kept, process.leaks, process.process, of_kernel=_always),
    *_of(
        "contracts.num_threads",
        {"probe": results.ignores_num_threads, "options": _of_threads},
        "plain blocks",
        "Does it do the same with any number of threads?",
        of_kernel=_always,
    ),
    *alone("contracts", digits.defaults),
    *_of(
        "memory.given",
        {**_SAME, "takes_refused": True},
        "given",
        "Does it do the same on the examples as on copies?",
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
        contiguous="Does it read or write behind the end of a contiguous tensor?",
        transposed="Does it respect strides: the same on dense tensors that are not contiguous?",
        gaps="The same with gaps of NaN between elements?",
        sliced="The same on a slice of something larger?",
        offset="The same on tensors that do not start where their memory does?",
        unaligned="The same on memory that is not aligned to 16 bytes?",
        channels_last="The same on channels-last tensors?",
        negative="The same on negative views?",
        conjugate="The same on conjugate views?",
        expanded="The same on expanded tensors, whose elements share memory?",
        mixed="The same with another layout for each argument?",
        empty="The same with 0 elements?",
        single="The same with 1 element?",
        # It would blame strides for the faults that one element shows too.
        odd_strides="The same with odd strides of size 1?",
        zero_dim="The same on tensors without a dimension?",
    ),
    *_each("memory", _REFUSED, written_expanded="Is writing into expanded tensors refused?"),
    *_of(
        "memory.blocks",
        {"probe": results.right_in_blocks, "options": _compared},
        "blocks",
        "Is every element written where sizes are a little more than those of blocks?",
        of_kernel=_always,
    ),
    *alone("dtypes", fakes.accepted, probe=fakes.describes_results),
    *_each("dtypes", _PROMOTED, promotion="Is promotion the same for the fake kernel?"),
    *_of("dtypes.numbers", _DOUBLE, "precisions", "Are results the same numbers in every dtype?"),
    *_of(
        "dtypes.half",
        {"probe": digits.keeps_digits_of_half, "options": _reproducible},
        "half_digits",
        "Are float16 results computed in float16, and not in bfloat16?",
    ),
    *_of(
        "dtypes.double",
        {"probe": digits.computes_in_double},
        "digits",
        "Are double results computed in double?",
    ),
    *alone("dtypes", digits.float_arguments),
    *_each(
        "values",
        _SAME,
        nan="Does it do the same wherever NaN lies?",
        inf="The same wherever infinities lie?",
        zeros="The same wherever zeros of both signs lie?",
        denormals="The same wherever numbers too small to be normal lie?",
        extremes="The same wherever the largest and smallest numbers of the dtype lie?",
    ),
    *_each(
        "values",
        _RIGHT,
        int8="Does it do as the reference with the smallest and the largest integers of 8 bits?",
        scalars="Does it do as the reference with other scalars?",
    ),
    *_each(
        "sharing",
        _SAME,
        one="Does it do the same if one tensor is passed for two arguments?",
        view="The same if one argument is a view of another?",
        overlap="The same if arguments overlap?",
        beside="Is the memory between the elements of a written argument left unchanged?",
    ),
    *_each(
        "sharing",
        _REFUSED,
        written="Is an argument that overlaps a written one refused, or the outcome the same?",
    ),
    *alone("providers", providers.supports, of_kernel=_always),
    *alone("providers", providers.agrees, of_kernel=_always, **_AGREES),
    *alone("providers", providers.configs, of_kernel=lambda provider: len(provider.configs) > 1),
    *alone("providers", providers.gradients, of_kernel=_always),
    *alone("providers", providers.deterministic, of_kernel=_if_deterministic),
    *_of(
        "subsystems.fake",
        _FAKE,
        f"plain {_LAYOUTS} {_SIZES} blocks absent scalars",
        "Does the fake kernel describe the results of all layouts and sizes?",
        of_kernel=_always,
    ),
    *alone("subsystems", fakes.fake_symbols, fakes.fake_devices, fakes.autograd_registration),
    *alone(
        "subsystems", incoming_gradients.grad_strides, gradients.gradcheck, gradients.gradgradcheck
    ),
    *alone(
        "subsystems", gradients.forward_mode, incoming_gradients.needs_input_grad, gradients.saved
    ),
    *alone("subsystems", gradients.checkpoint, gradients.determinism, residuals.residuals),
    *alone("subsystems", contexts.vmap, contexts.vmap_random, contexts.func),
    *alone("subsystems", process.threads, of_kernel=_if_deterministic),
    *alone("subsystems", contexts.autocast, contexts.inference_mode),
    *alone("subsystems", contexts.subclasses, contexts.sharding),
    *alone("subsystems", accelerator.accelerator, accelerator.capture),
    *alone("subsystems", contexts.vmap_compiled, fakes.compiled, is_costly=True),
    *alone("subsystems", fakes.export_dynamic, is_costly=True),
)
