"""In-place and out= operators use the sharding rule of their functional operator.

Uses private names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests.rules.user.sharding.ranks import assert_right, gathered, on_mesh, words
from torchop._rules.user.sharding import SHARDING
from torchop.testing import check_sharding

X = torch.arange(32.0).reshape(4, 8).cos()


def softmax(namespace: str) -> Any:
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x: x.softmax(-1),
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    op.register_fake(torch.empty_like)
    op.derive_autograd()
    op.derive_inplace()
    op.derive_out()
    return op


def test_forms_have_the_rule_of_their_operator(namespace: str, mesh: Any) -> None:
    op = softmax(namespace)
    op.register_sharding("... d -> ... d", whole="d")
    x = on_mesh(mesh, X, "S0")
    version = x._version
    assert op.inplace(x) is x
    assert_right(x, X.softmax(-1), "S0")
    assert x._version == version + 1
    for placed in ("S0", "S1", "R"):
        out = on_mesh(mesh, torch.zeros(4, 8), "S0")
        assert op.out(on_mesh(mesh, X, placed), out=out) is out
        assert_right(out, X.softmax(-1), "S0")


def test_mutated_arguments_of_forms_are_not_redistributed(namespace: str, mesh: Any) -> None:
    op = softmax(namespace)
    op.register_sharding("... d -> ... d", whole="d")
    expected = (
        rf"^{namespace}::op_: the operator writes into 'x', whose placements are \[Shard\(dim=1\)"
    )
    with pytest.raises(torchop.ShardingError, match=expected):
        op.inplace(on_mesh(mesh, X, "S1"))
    expected = rf"^{namespace}::op.out: the operator writes into 'out'.* out = out\.redistribute\("
    out = on_mesh(mesh, torch.zeros(4, 8), "S1")
    with pytest.raises(torchop.ShardingError, match=expected):
        op.out(on_mesh(mesh, X, "S0"), out=out)
    assert not gathered(out).any()


def test_all_placements_of_forms(namespace: str) -> None:
    op = softmax(namespace)
    op.register_sharding("... d -> ... d", whole="d")
    report = check_sharding(op.inplace, (X.clone(),), mesh=(2, 2))
    assert report.placements == 4
    assert len(report.refused) == 12
    report = check_sharding(op.out, (X,), {"out": torch.empty(4, 8)})
    assert (report.placements, len(report.refused)) == (8, 8)


def test_sums_that_are_pending_and_two_outputs(namespace: str, mesh: Any) -> None:
    def both(x: Tensor, w: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return x @ w * scale, x.sum(-1) * scale

    op = torchop.custom_op(f"{namespace}::op", both, mutates_args=())
    op.register_fake(
        lambda x, w, *, scale=1.0: (x.new_empty(x.shape[0], w.shape[1]), x.new_empty(x.shape[0]))
    )
    out = op.derive_out(outputs=("product", "sums"))
    op.register_sharding("b k, k n -> b n, b", reduce={"k": "sum", "n": "avg"})
    x, w = on_mesh(mesh, X, "S1"), on_mesh(mesh, X.t().contiguous(), "S0")
    product, sums = on_mesh(mesh, torch.zeros(4, 4), "P"), on_mesh(mesh, torch.zeros(4), "P")
    out(x, w, product=product, sums=sums, scale=2.0)
    assert_right(product, X @ X.t() * 2, "P")
    assert_right(sums, X.sum(-1) * 2, "P")
    with pytest.raises(torchop.ShardingError, match=r"writes into '(product|sums)'"):
        out(x, w, product=product, sums=on_mesh(mesh, torch.zeros(4), "S0"), scale=2.0)


def test_an_in_place_form_has_the_gradient_of_its_operator(namespace: str, mesh: Any) -> None:
    op = softmax(namespace)
    op.register_sharding("... d -> ... d", whole="d")
    plain = X.clone().requires_grad_()
    op(plain.sin()).sin().sum().backward()
    for placed in ("S0", "S1", "R"):
        x = on_mesh(mesh, X, placed).requires_grad_()
        y = x.sin()
        op.inplace(y)
        y.sin().sum().backward()
        assert_right(x.grad, plain.grad)  # type: ignore[arg-type]


def test_rules_of_forms_follow_the_operators_rule(namespace: str, mesh: Any) -> None:
    op = softmax(namespace)
    x = on_mesh(mesh, X, "S0")
    expected = (
        rf"^{namespace}::op_ has no sharding rule.*sharding\('{namespace}::op', 'pointwise'\)"
    )
    with pytest.raises(torchop.MissingRuleError, match=expected):
        op.inplace(x.clone())
    with torchop.Library(namespace, "FRAGMENT") as library:
        torchop.register_sharding(op, "... d -> ... d", whole="d", lib=library)
        assert words(op.inplace(x.clone())) == "S0"
        torchop.register_sharding(op, "replicate", lib=library)
        with pytest.raises(torchop.ShardingError, match="writes into 'x'"):
            op.inplace(x.clone())
        with torchop.Library(namespace, "FRAGMENT") as inner:
            torchop.register_sharding(op.inplace, "... d -> ... d", whole="d", lib=inner)
            assert words(op.inplace(x.clone())) == "S0"
        with pytest.raises(torchop.ShardingError, match="writes into 'x'"):
            op.inplace(x.clone())
        assert SHARDING.has(op.inplace)
    assert not SHARDING.has(op.inplace)
    with pytest.raises(torchop.MissingRuleError, match=expected):
        op.inplace(x.clone())
    op.register_sharding("... d -> ... d", whole="d")
    later = op.derive_inplace(f"{namespace}::later_")
    assert words(later(x.clone())) == "S0"
    overloads = [op.overload, later.overload]
    op._definition.deregister("over")
    assert not any(overload in SHARDING._registrations for overload in overloads)
