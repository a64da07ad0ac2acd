"""The keys of compile caches contain operators' rules and `cache_key_tag`. Uses private names."""

from __future__ import annotations

import inspect
import sys
import uuid
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.package import DynamoCache
from torch._dynamo.precompile_context import PrecompileContext

import torchop
from tests._support.common import assert_clean
from tests._support.forking import run_compiling
from torchop._compat import graphs
from torchop._inspect import cache_key


@pytest.fixture
def op(namespace: str) -> Any:
    def double(x: Tensor) -> Tensor:
        return x * 2

    return torchop.custom_op(f"{namespace}::double", double, mutates_args=())


def _backward_by_two(ctx: Any, grad: Tensor) -> Tensor:
    return grad * 2


def _backward_by_three(ctx: Any, grad: Tensor) -> Tensor:
    return grad * 3


def test_tag_is_the_same_for_the_same_rules(op: Any) -> None:
    op.register_autograd(_backward_by_two)
    before = torchop.cache_key_tag()
    op.register_autograd(_backward_by_two)
    assert torchop.cache_key_tag() == before


@pytest.mark.parametrize("rule", ["fake", "backward", "setup_context", "effect"])
def test_tag_changes_with_a_rule(op: Any, namespace: str, rule: str) -> None:
    op.register_autograd(_backward_by_two)
    before = torchop.cache_key_tag()
    if rule == "fake":
        op.register_fake(lambda x: torch.empty_like(x))
    elif rule == "backward":
        op.register_autograd(_backward_by_three)
    elif rule == "setup_context":
        op.register_autograd(_backward_by_two, setup_context=lambda ctx, inputs, output: None)
    else:
        op.register_effect(torchop.EffectType.ORDERED)
    assert torchop.cache_key_tag() != before


