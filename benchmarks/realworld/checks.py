"""What `torchop.testing.check` finds in operators of real packages that run on a CPU.

`make realworld-checks` is the command line's `check` of each package, each operator in a process of
its own, on the calls that `operators.py` compares, and on some of fbgemm and vLLM. What the checks
find is listed in `EXPECTED`, with its cause; a finding more or less is a failure. How each was
judged is in `findings.md`.

`python checks.py [PACKAGE ...]` checks these packages; all of them without a name.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The packages, and the folder of `.realworld` in which each lies: vLLM needs other versions.
PACKAGES = {
    "bitsandbytes": "packages",
    "torchao": "packages",
    "quanto": "packages",
    "nvalchemi": "packages",
    "fbgemm": "fbgemm",
    "vllm": "vllm",
}
BUDGET = 30  # seconds for each operator
HERE = Path(__file__).resolve().parent
_PACKAGE = "TORCHOP_REALWORLD_PACKAGE"  # of this process


def _examples(package: str) -> Mapping[str, list[tuple[Any, ...]]]:
    calls: dict[str, list[tuple[Any, ...]]] = {}
    for case in importlib.import_module(f"_{package}").package().cases:
        calls.setdefault(case.op, []).append(case.arguments())
    # A name without an overload is that of all of them; most with `out=` are for GPUs alone.
    outs = {name: examples for name, examples in calls.items() if name.endswith(".out")}
    return {**outs, "*.out": [], **calls}


EXAMPLES = _examples(os.environ[_PACKAGE]) if _PACKAGE in os.environ else {}


def main(packages: list[str]) -> int:
    """Checks each of the packages, and returns the exit code."""
    failed = 0
    for package in packages or PACKAGES:
        folder = HERE.parents[1] / ".realworld" / PACKAGES[package]
        path = os.pathsep.join([str(HERE), str(folder)])
        environment = {**os.environ, "PYTHONPATH": path, _PACKAGE: package}
        listing = [sys.executable, "-c", "import checks; print(*checks.EXAMPLES)"]
        listed = subprocess.run(listing, env=environment, capture_output=True, text=True)
        # The last line, because packages print when they are imported.
        operators = [n for n in listed.stdout.splitlines()[-1].split() if n != "*.out"]
        command = [sys.executable, "-m", "torchop", "check", *operators, "--import", "checks"]
        command += ["--examples", "checks:EXAMPLES", "--expected", "checks:EXPECTED"]
        command += ["--budget", str(BUDGET), "--json", str(folder.parent / f"{package}.json")]
        for check in CHECKS:
            command += ["-k", check]
        print(f"{package}: {len(operators)} operators", flush=True)
        failed += subprocess.run(command, env=environment).returncode
    return int(failed > 0)


# All but the compilers of programs, which take most of the time.
CHECKS = (
    "memory",
    "dtypes",
    "values",
    "sharing",
    "contracts",
    "fake",
    "fake_symbols",
    "fake_devices",
    "autograd_registration",
    "aot_dispatch_static",
    "aot_dispatch_dynamic",
    "threads",
    "autocast",
    "inference_mode",
    "modes",
    "subclasses",
    "functionalize",
    "gradcheck",
    "vmap",
)
# Findings by family: a kernel that reads past the end of a tensor reads something else each time.
_ADDRESSES = (
    "the C++ kernel takes the addresses of tensors, which need not be contiguous, nor of a size "
    "that fits: it returns other numbers, and ends the process where a tensor has 0 elements"
)
_NO_DOUBLE = "the fake kernel refuses float64 or says another dtype, and the kernel takes it"
_READS_DOUBLE = "the fake kernel refuses float64, and the kernel reads it as float32"
_BELOW = (
    "its kernel is differentiated below the autograd keys, and the fake kernel says other strides"
)
_COMPILED = "its kernel is differentiated below the autograd keys, but not in compiled programs"
_STRIDES = (
    "the fake kernel keeps the strides of the argument, and the kernel returns contiguous memory"
)
_EXPANDED = "torch._int_mm returns other numbers for expanded tensors"
_SECOND = "the fake kernel says int64 of the second result, and returns another number of results"
_WRITES = "with outliers, the kernel writes into A, which its schema does not name"
_NO_RULE = "out_dtype, which it calls, has no rule for the modes that look at calls"
_FLOAT8 = "float8 has no gradients: sums and promotion are not implemented"
EXPECTED: Mapping[str, Mapping[str, str]] = {
    "bitsandbytes::dequantize_4bit": {
        "memory": _ADDRESSES,
        "values": _ADDRESSES,
        "contracts": _ADDRESSES,
        "dtypes": _NO_DOUBLE,
        "subsystems": _ADDRESSES,
    },
    "bitsandbytes::dequantize_blockwise": {
        "memory": _ADDRESSES,
        "contracts": _ADDRESSES,
        "dtypes": _ADDRESSES,
        "subsystems": _ADDRESSES,
    },
    "bitsandbytes::quantize_4bit": {"dtypes": _NO_DOUBLE, "subsystems": _COMPILED},
    "bitsandbytes::quantize_blockwise": {
        "memory": _ADDRESSES,
        "contracts": _ADDRESSES,
        "dtypes": _NO_DOUBLE,
        "subsystems": _STRIDES,
    },
    "bitsandbytes::gem?_4bit": {
        "memory": _ADDRESSES,
        "values": _ADDRESSES,
        "contracts": _ADDRESSES,
        "dtypes": _NO_DOUBLE,
        "subsystems": _ADDRESSES,
    },
    "bitsandbytes::int8_linear_matmul.out": {},
    "bitsandbytes::int8_linear_matmul": {"memory": _EXPANDED},
    "bitsandbytes::int8_scaled_mm": {"memory": _EXPANDED},
    "bitsandbytes::int8_mixed_scaled_mm": {
        "memory": _EXPANDED,
        "dtypes": _SECOND,
        "subsystems": _SECOND,
    },
    "bitsandbytes::int8_vectorwise_dequant": {"dtypes": _NO_DOUBLE, "subsystems": _BELOW},
    "bitsandbytes::int8_vectorwise_quant": {"contracts": _WRITES, "subsystems": _WRITES},
    "torchao::quantize_affine_float8_non_decomposed": {"subsystems": _FLOAT8},
    "torchao::reference_dqlinear_int4": {
        "contracts": _NO_RULE,
        "dtypes": _NO_RULE,
        "subsystems": _NO_RULE,
    },
    "bitsandbytes::optimizer_update_32bit": {"dtypes": _NO_DOUBLE},
    "bitsandbytes::optimizer_update_8bit_blockwise": {
        "memory": _ADDRESSES,
        "contracts": _ADDRESSES,
        "dtypes": _READS_DOUBLE,
        "subsystems": _ADDRESSES,
    },
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
