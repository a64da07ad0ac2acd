"""torchop's sharding rules do not have the bugs of PyTorch's register_sharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding as stock_register_sharding

import torchop
from tests._support.common import assert_clean
from tests._support.forking import run_compiling
from tests.rules.user.sharding.operators import X, define, sine
from tests.rules.user.sharding.ranks import assert_right, gathered, on_mesh, words


def accumulate(acc: Tensor, x: Tensor) -> None:
    acc.add_(x)


def test_mutated_arguments_are_not_redistributed(namespace: str, mesh: Any) -> None:
    schema = "(Tensor(a!) acc, Tensor x) -> ()"
    ours = define(namespace, schema, accumulate, lambda acc, x: None, mutates_args=("acc",))
    ours.register_sharding("..., ... ->")
    acc = on_mesh(mesh, X, "S0")
    ours(acc, on_mesh(mesh, X, "S1"))
    assert_right(acc, X * 2, "S0")
    expected = (
        rf"^{namespace}::op: the operator writes into 'acc', whose placements "
        r"are \[Partial\(sum\)\].*cannot redistribute.* acc = "
        r"acc\.redistribute\(placements=\[Shard\(dim=1\)\]\)"
    )
    with pytest.raises(torchop.ShardingError, match=expected):
        ours(on_mesh(mesh, X, "P"), on_mesh(mesh, X, "S1"))

    stock = define(f"{namespace}s", schema, accumulate, lambda acc, x: None, mutates_args=("acc",))

    @stock_register_sharding(stock.overload)
    def _(acc: Any, x: Any) -> Any:
        return [([], [p, p]) for p in (Replicate(), Shard(0), Shard(1))]

    acc = on_mesh(mesh, X, "P")
    stock(acc, on_mesh(mesh, X, "S1"))
    assert not torch.equal(gathered(acc), X * 2), "PyTorch's rule is right now"


def cumulative(x: Tensor, *, rows: bool = True) -> Tensor:
    return x.cumsum(1 if rows else 0)


def test_arguments_that_are_no_tensors_are_in_the_key(namespace: str, mesh: Any) -> None:
    schema = "(Tensor x, *, bool rows=True) -> Tensor"
    fake = lambda x, *, rows: torch.empty_like(x)  # noqa: E731
    ours = define(namespace, schema, cumulative, fake, mutates_args=())

    @ours.register_sharding
    def _(x: Any, *, rows: bool) -> Any:
        return torchop.sharding("r c -> r c", whole="c" if rows else "r")

    x = on_mesh(mesh, X, "S0")
    assert_right(ours(x, rows=True), X.cumsum(1), "S0")
    assert_right(ours(x, rows=False), X.cumsum(0))

    stock = define(f"{namespace}s", schema, cumulative, fake, mutates_args=())

    @stock_register_sharding(stock.overload)
    def _(x: Any, *, rows: bool = True) -> Any:
        kept = Shard(0 if rows else 1)
        return [([Replicate()], [Replicate()]), ([kept], [kept])]

    assert_right(stock(x, rows=True), X.cumsum(1), "S0")
    stale = stock(x, rows=False)
    assert not torch.equal(gathered(stale), X.cumsum(0)), "PyTorch's rule is right now"


def grown(x: Tensor, by: Sequence[int]) -> Tensor:
    return torch.nn.functional.pad(x, (0, by[0]))


def test_shapes_that_depend_on_values(namespace: str, mesh: Any) -> None:
    schema = "(Tensor x, int[] by) -> Tensor"
    ours = define(namespace, schema, grown, grown, mutates_args=())
    ours.register_sharding("b . -> b .")
    x = on_mesh(mesh, X, "S0")
    for by in (2, 7):
        assert_right(ours(x, [by]), grown(X, [by]), "S0")

    stock = define(f"{namespace}s", schema, grown, grown, mutates_args=())

    @stock_register_sharding(stock.overload)
    def _(x: Any, by: Any) -> Any:
        return [([p], [p, None]) for p in (Replicate(), Shard(0))]

    assert stock(x, [2]).shape == (4, 10)
    assert stock(x, [7]).shape != (4, 15), "PyTorch's rule is right now"


def test_rule_registered_again_applies_immediately(namespace: str, mesh: Any) -> None:
    op = sine(namespace)
    x = on_mesh(mesh, X, "S0")
    with torchop.Library(namespace, "FRAGMENT") as library:
        op.register_sharding("pointwise")
        assert words(op(x)) == "S0"
        torchop.register_sharding(op, "replicate", lib=library)
        assert words(op(x)) == "R"
    assert words(op(x)) == "S0", "the rule of the library went with it"

    stock = sine(f"{namespace}s")
    for placements in ((Replicate(), Shard(0)), (Replicate(),)):
        stock_register_sharding(stock.overload)(lambda x, p=placements: [([q], [q]) for q in p])
        last = stock(x)
    assert words(last) == "S0", "PyTorch's rule counts at once now"


def test_rule_registered_again_applies_in_other_threads(namespace: str) -> None:
    # DTensor caches decisions per thread, and one thread cannot clear the cache of another. Use a
    # fake process group, because simulated ranks exist only in the thread that created them.
    source = """
        import sys, threading, queue, torch, torchop
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard, distribute_tensor
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        op = torchop.custom_op("t::op", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor")
        op.register_fake(torch.empty_like)
        op.register_sharding("pointwise")
        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        calls, answers = queue.Queue(), queue.Queue()
        def work():
            while calls.get():
                answers.put(op(x).placements[0])
        thread = threading.Thread(target=work)
        thread.start()
        def asked():
            calls.put(True)
            return answers.get(timeout=60)
        print(asked(), op(x).placements[0])
        op.register_sharding("replicate")
        print(asked(), op(x).placements[0])
        op.register_sharding("pointwise")
        print(asked(), op(x).placements[0])
        calls.put(False)
        thread.join()
        dist.destroy_process_group()
    """
    assert assert_clean(run_compiling(source)).splitlines() == ["S(0) S(0)", "R R", "S(0) S(0)"]


def test_tensors_by_keyword_are_moved(namespace: str, mesh: Any) -> None:
    # torchop's custom_op rejects keyword-only tensors, but operators of other packages have them.
    name = f"{namespace}::op"
    torchop.define(name, "(Tensor x, *, Tensor scale, Tensor? bias=None) -> Tensor")

    @torchop.impl(name, "CompositeExplicitAutograd")
    def _(x: Tensor, *, scale: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        return x * scale + (0 if bias is None else bias)

    op = getattr(torch.ops, namespace).op
    torchop.register_sharding(op, "... d, ... d, d -> ... d")
    scale, bias = X.exp(), X[0]
    for placed in ("S0", "S1", "R", "P"):
        for by_keyword in ("S0", "S1", "R", "P"):
            x, keyword = on_mesh(mesh, X, placed), on_mesh(mesh, scale, by_keyword)
            assert_right(op(x, scale=keyword), X * scale)
            vector = on_mesh(mesh, bias, by_keyword.replace("S1", "S0"))
            assert_right(op(x, scale=keyword, bias=vector), X * scale + bias)


def test_name_that_looks_like_an_in_place_operator(namespace: str, mesh: Any) -> None:
    op = torchop.custom_op(
        f"{namespace}::op_", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_fake(torch.empty_like)
    op.register_sharding("pointwise")
    x = on_mesh(mesh, X, "S0")
    assert_right(op(x), X + 1, "S0")
    assert_right(x, X, "S0")


def test_arguments_that_pytorch_cannot_hash(namespace: str, mesh: Any) -> None:
    op = define(
        namespace,
        "(Tensor x, complex c, Generator? g=None) -> Tensor",
        lambda x, c, g: x * c.real,
        lambda x, c, g: torch.empty_like(x),
        mutates_args=(),
    )
    op.register_sharding("pointwise")
    x = on_mesh(mesh, X, "S0")
    assert_right(op(x, 2 + 1j), X * 2, "S0")
    assert_right(op(x, 3 + 1j, torch.Generator()), X * 3, "S0")


def test_strided_shards_stay(namespace: str, square: Any) -> None:
    # If a module is tensor-parallel, FSDP2 gives its parameters this placement.
    from torch.distributed.tensor.placement_types import _StridedShard

    op = torchop.custom_op(
        f"{namespace}::step",
        lambda parameter, gradient: (parameter.sub_(gradient), None)[1],
        schema="(Tensor(a!) parameter, Tensor gradient) -> ()",
        mutates_args=("parameter",),
    )
    op.register_fake(lambda parameter, gradient: None)
    op.register_sharding("..., ... ->")
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    parameter = distribute_tensor(X.clone(), square, [Replicate()] * 2).redistribute(
        square, strided
    )
    gradient = on_mesh(square, X.exp(), "S1 R")
    op(parameter, gradient)
    assert list(parameter.placements) == strided
    torch.testing.assert_close(gathered(parameter), X - X.exp())
