from __future__ import annotations

import json

import pytest

from tests._support.common import needs_native

OPERATORS = """
import torch, torchop

@torchop.custom_op("NAMESPACE::scale", mutates_args=(), device_types="cpu")
def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor

scale.register_fake(like="x")
scale.register_autograd(lambda ctx, grad: (grad * 2, None))
scale.register_examples(lambda: [(torch.ones(2, 3),), {"x": torch.ones(4), "factor": 0.5}])

@torch.library.custom_op("NAMESPACE::stock", mutates_args=())
def stock(x: torch.Tensor) -> torch.Tensor:
    return x * 2

stock.register_vmap(lambda info, dims, x: (x * 2, dims[0]))

library = torch.library.Library("NAMESPACE", "FRAGMENT")
library.define("low(Tensor x) -> Tensor")
library.impl("low", lambda x: x.clone(), "CPU")
library.define("double_(Tensor(a!) x) -> ()")


def double_(x):
    x.mul_(2)


library.impl("double_", double_, "CPU")
"""


@pytest.fixture
def listed(write):
    return write("operators", OPERATORS)


@needs_native
def test_a_package_is_listed(run, listed, namespace, tmp_path):
    outcome = run("list", listed)
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["operator", "kernels", "rules", "tested", "where"]
    cells = {line.partition("(")[0]: line.rpartition(")")[2] + line for line in lines[1:]}
    assert set(cells) == {f"{namespace}::{name}" for name in ("scale", "stock", "low", "double_")}
    scale = cells[f"{namespace}::scale"]
    assert "(Tensor x, float factor=2.) -> Tensor  cpu  " in scale
    assert "autograd" in scale
    assert "fake" in scale
    assert "has examples" in scale
    assert f"{listed}.py:4" in scale
    assert "every device" in cells[f"{namespace}::stock"]
    assert "vmap" in cells[f"{namespace}::stock"]
    assert "no examples" in cells[f"{namespace}::stock"]
    assert "  CPU  " in cells[f"{namespace}::low"]
    assert "  none  " in cells[f"{namespace}::low"]
    assert f"{listed}.py:18" in cells[f"{namespace}::low"]


def test_the_catalogue_and_reports_agree(run, listed, namespace, tmp_path):
    report = tmp_path / "report.json"
    results = [{"outcome": "passed"}, {"outcome": "passed"}, {"outcome": "failed"}]
    report.write_text(json.dumps([{"op": f"{namespace}::scale", "results": results}]))
    pattern = (f"{namespace}::s*", "--import", listed)
    outcome = run("list", *pattern, "--checked", str(report))
    assert "2 passed, 1 failed" in outcome.out
    assert "no examples" in outcome.out
    entries = json.loads(run("list", *pattern, "--json", "--checked", str(report)).out)
    assert [entry["checked"] for entry in entries] == ["2 passed, 1 failed", ""]
    report.write_text("[3]")
    outcome = run("list", *pattern, "--checked", str(report))
    assert outcome.code == 1
    assert "not a report of `check --json` (TypeError)" in outcome.err


@needs_native
def test_calls_are_explained(run, listed, namespace):
    scale = (f"{namespace}::scale", "--import", listed)
    outcome = run("explain", *scale)
    assert outcome.out.startswith("(float32[2, 3] on cpu)\n")
    assert "\n(x=float32[4] on cpu, factor=0.5)\n" in outcome.out
    assert outcome.out.count(f"{namespace}::scale: native, because") == 2
    outcome = run("explain", *scale, "--grad", "--call", "torch.ones(2), factor=3.0")
    assert outcome.out.startswith("(float32[2] on cpu, requires_grad, factor=3.0)\n")
    outcome = run("explain", *scale, "--call", "torch.ones(2).to_sparse()")
    assert "through the dispatcher" in outcome.out


def test_explanations_in_json(run, listed, namespace):
    scale = f"{namespace}::scale", "--import", listed, "--json"
    outcome = run("explain", *scale)
    assert outcome.code == 0
    explained = json.loads(outcome.out)
    assert [each["call"] for each in explained] == [
        "(float32[2, 3] on cpu)",
        "(x=float32[4] on cpu, factor=0.5)",
    ]
    for each in explained:
        assert list(each) == [
            "op",
            "call",
            "native",
            "reason",
            "keys",
            "kernels",
            "provider",
            "providers",
        ]
        assert each["op"] == f"{namespace}::scale"
    (each,) = json.loads(run("explain", *scale, "--call", "torch.ones(2).to_sparse()").out)
    assert each["native"] is False
    assert each["keys"][-1] == "SparseCPU"
    assert each["kernels"][0].startswith("AutogradCPU: ")


@pytest.mark.parametrize("command", ["explain", "bench"])
def test_impossible_calls_are_errors(run, listed, namespace, command):
    outcome = run(command, f"{namespace}::low", "--import", listed)
    assert outcome.code == 1
    assert f"{namespace}::low has no examples; pass the arguments: --call" in outcome.err
    outcome = run(command, f"{namespace}::low", "--import", listed, "--call", "torch.ons(2)")
    assert outcome.code == 1
    assert "--call 'torch.ons(2)': AttributeError" in outcome.err


STRUCTURED = """
import dataclasses, torch, torchop

@dataclasses.dataclass(frozen=True)
class Window:
    size: int = 3

@torchop.custom_op("NAMESPACE::pool", mutates_args=())
def pool(x: torch.Tensor, window: Window) -> torch.Tensor:
    return x[: window.size].clone()

pool.register_examples(lambda: [(torch.ones(9), Window(2))])
"""


def test_examples_may_have_structures(run, write, namespace):
    pool = f"{namespace}::pool", "--import", write("structured", STRUCTURED), "--json"
    (explained,) = json.loads(run("explain", *pool).out)
    assert explained["call"] == "(float32[9] on cpu, Window(size=2))"
    (costs,) = json.loads(run("bench", *pool).out)
    assert costs["call"] == explained["call"]


@needs_native
def test_calls_are_measured_in_a_process_of_their_own(run, listed, namespace):
    outcome = run("bench", f"{namespace}::scale", "--import", listed, "--json")
    assert outcome.code == 0
    (costs,) = json.loads(outcome.out)
    assert costs["call"] == "(float32[2, 3] on cpu)"
    assert f"{namespace}::scale: native" in costs["explanation"]
    assert list(costs["microseconds"]) == [
        "its function alone",
        "torch.ops, no_grad",
        "torch.ops, no_grad, without native calls",
        "torch.ops, inference mode",
        "torch.ops, recording a gradient",
        "torch.ops, and backward",
        "torch.ops, with fake tensors",
    ]
    assert all(cost > 0 for cost in costs["microseconds"].values())


def test_mutated_arguments_are_measured_with_fresh_contents(run, listed, namespace):
    outcome = run(
        *("bench", f"{namespace}::double_", f"{namespace}::low", "--import", listed),
        *("--call", "torch.ones(2)"),
    )
    assert outcome.code == 0
    assert f"{namespace}::double_(float32[2] on cpu)\n" in outcome.out
    assert "recording" not in outcome.out.partition("::low")[0]
    assert "torch.ops, no_grad" in outcome.out.partition("::low")[2]
