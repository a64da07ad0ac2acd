"""Run every check on every operator of the zoo, and print how many faults were found.

`python -m tests.testing.zoo [--quick] [--results FILE] [--page] [NAME ...]`. With `--results`, an
interrupted run can be continued, because operators that are in the file are not checked again.

Uses private names.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torchop
from tests.testing.zoo import RIGHT, WRONG, Specimen
from torchop.testing._check.run import plan_checks
from torchop.testing._check.table import CHECKS

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "checks.md"
_SECTION = "## All checks\n"
_TEXT = """
The test suite of torchop contains {wrong} faulty operators, each with one deliberate fault, and
{right} correct operators. The tests verify that `torchop.testing.check` finds the fault in each
faulty operator, and that it reports no fault in the correct ones.

Since we chose the faults together with the checks, the numbers on this page only show which kinds
of faults each check finds. They don't predict how many of the faults in your own operators `check`
would find.

In the table, the last three columns count faulty operators:

- *faults*: operators whose fault this check must find.
- *found*: operators in which this check finds a fault.
- *alone*: operators in which only this check finds a fault.

For the columns *found* and *alone*, `check` ran on {measured} of the faulty
operators{kinds}. Even if a check has a 0 in
the column *alone*, it can be useful: other checks may find the same faults only by accident, or the
run may have left out the operators with these faults.

| check | question | faults | found | alone |
| --- | --- | --- | --- | --- |
{table}
"""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The results of all checks on one operator.

    `failed` contains the names of the failed checks. If `quick` is True, the checks that compile
    programs did not run.
    """

    name: str
    failed: Sequence[str]
    findings: int
    seconds: float
    quick: bool


def rows() -> list[str]:
    """Return the first three columns of the page that lists the checks.

    They are the check's name, its question, and the number of operators with this fault.
    """
    faults = Counter(str(specimen.check).partition("[")[0] for specimen in WRONG)
    return [f"| `{check.name}` | {check.question} | {faults[check.name]} |" for check in CHECKS]


def page_of(measured: Sequence[Measured]) -> str:
    """Return the page with a new section of measurements."""
    names = {specimen.name for specimen in WRONG}
    wrongs = [each for each in measured if each.name in names]
    counts = counted([each.failed for each in wrongs])
    costly = {check.name for check in CHECKS if check.is_costly}
    is_quick = any(each.quick for each in wrongs)
    table = []
    for check, row in zip(CHECKS, rows(), strict=True):
        found, alone = counts.get(check.name, (0, 0))
        is_left_out = is_quick and check.name in costly
        table.append(f"{row} - | - |" if is_left_out else f"{row} {found} | {alone} |")
    before = PAGE.read_text(encoding="utf-8").partition(_SECTION)[0]
    return (
        before
        + _SECTION
        + _TEXT.format(
            wrong=len(WRONG),
            right=len(RIGHT),
            measured=len(wrongs),
            kinds=", without the checks that compile programs" if is_quick else "",
            table="\n".join(table),
        )
    )


def counted(failures: Sequence[Sequence[str]]) -> dict[str, tuple[int, int]]:
    """Map each check to how many operators it reports, and how many only this check reports."""
    # Some names end with a provider, as in "memory.gaps[fast]". Count them as the same check.
    named = [{name.partition("[")[0] for name in names} for names in failures]
    found = Counter(name for names in named for name in names)
    alone = Counter(name for names in named if len(names) == 1 for name in names)
    return {name: (found[name], alone[name]) for name in found}


def measure(specimen: Specimen, *, quick: bool) -> Measured:
    # If `quick` is True, name the checks to run: those that apply to the operator, except the
    # checks that compile programs.
    planned = plan_checks(specimen.op, specimen.examples()) if quick else []
    with contextlib.redirect_stderr(io.StringIO()):
        report = torchop.testing.check(
            specimen.op,
            *specimen.examples(),
            reference=specimen.reference,
            only=[each.name for each in planned if not each.kind.is_costly] or None,
            raise_exception=False,
        )
    failed = [failure.check for failure in report.failures]
    return Measured(specimen.name, failed, len(report.findings), report.seconds, quick)


def verdict(specimen: Specimen, measured: Measured) -> str:
    """Return found or MISSED for a faulty operator, and right or ALARM for a correct operator."""
    if specimen.check is None:
        return "ALARM" if measured.failed else "right"
    return "found" if specimen.check in measured.failed else "MISSED"


def each_measured(
    specimens: Iterable[Specimen], file: Path | None, *, quick: bool
) -> Iterator[tuple[Specimen, Measured]]:
    """Yield each operator with its result, which is read from the file if the file contains it."""
    known = {}
    if file is not None and file.exists():
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        known = {line["name"]: Measured(**line) for line in lines}
    for specimen in specimens:
        if specimen.name not in known:
            known[specimen.name] = measure(specimen, quick=quick)
            if file is not None:
                with file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(dataclasses.asdict(known[specimen.name])) + "\n")
        yield specimen, known[specimen.name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of operators")
    parser.add_argument("--quick", action="store_true", help="without checks that compile programs")
    parser.add_argument("--results", type=Path, help="a file that gets a line for each operator")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    specimens = [
        specimen
        for specimen in (*WRONG, *RIGHT)
        if not options.names or any(name in specimen.name for name in options.names)
    ]
    results: list[Measured] = []
    verdicts: Counter[str] = Counter()
    for specimen, measured in each_measured(specimens, options.results, quick=options.quick):
        results.append(measured)
        verdicts[verdict(specimen, measured)] += 1
        also = ", ".join(name for name in measured.failed if name != specimen.check)
        print(
            f"{verdict(specimen, measured):7} {specimen.name}: "
            f"{specimen.check or 'nothing to find'}{f'; also {also}' if also else ''}; "
            f"{measured.seconds:.1f} s",
            flush=True,
        )
    wrong_names = {specimen.name for specimen in WRONG}
    wrongs = [each for each in results if each.name in wrong_names]
    print(
        f"\n{verdicts['found']} of {len(wrongs)} wrong operators are found by the check that must "
        f"find them, with {sum(each.findings for each in wrongs)} findings in all.\n"
        f"{verdicts['ALARM']} false alarms for {len(results) - len(wrongs)} right ones."
    )
    counts = counted([each.failed for each in wrongs])
    print("\nfound  alone  check")
    for name, (found, alone) in sorted(counts.items(), key=lambda item: item[1]):
        print(f"{found:5} {alone:6}  {name}")
    if options.page:
        PAGE.write_text(page_of(results), encoding="utf-8")
    return int(verdicts["MISSED"] > 0 or verdicts["ALARM"] > 0)


if __name__ == "__main__":
    sys.exit(main())
