"""Check that `accelerate` makes the operators of real packages faster, with the same results.

`nox -s realworld` runs this script with the packages in `requirements/realworld-packages.txt`. It
calls all operators that these packages register in Python and that have a CPU kernel. Each operator
is called with and without acceleration, and the bits of results and mutated arguments must be
equal. Then the script times a call before and after acceleration, and the kernel alone.

There are two limits. A call must take at most 0.5 us, or 2%, longer than the kernel. This is hard
to achieve if the kernel evicts torchop's code from the CPU cache. So as a second test, a call to an
operator with the same schema and an empty kernel must take at most 0.5 us, or 20 ns per argument.
Other programs on the machine disturb both measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import _bitsandbytes
import _nvalchemi
import _quanto
import _torchao
import _transformers
import torchop
from _case import Case, Package, difference, overload, run
from _empty_kernel import twin
from _overhead import overhead
from torchop._compat import autograd
from torchop._native.table import calls as table
from torchop._schema.naming import OpName

PACKAGES = (_bitsandbytes, _quanto, _torchao, _transformers, _nvalchemi)
BAR, SHARE = 0.5, 0.02  # the limits in microseconds, and as a share of the kernel's time
PER_ARGUMENT = 0.02  # the limit in microseconds per argument, for more than 25 arguments
PASSES = 3  # how often all cases are measured


class Measured(NamedTuple):
    """A row of the table. All times are in microseconds."""

    op: str
    before: float
    after: float
    kernel: float
    over: float  # the time that a native call adds to the kernel
    margin: float  # half of the confidence interval of `over`
    way: float  # like `over`, but measured with an empty kernel
    way_missed: bool  # whether `way` exceeds the limit
    records: bool  # whether the call records a gradient, because that takes additional time

    @property
    def missed(self) -> bool:
        in_place = self.over - self.margin > max(BAR, SHARE * self.kernel)
        return not self.records and (in_place or self.way_missed)

    def __str__(self) -> str:
        note = "  records a gradient" if self.records else "  MISSED" if self.missed else ""
        times = f"{self.before:9.2f}{self.after:9.2f}{self.kernel:9.2f}{self.over:9.2f}"
        return f"{self.op:60}{times} +-{self.margin:5.2f}{self.way:9.2f}{note}"


def check(case: Case) -> str:
    op = overload(case.op)
    expected = run(op, case.arguments())
    with torchop.accelerate(case.op):
        explanation = torchop.explain(op, *case.arguments())
        if not explanation.native:
            return f"the call is not native: {explanation.reason}"
        wrong = difference(run(op, case.arguments()), expected)
        return wrong or difference(run(op, case.arguments()), expected)


def check_program(program: Callable[[], list[torch.Tensor]]) -> str:
    expected = program()
    with torchop.accelerate("*") as acceleration:
        found = program()
        ways = [torchop.native.counters(row.op) for row in acceleration.operators]
    if not any("native" in way for way in ways):
        return "none of its calls is native"
    return difference(found, expected)


def measure(case: Case) -> Measured:
    """Time a case. All calls use the same arguments, and may mutate them."""
    op, name, arguments = overload(case.op), OpName.parse(case.op), case.arguments()
    with torchop.accelerate(case.op):
        known = table.accelerated.get(name)
        assert known is not None, "the call was native in `check`"
        _, (through_autograd, *_), function, *_ = known.entry.explain(*arguments)
        learnt = any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments)
        kernel = functools.partial(inspect.unwrap(function, stop=is_kernel), *arguments)
        call = functools.partial(op, *arguments)
        # If the operator has a formula, the kernel runs with autograd disabled.
        around_kernel = autograd.below_autograd if through_autograd else contextlib.nullcontext
        after = overhead(call, kernel, around_kernel)
    before = overhead(call, kernel, around_kernel)
    empty = twin(op, kernel.func, op(*arguments), is_custom_op=through_autograd)
    with torchop.accelerate(empty._name):
        known = table.accelerated.get(OpName.parse(empty._name))
        assert known is not None, "the operator has the schema of an accelerated one"
        alone = functools.partial(inspect.unwrap(known.entry.explain(*arguments)[2]), *arguments)
        nothing = functools.partial(empty, *arguments)
        way = overhead(nothing, alone)
    records = learnt and through_autograd
    way_missed = way.over - way.margin > max(BAR, PER_ARGUMENT * len(arguments))
    times = (before.call, after.call, after.kernel, after.over, after.margin, way.over)
    return Measured(f"{case.op} {case.label}", *times, way_missed, records)


def measure_all(cases: list[Case]) -> list[Measured]:
    """Time all cases several times, and return the least disturbed measurement of each.

    While another program uses the second hardware thread of the CPU core, all times may double.
    This may last from milliseconds to minutes.
    """
    passes = []
    for number in range(PASSES):
        passes.append([measure(case) for case in cases])
        print(f"pass {number + 1} of {PASSES}", flush=True)
    return [undisturbed(rows) for rows in zip(*passes, strict=True)]


def undisturbed(rows: Sequence[Measured]) -> Measured:
    """Return the least disturbed measurement of a case, i.e. the one with the fastest kernel."""
    in_place = min(rows, key=lambda row: row.kernel)
    empty = min(rows, key=lambda row: row.way)
    return in_place._replace(way=empty.way, way_missed=empty.way_missed)


def is_kernel(function: Callable[..., Any]) -> bool:
    """Return whether a function is the package's own kernel, and not a wrapper by torchop."""
    return not function.__module__.startswith("torchop.")


