"""The complete run: every check on every operator of the zoo.

Prints the score, and what each check finds that no other does:
`python -m tests.testing.zoo [--quick] [--page] [NAME ...]`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torchop
from tests.testing.zoo import RIGHT, WRONG
from torchop.testing import CheckReport
from torchop.testing._check.run import plan_checks
from torchop.testing._check.table import CHECKS

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "checks-compared.md"
_PAGE = """# What each check finds

`torchop.testing.check` is measured by a zoo: operators that are wrong on purpose, each in one way,
and right operators beside them, in `tests/testing/zoo`. Each of the {wrong} wrong operators must be
found by the check that names its fault, and no check may report a fault of the {right} right ones.
The authors of the checks know most of the operators, so the numbers show which faults the checks
can find, and not which share of the faults in your operators.

The last column is the number of wrong operators that a check must find. Two checks need an
accelerator, and have their wrong operators in `tests/device`. `make zoo` runs all checks on all
operators; `python -m tests.testing.zoo` also prints how many operators each check finds, and how
many no other check finds. `python -m tests.testing.zoo --page` writes this page.

| check | question | faults |
| --- | --- | --- |
{table}
"""


def page_of() -> str:
    """Return the page with all checks, and the number of wrong operators that each must find."""
    faults = Counter(str(specimen.check).partition("[")[0] for specimen in WRONG)
    rows = [f"| `{check.name}` | {check.question} | {faults[check.name]} |" for check in CHECKS]
    return _PAGE.format(wrong=len(WRONG), right=len(RIGHT), table="\n".join(rows))


def counted(failures: Sequence[Sequence[str]]) -> dict[str, tuple[int, int]]:
    """Return how many operators each check finds, and alone, from the failures of each."""
    # The checks of a provider's kernel are those of every kernel.
    named = [{name.partition("[")[0] for name in names} for names in failures]
    found = Counter(name for names in named for name in names)
    alone = Counter(name for names in named if len(names) == 1 for name in names)
    return {name: (found[name], alone[name]) for name in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of operators")
    parser.add_argument("--quick", action="store_true", help="without checks that compile programs")
    parser.add_argument("--page", action="store_true", help=f"only write {PAGE.name}")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page_of(), encoding="utf-8")
        return 0
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    reports: dict[str, CheckReport] = {}
    wrongs, missed, alarms, findings = 0, 0, 0, 0
    for specimen in (*WRONG, *RIGHT):
        if options.names and not any(name in specimen.name for name in options.names):
            continue
        # Not all operators have all checks: some are of those with a provider.
        planned = plan_checks(specimen.op, specimen.examples()) if options.quick else []
        with contextlib.redirect_stderr(io.StringIO()):
            report = torchop.testing.check(
                specimen.op,
                *specimen.examples(),
                reference=specimen.reference,
                only=[each.name for each in planned if not each.kind.is_costly] or None,
                raise_exception=False,
            )
        reports[specimen.name] = report
        failed = [failure.check for failure in report.failures]
        if specimen.check is None:
            alarms += bool(failed)
            verdict = "ALARM" if failed else "right"
        else:
            wrongs += 1
            findings += len(report.findings)
            is_found = specimen.check in failed
            missed += not is_found
            verdict = "found" if is_found else "MISSED"
        also = ", ".join(name for name in failed if name != specimen.check)
        print(
            f"{verdict:7} {specimen.name}: {specimen.check or 'nothing to find'}"
            f"{f'; also {also}' if also else ''}; {report.seconds:.1f} s",
            flush=True,
        )
    rights = len(reports) - wrongs
    print(
        f"\n{wrongs - missed} of {wrongs} wrong operators are found by the check that must find "
        f"them, with {findings} findings in all.\n{alarms} false alarms for {rights} right ones."
    )
    wrong_names = {specimen.name for specimen in WRONG}
    failures = [
        [failure.check for failure in report.failures]
        for name, report in reports.items()
        if name in wrong_names
    ]
    counts = counted(failures)
    print("\nfound  alone  check")
    for name, (found, alone) in sorted(counts.items(), key=lambda item: item[1]):
        print(f"{found:5} {alone:6}  {name}")
    return int(missed > 0 or alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
