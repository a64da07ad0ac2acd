"""Does `accelerate` make the operators of real packages cheap, and change nothing?

`make realworld` installs the packages of `requirements/realworld.txt` into an environment of their
own, without letting them change PyTorch, and runs this. For each operator: the results are compared
bit by bit, with and without, and a call is timed before, after, and as the kernel alone. The bar:
a call costs at most 0.5 us more than its kernel, within the accuracy of 5% of it.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchop
from torchop import _naming
from torchop._native import foreign

BAR = 0.5  # us
ACCURACY = 0.05  # of what a block takes; less cannot be told from a difference of two blocks
ROUNDS, CALLS = 101, 40


class Case(NamedTuple):
    """A call of an operator.

    Attributes:
        op: its name.
        arguments: makes the arguments; the same ones each time it is called.
    """

    op: str
    arguments: Callable[[], tuple[Any, ...]]


class Measured(NamedTuple):
    """A row of the table; times are in microseconds."""

    op: str
    before: float
    after: float
    kernel: float
    over: float  # what a native call takes more than the kernel
    native: bool
    records: bool

    @property
    def missed(self) -> bool:
        """Whether that is too much. To record a gradient has a cost of its own."""
        limit = max(BAR, ACCURACY * self.kernel)
        return self.native and not self.records and self.over > limit


def bitsandbytes() -> Iterator[Case]:
    """4-bit and 8-bit quantisation, and the optimizers, of what runs on a CPU."""
    functional = importlib.import_module("bitsandbytes.functional")
    torch.manual_seed(0)
    x, row = torch.randn(64, 64), torch.randn(1, 64)
    code = functional.create_dynamic_map()
    ops = torch.ops.bitsandbytes
    q4, absmax4 = ops.quantize_4bit(x, 64, "nf4", torch.uint8)
    q8, absmax8 = ops.quantize_blockwise(x, code, 64)
    i8, stats, _ = ops.int8_vectorwise_quant(x)
    i32 = ops.int8_linear_matmul(i8, i8)
    yield Case("bitsandbytes::quantize_4bit", lambda: (x, 64, "nf4", torch.uint8))
    yield Case(
        "bitsandbytes::dequantize_4bit",
        lambda: (q4, absmax4, 64, "nf4", x.shape, torch.float32),
    )
    table = functional.get_4bit_type("nf4", device="cpu")
    yield Case("bitsandbytes::gemv_4bit", lambda: (row, q4, x.shape, absmax4, table, 64))
    yield Case("bitsandbytes::quantize_blockwise", lambda: (x, code, 64))
    yield Case("bitsandbytes::dequantize_blockwise", lambda: (q8, absmax8, code, 64, torch.float32))
    yield Case("bitsandbytes::int8_vectorwise_quant", lambda: (x,))
    yield Case("bitsandbytes::int8_vectorwise_dequant", lambda: (i8, stats))
    yield Case("bitsandbytes::int8_linear_matmul", lambda: (i8, i8))
    yield Case("bitsandbytes::int8_mm_dequant", lambda: (i32, stats, stats))
    yield Case("bitsandbytes::int8_scaled_mm", lambda: (i8, i8, stats, stats))

    def adam() -> tuple[Any, ...]:
        torch.manual_seed(1)
        tensors = [torch.rand(64) for _ in range(4)]
        numbers = (0.0, 0.0, 0.9, 0.99, 0.0, 0.0, 1e-8, 0.0, 3, 1e-3, 1.0, False)
        return ("adam", *tensors, None, *numbers)

    yield Case("bitsandbytes::optimizer_update_32bit", adam)


def optimum_quanto() -> Iterator[Case]:
    """Quantisation of tensors, and the product with quantised weights."""
    importlib.import_module("optimum.quanto")
    torch.manual_seed(0)
    x, scale = torch.randn(32, 32), torch.rand(32, 1) + 0.1
    packed = torch.randint(0, 255, (16, 32), dtype=torch.uint8)
    weights = torch.randint(-127, 127, (32, 32), dtype=torch.int8)
    shift = torch.rand(32, 1)
    yield Case("quanto::quantize_symmetric", lambda: (x, torch.int8, 0, scale))
    yield Case("quanto::quantize_affine", lambda: (x, 4, 0, None, scale, shift))
    yield Case("quanto::unpack", lambda: (packed, 4))
    yield Case("quanto::qbytes_mm", lambda: (x, weights, scale))


def torchao() -> Iterator[Case]:
    """Affine quantisation, and scales of float8."""
    importlib.import_module("torchao.quantization")
    torch.manual_seed(0)
    x, scale = torch.randn(32, 32), torch.rand(32) + 0.1
    zero = torch.zeros(32, dtype=torch.int32)
    quantised = torch.randint(-127, 127, (32, 32), dtype=torch.int8)
    block, ends = [1, 32], (-128, 127)
    yield Case("torchao::choose_qparams_affine", lambda: (x, "SYMMETRIC", block, torch.int8, *ends))
    yield Case("torchao::quantize_affine", lambda: (x, block, scale, zero, torch.int8, *ends))
    yield Case(
        "torchao::dequantize_affine", lambda: (quantised, block, scale, zero, torch.int8, *ends)
    )


def transformers() -> Iterator[Case]:
    """The experts of a mixture, and their gradient."""
    importlib.import_module("transformers.integrations.moe")
    torch.manual_seed(0)
    x, weight = torch.randn(8, 16), torch.randn(2, 16, 16)
    ends = torch.tensor([4, 8], dtype=torch.int32)
    grad = torch.randn(8, 16)
    learnt = weight.clone().requires_grad_()
    yield Case("transformers::grouped_mm_fallback", lambda: (x, weight, ends))
    yield Case("transformers::grouped_mm_fallback", lambda: (x, learnt, ends))
    yield Case("transformers::grouped_mm_fallback_backward", lambda: (x, weight, ends, grad))


PACKAGES = (bitsandbytes, optimum_quanto, torchao, transformers)


def measure(case: Case) -> Measured:
    """Runs a case with and without acceleration.

    Raises:
        AssertionError: the results differ.
    """
    name = _naming.parse(case.op)
    # As packages call those of several overloads; of a packet, PyTorch chooses on each call.
    op = getattr(getattr(torch.ops, name.namespace), name.name).default
    expected = run(op, case.arguments())
    with torchop.accelerate(case.op):
        assert_equal(run(op, case.arguments()), expected, case.op)
        explanation = torchop.explain(op, *case.arguments())
        known = foreign.find(_naming.parse(op._name))
        function = None if known is None else known.entry.explain(*case.arguments())[2]
        records = any(isinstance(a, Tensor) and a.requires_grad for a in case.arguments())
        # On the same arguments: what it writes, it may write again.
        arguments = case.arguments()
        rounds = [
            time_in_turn(op, inspect.unwrap(function, stop=is_kernel), arguments, records)
            for _ in range(ROUNDS)
            if function is not None
        ]
    before, after, kernel, over = (
        statistics.median(times) for times in zip(*rounds or [(math.nan,) * 4], strict=True)
    )
    return Measured(case.op, before, after, kernel, over, explanation.native, records)


def time_in_turn(
    op: Any, kernel: Callable[..., Any], arguments: tuple[Any, ...], records: bool
) -> tuple[float, float, float, float]:
    """Times a few calls of each; the last number is what a native call takes more than the kernel.

    That is a difference of two blocks that follow on each other: what else the machine does falls
    on both, mostly.
    """
    with torchop.native.disabled():
        before = timed(op, arguments)
    after = timed(op, arguments)
    with torch.set_grad_enabled(not records):  # a kernel that has a formula is not differentiated
        alone = timed(kernel, arguments)
    return before, after, alone, after - alone


def is_kernel(function: Any) -> bool:
    """Whether it is the package's own, below what torchop may put around it."""
    return not function.__module__.startswith("torchop.")