def without_case(package: Package) -> dict[str, str]:
    covered = {case.op for case in package.cases}
    with torchop.accelerate("*") as acceleration:
        return {
            row.op: row.reason or package.left_out.get(row.op, "")
            for row in acceleration.operators
            if OpName.parse(row.op).namespace in package.namespaces and row.op not in covered
        }


def main() -> int:
    """Print the table. Return 1 if results differ, cases are missing, or a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    quick = "skip timing, and nvalchemi, whose kernels take minutes to compile"
    parser.add_argument("--quick", action="store_true", help=quick)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    problems: list[str] = []
    cases: list[Case] = []
    modules = [module for module in PACKAGES if not (options.quick and module is _nvalchemi)]
    for module in modules:
        package = module.package()
        found = {f"{case.op} {case.label}": check(case) for case in package.cases}
        programs = package.programs
        found |= {name: check_program(programs[name]) for name in programs}
        problems += [f"{case}: {wrong}" for case, wrong in found.items() if wrong]
        cases += package.cases
        operators = len({case.op for case in package.cases})
        counts = f"{operators} operators, {len(package.cases)} cases, {len(programs)} programs"
        print(f"{package.name}: {counts}")
        reasons = without_case(package)
        for name, reason in reasons.items():
            print(f"  {name}: {reason}")
        problems += [f"{name}: no case, and no reason" for name in reasons if not reasons[name]]
    print("\n".join(problems) or f"{len(cases)} cases, all native and bit-equal")
    if options.quick or problems:
        return int(bool(problems))
    rows = measure_all(cases)
    columns = f"{'before':>9}{'after':>9}{'kernel':>9}{'over kernel':>17}{'if empty':>9}"
    print(f"\ntorch {torch.__version__}\n{'operator':60}{columns}  (us)")
    print(*rows, sep="\n")
    if options.json:
        found = {"torch": str(torch.__version__), "rows": [row._asdict() for row in rows]}
        options.json.write_text(json.dumps(found, indent=2))
    missed = [row for row in rows if row.missed]
    within = sum(row.over <= BAR for row in rows if not row.records)
    print(f"{within} of {len(rows)} take at most {BAR} us longer than their kernel")
    print(
        f"{len(missed)} exceed a limit: {BAR} us or {SHARE:.0%} more than the kernel, or {BAR} us "
        "with an empty kernel"
    )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
