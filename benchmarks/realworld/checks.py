"""Run `torchop.testing.check` on operators of real packages, on a CPU.

    python checks.py [PACKAGE ...]

`nox -s "realworld(part='checks')"` runs this script for all packages. The checks use the calls in
`operators.py`, and calls to operators of fbgemm and vLLM. `EXPECTED` lists the known findings with
their causes. The script fails if it finds something else, or if a known finding is missing, unless
the finding depends on the machine. `findings.md` assesses each finding.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

# The packages, and the folders in `.realworld` where they are installed. vLLM has a separate
# folder, because it requires other versions of dependencies.
PACKAGES = {
    "bitsandbytes": "packages",
    "torchao": "packages",
    "quanto": "packages",
    "nvalchemi": "packages",
    "fbgemm": "fbgemm",
    "vllm": "vllm",
}
HERE = Path(__file__).resolve().parent
_PACKAGE = "TORCHOP_REALWORLD_PACKAGE"  # environment variable: the package to check


def _examples(package: str) -> Mapping[str, list[tuple[Any, ...]]]:
    calls: dict[str, list[tuple[Any, ...]]] = {}
    for case in importlib.import_module(f"_{package}").package().cases:
        calls.setdefault(case.op, []).append(case.arguments())
    # A name without an overload is a pattern that matches all overloads. Exclude `out=` overloads
    # for which there is no case, because most of them have only GPU kernels.
    outs = {name: examples for name, examples in calls.items() if name.endswith(".out")}
    return {**outs, "*.out": [], **calls}


EXAMPLES = _examples(os.environ[_PACKAGE]) if _PACKAGE in os.environ else {}


def list_operators() -> None:
    """Call each operator once, and print the names of all operators.

    In the first call, some packages compile a kernel, which takes minutes on a busy machine.
    """
    import torch  # not at the top, because the package must be imported first

    for name, calls in EXAMPLES.items():
        namespace, _, op = name.partition("::")
        for args in calls:
            with contextlib.suppress(Exception), torch.no_grad():
                getattr(getattr(torch.ops, namespace), op)(*args)
    print(*(name for name in EXAMPLES if name != "*.out"))


def main(packages: list[str]) -> int:
    failed = 0
    for package in packages or PACKAGES:
        folder = HERE.parents[1] / ".realworld" / PACKAGES[package]
        path = os.pathsep.join([str(HERE), str(folder)])
        environment = {**os.environ, "PYTHONPATH": path, _PACKAGE: package}
        listing = [sys.executable, "-c", "import checks; checks.list_operators()"]
        listed = subprocess.run(listing, env=environment, capture_output=True, text=True)
        # The names are in the last line. Some packages print other lines when they are imported.
        operators = listed.stdout.splitlines()[-1].split()
        command = [sys.executable, "-m", "torchop", "check", *operators, "--import", "checks"]
        command += ["--examples", "checks:EXAMPLES", "--expected", "checks:EXPECTED"]
        found = folder.parent / f"{package}.json"
        found.unlink(missing_ok=True)
        command += ["--json", str(found)]
        for check in CHECKS:
            command += ["-k", check]
        print(f"{package}: {len(operators)} operators", flush=True)
        code = subprocess.run(command, env=environment).returncode
        failed += (
            code not in (0, 1) or not found.exists() or any(_unexpected(found, len(operators)))
        )
    return int(failed > 0)


def _unexpected(found: Path, number: int) -> Iterator[str]:
    """Yield the failures in the output of `check --json`, except for findings that occur by chance.

    A missing report is also a failure, because it means that the package could not be imported.
    """
    reports = json.loads(found.read_text(encoding="utf-8"))
    if len(reports) < number:
        yield f"{number - len(reports)} operators were not checked"
    for report in reports:
        for result in report["results"]:
            by_chance = any(f"expected to fail ({each})" in result["message"] for each in BY_CHANCE)
            if result["outcome"] == "failed" and not by_chance:
                yield f"{report['op']}: {result['check']}"
            elif result["outcome"] == "failed":
                print(f"{report['op']}: {result['check']} passes on this machine", flush=True)


# All checks except those that compile programs, because these take most of the time.
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
    "threads",
    "autocast",
    "inference_mode",
    "subclasses",
    "gradcheck",
    "vmap",
)
# The causes of the findings in `EXPECTED`.
_ADDRESSES = (
    "the C++ kernel reads pointers without checking sizes or strides: it returns wrong values, and "
    "crashes for tensors with 0 elements"
)
_NO_DOUBLE = "the fake kernel rejects float64 or returns another dtype, unlike the kernel"
_READS_DOUBLE = "the fake kernel rejects float64, and the kernel reads it as float32"
_BELOW = (
    "the kernel is differentiated below the autograd keys, and the fake kernel has other strides"
)
_COMPILED = "the kernel is differentiated below the autograd keys, but not in compiled programs"
_STRIDES = (
    "the fake kernel preserves the strides of the argument, and the kernel's result is contiguous"
)
_EXPANDED = "torch._int_mm returns wrong values for expanded tensors"
_SECOND = "the fake kernel returns int64 as the second result, and another number of results"
_WRITES = "with outliers, the kernel writes into A, which the schema does not declare"
_NO_RULE = "the kernel calls out_dtype, which has no rule for dispatch modes"
_FLOAT8 = "float8 has no gradients: sums and promotion are not implemented"
_UNDIFFERENTIATED = "the result requires grad, but there is no autograd kernel"
_INT8PACK = "torch._weight_int8pack_mm crashes for int8 weights with an offset or gaps"
_TAKES_ADDRESSES = "the C++ kernel reads pointers of tensors that are not contiguous"
_FAKE = "there is no fake kernel, or it returns other sizes than the kernel"
_NO_ROWS = "with 0 rows or offsets, the kernel divides by zero, or does not write the result"
_RETURNS_OFFSETS = "the kernel returns an argument, the offsets, and the schema does not declare it"
_NO_BATCHES = "there is no batching rule, and PyTorch cannot derive one for these results"
_PROMOTES = "the fake kernel and the kernel promote to different dtypes"
_OVERLAPPING = "a precondition: the written tensor is not expanded"
_NO_ATOMS = "with 0 atoms or neighbours, the kernel crashes"
_SEGMENTS = "a precondition: there is an index below num_segments for each row"
# For jagged tensors and neighbour lists, sizes in one argument must match the values in another.
_UNFITTING = "a precondition: lengths, offsets, permutations and buffers match each other"
# Findings with these causes depend on the contents of unrelated memory, on the CPU, or on the time
# limit. They may be missing in a run although the bug still exists.
BY_CHANCE = (_ADDRESSES, _TAKES_ADDRESSES, _EXPANDED, _INT8PACK, _UNFITTING, _SEGMENTS, _NO_ATOMS)
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
    "bitsandbytes::int8_mm_dequant": {"subsystems": _UNDIFFERENTIATED},
    "bitsandbytes::int8_scaled_mm": {"memory": _EXPANDED, "subsystems": _UNDIFFERENTIATED},
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
    "quanto::qbytes_mm": dict.fromkeys(("contracts", "memory", "sharing", "subsystems"), _INT8PACK),
    "quanto::quantize_symmetric": {"subsystems": _UNDIFFERENTIATED},
    **dict.fromkeys(
        (
            "fbgemm::Bfloat16QuantizedToFloat",
            "fbgemm::FloatToBfloat16Quantized",
            "fbgemm::FloatToFused8BitRowwiseQuantized",
        ),
        MappingProxyType({"memory": _TAKES_ADDRESSES, "subsystems": _FAKE}),
    ),
    "fbgemm::FloatToFusedNBitRowwiseQuantizedSBHalf": {"memory": _TAKES_ADDRESSES},
    "fbgemm::Fused8BitRowwiseQuantizedToFloat": {"memory": _TAKES_ADDRESSES, "subsystems": _FAKE},
    "fbgemm::FusedNBitRowwiseQuantizedSBHalfToFloat": {"memory": _TAKES_ADDRESSES},
    "fbgemm::batched_dense_vec_jagged_2d_mul": dict.fromkeys(
        ("contracts", "memory", "subsystems"), _NO_ROWS
    ),
    "fbgemm::block_bucketize_sparse_features": {
        "contracts": _NO_ROWS,
        "memory": _UNFITTING,
        "subsystems": _NO_ROWS,
    },
    "fbgemm::dense_to_jagged": {"contracts": _RETURNS_OFFSETS, "subsystems": _NO_BATCHES},
    "fbgemm::index_select_dim0": {"subsystems": _FAKE},
    "fbgemm::jagged_dense_bmm": {
        "contracts": _RETURNS_OFFSETS,
        "memory": _UNFITTING,
        "subsystems": _NO_ROWS,
    },
    "fbgemm::jagged_dense_elementwise_add": {"dtypes": _PROMOTES, "subsystems": _BELOW},
    "fbgemm::jagged_dense_elementwise_mul": {"contracts": _RETURNS_OFFSETS, "dtypes": _PROMOTES},
    "fbgemm::jagged_index_select": {"subsystems": _NO_BATCHES},
    "fbgemm::jagged_softmax": {"contracts": _RETURNS_OFFSETS, "memory": _UNFITTING},
    "fbgemm::jagged_to_padded_dense": {"subsystems": _NO_BATCHES},
    "fbgemm::offsets_range": {"memory": _NO_ROWS},
    "fbgemm::pack_segments": {"memory": _TAKES_ADDRESSES},
    "fbgemm::permute_1D_sparse_data": {"memory": _UNFITTING},
    "fbgemm::permute_2D_sparse_data": {"memory": _TAKES_ADDRESSES, "subsystems": _UNFITTING},
    "fbgemm::segment_sum_csr": {"memory": _TAKES_ADDRESSES},
    # The bug corrupts memory, so the process may crash only in the next check.
    "_C::*_and_mul": dict.fromkeys(
        ("contracts", "memory", "dtypes", "sharing", "subsystems"), _ADDRESSES
    ),
    **dict.fromkeys(
        ("_C::gelu_fast", "_C::gelu_new", "_C::gelu_quick", "_C::gelu_tanh", "_C::rms_norm"),
        dict.fromkeys(("contracts", "memory", "dtypes", "sharing", "subsystems"), _ADDRESSES),
    ),
    "_C::fused_add_rms_norm": dict.fromkeys(
        ("contracts", "memory", "dtypes", "subsystems"), _ADDRESSES
    ),
    "_C::dynamic_scaled_int8_quant": dict.fromkeys(
        ("contracts", "memory", "subsystems"), _ADDRESSES
    ),
    "_C::static_scaled_int8_quant": dict.fromkeys(
        ("contracts", "memory", "subsystems"), _ADDRESSES
    ),
    "_C::rotary_embedding": dict.fromkeys(
        ("contracts", "memory", "sharing", "subsystems"), _ADDRESSES
    ),
    "_C::greedy_argmax": {"subsystems": _FAKE},
    "_C::fused_gumbel_argmax": {"subsystems": _FAKE},
    "nvalchemiops::build_cell_list": {"memory": _OVERLAPPING},
    "nvalchemiops::fire2_step_coord": {"memory": _OVERLAPPING},
    "nvalchemiops::dftd3_matrix*": dict.fromkeys(("contracts", "memory", "subsystems"), _NO_ATOMS),
    "nvalchemiops::fire2_step_coord_cell": dict.fromkeys(
        ("contracts", "memory", "subsystems"), _UNFITTING
    ),
    "nvalchemiops::lbfgs_step_coord_cell": dict.fromkeys(
        ("contracts", "memory", "subsystems"), _UNFITTING
    ),
    "nvalchemiops::query_cell_list": dict.fromkeys(("contracts", "memory"), _UNFITTING),
    "nvalchemiops::segmented_dot": {"subsystems": _SEGMENTS},
    "nvalchemiops::segmented_dot_backward": {"subsystems": _SEGMENTS},
    "nvalchemiops::segmented_dot_double_backward": {"dtypes": _SEGMENTS, "subsystems": _STRIDES},
    "nvalchemiops::segmented_mean": {"subsystems": _SEGMENTS},
    "nvalchemiops::segmented_sum": {"subsystems": _SEGMENTS},
    "nvalchemiops::segmented_mean_backward": {"dtypes": _PROMOTES, "subsystems": _STRIDES},
    "nvalchemiops::segmented_mean_double_backward": {"dtypes": _PROMOTES, "subsystems": _STRIDES},
    "nvalchemiops::segmented_sum_backward": {"dtypes": _PROMOTES, "subsystems": _STRIDES},
    "nvalchemiops::segmented_sum_double_backward": {"dtypes": _PROMOTES, "subsystems": _STRIDES},
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
