"""The two example rules of docs/dev/add-a-rule.md are short and work. Uses private names."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests.project.test_docs import collect
from torchop._core.definition import CompiledRule
from torchop._define.registrations import Registrations
from torchop._rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "dev" / "add-a-rule.md"
LONGEST = 59
COMPILED, PUBLIC = (block.code for block in collect(PAGE))


def run(code: str) -> types.ModuleType:
    module = types.ModuleType("mylib")  # as if a package named mylib defined the rule
    sys.modules[module.__name__] = module
    try:
        exec(compile(code, str(PAGE), "exec", dont_inherit=True), vars(module))
    finally:
        del sys.modules[module.__name__]
    return module


@pytest.fixture
def relu(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::relu", mutates_args=())
    def relu(x: Tensor, floor: float = 0.0) -> Tensor:
        return x.clamp(min=floor)

    return relu


@pytest.mark.parametrize("code", [COMPILED, PUBLIC], ids=["compiled", "public"])
def test_template_is_short(code: str) -> None:
    assert len(code.splitlines()) <= LONGEST


def test_a_compiled_rule(relu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = run(COMPILED)
    kind: type[CompiledRule[Any]] = template.SparseRule
    monkeypatch.setattr("torchop._core.definition.kinds", (*RULES, kind))
    relu._definition.outdate_plan()
    x = torch.tensor([1.0, -1.0]).to_sparse()
    with pytest.raises(NotImplementedError, match="SparseCPU"):
        relu(x)
    for _ in range(2):  # the second time, the dispatcher kernel is installed already

        @template.register_sparse(relu)
        def _(x: Tensor, floor: float) -> Tensor:
            return relu(x.to_dense(), floor).to_sparse()

    assert relu(x).to_dense().tolist() == [1, 0]
    assert repr(relu).endswith("; sparse>")
    with pytest.raises(torchop.RuleSignatureError, match="a sparse kernel is called with"):
        template.register_sparse(relu, lambda x: x)
    template.register_sparse(relu, lambda x, floor: None)
    with pytest.raises(torchop.ResultError, match="sparse kernel"):
        relu(x)


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Run the template of a public rule, and add its registration method to torchop's classes."""
    template = run(PUBLIC)
    name = "register_error_bound"
    monkeypatch.setattr(Registrations, name, getattr(template, name), raising=False)
    return template


def test_a_public_rule(public: types.ModuleType, namespace: str, relu: Any) -> None:
    @relu.register_error_bound
    def _(x: Tensor, floor: float) -> float:
        return floor

    assert public.error_bound(relu)(torch.ones(1)) == 0.0
    assert public.error_bound(relu)(torch.ones(1), 2.0) == 2.0
    assert repr(relu).endswith("; error bound>")
    with pytest.raises(torchop.RuleSignatureError, match="an error bound is called with"):
        relu.register_error_bound(lambda x: 1.0)
    relu.register_error_bound(lambda x, floor: "much")
    with pytest.raises(torchop.ResultError, match="the error bound is a float, got 'much'"):
        public.error_bound(relu)(torch.ones(1))
    with pytest.raises(torchop.MissingRuleError, match="no error bound is registered"):
        public.error_bound("aten::sin")
