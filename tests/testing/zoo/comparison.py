"""Stock checks beside `torchop.testing.check`, on every operator of the zoo: what each finds.

`python -m tests.testing.zoo.comparison [--missing] [NAME ...]` asks the tools and renews the rows
of `docs/explanation/checks-compared.md`, operator by operator; `--missing` goes on where a run was
ended. Each call is in a process group of its own with a limit of time, because some operators
crash, hang or fork. Stock tools are never run on an operator that forks: each call would double the
processes, and no limit of processes holds for root.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.testing._internal.common_dtype import floating_and_complex_types
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import torchop
from tests.testing.zoo import RIGHT, WRONG, Specimen
from torchop.extend import Operator
from torchop.testing import probes
from torchop.testing._check.run import plan_checks
from torchop.testing._processes import ChildError, answers
from torchop.testing.process_state import restored

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "checks-compared.md"
LIMIT = 120.0  # seconds for one tool on one operator
FORKS = "zoo::forks"


class Answer(NamedTuple):
    """What one tool says of an operator, as it is in the table.

    Attributes:
        word: "found", "other" (only by checks of another fault), "-" (nothing), or "cannot".
        seconds: how long it took.
    """

    word: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.word} ({self.seconds:.1f})" if self.seconds else self.word

    @classmethod
    def parse(cls, text: str) -> Answer:
        """The answer that a cell of the table says."""
        word, _, seconds = text.partition(" (")
        return cls(word, float(seconds.removesuffix(")") or 0))


Rows = Mapping[str, tuple[str, Mapping[str, Answer]]]  # the check of each fault, and the answers


class CannotAsk(Exception):  # noqa: N818  (not an error)
    """Why a tool cannot be asked about an operator."""


# --------------------------------------------------------------------------------------------------
# The tools: each returns a word


def _calls(specimen: Specimen) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The overload with the arguments of each example, as the schema has them."""
    operator = Operator(specimen.op, "comparison")
    calls = []
    for example in specimen.examples():
        is_pair = len(example) == 2 and isinstance(example[1], dict)
        args, kwargs = example if is_pair else (tuple(example), {})
        calls.append((operator.overload, *operator.flat_arguments(args, kwargs)))
    return calls


def opcheck(specimen: Specimen) -> str:
    """`torch.library.opcheck` on the examples."""
    for op, args, kwargs in _calls(specimen):
        try:
            torch.library.opcheck(op, args, kwargs)
        except Exception:
            return "found"
    return "-"


def gradcheck(specimen: Specimen) -> str:
    """`torch.autograd.gradcheck`, and `gradgradcheck`, on the examples in double."""
    for op, args, kwargs in _calls(specimen):
        if op._schema.is_mutable:
            raise CannotAsk("it writes into its arguments")
        try:
            function, inputs = probes.as_function(op, *probes.mapped((args, kwargs), _double))
            outputs = function(*inputs)
        except Exception as error:
            raise CannotAsk("the call in double fails") from error
        if not inputs or not any(output.requires_grad for output in outputs):
            raise CannotAsk("there is no gradient")
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            try:
                check(function, inputs)
            except torchop.MissingFormulaError as error:
                if check is torch.autograd.gradcheck:
                    raise CannotAsk("there is no formula") from error
            except Exception:
                return "found"
    return "-"


