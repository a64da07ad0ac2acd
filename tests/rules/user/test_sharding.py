"""Sharding rules, as DTensor runs operators by them; on simulated ranks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding as stock_register_sharding

import torchop
from tests.rules.user.sharding.ranks import (
    assert_right,
    gathered,
    on_mesh,
    words,
)
from tests.support import assert_clean, run_program
from torchop._rules.user.sharding import SHARDING

VALUES = {"sharding": "pointwise"}
X = torch.arange(32.0).reshape(4, 8).cos()


def define(
    namespace: str, schema: str, function: Callable[..., Any], fake: Any, **options: Any
) -> Any:
    """`ns::op` with a fake kernel."""
    op = torchop.custom_op(f"{namespace}::op", function, schema=schema, **options)
    op.register_fake(fake)
    return op


def sine(namespace: str) -> Any:
    return define(namespace, "(Tensor x) -> Tensor", torch.sin, torch.empty_like, mutates_args=())


# --------------------------------------------------------------------------------------------------
# Calls


def test_a_pointwise_operator(namespace: str, mesh: Any) -> None:
    op = sine(namespace)
    op.register_sharding("pointwise")
    assert "sharding" in repr(op)
    assert_right(op(on_mesh(mesh, X, "S0")), X.sin(), "S0")
    assert_right(op(on_mesh(mesh, X, "S1")), X.sin(), "S1")
    assert_right(op(on_mesh(mesh, X)), X.sin(), "R")
    assert_right(op(on_mesh(mesh, X, "P")), X.sin())
    assert_right(op(on_mesh(mesh, X[:3], "S0")), X[:3].sin(), "S0")
    assert_right(getattr(torch.ops, namespace).op(on_mesh(mesh, X, "S0")), X.sin(), "S0")


def test_several_mesh_dimensions(namespace: str, square: Any) -> None:
    op = define(
        namespace,
        "(Tensor a, Tensor b) -> Tensor",
        torch.mm,
        lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
        mutates_args=(),
    )
    op.register_sharding("b k, k n -> b n", reduce={"k": "sum"}, linear=(0, 1))
    b = X.t().contiguous()
    a_placed = {"S0 S1": "S0 P", "S1 S1": "P P", "S0 S0": "S0 S0", "R S0": "R S0"}
    for placed, expected in a_placed.items():
        right = on_mesh(square, b, placed.replace("S0", "R").replace("S1", "S0"))
        assert_right(op(on_mesh(square, X, placed), right), X @ b, expected)
    assert_right(op(on_mesh(square, X, "P R"), on_mesh(square, b, "R S1")), X @ b, "P S1")


def test_the_words(namespace: str, mesh: Any) -> None:
    op = sine(namespace)
    op.register_sharding("batch")
    assert words(op(on_mesh(mesh, X, "S0"))) == "S0"
    assert_right(op(on_mesh(mesh, X, "S1")), X.sin())
    assert words(op(on_mesh(mesh, X, "S1"))) in ("R", "S0")
    op.register_sharding("replicate")
    assert_right(op(on_mesh(mesh, X, "S0")), X.sin(), "R")


@dataclasses.dataclass(frozen=True)
class Options:
    scale: Tensor
    power: float = 2.0


def test_structured_arguments(namespace: str, mesh: Any) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, options: Options) -> Tensor:
        return x * options.scale**options.power

    op.register_fake(lambda x, options: torch.empty_like(x))
    seen = []

    @op.register_sharding
    def _(x: Any, options: Options) -> str:
        seen.append((x.ndim, options.scale.shape, options.scale.dtype, options.power))
        return "b d, d -> b d"

    options = Options(on_mesh(mesh, X[0], "R"), 3.0)
    assert_right(op(on_mesh(mesh, X, "S1"), options), X * X[0] ** 3, "S1")
    assert seen[-1] == (2, (8,), torch.float32, 3.0)
    with pytest.raises(torchop.ShardingRuleError, match=r"2 tensors \(x, options_scale\)"):
        op.register_sharding("b d -> b d")


def test_lists_two_results_optional_tensors(namespace: str, mesh: Any) -> None:
    total = define(
        namespace,
        "(Tensor[] xs, float scale=1.0) -> Tensor",
        lambda xs, scale: sum(xs) * scale,
        lambda xs, scale: torch.empty_like(xs[0]),
        mutates_args=(),
    )
    total.register_sharding("[...] -> ...", linear=(0,))
    xs = [on_mesh(mesh, X, "S0"), on_mesh(mesh, X, "R"), on_mesh(mesh, X, "S1")]
    assert_right(total(xs, 2.0), X * 6)
    assert_right(total([on_mesh(mesh, X, "P")] * 2), X * 2, "P")

    two = define(
        f"{namespace}b",
        "(Tensor x) -> (Tensor, Tensor)",
        lambda x: (x + 1, x.sum(-1)),
        lambda x: (torch.empty_like(x), x.new_empty(x.shape[:-1])),
        mutates_args=(),
    )
    two.register_sharding("... d -> ... d, ...", reduce={"d": "sum"})
    first, second = two(on_mesh(mesh, X, "S1"))
    assert_right(first, X + 1, "S1")
    assert_right(second, X.sum(-1), "P")

    optional = define(
        f"{namespace}c",
        "(Tensor x, Tensor? b=None) -> Tensor",
        lambda x, b: x + 1 if b is None else x + b,
        lambda x, b: torch.empty_like(x),
        mutates_args=(),
    )
    optional.register_sharding("... d, d -> ... d")
    assert_right(optional(on_mesh(mesh, X, "S1")), X + 1, "S1")
    assert_right(optional(on_mesh(mesh, X, "S1"), on_mesh(mesh, X[0], "R")), X + X[0], "S1")


def test_list_results(namespace: str, mesh: Any) -> None:
    op = define(
        namespace,
        "(Tensor x, int n) -> Tensor[]",
        lambda x, n: [x + i for i in range(n)],
        lambda x, n: [torch.empty_like(x) for _ in range(n)],
        mutates_args=(),
    )
    op.register_sharding("... -> [...]")
    x = on_mesh(mesh, X, "S0")
    for count in (2, 3):
        for index, value in enumerate(op(x, count)):
            assert_right(value, X + index, "S0")


def test_reductions(namespace: str, mesh: Any) -> None:
    for number, (how, function) in enumerate(
        {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "avg": torch.mean}.items()
    ):
        op = define(
            f"{namespace}n{number}",
            "(Tensor input) -> Tensor",
            functools.partial(function, dim=-1),
            lambda x: x.new_empty(x.shape[:-1]),
            mutates_args=(),
        )
        op.register_sharding("... d -> ...", reduce={"d": how})
        value = op(on_mesh(mesh, X, "S1"))
        assert words(value) == ("P" if how == "sum" else f"Partial({how})")
        assert_right(value, function(X, dim=-1))
        # The parts of 7 are unequal, and those of 1 empty: an average of averages is none, and the
        # maximum of nothing does not exist.
        assert_right(op(on_mesh(mesh, X[:, :7], "S1")), function(X[:, :7], dim=-1))
        assert_right(op(on_mesh(mesh, X[:, :1], "S1")), function(X[:, :1], dim=-1))


def test_a_function_of_the_other_arguments(namespace: str, mesh: Any) -> None:
    op = define(
        namespace,
        "(Tensor x, int[] dims) -> Tensor",
        lambda x, dims: x.sum(tuple(dims), keepdim=True),
        lambda x, dims: x.sum(tuple(dims), keepdim=True),
        mutates_args=(),
    )

    @op.register_sharding
    def rule(x: Any, dims: Sequence[int]) -> Any:
        names = [f"d{i}" for i in range(x.ndim)]
        gone = {names[d] for d in dims}
        results = ["." if name in gone else name for name in names]
        return torchop.sharding(
            f"{' '.join(names)} -> {' '.join(results)}", reduce=dict.fromkeys(gone, "sum")
        )

    x = on_mesh(mesh, X, "S0")
    assert_right(op(x, [1]), X.sum(1, keepdim=True), "S0")
    assert_right(op(x, [0]), X.sum(0, keepdim=True), "P")
    assert_right(op(x, [0, 1]), X.sum((0, 1), keepdim=True), "P")
    op.register_sharding(lambda x, dims: 3)
    with pytest.raises(torchop.ShardingError, match=r"got 3. The function that chooses the rule"):
        op(x, [1])
    op.register_sharding(lambda x, dims: "a -> a")
    with pytest.raises(torchop.ShardingError, match="'a' of the sharding rule 'a -> a' does not"):
        op(x, [1])


# --------------------------------------------------------------------------------------------------
# The four silent faults of PyTorch's register_sharding, of which each test shows both


def elementwise(x: Any, *rest: Any) -> Any:
    tensors = 1 + sum(hasattr(value, "placements") for value in rest)
    others = [None] * (len(rest) + 1 - tensors)
    every: list[Any] = [Replicate(), *(Shard(i) for i in range(len(x.shape)))]
    return [([p], [p] * tensors + others) for p in every]


def accumulate(acc: Tensor, x: Tensor) -> None:
    acc.add_(x)


def test_what_is_written_is_not_moved(namespace: str, mesh: Any) -> None:
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


def test_a_rule_that_is_registered_again_counts_at_once(namespace: str, mesh: Any) -> None:
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


def test_it_counts_in_other_threads_too(namespace: str) -> None:
    # PyTorch's cache belongs to a thread, which another one cannot clear. A fake group, because
    # simulated ranks belong to a thread as well.
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
    assert assert_clean(run_program(source)).splitlines() == ["S(0) S(0)", "R R", "S(0) S(0)"]


# --------------------------------------------------------------------------------------------------
# What PyTorch's dispatch gets wrong


def test_tensors_by_keyword_are_moved(namespace: str, mesh: Any) -> None:
    # torchop's custom_op refuses them; other packages have them.
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


def test_a_name_that_looks_like_that_of_an_in_place_operator(namespace: str, mesh: Any) -> None:
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
    # What FSDP2 makes of the parameters of a module that is tensor parallel.
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


# --------------------------------------------------------------------------------------------------
# What is refused


def test_an_operator_without_a_rule(namespace: str, mesh: Any) -> None:
    op = define(
        namespace,
        "(Tensor x, Tensor y) -> Tensor",
        torch.add,
        lambda x, y: x.clone(),
        mutates_args=(),
    )
    x = on_mesh(mesh, X, "S0")
    expected = (
        rf"^{namespace}::op has no sharding rule.*sharding\('{namespace}::op', 'pointwise'\)"
        rf".*{namespace}::op\(Tensor x, Tensor y\) -> Tensor: '\.\.\., \.\.\. -> \.\.\.'.*local_map"
    )
    for call in (op, getattr(torch.ops, namespace).op):
        with pytest.raises(NotImplementedError, match=expected) as caught:
            call(x, x)
        assert type(caught.value) is torchop.MissingRuleError
    with pytest.raises(torchop.MissingRuleError, match=expected):
        torchop.get_rule("sharding").lookup(op)
    op.register_sharding("pointwise")
    assert_right(op(x, x), X * 2, "S0")


def test_operators_of_others_say_what_they_said(namespace: str, mesh: Any) -> None:
    stock = torch.library.custom_op(
        f"{namespace}::stock", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    stock.register_fake(torch.empty_like)
    x = on_mesh(mesh, X, "S0")
    with pytest.raises(
        NotImplementedError, match=r"^Operator .* does not have a sharding strategy"
    ):
        stock(x)
    torchop.register_sharding(stock, "pointwise")
    assert_right(stock(x), X.sin(), "S0")


def test_a_strategy_that_was_there_comes_back(namespace: str, mesh: Any) -> None:
    x = on_mesh(mesh, X, "S0")
    with torchop.Library("aten", "FRAGMENT") as library:
        torchop.register_sharding("aten::sin", "replicate", lib=library)
        assert words(x.sin()) == "R"
    assert words(x.sin()) == "S0"


def test_plain_tensors_among_dtensors(namespace: str, mesh: Any) -> None:
    op = define(
        namespace,
        "(Tensor x, Tensor y) -> Tensor",
        torch.add,
        lambda x, y: x.clone(),
        mutates_args=(),
    )
    op.register_sharding("pointwise")
    expected = rf"^{namespace}::op: some tensors of the call are DTensors.*distribute_tensor\("
    with pytest.raises(torchop.ArgumentError, match=expected):
        op(on_mesh(mesh, X, "S0"), X)


WRONG: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "arguments": (
        "(Tensor x, Tensor w) -> Tensor",
        "a -> a",
        {},
        r"1 operands before .* 2 tensors \(x, w\).*'\.\.\., \.\.\. -> \.\.\.'",
    ),
    "results": (
        "(Tensor x) -> Tensor",
        "a -> a, a",
        {},
        "2 operands after '->', but the operator returns 1 tensors",
    ),
    "a list": (
        "(Tensor[] xs) -> Tensor",
        "a -> a",
        {},
        r"xs is a list .* in \[brackets\]. .*'\[\.\.\.\] -> \.\.\.'",
    ),
    "no list": (
        "(Tensor x) -> Tensor",
        "[a] -> a",
        {},
        r"x is one tensor, whose operand is not in",
    ),
    "a list result": ("(Tensor x) -> Tensor[]", "a -> a", {}, "result 0 is a list of tensors"),
    "no tensors": ("(int x) -> Tensor", "-> a", {}, "needs an operator that takes tensors"),
    "no text": (
        "(Tensor x) -> Tensor",
        3.5,
        {},
        r"is a text such as '\.\.\. -> \.\.\.', one of 'pointwise'.*got 3\.5",
    ),
    "no notation": (
        "(Tensor x) -> Tensor",
        "a",
        {},
        r"must have one '->'.*one of 'pointwise'.*Got .*Tensor x",
    ),
    "a word's options": (
        "(Tensor x) -> Tensor",
        "pointwise",
        {"whole": "a"},
        "options of a rule that is a string. 'pointwise' takes",
    ),
    "a function's options": (
        "(Tensor x) -> Tensor",
        lambda x: "",
        {"whole": "a"},
        "A function that chooses the rule returns",
    ),
    "reduce into written": (
        "(Tensor(a!) y, Tensor x) -> ()",
        "a, a k -> ",
        {"reduce": {"k": "sum"}},
        "reduces 'k', which the argument 'y' lacks",
    ),
    "linear unknown": (
        "(Tensor x) -> Tensor",
        "a -> a",
        {"linear": ("z",)},
        "'a -> a': linear= names 'z'.* from 0 to 0, or their names: x",
    ),
    "linear number": ("(Tensor x) -> Tensor", "a -> a", {"linear": (1,)}, "linear= names 1"),
    "linear written": (
        "(Tensor(a!) y, Tensor x) -> ()",
        "a, a -> ",
        {"linear": (1,)},
        "has x without y, which the operator writes",
    ),
    "unhashed text": (
        "(Tensor x, float lr) -> Tensor",
        "a -> a",
        {"unhashed": "lr"},
        "tuple of names of arguments",
    ),
    "unhashed tensor": (
        "(Tensor x) -> Tensor",
        "a -> a",
        {"unhashed": ("x",)},
        "names 'x', which is no argument without",
    ),
    "unhashed behind": (
        "(Tensor x, int n, float lr) -> Tensor",
        "a -> a",
        {"unhashed": ("lr",)},
        "unhashed= cannot name 'lr'.* from 'n' on. Make it keyword-only",
    ),
    "unhashed number": (
        "(Tensor x) -> Tensor",
        "a -> a",
        {"unhashed": ([],)},
        r"names \[\], which is no argument without",
    ),
    "a whole that is no text": ("(Tensor x) -> Tensor", "a -> a", {"whole": X}, "is a string with"),
    "a reduction that is no text": (
        "(Tensor x) -> Tensor",
        "a b -> a",
        {"reduce": {"b": X}},
        r"reduce={'b': tensor\(.*combined by one of 'avg', 'max'",
    ),
    "keyword list": (
        "(Tensor x, *, Tensor[] w) -> Tensor",
        "a, [a] -> a",
        {},
        "lists of tensors that are passed by keyword, such as 'w'",
    ),
    "a list of several": (
        "(Tensor x) -> (Tensor[], Tensor)",
        "a -> [a], a",
        {},
        "does not support a list of tensors beside other results",
    ),
}


@pytest.mark.parametrize(("schema", "rule", "options", "message"), WRONG.values(), ids=WRONG)
def test_a_rule_is_checked_when_it_is_registered(
    namespace: str, schema: str, rule: Any, options: dict[str, Any], message: str
) -> None:
    torchop.define(f"{namespace}::op", schema)
    with pytest.raises(torchop.ShardingRuleError, match=f"^{namespace}::op: .*{message}"):
        torchop.register_sharding(f"{namespace}::op", rule, **options)
    assert not SHARDING.has(f"{namespace}::op")


def test_messages_are_short_and_long_rules_are_read_fast(namespace: str) -> None:
    op = sine(namespace)
    long = "a" * 100_000
    many = " ".join(f"d{index}" for index in range(20_000))
    wrong = {
        f"{long} -> {long}, {long}": "2 operands after '->'",
        f"{long} {long} -> ": "twice",
        f"{many} -> z": "only a result has the dimension 'z'",
        f"{many} d1 -> ": "has 'd1' twice",
        long: "must have one '->'",
    }
    for text, expected in wrong.items():
        with pytest.raises(torchop.ShardingRuleError, match=expected) as caught:
            op.register_sharding(text)
        assert len(str(caught.value)) < 1200
    with pytest.raises(torchop.ShardingRuleError, match="has no dimension 'z'") as caught:
        op.register_sharding(f"{many} ->", reduce={"z": "sum"})
    assert len(str(caught.value)) < 1200


def test_a_function_that_raises(namespace: str, mesh: Any) -> None:
    op = sine(namespace)
    op.register_sharding(lambda x: x.placements)
    expected = (
        rf"^{namespace}::op: the function that chooses the sharding rule raised AttributeError: .*"
        "'placements'.*an object that has shape, stride, dtype and ndim instead of each tensor"
    )
    with pytest.raises(torchop.ShardingError, match=expected) as caught:
        op(on_mesh(mesh, X, "S0"))
    assert isinstance(caught.value.__cause__, AttributeError)
    op.register_sharding("pointwise")
    assert words(op(on_mesh(mesh, X, "S0"))) == "S0"


def test_operators_may_share_a_rule(namespace: str, mesh: Any) -> None:
    rule = torchop.sharding("... d -> ... d", linear=("x",))
    first = sine(namespace)
    second = define(
        f"{namespace}b",
        "(Tensor w, Tensor x) -> Tensor",
        torch.mul,
        lambda w, x: torch.empty_like(x),
        mutates_args=(),
    )
    first.register_sharding(rule)
    with pytest.raises(torchop.ShardingRuleError, match=r"the operator takes 2 tensors \(w, x\)"):
        second.register_sharding(rule)
    shared = torchop.sharding("..., ... -> ...", linear=("x",))
    third = define(
        f"{namespace}c",
        "(Tensor x, Tensor w) -> Tensor",
        torch.mul,
        lambda x, w: torch.empty_like(x),
        mutates_args=(),
    )
    second.register_sharding(shared)
    third.register_sharding(shared)
    assert repr(shared) == "torchop.sharding('..., ... -> ...', linear=(('x',),))"
    pending, replicated = on_mesh(mesh, X, "P"), on_mesh(mesh, X)
    assert_right(second(replicated, pending), X * X, "P")
    assert_right(third(pending, replicated), X * X, "P")


def test_a_function_takes_the_arguments(namespace: str) -> None:
    op = sine(namespace)
    with pytest.raises(torchop.RuleSignatureError, match=r"a sharding rule is called with \(x\)"):
        op.register_sharding(lambda: "a -> a")


def test_in_place_results_have_the_operand_of_the_argument(namespace: str) -> None:
    op = sine(namespace)
    op.derive_inplace()
    with pytest.raises(torchop.ShardingRuleError, match="result 0 is the argument 'x', so both"):
        op.inplace.register_sharding("a b -> b a")


# --------------------------------------------------------------------------------------------------
# Where it is registered


def test_the_class_form(namespace: str, mesh: Any) -> None:
    @torchop.operator(f"{namespace}::op")
    class op:
        fake = {"like": "x"}  # noqa: RUF012  # a declaration
        sharding = torchop.sharding("... d -> ... d", whole="d")

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.softmax(-1)

    assert_right(op(on_mesh(mesh, X, "S0")), X.softmax(-1), "S0")  # type: ignore[operator]


def test_unhashed_arguments_are_not_in_the_key(namespace: str, mesh: Any) -> None:
    def calls_of(unhashed: tuple[str, ...], name: str) -> int:
        op = define(
            name,
            "(Tensor x, *, float lr, float? eps=None) -> Tensor",
            lambda x, *, lr, eps: x * lr,
            lambda x, *, lr, eps: torch.empty_like(x),
            mutates_args=(),
        )
        calls = []

        @op.register_sharding(unhashed=unhashed)
        def _(x: Any, *, lr: float, eps: Optional[float]) -> str:
            calls.append(lr)
            return "... -> ..."

        x = on_mesh(mesh, X, "S0")
        for step in range(3):
            assert_right(op(x, lr=float(step)), X * step, "S0")
        return len(calls)

    assert calls_of((), namespace) == 3
    assert calls_of(("lr", "eps"), f"{namespace}b") == 1


def test_importing_torchop_imports_no_dtensor() -> None:
    source = """
        import sys, torch, torchop
        op = torchop.custom_op("t::op", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor")
        op.register_sharding("pointwise")
        other = torchop.custom_op("t::b", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor")
        assert "torch.distributed.tensor" not in sys.modules
        from torch.distributed.tensor import DTensor
        strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
        print(op.overload in strategies, other.overload in strategies)
        op._definition.end("over")
        print(any("t.op" in str(op) for op in strategies))
    """
    assert assert_clean(run_program(source)).splitlines() == ["True False", "False"]


def test_a_redefinition_starts_anew(namespace: str, mesh: Any) -> None:
    op = sine(namespace)
    op.register_sharding("pointwise")
    x = on_mesh(mesh, X, "S0")
    assert words(op(x)) == "S0"
    op = sine(namespace)
    with pytest.raises(torchop.MissingRuleError):
        op(x)
    op.register_sharding("replicate")
    assert words(op(x)) == "R"
