"""Run the checks of an operator in a forked process, and report a crash as a failed check."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchop.testing._check.findings import Result
from torchop.testing._check.run import Check, changes_of, program_of, run_check, shortened
from torchop.testing._fork import Worker, WorkerError, crash_file
from torchop.testing.process_state import quiet


def noted(check: Check, file: Path, /, **values: Any) -> Check:
    """Return a copy of a check that writes each call to a file before making it.

    If the call crashes the process, `crashed` reads the file. The file also contains `values`.
    """

    def write(label: str, program: str, group: str = "", changes: Sequence[str] = ()) -> None:
        call = {"label": label, "program": program, "group": group, "changes": changes}
        text = json.dumps({**values, **call}, default=str)
        file.write_text(text, encoding="utf-8")

    def cases(subject: Any, details: Any) -> Iterator[Any]:
        for case in check.kind.cases(subject, details):
            program = ""
            changes: tuple[str, ...] = ()
            with contextlib.suppress(Exception):  # best effort; run the check in any case
                changes = changes_of(subject, case)
                program = program_of(check, case)
            write(case.label, program, case.group, changes)
            yield case

    write("before the first call", "")
    return dataclasses.replace(check, kind=dataclasses.replace(check.kind, cases=cases))


def crashed(name: str, file: Path, problem: str) -> Result:
    """Return the failure of a check whose process crashed, with `problem` as the reason."""
    values = json.loads(file.read_text(encoding="utf-8"))
    message = f"{values['label']}: the call {problem}."
    traceback_file = crash_file(file)
    text = traceback_file.read_text() if traceback_file.exists() else ""
    _, crash, traceback = text.partition("error: ")
    if crash:
        innermost = [line.strip() for line in traceback.splitlines() if "File " in line][:3]
        message += f" {' '.join([traceback.partition(chr(10))[0], *innermost])}"
    return Result(
        name,
        "failed",
        shortened(message),
        values["program"],
        cause=f"the call {problem}",
        group=values["group"],
        changes=tuple(values["changes"]),
    )


class CheckWorker:
    """Run the checks of one operator in a worker process.

    Args:
        plan: a function that returns the checks by name. It is called in the worker process.
    """

    def __init__(self, plan: Callable[[], Mapping[str, Check]]) -> None:
        self._plan = plan
        self._checks: Mapping[str, Check] | None = None
        self._worker = Worker(self._answer)
        # The CPU time of all checks so far, in seconds. Unlike wall-clock time, it does not depend
        # on the load of the machine.
        self.seconds = 0.0

    def names(self, limit: float) -> list[str]:
        names: list[str] = self._worker.ask(None, limit)
        return names

    def run(self, name: str, limit: float, end: float) -> Result:
        """Run a check, and report a crash or a timeout after `limit` seconds as a failure."""
        try:
            result, seconds = self._worker.ask((name, end), limit)
        except WorkerError as error:
            if not self._worker.call_file.exists():
                return Result(name, "failed", f"preparing the check failed: {error}")
            return crashed(name, self._worker.call_file, str(error))
        self.seconds += seconds
        found: Result = result
        return found

    def close(self) -> None:
        self._worker.close()

    def _answer(self, request: tuple[str, float] | None) -> Any:
        if self._checks is None:
            with quiet():
                self._checks = self._plan()
        if request is None:
            return list(self._checks)
        name, end = request
        before = time.thread_time()
        result = run_check(noted(self._checks[name], self._worker.call_file), end=end)
        # Convert the details to JSON types, because some of their values cannot be pickled.
        details = json.loads(json.dumps(dict(result.details), default=str))
        return dataclasses.replace(result, details=details), time.thread_time() - before
