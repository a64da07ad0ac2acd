"""Write the results of the benchmarks into README.md and the documentation.

    python benchmarks/report.py

`passages` returns all sentences and table rows that state a measurement, with the numbers from
`results/*.json`. For each of them, this program finds the same sentence with other numbers in a
page, and replaces the numbers. It also draws the charts. `tests/project/test_benchmarks.py` checks
that all pages and charts are up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import _cases
import calls
import compiling
import device
import providers
import registration
from harness import Result

ROOT = Path(__file__).parents[1]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def passages() -> dict[str, list[str]]:
    return {
        "README.md": [*_readme()],
        "docs/dev/native-calls.md": [*_costs()],
        "docs/how-to/accelerate.md": [*_accelerate()],
        "docs/index.md": [_alternative_text()],
        "docs/how-to/several-kernels.md": [*_providers()],
        "docs/reference/differences.md": [*_registration()],
        "docs/tutorials/gpu-kernels.md": [*_devices()],
        "docs/tutorials/families.md": [*_families()],
    }


def _call(case: _cases.Case) -> dict[str, float]:
    return Result("calls").values(calls.TABLE, case.title)


def _ratio(case: _cases.Case, variant: str, base: str) -> float:
    return Result("calls").compare(calls.TABLE, case.title, variant, base)


def _readme() -> Iterator[str]:
    fourteen = _call(calls.FOURTEEN)
    ours, stock, low = (fourteen[v] for v in (calls.HANDLE, calls.CUSTOM_OP, calls.LOW_LEVEL))
    yield (
        f"A call with 14 tensors takes {ours:.1f} us. It takes {stock:.1f} us with "
        f"`torch.library.custom_op` ({_ratio(calls.FOURTEEN, calls.CUSTOM_OP, calls.HANDLE):.0f}x) "
        f"and {low:.1f} us with `define` and `impl` "
        f"({_ratio(calls.FOURTEEN, calls.LOW_LEVEL, calls.HANDLE):.0f}x)."
    )
    yield _alternative_text()


def _alternative_text() -> str:
    fourteen = _call(calls.FOURTEEN)
    return (
        f"Microseconds for one call with 14 small tensors: torchop {fourteen[calls.HANDLE]:.1f}, "
        f"torch.library.custom_op {fourteen[calls.CUSTOM_OP]:.1f}."
    )


def _costs() -> Iterator[str]:
    plain, handle = calls.PLAIN, calls.HANDLE
    yield (
        f"For a function of 14 tensors that takes {_call(calls.FOURTEEN)[plain]:.1f} us, a native "
        f"call takes {_ratio(calls.FOURTEEN, handle, plain):.2f} times as long as the function, "
        f"and {_ratio(calls.INFERENCE, handle, plain):.2f} times in inference mode."
    )
    through_ops = _ratio(calls.FOURTEEN, calls.OPS, plain)
    yield f"A call through `torch.ops` takes {through_ops:.2f} times as long as the function."
    training = _ratio(calls.TRAINING, handle, calls.WRITTEN)
    yield f"A training step takes {training:.2f} times as long as with `autograd.Function`."


def _accelerate() -> Iterator[str]:
    without_gradient = (calls.FOURTEEN, _cases.FOUR, calls.ONE, calls.INFERENCE, calls.TYPED)
    slow = (calls.MUTATION, calls.MUTATION_OF_3, calls.SAVES)

    def ratios(cases: Sequence[_cases.Case], variant: str) -> list[float]:
        return sorted(_ratio(case, variant, calls.PLAIN) for case in cases)

    stock, low = (ratios(without_gradient, v) for v in (calls.CUSTOM_OP, calls.LOW_LEVEL))
    result = Result("calls")
    fast = max(
        result.compare(calls.TABLE, case.title, calls.ACCELERATED, calls.PLAIN, difference=True)
        for case in without_gradient
    )
    yield (
        f"a `custom_op` call takes {stock[0]:.0f} to {stock[-1]:.0f} times as long as its kernel, "
        f"and {ratios(slow, calls.CUSTOM_OP)[0]:.0f} times or more if it mutates or saves tensors. "
        f"A `define` and `impl` call takes {low[0]:.0f} to {low[-1]:.0f} times as long. An "
        f"accelerated call takes at most {fast:.1f} us more than its kernel."
    )
    for of in Result("realworld").tables.values():
        unit = "" if of["unit"] == "us" else f" {of['unit']}"
        for row, variants in of["rows"].items():
            numbers = " | ".join(f"{value}{unit}" for (value,) in variants.values())
            yield f"| {row} | {numbers} |"


def _providers() -> Iterator[str]:
    added = Result("providers").values(providers.SELECTION, providers.ROW)
    yield (
        "With a `supports` function, a call looks up the cached answer in C++, which takes "
        f"{added[providers.SUPPORTS]:.0f} ns."
    )


def _registration() -> Iterator[str]:
    result = Result("registration")
    ours, stock = registration.TORCHOP, registration.CUSTOM_OP
    time, memory = (
        100 * result.compare(table, registration.KERNEL, ours, stock)
        for table in (registration.TIME, registration.MEMORY)
    )
    yield (
        f"Registering a functional operator takes {time:.0f}% of the time and {memory:.0f}% of the "
        "memory of `torch.library.custom_op`."
    )


def _families() -> Iterator[str]:
    added = Result("compiling").values(compiling.OVERHEAD, compiling.ELEMENTWISE)
    yield (
        f"With `out_op`, a call whose memory Inductor plans takes {added[compiling.FAMILY]:.1f} us "
        "more than its kernel. With the tag `torch.Tag.out`, it takes "
        f"{added[compiling.TAGGED]:.1f} us more."
    )


def _devices() -> Iterator[str]:
    for title, table in Result("device").tables.items():
        elapsed = {name: values[0] for name, values in table["rows"][device.ELAPSED].items()}
        names = (device.PLAIN, device.HANDLE, "custom_op", "define + impl")
        cells = (f"{elapsed[name]:.1f}" if name in elapsed else "" for name in names)
        yield f"| {title} | {' | '.join(cells)} |"


def refresh(page: str, passage: str) -> str:
    """Return the text of a page with the numbers of a passage replaced."""
    numbers = NUMBER.findall(passage)

    def replace(match: re.Match[str]) -> str:
        text, end = "", match.start()
        for group, number in enumerate(numbers, 1):
            text += page[end : match.start(group)] + number
            end = match.end(group)
        return text + page[end : match.end()]

    refreshed, count = pattern(passage).subn(replace, page)
    if count == 0:
        raise ValueError(f"the page does not have this passage:\n{passage}")
    return refreshed


def pattern(passage: str) -> re.Pattern[str]:
    """Return a pattern that matches a passage with any other numbers and line breaks."""
    text = NUMBER.sub("\0", passage)  # no page contains this character
    words = [re.escape(word).replace("\0", f"({NUMBER.pattern})") for word in text.split()]
    return re.compile(r"\s+".join(words))


def main() -> None:
    for name, texts in passages().items():
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        for text in texts:
            page = refresh(page, text)
        path.write_text(page, encoding="utf-8")
    import _charts  # not at the top, because it requires matplotlib

    _charts.draw()


if __name__ == "__main__":
    main()
