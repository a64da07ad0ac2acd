"""Do a package's own tests of its operators pass when these are accelerated?

`nox -s realworld` unpacks the source distribution of optimum-quanto, the only one of the packages
that ships its tests, and runs this: the tests run twice, as they are and below
`torchop.accelerate("*")`, and each must come out the same. The counters of `torchop.native` must
have seen native calls of each operator.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

HERE = Path(__file__).parent
# The tests of operators, and of the tensors that call them; and of modules made of these.
FOLDERS, MORE = ("library", "tensor"), ("nn", "quantize")
NAMESPACE = "quanto::"
Process: TypeAlias = "subprocess.Popen[bytes]"


class Run(NamedTuple):
    """A run of the tests.

    Attributes:
        outcomes: "passed", "skipped" or "failed" by the name of the test.
        calls: how many calls of each accelerated operator went which way.
        output: what pytest printed.
    """

    outcomes: dict[str, str]
    calls: dict[str, dict[str, int]]
    output: str


def start(tests: Path, folders: tuple[str, ...], report: Path, pattern: str) -> Process:
    """Starts a run, accelerated if the pattern is not empty."""
    search = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(search),
        "REALWORLD_REPORT": str(report),
        "REALWORLD_ACCELERATE": pattern,
        "OMP_NUM_THREADS": "1",
    }
    # Their settings instead of ours, which make warnings of any package errors.
    settings = ["-c", str(tests.parent / "pyproject.toml"), "-p", "no:cacheprovider"]
    # A file, not a pipe: a run that waits for its pipe to be read may hold a lock that another run
    # waits for, that of the C++ extension that they build.
    with report.with_suffix(".txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *settings, "-p", "_pytest_plugin", *folders],
            cwd=tests,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def finish(process: Process, report: Path) -> Run:
    """Waits for a run.

    Raises:
        RuntimeError: it did not come to an end.
    """
    process.wait()
    output = report.with_suffix(".txt").read_text()
    if not report.exists():
        raise RuntimeError(f"pytest ended with {process.returncode}:\n{output}")
    found: dict[str, Any] = json.loads(report.read_text())
    return Run(found["outcomes"], found["calls"], output)


def problems(plain: Run, accelerated: Run) -> list[str]:
    """What is wrong with a pair of runs; empty if nothing is."""
    found = [
        f"{test}: {plain.outcomes.get(test, 'missing')} as it is, "
        f"{accelerated.outcomes.get(test, 'missing')} accelerated"
        for test in sorted(plain.outcomes | accelerated.outcomes)
        if plain.outcomes.get(test) != accelerated.outcomes.get(test)
    ]
    if "passed" not in plain.outcomes.values():
        found.append("no test passed")
    called = {op: ways for op, ways in accelerated.calls.items() if op.startswith(NAMESPACE)}
    if not called:
        found.append(f"no test called an operator of {NAMESPACE} that is accelerated")
    found += [
        f"{op}: no call was native, of {ways}"
        for op, ways in called.items()
        if "native" not in ways
    ]
    return found


def main() -> int:
    """Prints what was found; returns 1 if a test came out in another way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", type=Path, help="the folder of the tests")
    parser.add_argument("--quick", action="store_true", help="leave out the tests of modules")
    options = parser.parse_args()
    tests = options.tests.resolve()
    folders = FOLDERS if options.quick else (*FOLDERS, *MORE)
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder, "plain.json"), Path(folder, "accelerated.json")]
        # At the same time, as most machines have two processors.
        processes = [
            start(tests, folders, report, pattern)
            for report, pattern in zip(reports, ("", "*"), strict=True)
        ]
        plain, accelerated = map(finish, processes, reports)
    wrong = problems(plain, accelerated)
    if wrong:
        print(accelerated.output)
    counts = {way: list(plain.outcomes.values()).count(way) for way in ("passed", "failed")}
    print(f"{tests.parent.name}: {counts['passed']} tests pass, {counts['failed']} fail")
    for op, ways in accelerated.calls.items():
        if op.startswith(NAMESPACE):
            print(f"{op:32}", ", ".join(f"{count} {way}" for way, count in ways.items()))
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
