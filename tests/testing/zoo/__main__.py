"""The complete run: every check on every operator of the zoo, stock `opcheck` beside it.

Prints the score: `python -m tests.testing.zoo [--quick] [--table] [--html FILE] [NAME ...]`.
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

import torch

import torchop
from tests.testing.zoo import RIGHT, WRONG, Specimen
from torchop.testing import CheckReport
from torchop.testing._check.report import write_html
from torchop.testing._check.run import kinds, plan_checks
from torchop.testing.process_state import restored


def stock_finds(specimen: Specimen) -> bool:
    """Whether `torch.library.opcheck`, with the samples that the checks get, finds anything."""
    if specimen.name == "zoo::forks":
        return False  # it does not look, and each call would double the processes
    op = specimen.op.overload if isinstance(specimen.op, torchop.CustomOp) else None
    if op is None:
        namespace, _, name = specimen.name.partition("::")
        op = getattr(getattr(torch.ops, namespace), name).default
    for example in specimen.examples():
        is_pair = len(example) == 2 and isinstance(example[1], dict)
        args, kwargs = example if is_pair else (example, {})
        try:
            torch.library.opcheck(op, args, kwargs)
        except Exception:
            return True
    return False


def print_table(reports: Sequence[CheckReport]) -> None:
    """How many operators each check finds, alone or with others, and for how many seconds."""
    finds, alone, seconds = Counter[str](), Counter[str](), Counter[str]()
    wrong = {specimen.name for specimen in WRONG}
    for report in reports:
        failed = [failure.check for failure in report.failures if report.op in wrong]
        finds.update(failed)
        alone.update(failed if len(failed) == 1 else ())
        for result in report.results:
            seconds[result.check] += result.seconds
    print("\nfinds  alone  seconds  finds/s  check")
    for check in sorted(seconds, key=lambda name: -finds[name] / max(seconds[name], 1e-3)):
        rate = finds[check] / max(seconds[check], 1e-3)
        print(f"{finds[check]:5} {alone[check]:6} {seconds[check]:8.2f} {rate:8.2f}  {check}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of operators")
    parser.add_argument("--html", help="write the reports to this file")
    parser.add_argument("--quick", action="store_true", help="without what takes seconds")
    parser.add_argument("--table", action="store_true", help="what each check finds, and costs")
    options = parser.parse_args()
    quick = {kind.name for kind in kinds() if not kind.is_costly}
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    reports: list[CheckReport] = []
    score = {"found": 0, "stock": 0, "alarms": 0, "stock alarms": 0, "wrong": 0, "right": 0}
    for specimen in (*WRONG, *RIGHT):
        if options.names and not any(name in specimen.name for name in options.names):
            continue
        if options.quick and specimen.check is not None and specimen.check not in quick:
            continue
        # Not all operators have all checks: some are of those with a provider.
        planned = plan_checks(specimen.op, specimen.examples()) if options.quick else None
        only = [each.name for each in planned if not each.kind.is_costly] if planned else None
        with contextlib.redirect_stderr(io.StringIO()):
            report = torchop.testing.check(
                specimen.op,
                *specimen.examples(),
                reference=specimen.reference,
                only=only,
                raise_exception=False,
            )
            with restored():
                stock = stock_finds(specimen)
        reports.append(report)
        failed = [failure.check for failure in report.failures]
        if specimen.check is None:
            score["right"] += 1
            score["alarms"] += bool(failed)
            score["stock alarms"] += stock
            verdict = "ALARM" if failed else "right"
        else:
            score["wrong"] += 1
            score["found"] += specimen.check in failed
            score["stock"] += stock
            verdict = "found" if specimen.check in failed else "MISSED"
        also = ", ".join(name for name in failed if name != specimen.check)
        print(
            f"{verdict:7} {specimen.name}: {specimen.check or 'nothing to find'}"
            f"{f'; also {also}' if also else ''}; {report.seconds:.1f} s"
            f"{'; stock opcheck fails' if stock else ''}",
            flush=True,
        )
    print(
        f"\n{score['found']} of {score['wrong']} wrong operators are found by the check that must "
        f"find them; stock opcheck finds {score['stock']}.\n"
        f"{score['alarms']} false alarms for {score['right']} right operators; stock opcheck gives "
        f"{score['stock alarms']}."
    )
    if options.table:
        print_table(reports)
    if options.html:
        write_html(reports, options.html)
    return int(score["found"] < score["wrong"] or score["alarms"] > 0)


if __name__ == "__main__":
    sys.exit(main())
