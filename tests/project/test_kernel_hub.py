"""`examples/kernel_hub` loads a package twice, under two namespaces, as the kernel hub does.

Uses private names.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import itertools
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native
from tests._support.forking import run_script
from torchop._inspect import cache_key, registrant
from torchop.extend import OpName

pytestmark = pytest.mark.project

FOLDER = Path(__file__).parents[2] / "examples" / "kernel_hub"
_numbers = itertools.count()


def _load(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copies() -> Iterator[list[Any]]:
    loader = _load("torchop_load_twice", FOLDER / "load_twice.py")
    loaded: list[ModuleType] = [
        loader.load(FOLDER / "scaled_norm", f"cpu_{next(_numbers)}") for _ in range(2)
    ]
    yield loaded
    prefixes = tuple(module.__name__ for module in loaded)
    for name in [each for each in sys.modules if each.startswith(prefixes)]:
        del sys.modules[name]


X = torch.linspace(-1, 1, 12).reshape(2, 6)
WEIGHT = torch.linspace(1, 2, 6)


def _reference(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def test_example_runs() -> None:
    done = run_script(FOLDER / "load_twice.py")
    assert done.returncode == 0, done.stderr
    assert "3f9c2ab: calls float64" in done.stdout
    assert "81d04ce: calls reference" in done.stdout


def test_every_operator_of_both_copies_works(copies: list[Any]) -> None:
    for module in copies:
        for op, inputs in (
            (module.rms_norm, (X.clone().requires_grad_(), WEIGHT.clone().requires_grad_())),
            (module.gate, (X.clone().requires_grad_(),)),
            (module.negate, (X.clone(),)),
        ):
            assert op._qualname.startswith(f"{module.NAMESPACE}::")
            torchop.opcheck(op, inputs)
        torch.testing.assert_close(module.rms_norm(X, WEIGHT), _reference(X, WEIGHT))
        wide = [each.double().requires_grad_() for each in (X, WEIGHT)]
        torch.autograd.gradcheck(module.rms_norm, wide)
        torch.autograd.gradcheck(module.gate, wide[:1])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_compiled_program_uses_both_copies(copies: list[Any], backend: str) -> None:
    first, second = copies
    layers = [module.layers.RMSNorm() for module in copies]
    for layer in layers:
        layer.weight, layer.eps = WEIGHT, 1e-6

    def program(x: Tensor) -> Tensor:
        return second.gate(first.rms_norm(x, WEIGHT)) + second.negate(
            first.gate(layers[1](layers[0](x)))
        )

    x, compiled_x = X.clone().requires_grad_(), X.clone().requires_grad_()
    program(x).sum().backward()
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    result = compiled(compiled_x)
    torch.testing.assert_close(result, program(x))
    result.sum().backward()
    torch.testing.assert_close(compiled_x.grad, x.grad)


@pytest.mark.filterwarnings("ignore:.* was registered at .*:UserWarning")  # by another package
def test_rule_of_one_copy_does_not_affect_the_other(copies: list[Any]) -> None:
    first, second = copies
    before = cache_key.identify([second.rms_norm._qualname])
    first.rms_norm.register_fake(lambda x, weight, eps=1e-6: x.new_empty(7))
    first.rms_norm.register_autograd(lambda ctx, grad: (None, None, None))
    first.rms_norm.register_vmap(lambda info, in_dims, *args: (args[0], in_dims[0]))
    first.rms_norm.register_kernel("cpu", lambda x, weight, eps=1e-6: x.clone())
    first.gate.register_kernel("cpu", lambda x: x.clone())
    assert cache_key.identify([second.rms_norm._qualname]) == before

    torch.testing.assert_close(second.rms_norm(X, WEIGHT), _reference(X, WEIGHT))
    assert second.rms_norm(X.to("meta"), WEIGHT.to("meta")).shape == X.shape
    torch.autograd.gradcheck(
        second.rms_norm, [each.double().requires_grad_() for each in (X, WEIGHT)]
    )
    assert second.gate(X).shape == (2, 3)
    assert "vmap" not in repr(second.rms_norm)
    assert first.rms_norm(X.to("meta"), WEIGHT.to("meta")).shape == (7,)


def test_priority_applies_to_one_copy(copies: list[Any]) -> None:
    with copies[0].use_float64():
        ranks = [
            {each.provider: each.rank for each in torchop.providers(f"{module.NAMESPACE}::*")}
            for module in copies
        ]
    assert ranks[0]["float64"] == 1
    assert ranks[1]["float64"] != 1


def test_both_copies_have_sharding_rules(copies: list[Any]) -> None:
    rule = torchop.get_rule("sharding")
    assert all(rule.has(module.rms_norm) and rule.has(module.gate) for module in copies)


@needs_native
def test_both_copies_accelerate_their_operator(copies: list[Any]) -> None:
    for module in copies:
        op = getattr(torch.ops, module.NAMESPACE).negate
        op(X)
        before = torchop.native.counters(op)["native"]
        torch.testing.assert_close(op(X), -X)
        assert torchop.native.counters(op)["native"] == before + 1


def test_handles_of_copies_can_be_pickled_and_inspected(copies: list[Any]) -> None:
    for module in copies:
        assert pickle.loads(pickle.dumps(module.rms_norm)) is module.rms_norm
        assert copy.deepcopy(module.gate) is module.gate
        assert module.rms_norm.__module__ == f"{module.__name__}.norm"
        assert list(inspect.signature(module.rms_norm).parameters) == ["x", "weight", "eps"]
        assert "rsqrt" in inspect.getsource(inspect.unwrap(module.rms_norm))


def test_operator_belongs_to_the_copy_that_defined_it(copies: list[Any]) -> None:
    first, second = (module.__name__ for module in copies)
    for module, other in ((copies[0], second), (copies[1], first)):
        for local in ("rms_norm", "gate", "negate"):
            op = OpName.parse(f"{module.NAMESPACE}::{local}")
            assert registrant.registers(module.__name__, op)
            assert not registrant.registers(other, op)
