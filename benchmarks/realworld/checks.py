"""What `torchop.testing.check` finds in operators of real packages that run on a CPU.

`make realworld-checks` is the command line's `check` of bitsandbytes and torchao, each operator in
a process of its own, on the calls that `operators.py` compares. What the checks find is listed in
`EXPECTED`, with what it comes from; a finding more, or less, is a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import _bitsandbytes
import _torchao


def _examples() -> Mapping[str, list[tuple[Any, ...]]]:
    calls: dict[str, list[tuple[Any, ...]]] = {}
    for package in (_bitsandbytes.package(), _torchao.package()):
        for case in package.cases:
            calls.setdefault(case.op, []).append(case.arguments())
    # A name without an overload is that of all of them; most with `out=` are for GPUs alone.
    outs = {name: examples for name, examples in calls.items() if name.endswith(".out")}
    return {**outs, "*.out": [], **calls}


EXAMPLES = _examples()
EXPECTED: Mapping[str, Mapping[str, str]] = {}