def test_tag_changes_with_the_code_of_torchop(
    op: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op.register_autograd(_backward_by_two)
    tags = []
    (tmp_path / "rules").mkdir()
    monkeypatch.setattr(torchop, "__file__", str(tmp_path / "__init__.py"))
    for code in ("", "x = 1", "x = 2", "x = 2"):  # as if torchop itself were edited
        (tmp_path / "rules/rule.py").write_text(code)
        cache_key._own_code.cache_clear()
        tags.append(torchop.cache_key_tag())
    cache_key._own_code.cache_clear()
    assert len(set(tags)) == 3
    assert tags[2] == tags[3]


def test_tag_does_not_change_with_a_kernel(op: Any) -> None:
    before = torchop.cache_key_tag()
    op.register_kernel("cpu", lambda x: x + x)
    assert torchop.cache_key_tag() == before


def _twice(grad: Tensor) -> Tensor:
    return grad * 2


def _thrice(grad: Tensor) -> Tensor:
    return grad * 3


def _around(helper: Any) -> Any:
    return lambda ctx, grad: helper(grad)


def _backward_by_helper(ctx: Any, grad: Tensor) -> Tensor:
    return _twice(grad)


def _identity_of_double(op: Any) -> str:
    return cache_key.identify([str(op._qualname)])[0]


def test_functions_called_by_a_formula_are_part_of_the_key(op: Any, monkeypatch: Any) -> None:
    op.register_autograd(_around(_twice))
    twice = _identity_of_double(op)
    op.register_autograd(_around(_thrice))
    assert _identity_of_double(op) != twice

    op.register_autograd(_backward_by_helper)
    by_helper = _identity_of_double(op)
    assert _identity_of_double(op) == by_helper
    monkeypatch.setattr(sys.modules[__name__], "_twice", _thrice)
    assert _identity_of_double(op) != by_helper


@pytest.mark.parametrize("way", ["handle", "torch.ops"])
def test_an_operator_that_a_formula_calls_is_part_of_the_key(
    op: Any, namespace: str, way: str
) -> None:
    inner = torchop.custom_op(
        f"{namespace}::scale",
        lambda grad: grad * 2,
        mutates_args=(),
        schema="(Tensor grad) -> Tensor",
    )
    source = (
        f"lambda ctx, grad: torch.ops.{namespace}.scale(grad)"
        if way == "torch.ops"
        else ("lambda ctx, grad: inner(grad)")
    )
    op.register_autograd(eval(source, {"torch": torch, "inner": inner, "__name__": __name__}))
    before = _identity_of_double(op)
    inner.register_fake(lambda grad: torch.empty_like(grad))
    assert _identity_of_double(op) != before


@pytest.mark.parametrize("owner", ["custom_op", "Library"])
def test_stock_operators_are_part_of_the_key(namespace: str, owner: str) -> None:
    qualname = f"{namespace}::other"
    if owner == "custom_op":

        def other(x: Tensor) -> Tensor:
            return x * 2

        handle = torch.library.custom_op(qualname, other, mutates_args=())
        changes = [
            lambda: handle.register_autograd(_backward_by_two),
            lambda: handle.register_autograd(_backward_by_three),
            lambda: handle.register_fake(lambda x: torch.empty_like(x)),
        ]
    else:
        torch.library.define(qualname, "(Tensor x) -> Tensor")
        changes = [
            lambda: torchop.register_fake(qualname, lambda x: torch.empty_like(x)),
            lambda: torchop.register_autograd(qualname, _backward_by_two),
            lambda: torchop.register_autograd(qualname, _backward_by_three),
        ]
    seen = {cache_key.identify([qualname])[0]}
    for change in changes:
        change()
        seen.add(cache_key.identify([qualname])[0])
    assert len(seen) == 4


def test_operators_without_rules_add_nothing_to_the_key() -> None:
    assert cache_key.identify(["aten::sin", "aten::cos.out"]) == ("", [])


def test_a_helper_operator_has_the_rules_of_its_operator(op: Any) -> None:
    op.register_autograd(_backward_by_two)
    forms = op.derive_inplace(), op.derive_out()
    before = [_identity_of_double(form) for form in forms]
    op.register_autograd(_backward_by_three)
    assert all(_identity_of_double(form) != old for form, old in zip(forms, before, strict=True))


def test_the_operators_of_a_graph_are_found_in_its_regions(namespace: str) -> None:
    region = torch.fx.Graph()
    x = region.placeholder("x")
    region.output(region.call_function(torch.ops.aten.sin.default, (x,)))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x = graph.call_module("region", (x,))
    handed_on = graph.call_function(print, (torch.ops.aten.add.Tensor, x))
    graph.output(graph.call_function(torch.ops.aten.cos.out, (handed_on,)))
    inner = torch.fx.GraphModule({}, region)
    module = torch.fx.GraphModule({"region": inner}, graph)
    names = [op.name() for op in graphs.operators_in(module)]
    assert names == ["aten::add.Tensor", "aten::cos.out", "aten::sin"]


def _fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_precompiled_program_depends_on_the_code_of_rules(op: Any, tmp_path: Path) -> None:
    op.register_fake(_fake)

    def program(x: Tensor) -> Any:
        return op(x) + 1

    # Store Dynamo's cache in a folder of its own. By default, it is inside of Inductor's cache.
    with (
        torch._dynamo.config.patch(caching_precompile=True),
        warnings.catch_warnings(),
        mock.patch.object(DynamoCache, "path_prefix", return_value=str(tmp_path)),
    ):
        warnings.simplefilter("ignore")
        torch.compile(program, fullgraph=True)(torch.ones(2))
        PrecompileContext.save_to_dynamo_cache()
        precompiled = DynamoCache.load(program)
    assert precompiled is not None
    # When the program is loaded, Dynamo raises if one of these sources has changed. So the sources
    # must include the fake kernel.
    sources = precompiled.dynamo.source_info.inlined_sources
    _, first = inspect.getsourcelines(_fake)
    assert first in {source.firstlineno for source in sources if source.module == __name__}


# This program compiles repeatedly. `torch._dynamo.reset` removes all graphs from memory, so each
# compilation can only use the cache on disk, as in a new process after the formula was edited.
_PROGRAM = """
import sys, torch, torchop
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

class Pass(CustomGraphPass):
    calls = 0
    def __call__(self, graph):
        Pass.calls += 1
    def uuid(self):
        return "of the user"

config.post_grad_custom_pre_pass = Pass()

@torchop.custom_op(f"{sys.argv[1]}::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@torchop.custom_op(f"{sys.argv[1]}::other", mutates_args=())
def other(x: torch.Tensor) -> torch.Tensor:
    return x * 2

double.register_fake(lambda x: torch.empty_like(x))
for operator, factor in (double, 2), (double, 3), (other, 4), (double, 3):
    # Put a new number into the code, as if the file had been edited.
    operator.register_autograd(eval(f"lambda ctx, grad: grad * {factor}"))
    torch._dynamo.reset()
    counters.clear()
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: double(x) + 1, fullgraph=True)(x).sum().backward()
    print(factor, x.grad[0].item(), counters["aot_autograd"]["autograd_cache_hit"], Pass.calls > 0)
"""


def test_an_edited_formula_of_an_operator_in_the_graph_is_compiled_again() -> None:
    # Use a new name, which the cache on disk cannot contain yet. This is faster than an empty
    # cache, for which Inductor would compile its check for vector instructions again.
    done = run_compiling(_PROGRAM, f"cached_{uuid.uuid4().hex}")
    assert assert_clean(done).splitlines() == [
        "2 2.0 0 True",
        "3 3.0 0 True",
        "4 3.0 1 True",
        "3 3.0 1 True",
    ]