def run(op: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """The results, what was written, and the gradients."""
    results = op(*arguments)
    flat = list(results) if isinstance(results, (tuple, list)) else [results]
    wanted = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    grads = torch.autograd.grad(flat[0].sum(), wanted) if wanted else ()
    return [*flat, *(a for a in arguments if isinstance(a, Tensor)), *grads]


def assert_equal(found: list[Any], expected: list[Any], op: str) -> None:
    """Bit by bit: two NaNs are equal, 0.0 and -0.0 are not."""
    assert len(found) == len(expected), op
    for one, other in zip(found, expected, strict=True):
        if not isinstance(one, Tensor):
            assert one == other, op
            continue
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        bits = [t.detach().contiguous().view(torch.uint8) for t in (one, other) if t.numel()]
        assert not bits or torch.equal(*bits), op


def timed(call: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    start = time.thread_time()
    for _ in range(CALLS):
        call(*arguments)
    return (time.thread_time() - start) / CALLS * 1e6


def main() -> int:
    """Prints the table; returns 1 if a bar was missed or nothing could be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[Measured] = []
    for package in PACKAGES:
        rows += [measure(case) for case in package()]
    print(f"{'operator':48}{'before':>9}{'after':>9}{'kernel':>9}{'over kernel':>13}  (us)")
    for row in rows:
        note = "" if row.native else "  dispatched"
        note = "  records a gradient" if row.records else note
        note = "  MISSED" if row.missed else note
        print(
            f"{row.op:48}{row.before:9.2f}{row.after:9.2f}{row.kernel:9.2f}{row.over:13.2f}{note}"
        )
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=2))
    missed = [row for row in rows if row.missed]
    print(
        f"{len(rows)} cases, all bit-equal; {sum(row.native for row in rows)} native; "
        f"{len(missed)} cost over {BAR} us more than their kernel"
    )
    return int(bool(missed) or not rows)


if __name__ == "__main__":
    sys.exit(main())
