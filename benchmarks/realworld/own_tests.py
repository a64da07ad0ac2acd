"""Run a package's own tests with accelerated operators.

`nox -s realworld` runs this script with optimum-quanto, the only package whose source distribution
contains tests. The tests run with and without `torchop.accelerate("*")`, and each test must have
the same outcome in both runs. The counters of `torchop.native` must show native calls to each
operator.
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
# The folders with tests of operators and tensors, and the folders with tests of modules.
FOLDERS, MORE = ("library", "tensor"), ("nn", "quantize")
NAMESPACE = "quanto::"
Process: TypeAlias = "subprocess.Popen[bytes]"


class Run(NamedTuple):
    """The results of a test run.

    `outcomes` maps each test to "passed", "skipped" or "failed". `calls` maps each accelerated
    operator to torchop's counters of calls.
    """

    outcomes: dict[str, str]
    calls: dict[str, dict[str, int]]
    output: str


def start(tests: Path, folders: tuple[str, ...], report: Path, pattern: str) -> Process:
    search = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(search),
        "REALWORLD_REPORT": str(report),
        "REALWORLD_ACCELERATE": pattern,
        "OMP_NUM_THREADS": "1",
    }
    # Use the package's own pytest settings, because ours turn warnings into errors.
    settings = ["-c", str(tests.parent / "pyproject.toml"), "-p", "no:cacheprovider"]
    # Redirect the output to a file instead of a pipe. If the pipe were full, a run would block,
    # maybe while it is building the C++ extension and holds the lock that the other run waits for.
    with report.with_suffix(".txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *settings, "-p", "_pytest_plugin", *folders],
            cwd=tests,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def finish(process: Process, report: Path) -> Run:
    process.wait()
    output = report.with_suffix(".txt").read_text()
    if not report.exists():
        raise RuntimeError(f"pytest ended with {process.returncode}:\n{output}")
    found: dict[str, Any] = json.loads(report.read_text())
    return Run(found["outcomes"], found["calls"], output)


def problems(plain: Run, accelerated: Run) -> list[str]:
    found = [
        f"{test}: {plain.outcomes.get(test, 'missing')} without acceleration, "
        f"{accelerated.outcomes.get(test, 'missing')} with it"
        for test in sorted(plain.outcomes | accelerated.outcomes)
        if plain.outcomes.get(test) != accelerated.outcomes.get(test)
    ]
    if "passed" not in plain.outcomes.values():
        found.append("no test passed")
    called = {op: ways for op, ways in accelerated.calls.items() if op.startswith(NAMESPACE)}
    if not called:
        found.append(f"no test called an accelerated operator of {NAMESPACE}")
    found += [
        f"{op}: no call was native, of {ways}"
        for op, ways in called.items()
        if "native" not in ways
    ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", type=Path, help="the folder of the tests")
    parser.add_argument("--quick", action="store_true", help="skip the tests of modules")
    options = parser.parse_args()
    tests = options.tests.resolve()
    folders = FOLDERS if options.quick else (*FOLDERS, *MORE)
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder, "plain.json"), Path(folder, "accelerated.json")]
        # Run both in parallel, because most machines have at least two CPU cores.
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
