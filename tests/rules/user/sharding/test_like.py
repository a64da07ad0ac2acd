"""A sharding rule may name an ATen operator. DTensor then applies the rule of this operator.

Uses private names.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import assert_clean
from tests._support.forking import run_forked
from tests.rules.user.sharding.operators import X, define, sine
from tests.rules.user.sharding.ranks import assert_right, gathered, on_mesh, words
from torchop._rules.user.sharding import SHARDING, register_sharding
from torchop.testing import check_sharding

aten = torch.ops.aten
PLACED = ("R", "S0", "S1", "P")


def topk(namespace: str, schema: str = "(Tensor x, int k, int dim=-1)", **options: Any) -> Any:
    def both(x: Tensor, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
        values, indices = x.topk(k, dim)
        return values, indices

    return define(namespace, f"{schema} -> (Tensor, Tensor)", both, both, mutates_args=())


def product(namespace: str) -> Any:
    schema = "(Tensor x, Tensor w) -> Tensor"
    return define(namespace, schema, torch.mm, torch.mm, mutates_args=())


def weighted(namespace: str) -> Any:
    def add(x: Tensor, y: Tensor, *, alpha: float = 1.0) -> Tensor:
        return torch.add(x, y, alpha=alpha)

    schema = "(Tensor x, Tensor y, *, float alpha=1.0) -> Tensor"
    return define(namespace, schema, add, add, mutates_args=())


def assert_same(op: Any, like: Any, tensors: list[Any], *args: Any, **kwargs: Any) -> None:
    """Check that a call has the same results and placements as a call to the operator `like`."""
    results, expected = op(*tensors, *args, **kwargs), like(*tensors, *args, **kwargs)
    if isinstance(results, Tensor):
        results, expected = (results,), (expected,)
    for result, right in zip(results, expected, strict=True):
        assert words(result) == words(right)
        torch.testing.assert_close(gathered(result), gathered(right))


def test_two_results_and_a_dimension(namespace: str, mesh: Any) -> None:
    op = topk(namespace)
    assert op.register_sharding(aten.topk.default) is aten.topk.default
    for placed, dim in itertools.product(PLACED, (0, 1, -1)):
        assert_same(op, aten.topk.default, [on_mesh(mesh, X, placed)], 2, dim)
    values, indices = op(on_mesh(mesh, X, "S0"), 3)
    assert_right(values, X.topk(3).values, "S0")
    assert_right(indices, X.topk(3).indices, "S0")
    assert words(op(on_mesh(mesh, X, "S0"), 3, 0)[0]) == "R"


def test_a_pointwise_operator_and_a_keyword(namespace: str, mesh: Any) -> None:
    op = weighted(namespace)
    op.register_sharding(aten.add.Tensor)
    for first, second in itertools.product(PLACED, PLACED):
        tensors = [on_mesh(mesh, X, first), on_mesh(mesh, X + 1, second)]
        assert_same(op, aten.add.Tensor, tensors, alpha=3.0)
    x = on_mesh(mesh, X, "S0")
    assert_right(op(x, x, alpha=2.0), X * 3, "S0")
    assert_right(op(x, x), X * 2, "S0")


def test_a_product_on_two_dimensions_of_a_mesh(namespace: str, square: Any) -> None:
    op = product(namespace)
    op.register_sharding(aten.mm.default)
    w = X.t().contiguous()
    each = [" ".join(pair) for pair in itertools.product(("R", "S0", "S1"), repeat=2)]
    for number, (first, second) in enumerate(itertools.product(each, each)):
        # To save time, test every third pair. The tested pairs still contain each placement both in
        # the first and in the second position.
        if number % 3 != 0:
            continue
        tensors = [on_mesh(square, X, first), on_mesh(square, w, second)]
        assert_same(op, aten.mm.default, tensors)
    pending = op(on_mesh(square, X, "S0 S1"), on_mesh(square, w, "R S0"))
    assert_right(pending, X @ w, "S0 P")


def test_lists_of_tensors(namespace: str, mesh: Any) -> None:
    schema = "(Tensor[] xs, int dim=0) -> Tensor"

    def cat(xs: Any, dim: int = 0) -> Tensor:
        return torch.cat(xs, dim)

    op = define(namespace, schema, cat, cat, mutates_args=())
    op.register_sharding(aten.cat.default)
    for first, second, dim in itertools.product(("R", "S0", "S1"), ("R", "S0", "S1"), (0, 1)):
        xs = [on_mesh(mesh, X, first), on_mesh(mesh, X * 2, second)]
        assert_same(op, aten.cat.default, [xs], dim)


def test_size_arguments_are_local_to_a_shard(namespace: str, mesh: Any) -> None:
    op = define(
        namespace,
        "(Tensor x, SymInt[] size) -> Tensor",
        lambda x, size: x.expand(size).clone(),
        lambda x, size: x.new_empty(size),
        mutates_args=(),
    )
    op.register_sharding(aten.expand.default)
    sizes = SHARDING.registration(op.overload)
    assert_right(op(on_mesh(mesh, X[:, :1], "S0"), [4, 8]), X[:, :1].expand(4, 8), "S0")
    assert sizes is not None
    sizes.undo()
    from torchop._compat.dtensor import propagator

    assert op.overload not in propagator().op_to_shape_and_stride_idx


def test_dtypes_that_the_aten_operator_lacks(namespace: str, mesh: Any) -> None:
    op = define(
        namespace,
        "(Tensor x, Tensor w) -> Tensor",
        lambda x, w: x.float() @ w.float(),
        lambda x, w: x.new_empty((x.shape[0], w.shape[1]), dtype=torch.float32),
        mutates_args=(),
    )
    op.register_sharding(aten.mm.default)
    x = X.half()
    with pytest.raises(RuntimeError):
        torch.mm(x, X.t())
    w = X.t().contiguous()
    result = op(on_mesh(mesh, x, "S0"), on_mesh(mesh, w))
    assert_right(result, x.float() @ w, "S0")
    assert result.dtype is torch.float32


def test_check_sharding(namespace: str) -> None:
    op = topk(namespace)
    op.register_sharding(aten.topk.default)
    assert check_sharding(op, (X[:3], 2, 1)) == (4, [], 0)
    op = product(f"{namespace}b")
    op.derive_autograd()
    op.register_sharding(aten.mm.default)
    x, w = X.clone().requires_grad_(), X.t().contiguous().requires_grad_()
    assert check_sharding(op, (x, w), mesh=(2,)) == (16, [], 0)


def test_forms_and_gradients(namespace: str, mesh: Any) -> None:
    op = define(namespace, "(Tensor x) -> Tensor", torch.sin, torch.empty_like, mutates_args=())
    op.derive_autograd()
    op.derive_inplace()
    op.derive_out()
    op.register_sharding(aten.sin.default)
    assert_right(op.inplace(on_mesh(mesh, X, "S1")), X.sin(), "S1")
    out = on_mesh(mesh, torch.zeros(4, 8), "S0")
    op.out(on_mesh(mesh, X, "R"), out=out)
    assert_right(out, X.sin(), "S0")
    x = on_mesh(mesh, X, "S0").requires_grad_()
    op(x).sum().backward()
    assert_right(x.grad, X.cos(), "S0")  # type: ignore[arg-type]


def test_a_backward_kernel_runs_on_the_same_shards(namespace: str, mesh: Any) -> None:
    op = product(namespace)
    seen = []

    def backward(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(tuple(x.shape))
        return grad @ w.t(), x.t() @ grad

    op.register_autograd(backward_kernel=backward)
    op.register_sharding(aten.mm.default)
    x = on_mesh(mesh, X, "S0").requires_grad_()
    w = on_mesh(mesh, X.t().contiguous()).requires_grad_()
    op(x, w).sum().backward()
    assert set(seen) == {(2, 8)}
    expected = torch.ones(4, 4)
    assert_right(x.grad, expected @ X, "S0")  # type: ignore[arg-type]
    assert_right(w.grad, X.t() @ expected)  # type: ignore[arg-type]


def in_place(name: str, schema: str, function: Any) -> Any:
    torchop.define(name, schema)
    torchop.impl(name, "CompositeExplicitAutograd", function)
    torchop.register_fake(name, lambda x, *rest: x)
    return torchop.extend.Operator(name, "test").overload


def test_in_place_operators(namespace: str, mesh: Any) -> None:
    schema = "(Tensor(a!) x, Tensor y) -> Tensor(a!)"
    op = in_place(f"{namespace}::add_", schema, lambda x, y: x.add_(y))
    torchop.register_sharding(op, aten.add_.Tensor)
    for first, second in itertools.product(("R", "S0", "S1"), repeat=2):
        x = on_mesh(mesh, X, first)
        assert op(x, on_mesh(mesh, X, second)) is x
        assert_right(x, X * 2, first)
    op = in_place(f"{namespace}::sin_", "(Tensor(a!) x) -> Tensor(a!)", torch.sin_)
    torchop.register_sharding(op, aten.sin_.default)
    pending = on_mesh(mesh, X, "P")
    with pytest.raises(torchop.ShardingError, match=rf"^{namespace}::sin_: "):
        op(pending)
    assert_right(pending, X, "P")
    functional = sine(namespace)
    with pytest.raises(torchop.ShardingRuleError, match="'x' is not written, unlike 'self'"):
        functional.register_sharding(aten.sin_.default)


def test_registrations_end_and_replace_each_other(namespace: str, mesh: Any) -> None:
    op = sine(namespace)
    x = on_mesh(mesh, X, "S0")
    op.register_sharding("replicate")
    assert words(op(x)) == "R"
    with torchop.Library(namespace, "FRAGMENT") as library:
        torchop.register_sharding(op, aten.sin.default, lib=library)
        assert words(op(x)) == "S0"
        with torchop.Library(namespace, "FRAGMENT") as inner:
            torchop.register_sharding(op, "replicate", lib=inner)
            assert words(op(x)) == "R"
        assert words(op(x)) == "S0"
    assert words(op(x)) == "R"


def test_a_rule_that_replaces_the_one_of_dtensor_is_used(namespace: str, mesh: Any) -> None:
    op = topk(namespace)
    op.register_sharding(aten.topk.default)
    x = on_mesh(mesh, X, "S0")
    assert words(op(x, 2)[0]) == "S0"
    with torchop.Library("aten", "IMPL") as library:
        register_sharding(aten.topk.default, "replicate", lib=library)
        assert words(op(x, 2)[0]) == "R"
    assert words(op(x, 2)[0]) == "S0"


def test_rule_must_not_refer_to_its_own_operator() -> None:
    with torchop.Library("aten", "IMPL") as library:
        register_sharding(aten.sin.default, aten.cos.default, lib=library)
        for op in (aten.sin.default, aten.cos.default):
            with pytest.raises(torchop.ShardingRuleError, match=r"sharded like aten::\w+ itself"):
                register_sharding(op, aten.sin.default, lib=library)


def test_a_rule_before_dtensor_is_imported() -> None:
    source = """
        import sys, torch, torchop
        aten = torch.ops.aten
        def define(name, like):
            schema = "(Tensor x) -> Tensor"
            op = torchop.custom_op(name, lambda x: x.clone(), mutates_args=(), schema=schema)
            op.register_fake(torch.empty_like)
            op.register_sharding(like)
            return op
        right, wrong = define("t::a", aten.sin.default), define("t::b", aten.argmax.default)
        assert "torch.distributed.tensor" not in sys.modules
        from tests.rules.user.sharding.ranks import placed, simulated_mesh
        from torch.distributed.tensor import Shard
        with simulated_mesh((2,)) as mesh:
            x = placed(torch.ones(4), mesh, [Shard(0)])
            print(right(x).placements)
            try:
                wrong(x)
            except torchop.ShardingError as error:
                print(error)
    """
    lines = assert_clean(run_forked(source)).splitlines()
    assert lines[0] == "(Shard(dim=0),)"
    assert lines[1].startswith("t::b: DTensor's rule for aten::argmax cannot shard another")


REFUSED: dict[str, tuple[str, Any, str]] = {
    "a packet": ("(Tensor x) -> Tensor", aten.sin, "is not an overload of an ATen operator"),
    "too many": (
        "(Tensor x, int n) -> Tensor",
        aten.sin.default,
        "takes 2 positional arguments instead of 1.*Give .* the signature of aten::sin, or write",
    ),
    "a kind": (
        "(Tensor x, Tensor k) -> (Tensor, Tensor)",
        aten.topk.default,
        "'k' is of type Tensor instead of int",
    ),
    "an optional argument": (
        "(Tensor? x) -> Tensor",
        aten.sin.default,
        r"'x' is of type Optional\[Tensor\] instead of Tensor",
    ),
    "a list": ("(Tensor[] x) -> Tensor", aten.sin.default, r"of type List\[Tensor\] instead"),
    "no default": ("(Tensor x) -> (Tensor, Tensor)", aten.topk.default, "lacks the argument 'k'"),
    "results": (
        "(Tensor x, int k) -> Tensor",
        aten.topk.default,
        r"returns \(Tensor\) instead of \(Tensor, Tensor\)",
    ),
    "a keyword": (
        "(Tensor x, Tensor y, *, float beta=1.0) -> Tensor",
        aten.add.Tensor,
        "aten::add.Tensor has no keyword-only argument 'beta'",
    ),
    "out": ("(Tensor x, *, Tensor y) -> Tensor", aten.sin.out, "'out' by keyword.*derive_out"),
    "no rule": (
        "(Tensor x1, Tensor x2, float p, int? mode) -> Tensor",
        aten._cdist_forward.default,
        "DTensor's rule for aten::_cdist_forward cannot shard another operator: DTensor has no "
        "rule for it.*'replicate'",
    ),
    "code of its own": (
        "(Tensor x, int? dim=None, bool keepdim=False) -> Tensor",
        aten.argmax.default,
        "DTensor runs it with custom code",
    ),
}


@pytest.mark.parametrize(("schema", "like", "message"), REFUSED.values(), ids=REFUSED)
def test_other_operators_are_refused(
    namespace: str, schema: str, like: Any, message: str, mesh: Any
) -> None:
    torchop.define(f"{namespace}::op", schema)
    with pytest.raises(torchop.ShardingRuleError, match=rf"^{namespace}::op: .*{message}"):
        torchop.register_sharding(f"{namespace}::op", like)
    assert not SHARDING.has(f"{namespace}::op")


def test_an_operator_that_dtensor_replaces_is_refused(namespace: str, mesh: Any) -> None:
    from torchop._compat.dtensor import propagator

    if not hasattr(propagator(), "squeeze_op_to_dims_variant"):
        pytest.skip("this release applies the rule of squeeze, and replaces no operator")
    torchop.define(f"{namespace}::op", "(Tensor x) -> Tensor")
    with pytest.raises(torchop.ShardingRuleError, match="replaces it with another operator"):
        torchop.register_sharding(f"{namespace}::op", aten.squeeze.default)


def test_options_and_other_operators_are_refused(namespace: str) -> None:
    op = sine(namespace)
    with pytest.raises(torchop.ShardingRuleError, match=r"aten\.sin\.default takes no options"):
        op.register_sharding(aten.sin.default, whole="a")
    for other in (op, op.overload, sine(f"{namespace}b")):
        with pytest.raises(torchop.ShardingRuleError, match="is not an overload of an ATen"):
            op.register_sharding(other)
