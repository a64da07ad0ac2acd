"""`python -m torchop explain` and `bench --providers`, with operators that have several kernels.

Uses private names.
"""

from __future__ import annotations

import contextlib
import json
import pickle

import pytest

from torchop.cli import calls
from torchop.testing import _tune

OPERATORS = """
import torch, torchop

@torchop.custom_op("NAMESPACE::scale", mutates_args=(), priority=["fast", "vendor"])
def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor

@scale.register_kernel(["cpu", "cuda"], provider="fast", batch_invariant=True)
def _(x, factor):
    return x * factor

@scale.register_kernel("cpu", provider="vendor", supported=lambda: 1 / 0)
def _(x, factor):
    return x * factor

@torchop.custom_op("NAMESPACE::alone", mutates_args=())
def alone(x: torch.Tensor) -> torch.Tensor:
    return x.clone()
"""


def test_explain_lists_the_providers_in_their_order(run, write, namespace):
    package = write("operators", OPERATORS)
    outcome = run("explain", package, "--call", "torch.ones(2)")
    assert outcome.code == 0
    _, alone, scale = outcome.out.split("(float32[2] on cpu)\n")
    assert "providers" not in alone
    fast, vendor, reference = scale.partition("providers (")[2].splitlines()[1:4]
    assert fast.startswith("  1. fast (cpu, cuda): runs (")
    assert "operators_of_" in fast
    assert vendor.startswith("  2. vendor (cpu): fast comes before it (")
    assert reference.startswith("  reference (every device): fast comes before it (")
    explained = run("explain", package, "--call", "torch.ones(2)", "--json")
    numbers = {each["op"]: len(each["providers"]) for each in json.loads(explained.out)}
    assert numbers == {f"{namespace}::scale": 3, f"{namespace}::alone": 0}


COMPARED = """
import torch, torchop

@torchop.custom_op("NAMESPACE::cube", mutates_args=(), priority=["mul"])
def cube(x: torch.Tensor) -> torch.Tensor:
    return x.pow(3)

@cube.register_kernel("cpu", provider="mul", configs=[{"times": 1}, {"times": 2}])
def _(x, *, times):
    return x * x * x

@cube.register_kernel("cpu", provider="wrong")
def _(x):
    return x * 2

cube.register_examples(lambda: [(torch.full((5,), 3.0),)])

@torchop.custom_op("NAMESPACE::alone", mutates_args=())
def alone(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

alone.register_examples(lambda: [(torch.ones(2),)])
"""


@pytest.fixture
def quick(monkeypatch):
    def answers_of(function, args, limit, modules):
        found = (each for each in function(*args) if not isinstance(each, str))
        return contextlib.nullcontext(pickle.loads(pickle.dumps(each)) for each in found)

    monkeypatch.setattr(calls, "answers_of", answers_of)
    monkeypatch.setattr(_tune, "_SECONDS", 0.005)


def test_kernels_are_compared_over_sizes(run, write, namespace, quick):
    package = write("compared", COMPARED)
    command = "bench", f"{namespace}::cube", "--import", package, "--providers"
    sizes = "--call", "torch.full((2, n), 3.0)", "--over", "n=4,50"
    outcome = run(*command, *sizes, "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert [each["call"] for each in found] == ["(float32[2, 4] on cpu)", "(float32[2, 50] on cpu)"]
    for each in found:
        assert each["op"] == f"{namespace}::cube"
        assert each["chosen"] == "mul"
        kernels = [(kernel["provider"], kernel["config"]) for kernel in each["kernels"]]
        expected = [("mul", {"times": 1}), ("mul", {"times": 2}), ("reference", {})]
        assert sorted(kernels, key=str) == expected
        for timed in (*each["kernels"], each["operator"]):
            low, high = timed["interval"]
            assert 0 < low <= timed["microseconds"] <= high
        medians = [kernel["microseconds"] for kernel in each["kernels"]]
        assert medians == sorted(medians)
        assert len(each["problems"]) == 1
        assert each["problems"][0].startswith("wrong is left out: ")


def test_kernels_are_compared_with_the_examples(run, write, namespace, quick):
    outcome = run("bench", write("compared", COMPARED), "--providers")
    assert outcome.code == 0
    assert f"{namespace}::alone: it has no providers" in outcome.err
    heading, columns, *rows = outcome.out.splitlines()
    assert heading == f"{namespace}::cube(float32[5] on cpu)"
    assert columns.split() == ["kernel", "us", "interval"]
    assert sum(row.startswith("mul times=") for row in rows) == 2
    assert any(row.startswith("the operator, which runs mul") for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--over", "n=1"], "--over is an option of --providers"),
        (["--providers", "--over", "n=1"], "--over requires --call"),
        (
            ["--providers", "--over", "n=1", "--call", "torch.ones(m)"],
            "--call 'torch.ones(m)': NameError: name 'm' is not defined",
        ),
        (["--over", "n=a"], "'n=a' is not like 'n=1,16,256'"),
    ],
)
def test_impossible_sizes_are_errors(run, write, namespace, options, message):
    outcome = run("bench", f"{namespace}::cube", "--import", write("wrong", COMPARED), *options)
    assert outcome.code != 0
    assert message in outcome.err
