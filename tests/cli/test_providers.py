"""`python -m torchop providers`."""

from __future__ import annotations

import json

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


def test_a_package_is_listed(run, write, namespace):
    outcome = run("providers", write("operators", OPERATORS))
    assert outcome.code == 0
    heading, reference, fast, vendor = outcome.out.splitlines()
    assert heading.split()[:3] == ["operator", "order", "provider"]
    assert reference.split()[:5] == [f"{namespace}::scale", "reference", "every", "device", "yes"]
    assert fast.split()[:6] == [f"{namespace}::scale", "1", "fast", "cpu,", "cuda", "yes"]
    assert "no: its `supported` raised ZeroDivisionError: division by zero" in vendor
    assert "operators_of_" in fast


def test_json_and_an_operator_without_providers(run, write, namespace):
    package = write("operators", OPERATORS)
    kernels = json.loads(run("providers", package, "--json").out)
    assert [(kernel["provider"], kernel["rank"]) for kernel in kernels] == [
        ("reference", None),
        ("fast", 1),
        ("vendor", 2),
    ]
    assert kernels[1]["device_types"] == ["cpu", "cuda"]
    assert [kernel["batch_invariant"] for kernel in kernels] == [False, True, False]
    outcome = run("providers", f"{namespace}::alone", "--import", package)
    assert outcome.out == "No operator has more than one provider.\n"
