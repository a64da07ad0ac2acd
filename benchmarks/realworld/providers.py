"""What a provider of our own gains in a package: rows of 8 bits by bitsandbytes, on the CPU.

There, bitsandbytes has no kernel of its own to quantize rows, so PyTorch's operators run one after
the other. They look for the places of the largest values too, which nobody needs; the provider that
is put beside them does not, and rounds in place. Its results are equal, bit for bit. Calls
of both are timed in turns, and their medians are shown.

    make realworld-providers
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import bitsandbytes  # noqa: F401  (registers its operators)
import torch
from torch import Tensor

import torchop

NAME = "bitsandbytes::int8_vectorwise_quant"
SIZES = ((1, 4096), (16, 4096), (64, 4096), (256, 4096), (1024, 4096))
SECONDS = 1.0  # for each size


def without_outliers(A: Tensor, threshold: float) -> bool:  # noqa: N803  (the operator's names)
    return threshold == 0.0 and A.ndim == 2 and A.shape[1] > 0


def quantized(A: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, None]:  # noqa: N803
    largest = A.abs().amax(dim=1).float()
    return (A * (127.0 / largest.unsqueeze(-1))).round_().to(torch.int8), largest, None


def times(with_provider: Callable[[], object], without: Callable[[], object]) -> tuple[float, ...]:
    """Medians in microseconds, of calls in turns."""
    for call in (with_provider, without) * 3:
        call()
    found: list[list[float]] = [[], []]
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(found[0]) < 10:
        for call, column in zip((with_provider, without), found, strict=True):
            start = time.perf_counter()
            call()
            column.append(1e6 * (time.perf_counter() - start))
    return tuple(map(statistics.median, found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="compare the results, and time nothing"
    )
    quick: bool = parser.parse_args().quick
    torch.manual_seed(0)
    torch.set_num_threads(1)  # on a machine with other work, threads wait for each other
    call = torch.ops.bitsandbytes.int8_vectorwise_quant
    print(f"{NAME}, {torch.get_num_threads()} threads")
    for rows, columns in SIZES:
        A = torch.randn(rows, columns)  # noqa: N806  (as above)
        own = call(A)
        with torchop.Library("bitsandbytes", "FRAGMENT") as library:
            torchop.register_kernel(
                NAME,
                "cpu",
                quantized,
                provider="lean",
                supports=without_outliers,
                lib=library,
            )
            without = functools.partial(call, A)
            with_provider = torchop.priority({NAME: ["lean"]}, strict=True)(lambda A=A: call(A))  # noqa: N803
            _check_equal(with_provider(), own)
            _check_equal(without(), own)
            line = f"  {rows:4} rows of {columns}: equal"
            if not quick:
                fast, slow = times(with_provider, without)
                line += f", {slow:7.0f} us by bitsandbytes, {fast:7.0f} us: {slow / fast:.2f} times"
            print(line)
        _check_equal(call(A), own)
        if torchop.providers(NAME):
            raise AssertionError("closing the library did not take the provider back")


def _check_equal(results: tuple[Tensor | None, ...], own: tuple[Tensor | None, ...]) -> None:
    for result, expected in zip(results, own, strict=True):
        if (result is None) is not (expected is None) or (
            result is not None and not torch.equal(result, expected)
        ):
            raise AssertionError(f"{NAME}: the provider does not return what bitsandbytes returns")


if __name__ == "__main__":
    main()
