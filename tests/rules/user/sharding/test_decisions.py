"""torchop offers DTensor only some of the placements that a rule accepts, to save time.

DTensor must decide as if it were offered all of them. Uses private names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor._sharding_prop import _select_min_cost_strategy

import torchop
from tests._support.common import assert_clean
from tests._support.forking import run_compiling
from tests._support.strategies import stable
from tests.rules.user.sharding import ranks
from torchop._compat import dtensor_moves
from torchop._compat.dtensor import propagator
from torchop._compat.dtensor_strategies import Redistributable, decisive_specs, op_specs
from torchop._rules.user.sharding.rule import SHARDING

# For each name: the arguments in the operator's schema, its sharding rule, and several calls, each
# given by the shapes of its tensors.
RULES: dict[str, tuple[str, Any, tuple[tuple[tuple[int, ...], ...], ...]]] = {
    "pointwise": (
        "Tensor a, Tensor b, Tensor c",
        "pointwise",
        (((8, 4),) * 3, ((8, 4), (1, 4), (4,))),
    ),
    "batch": ("Tensor a, Tensor b", "batch", (((8, 4), (8, 2)),)),
    "replicate": ("Tensor a, Tensor b", "replicate", (((8, 4), (8, 2)),)),
    "product": (
        "Tensor a, Tensor b",
        torchop.sharding("b k, k n -> b n", reduce={"k": "sum"}, linear=(0, 1)),
        (((8, 4), (4, 8)), ((3, 16), (16, 2)), ((64, 512), (512, 8))),
    ),
    "largest": (
        "Tensor a, Tensor b",
        torchop.sharding("b k, b k -> b", reduce={"k": "max"}),
        (((8, 8), (8, 8)), ((6, 3), (6, 3))),
    ),
    "written": ("Tensor(a!) a, Tensor b, Tensor c", "pointwise", (((8, 4),) * 3,)),
    "by keyword": ("Tensor a, Tensor b, *, Tensor c", "pointwise", (((8, 4),) * 3,)),
    "list": ("Tensor[] a", "pointwise", (((8, 4),) * 4, ((8, 8),) * 2)),
}
MESHES = ((2,), (2, 2), (2, 2, 2))
PLACEMENTS = (Replicate(), Shard(0), Shard(1), Partial(), Partial("avg"), Partial("max"))


class Question(NamedTuple):
    rule: str
    shapes: tuple[tuple[int, ...], ...]
    mesh: tuple[int, ...]
    placements: list[tuple[Any, ...]]


@st.composite
def questions(draw: st.DrawFn, mesh: tuple[int, ...]) -> Question:
    rule = draw(st.sampled_from(list(RULES)))
    shapes = draw(st.sampled_from(RULES[rule][2]))
    of_all = st.tuples(*[st.sampled_from(PLACEMENTS)] * len(mesh))
    usual = draw(of_all)
    placed = [draw(st.one_of(st.just(usual), of_all)) for _ in shapes]
    placed = [
        tuple(p if not isinstance(p, Shard) or p.dim < len(shape) else Replicate() for p in each)
        for each, shape in zip(placed, shapes, strict=True)
    ]
    return Question(rule, shapes, mesh, placed)


@pytest.fixture
def ops(namespace: str) -> Iterator[dict[str, Any]]:
    with torchop.Library(namespace, "FRAGMENT") as library:
        found = {}
        for index, (name, (arguments, rule, _)) in enumerate(RULES.items()):
            local = f"op{index}"
            written = name == "written"
            library.define(f"{local}({arguments}) -> {'()' if written else 'Tensor'}")
            op = getattr(getattr(torch.ops, namespace), local).default
            torchop.register_fake(op, FAKES.get(name, lambda a, *rest, **more: torch.empty_like(a)))
            torchop.register_sharding(op, rule)
            found[name] = op
        yield found


FAKES: dict[str, Any] = {
    "product": lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
    "largest": lambda a, b: a.new_empty(a.shape[0]),
    "written": lambda a, b, c: None,
    "list": lambda a: torch.empty_like(a[0]),
}


def schema_of(op: Any, question: Question, mesh: Any) -> Any:
    specs = [
        DTensorSpec(mesh, placed, tensor_meta=TensorMeta(torch.Size(shape), stride, torch.float32))
        for shape, placed in zip(question.shapes, question.placements, strict=True)
        for stride in [torch.empty(shape, device="meta").stride()]
    ]
    args: tuple[Any, ...] = tuple(specs)
    kwargs: dict[str, Any] = {}
    if question.rule == "list":
        args = (specs,)
    if question.rule == "by keyword":
        args, kwargs = tuple(specs[:2]), {"c": specs[2]}
    return OpSchema(op, args, kwargs, schema_info=propagator().op_to_schema_info[op])


def decided(op: Any, op_schema: Any, all_of_them: bool) -> tuple[Any, ...]:
    """Return the placements that DTensor chooses, or the error message if the rule raises.

    If `all_of_them` is True, DTensor chooses from all placements that the rule accepts.
    """
    rule, engine = SHARDING.lookup(op), propagator()
    wrapped = engine._wrap_with_op_strategy(op_schema)

    def rows(call: Any) -> Any:
        return rule.rows(op, call)

    try:
        if all_of_them:
            specs = op_specs(op, rows, wrapped, Redistributable.ARGUMENTS)
        else:
            specs = decisive_specs(op, rows, wrapped)
    except (torchop.ShardingError, AssertionError) as error:
        # DTensor cannot move a tensor that is passed by keyword, so some placements raise an error.
        return (str(error),)
    chosen = _select_min_cost_strategy(OpStrategy(specs), op_schema)
    outputs = chosen.output_specs
    outputs = outputs if isinstance(outputs, tuple) or outputs is None else (outputs,)
    return (
        [spec.placements for spec in chosen.input_specs],
        outputs and [spec.placements for spec in outputs],
        chosen.redistribute_cost,
    )


@pytest.mark.parametrize("shape", MESHES)
def test_decision_equals_the_one_among_all_placements(
    ops: dict[str, Any], shape: tuple[int, ...]
) -> None:
    @stable
    @given(questions(shape))
    def check(question: Question) -> None:
        op = ops[question.rule]
        op_schema = schema_of(op, question, mesh)
        assert decided(op, op_schema, False) == decided(op, op_schema, True)

    with ranks.simulated_mesh(shape) as mesh:
        check()


def test_a_call_that_moves_nothing_computes_no_cost(
    ops: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the tensors can stay where they are, no costs of moving them are computed.

    For each cost that DTensor computes, it stores a plan in a cache that grows without a limit.
    """
    asked = []
    original = dtensor_moves.Inputs.costs

    def costs(self: Any, index: int, placements: Any) -> Any:
        asked.append((index, placements))
        return original(self, index, placements)

    monkeypatch.setattr(dtensor_moves.Inputs, "costs", costs)
    placed = (Shard(0), Shard(1), Replicate())
    question = Question("pointwise", ((8, 4),) * 3, (2, 2, 2), [placed] * 3)
    op = ops["pointwise"]
    with ranks.simulated_mesh((2, 2, 2)) as mesh:
        wrapped = propagator()._wrap_with_op_strategy(schema_of(op, question, mesh))
        specs = decisive_specs(op, lambda call: SHARDING.lookup(op).rows(op, call), wrapped)
    assert [[i.placements for i in spec.input_specs] for spec in specs] == [[placed] * 3]
    assert set(asked) == set(itertools.product(range(3), [placed]))


@pytest.mark.parametrize(
    "rule",
    ["'a k, k b -> a b'", pytest.param("torch.ops.aten.mm.default", marks=pytest.mark.exhaustive)],
)
def test_sizes_are_symbolic_in_compiled_calls(rule: str) -> None:
    source = f"""
        import torch, torchop, torch.distributed as dist
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        schema = "(Tensor x, Tensor w) -> Tensor"
        op = torchop.custom_op("t::op", lambda x, w: x @ w, mutates_args=(), schema=schema)
        op.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
        op.derive_autograd()
        op.register_sharding({rule})
        compiled = torch.compile(op, backend="aot_eager", fullgraph=True, dynamic=True)
        for rows in (4, 6):
            x = distribute_tensor(torch.ones(rows, 8), mesh, [Shard(0)]).requires_grad_()
            w = distribute_tensor(torch.ones(8, 3), mesh, [Replicate()]).requires_grad_()
            y = compiled(x, w)
            y.sum().backward()
            print(tuple(y.shape), y.placements == x.grad.placements == x.placements)
    """
    assert assert_clean(run_compiling(source)).splitlines() == ["(4, 3) True", "(6, 3) True"]