def _double(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_()


def opinfo(specimen: Specimen) -> str:
    """What OpInfo's tests do that can be done with an operator whose samples are examples.

    These are the parts of PyTorch's test_ops.py about one operator without variants: a call is
    repeated (test_variant_consistency_eager), its samples are made noncontiguous
    (test_noncontiguous_samples), and it is compared with its reference (test_python_ref).
    """
    calls = _calls(specimen)
    if not all(args and isinstance(args[0], torch.Tensor) for _, args, _ in calls):
        raise CannotAsk("OpInfo needs a tensor as the first argument")
    samples = [SampleInput(a[0], args=tuple(a[1:]), kwargs=kwargs) for _, a, kwargs in calls]
    info = OpInfo(
        str(calls[0][0]),
        op=calls[0][0],
        dtypes=floating_and_complex_types(),
        sample_inputs_func=lambda *args, **kwargs: iter(samples),
        supports_out=False,
        supports_autograd=False,
    )

    def call(function: Any, sample: SampleInput, copy: bool = True) -> Any:
        values = sample.input, *sample.args
        values, kwargs = probes.copies((values, sample.kwargs)) if copy else (values, sample.kwargs)
        return function(*values, **kwargs)

    with torch.no_grad():
        for sample in info.sample_inputs("cpu", torch.float32):
            try:
                expected = call(info, sample)
                again = call(info, sample)
                torch.testing.assert_close(again, expected, equal_nan=True)
                if specimen.reference is not None:
                    wanted = call(specimen.reference, sample)
                    torch.testing.assert_close(expected, wanted, equal_nan=True, check_dtype=False)
                result = call(info, sample.noncontiguous(), copy=False)
                torch.testing.assert_close(result, expected, equal_nan=True)
            except Exception:
                return "found"
    return "-"


def check(specimen: Specimen) -> str:
    """`torchop.testing.check`, without the checks that compile and export, but for their faults."""
    kinds = [each.kind for each in plan_checks(specimen.op, specimen.examples())]
    report = torchop.testing.check(
        specimen.op,
        *specimen.examples(),
        reference=specimen.reference,
        only=[k.name for k in kinds if not k.is_costly or k.name == specimen.check],
        raise_exception=False,
    )
    names = [failure.check for failure in report.failures]
    if specimen.check in (None, *names):
        return "found" if names else "-"
    return "other" if names else "-"


TOOLS: dict[str, Callable[[Specimen], str]] = {
    "opcheck": opcheck,
    "gradcheck": gradcheck,
    "OpInfo": opinfo,
    "check": check,
}


# --------------------------------------------------------------------------------------------------
# Asking them


def ask(tool: str, specimen: Specimen, limit: float = LIMIT) -> Answer:
    """What a tool says of an operator, in a fork of its own, which ends with all that it starts."""
    if specimen.name == FORKS and tool != "check":
        return Answer("cannot")
    started = time.perf_counter()
    work = "fork", _answer, (tool, specimen), itertools.repeat(limit), Exception
    with answers(*work, Path(os.devnull)) as messages:
        try:
            word, seconds = next(messages)
        except ChildError:  # a crash, or no end, which is a finding
            word, seconds = "found", time.perf_counter() - started
    return Answer(word, round(seconds, 1))  # as the page has it, so that totals are of its rows


def _answer(tool: str, specimen: Specimen) -> Iterator[tuple[str, float]]:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    started = time.perf_counter()
    with restored():
        try:
            word = TOOLS[tool](specimen)
        except CannotAsk:
            word = "cannot"
    yield word, time.perf_counter() - started


# --------------------------------------------------------------------------------------------------
# The page


def rows_of(text: str) -> dict[str, tuple[str, dict[str, Answer]]]:
    """The rows of the page."""
    rows = {}
    for line in re.findall(r"^\| `(zoo::.*) \|$", text, re.MULTILINE):
        name, fault, *cells = line.split(" | ")
        answers = dict(zip(TOOLS, map(Answer.parse, cells), strict=True))
        rows[name.rstrip("`")] = fault.strip("`"), answers
    return rows


def page_of(rows: Rows) -> str:
    """The page with these rows, and their totals."""
    wrong = {name: answers for name, (fault, answers) in rows.items() if fault != "right"}
    right = {name: answers for name, (fault, answers) in rows.items() if fault == "right"}

    def counted(tool: str) -> list[str]:
        found = sum(answers[tool].word in ("found", "other") for answers in wrong.values())
        named = sum(answers[tool].word == "found" for answers in wrong.values())
        alarms = sum(answers[tool].word == "found" for answers in right.values())
        refused = sum(answers[tool].word == "cannot" for _, answers in rows.values())
        seconds = sum(answers[tool].seconds for _, answers in rows.values()) / max(len(rows), 1)
        by_name = str(named) if tool == "check" else "it names no fault"
        return [str(found), by_name, str(alarms), str(refused), f"{seconds:.1f}"]

    totals = "\n".join(f"| {' | '.join([_TOOL_NAMES[t], *counted(t)])} |" for t in TOOLS)
    lines = [
        f"| {' | '.join([f'`{name}`', fault if fault == 'right' else f'`{fault}`', *cells])} |"
        for name, (fault, answers) in rows.items()
        for cells in [[str(answers[tool]) for tool in TOOLS]]
    ]
    table = "\n".join(lines)
    return _PAGE.format(wrong=len(wrong), right=len(right), totals=totals, table=table)


_TOOL_NAMES = {
    "opcheck": "`torch.library.opcheck`",
    "gradcheck": "`torch.autograd.gradcheck`",
    "OpInfo": "OpInfo's tests",
    "check": "`torchop.testing.check`",
}
_PAGE = """# Checks compared

This page compares what `torchop.testing.check` finds with what the checks of PyTorch find, on
{wrong} operators that are wrong on purpose and {right} right ones, which are in
`tests/testing/zoo`. The authors of the checks know most of these operators. The numbers therefore
show which faults each tool can see at all, and not what share of the faults in your operators it
finds.

| tool | found, of {wrong} wrong ones | by the check of the fault | alarms, of {right} right ones \
| cannot be asked | seconds each |
| --- | --- | --- | --- | --- | --- |
{totals}

Each tool gets the same examples, which are those of the authors.

- `torch.library.opcheck` runs with all of its tests.
- `torch.autograd.gradcheck` and `gradgradcheck` run on the examples in float64, where there is a
  gradient.
- Of OpInfo's tests, those run that need nothing but samples: repeated calls, noncontiguous
  samples, and the reference where there is one. An author who adds more to an `OpInfo`, such as
  further samples, finds more.
- `torchop.testing.check` runs without the checks that compile and export programs, except for
  operators with a fault that only these find.

`nox -s comparison` asks all of them anew and writes this page; each call runs in a process group of
its own, for at most {limit:.0f} seconds. Stock tools are not run on `{forks}`: each call would
double the processes.

## Operator by operator

"found" means that the tool failed; if it names faults, the check of this fault failed. "other"
means that only other checks failed. For right operators, both are false alarms. A crash or a hang
counts as "found", because nobody overlooks it. "-" means that nothing was found, and "cannot" that
the tool cannot be asked about this operator. The seconds are in brackets.

| operator | fault | opcheck | gradcheck | OpInfo | check |
| --- | --- | --- | --- | --- | --- |
{table}
""".replace("{limit:.0f}", f"{LIMIT:.0f}").replace("{forks}", FORKS)


def measure(specimens: Iterable[Specimen], known: Rows) -> Iterator[Rows]:
    """All rows, as often as there is a new one."""
    rows = dict(known)
    for specimen in specimens:
        answers = {tool: ask(tool, specimen) for tool in TOOLS}
        rows[specimen.name] = specimen.check or "right", answers
        told = ", ".join(f"{tool} {answer}" for tool, answer in answers.items())
        print(f"{specimen.name} ({specimen.check or 'right'}): {told}", flush=True)
        order = [each.name for each in (*WRONG, *RIGHT) if each.name in rows]
        yield {name: rows[name] for name in order}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of operators")
    parser.add_argument("--missing", action="store_true", help="only those without a row")
    options = parser.parse_args()
    known = rows_of(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    chosen = [
        each
        for each in (*WRONG, *RIGHT)
        if not (options.missing and each.name in known)
        and (not options.names or any(name in each.name for name in options.names))
    ]
    for rows in measure(chosen, known):
        PAGE.write_text(page_of(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
