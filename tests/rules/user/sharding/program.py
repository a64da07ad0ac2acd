"""Compare calls on DTensors in several processes with calls on plain tensors in one process.

    torchrun --standalone --nproc-per-node 2 program.py FOLDER

The tests start the ranks without torchrun, which is faster. FOLDER must be empty. The program
writes `outcomes.json` into it, which maps each case to its error, or to "" if the case passed.
Cases that need a different number of processes are skipped.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import torchop
from tests.rules.user.sharding import ranks

CASES: dict[str, tuple[int, Callable[[Any], None]]] = {}
EXAMPLES = Path(__file__).parents[4] / "examples"
EXAMPLE = EXAMPLES / "tensor_parallel.py"
PLACED = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial()}
X = torch.arange(32.0).reshape(4, 8).cos()
W, B = torch.arange(8.0).sin(), torch.arange(8.0).cos()


def case(processes: int) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def add(function: Callable[[Any], None]) -> Callable[[Any], None]:
        CASES[function.__name__] = processes, function
        return function

    return add


def collectives_of(function: Callable[..., Any], *args: Any) -> int:
    with CommDebugMode() as mode:
        function(*args)
    return mode.get_total_counts()


def on(mesh: Any, tensor: Tensor, words: str = "R") -> Any:
    placements = [PLACED[word] for word in words.split()]
    placements = placements * mesh.ndim if len(placements) == 1 else placements
    return ranks.placed(tensor, mesh, placements)


def same(value: Any, expected: Tensor, where: str | None = None) -> None:
    if where is not None:
        words = [PLACED[word] for word in where.split()] * value.device_mesh.ndim
        assert list(value.placements) == words[: value.device_mesh.ndim], value.placements
    value = value.full_tensor() if isinstance(value, DTensor) else value
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


def save_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


# --------------------------------------------------------------------------------------------------
# Operators


@torchop.custom_op("ranks::sine", mutates_args=())
def sine(x: Tensor) -> Tensor:
    return x.sin()


sine.register_fake(torch.empty_like)
sine.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0].cos(), setup_context=save_inputs)
sine.register_sharding("pointwise")


@torchop.custom_op("ranks::tanh", mutates_args=(), residuals={"slope": Tensor})
def tanh(x: Tensor) -> Tensor:
    output = x.tanh()
    return torchop.residuals(output, 1 - output * output)


@tanh.register_fake
def _(x: Tensor) -> Tensor:
    return torchop.residuals(torch.empty_like(x), torch.empty_like(x))


def save_slope(ctx: Any, inputs: Any, output: Any, residuals: Any) -> None:
    ctx.save_for_backward(residuals.slope)


tanh.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0], setup_context=save_slope)
tanh.register_sharding("pointwise")


@torchop.custom_op("ranks::mm", mutates_args=())
def mm(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


mm.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
mm.register_sharding("b k, k n -> b n", reduce={"k": "sum"}, linear=(0, 1))


@mm.register_autograd(setup_context=save_inputs)
def _(ctx: Any, grad: Tensor) -> Any:
    a, b = ctx.saved_tensors
    return mm(grad, b.t()), mm(a.t(), grad)


@torchop.operator("ranks::softmax")
class softmax:
    fake = {"like": "x"}  # noqa: RUF012  # a declaration
    backward = torchop.derived
    sharding = torchop.sharding("... d -> ... d", whole="d")

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.softmax(-1)


@torchop.custom_op("ranks::layer_norm", mutates_args=())
def layer_norm(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:], weight, bias)


layer_norm.register_fake(lambda x, weight, bias=None: torch.empty_like(x))
layer_norm.derive_autograd()
layer_norm.register_sharding("... d, d, d -> ... d", whole="d")


@torchop.custom_op("ranks::embed", mutates_args=())
def embed(table: Tensor, index: Tensor) -> Tensor:
    return table[index]


embed.register_fake(lambda table, index: table.new_empty(*index.shape, table.shape[1]))
embed.derive_autograd()
embed.register_sharding("v d, ... -> ... d")


@torchop.custom_op("ranks::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool = False) -> Tensor:
    scores = q @ k.transpose(-1, -2) + mask
    return scores.softmax(-1) @ v


attend.register_fake(lambda q, k, v, mask, causal=False: torch.empty_like(q))
attend.derive_autograd()
attend.register_sharding("b h q d, b h k d, b h k d, b h q k -> b h q d", whole="d k")


@torchop.custom_op("ranks::in_numpy", mutates_args=())
def in_numpy(x: Tensor, w: Tensor) -> Tensor:
    return torch.from_numpy(np.sin(x.numpy() * w.numpy()))


in_numpy.register_fake(lambda x, w: torch.empty_like(x))
in_numpy.register_sharding("... d, d -> ... d")


def in_numpy_backward(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    inner = grad.numpy() * np.cos(x.numpy() * w.numpy())
    return torch.from_numpy(inner * w.numpy()), torch.from_numpy((inner * x.numpy()).sum(0))


in_numpy.register_autograd(backward_kernel=in_numpy_backward)


@torchop.custom_op("ranks::total", mutates_args=())
def total(xs: list[Tensor], scale: float = 1.0) -> Tensor:
    return torch.stack(xs).sum(0) * scale


total.register_fake(lambda xs, scale=1.0: torch.empty_like(xs[0]))
total.register_sharding("[...] -> ...", linear=(0,))


@torchop.custom_op("ranks::two", mutates_args=())
def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x.sum(-1)


two.register_fake(lambda x: (torch.empty_like(x), x.new_empty(x.shape[:-1])))
two.register_sharding("... d -> ... d, ...", reduce={"d": "sum"})


@torchop.custom_op("ranks::add", mutates_args=("acc",))
def add(acc: Tensor, x: Tensor) -> None:
    acc.add_(x)


add.register_fake(lambda acc, x: None)
add.register_sharding("..., ... ->")


@torchop.custom_op("ranks::inc_", mutates_args=("x",))
def inc_(x: Tensor) -> None:
    x.add_(1)


inc_.register_fake(lambda x: None)
inc_.register_sharding("... ->")

double = torchop.custom_op(
    "ranks::double", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
)
double.register_fake(torch.empty_like)
double.register_sharding("pointwise")
double_, double_out = double.derive_inplace(), double.derive_out()


@torchop.custom_op(
    "ranks::noise",
    mutates_args=(),
    schema="(Tensor x, *, Generator? generator=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
def noise(x: Tensor, *, generator: Optional[torch.Generator] = None) -> Tensor:
    return torch.rand(x.shape, generator=generator)


noise.register_fake(lambda x, *, generator=None: torch.empty_like(x))
noise.register_sharding("pointwise")


@dataclasses.dataclass(frozen=True)
class Options:
    scale: Tensor
    power: float = 2.0


@torchop.custom_op("ranks::scaled", mutates_args=())
def scaled(x: Tensor, options: Options) -> Tensor:
    return x * options.scale**options.power


scaled.register_fake(lambda x, options: torch.empty_like(x))
scaled.register_sharding("b d, d -> b d")


def reduction(how: str, function: Any) -> Any:
    op = torchop.custom_op(
        f"ranks::{how}",
        lambda input: function(input, dim=-1),
        mutates_args=(),
        schema="(Tensor input) -> Tensor",
    )
    op.register_fake(lambda input: input.new_empty(input.shape[:-1]))
    op.register_sharding("... d -> ...", reduce={"d": how})
    return op


REDUCTIONS = {
    how: (reduction(how, function), function)
    for how, function in {"sum": torch.sum, "max": torch.amax, "avg": torch.mean}.items()
}


# --------------------------------------------------------------------------------------------------
# Cases, each with the number of processes that it needs


def trained(function: Any, values: list[Any]) -> list[Tensor]:
    result = function(*values)
    result.sin().sum().backward()
    return [result.detach(), *(v.grad for v in values if v.requires_grad)]


def compare(
    mesh: Any, op: Any, plain: Any, values: dict[str, Tensor], placed: list[str], how: Any
) -> None:
    leaves = [v.clone().requires_grad_(v.is_floating_point()) for v in values.values()]
    expected = trained(plain, leaves)
    for words in placed:
        dtensors = [
            on(mesh, v, w).requires_grad_(v.is_floating_point())
            for v, w in zip(values.values(), words.split(), strict=True)
        ]
        for value, right in zip(trained(how(op), dtensors), expected, strict=True):
            same(value, right)


def eager(op: Any) -> Any:
    return op


def compiled(op: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(lambda *args: op(*args), backend="aot_eager", fullgraph=True)


def inductor(op: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(lambda *args: op(*args) * 2, fullgraph=True)


Q = torch.arange(128.0).reshape(4, 4, 2, 4).cos()
MASK = torch.zeros(4, 4, 2, 2).masked_fill(torch.eye(2).bool(), -1.0)
TRAINED: dict[str, tuple[Any, Any, dict[str, Tensor], list[str]]] = {
    "pointwise": (sine, torch.sin, {"x": X}, ["S0", "S1", "R", "P"]),
    "matmul": (mm, torch.mm, {"a": X, "b": X.t().exp()}, ["S0 R", "S1 S0", "R S1", "P S0"]),
    "softmax": (softmax, lambda x: x.softmax(-1), {"x": X}, ["S0", "S1"]),
    "layer_norm": (
        layer_norm,
        lambda x, w, b: nn.functional.layer_norm(x, x.shape[-1:], w, b),
        {"x": X, "w": W, "b": B},
        ["S0 R R", "S1 S0 S0"],
    ),
    "embedding": (
        embed,
        lambda table, index: table[index],
        {"table": X, "index": torch.tensor([[0, 1], [3, 3], [2, 0], [1, 1]])},
        ["S1 R", "R S0", "S0 S0"],
    ),
    "attention": (
        attend,
        lambda q, k, v, mask: (q @ k.transpose(-1, -2) + mask).softmax(-1) @ v,
        {"q": Q, "k": Q.sin(), "v": Q.exp(), "mask": MASK},
        ["S1 S1 S1 S1", "S0 R R R"],
    ),
    "in_numpy": (
        in_numpy,
        lambda x, w: (x * w).sin(),
        {"x": X, "w": W},
        ["S0 R", "S1 S0", "S0 S0"],
    ),
}


def add_trained(name: str) -> None:
    op, plain, values, placed = TRAINED[name]

    def run(mesh: Any) -> None:
        compare(mesh, op, plain, values, placed, eager)

    def run_compiled(mesh: Any) -> None:
        compare(mesh, op, plain, values, placed[:2], compiled)

    CASES[name] = 0, run
    if name != "matmul":  # the case `checked_compiled` already compiles matmul
        CASES[f"{name}_compiled"] = 2, run_compiled


for _name in TRAINED:
    add_trained(_name)


@case(2)
def compiled_by_inductor(mesh: Any) -> None:
    compare(mesh, sine, lambda x: x.sin() * 2, {"x": X}, ["S0"], inductor)


@case(0)
def reductions(mesh: Any) -> None:
    for how, (op, function) in REDUCTIONS.items():
        value = op(on(mesh, X, "S1"))
        assert all(p.is_partial(how) for p in value.placements), value.placements
        same(value, function(X, dim=-1))
        same(op(on(mesh, X[:, :7], "S1")), function(X[:, :7], dim=-1))
        same(op(on(mesh, X[:, :1], "S1")), function(X[:, :1], dim=-1))


@case(0)
def lists_and_two_results(mesh: Any) -> None:
    xs = [on(mesh, X, "S0"), on(mesh, X, "R"), on(mesh, X, "S1")]
    same(total(xs, 2.0), X * 6)
    same(total([on(mesh, X, "P")] * 2), X * 2, "P")
    first, second = two(on(mesh, X, "S1"))
    same(first, X + 1, "S1")
    same(second, X.sum(-1), "P")


@case(0)
def mutated_arguments(mesh: Any) -> None:
    acc = on(mesh, X, "S0")
    add(acc, on(mesh, X, "S1"))
    same(acc, X * 2, "S0")
    inc_(acc)
    same(acc, X * 2 + 1, "S0")
    with pytest.raises(torchop.ShardingError, match="writes into 'acc'"):
        add(on(mesh, X, "P"), on(mesh, X, "S1"))


@case(2)
def mutated_arguments_compiled(mesh: Any) -> None:
    def step(acc: Tensor, x: Tensor) -> Tensor:
        add(acc, x)
        inc_(acc)
        double_(acc)
        out = torch.zeros_like(acc)
        return double_out(acc, out=out)

    acc = on(mesh, X, "S0")
    result = compiled(step)(acc, on(mesh, X, "S1"))
    same(acc, (X * 2 + 1) * 2, "S0")
    same(result, (X * 2 + 1) * 4, "S0")


@case(0)
def structured(mesh: Any) -> None:
    same(scaled(on(mesh, X, "S1"), Options(on(mesh, W))), X * W**2, "S1")


@case(2)
def structured_compiled(mesh: Any) -> None:
    function = torch.compile(
        lambda x, w: scaled(x, Options(w, 3.0)), backend="aot_eager", fullgraph=True
    )
    same(function(on(mesh, X, "S1"), on(mesh, W)), X * W**3)


@case(2)
def each_provider_has_the_sharding_rule(mesh: Any) -> None:
    ran: list[str] = []
    sine.register_kernel("cpu", lambda x: ran.append("fast") or np_sine(x), provider="fast")
    for order in (["reference"], ["fast"]):
        with torchop.priority({"ranks::sine": order}):
            same(sine(on(mesh, X, "S1")), X.sin(), "S1")
    assert ran == ["fast"]


def np_sine(x: Tensor) -> Tensor:
    return torch.from_numpy(np.sin(x.contiguous().numpy()))


@case(2)
def checked_in_real_processes(mesh: Any) -> None:
    from torchop.testing import check_sharding

    report = check_sharding(sine, (X.clone().requires_grad_(),), mesh=(2,))
    assert report.placements == 4, report
    assert check_sharding(mm, (X, X.t().contiguous()), mesh=(2,)).placements == 16


@case(2)
def checked_compiled(mesh: Any) -> None:
    from torchop.testing import OpCheckError, check_sharding

    # Test 10 placements, which are more than Dynamo's limit of recompilations.
    leaves = X.clone().requires_grad_(), X.t().clone().requires_grad_()
    report = check_sharding(mm, leaves, mesh=(2,), backend="aot_eager", limit=10)
    assert report.placements == 10, report
    two.register_sharding("... d -> ... d, ...", reduce={"d": "max"})
    try:
        with pytest.raises(OpCheckError, match=r"with x: S\(1\) result 1 is wrong"):
            check_sharding(two, (X,), mesh=(2,), backend="aot_eager")
    finally:
        two.register_sharding("... d -> ... d, ...", reduce={"d": "sum"})


@case(2)
def random_numbers(mesh: Any) -> None:
    def seeded(function: Any, *args: Any) -> Any:
        torch.manual_seed(3)
        return function(*args)

    numbers = seeded(torch.rand, X.shape)
    replicated: list[Any] = [None, None]
    dist.all_gather_object(replicated, seeded(noise, on(mesh, X)).to_local())
    assert all(torch.equal(each, numbers) for each in replicated)
    shards = seeded(noise, on(mesh, X, "S0")).full_tensor()
    assert torch.equal(shards[:2], shards[2:])
    # On CPUs, PyTorch's own operators also draw the same random numbers on every rank.
    assert torch.equal(seeded(torch.rand_like, on(mesh, X, "S0")).full_tensor(), shards)
    of_rank = torch.Generator().manual_seed(dist.get_rank())
    shards = noise(on(mesh, X, "S0"), generator=of_rank).full_tensor()
    assert not torch.equal(shards[:2], shards[2:])


@case(2)
def attention_over_heads(mesh: Any) -> None:
    """Each rank computes its own attention heads without communication, forward and backward."""
    attention = runpy.run_path(str(EXAMPLES / "attention_with_residuals.py"))["attention"]
    heads = torch.arange(48.0).reshape(2, 2, 3, 4)
    values = {"q": heads.sin(), "k": heads.cos(), "v": heads / 48}
    for how in (eager, compiled):
        compare(mesh, attention, attention, values, ["S1 S1 S1"], how)
    assert collectives_of(attention, *(on(mesh, v, "S1") for v in values.values())) == 0


@case(2)
def collectives_of_real_processes(mesh: Any) -> None:
    assert collectives_of(mm, on(mesh, X, "S0"), on(mesh, X.t().contiguous())) == 0
    assert collectives_of(softmax, on(mesh, X, "S1")) > 0, "a softmax of parts gathers them"


class Block(nn.Module):
    """A module that calls torchop operators: two linear layers, and an operator with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(W.clone()), nn.Parameter(B.clone())
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        hidden = layer_norm(x, self.weight, self.bias)
        return self.down(tanh(sine(self.up(hidden))))


def block() -> Block:
    torch.manual_seed(0)
    return Block()


def rows_of_rank() -> Tensor:
    return X.chunk(dist.get_world_size())[dist.get_rank()]


def steps(module: nn.Module, rows: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = module(rows).sin().square().mean()
        loss.backward()
        optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in module.parameters()]


@case(0)
def fsdp2(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    flat = init_device_mesh("cpu", (dist.get_world_size(),))
    module = block()
    fully_shard(module, mesh=flat)
    for value, right in zip(steps(module, rows_of_rank()), steps(block(), X), strict=True):
        torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-5)


@case(2)
def compiled_fsdp2_and_ddp(mesh: Any) -> None:
    """The hooks of FSDP2 and DDP must not run before the backward has used the residuals."""
    from torch.distributed.fsdp import fully_shard

    right = steps(block(), X)
    for whole in (True, False):
        for parallel in (fully_shard, nn.parallel.DistributedDataParallel):
            torch._dynamo.reset()
            module = block()
            if not whole:
                module.compile(backend="aot_eager", fullgraph=True)
            module = parallel(module)
            if whole:
                module = torch.compile(module, backend="aot_eager")
            for value, expected in zip(steps(module, rows_of_rank()), right, strict=True):
                torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


@case(0)
def ddp(mesh: Any) -> None:
    module = nn.parallel.DistributedDataParallel(block())
    for value, right in zip(steps(module, rows_of_rank()), steps(block(), X), strict=True):
        torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-5)


@case(4)
def tensor_parallel(mesh: Any) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    flat = init_device_mesh("cpu", (4,))
    right = block()
    expected = right(X)
    expected.sin().sum().backward()
    for local in (True, False):
        module = block()
        plan: dict[str, Any] = {
            "up": ColwiseParallel(use_local_output=local),
            "down": RowwiseParallel(use_local_output=True),
        }
        module = parallelize_module(module, flat, plan)
        # Unless `local` is set, the first layer returns a DTensor, so the operator after this layer
        # runs on shards.
        assert isinstance(module.up(X), DTensor) is not local
        value = module(X)
        same(value, expected.detach())
        value.sin().sum().backward()
        same(module.up.weight.grad, right.up.weight.grad)
        same(module.down.weight.grad, right.down.weight.grad)


@case(4)
def in_local_map(mesh: Any) -> None:
    from torch.distributed.tensor.experimental import local_map

    without_rule = torchop.custom_op(
        "ranks::without", lambda x: x.exp(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    without_rule.register_fake(torch.empty_like)
    rows = [Shard(0)] * mesh.ndim
    function = local_map(
        lambda x: without_rule(x), out_placements=rows, in_placements=(rows,), device_mesh=mesh
    )
    same(function(on(mesh, X, "S0")), X.exp(), "S0")
    with pytest.raises(NotImplementedError, match=r"^ranks::without has no sharding rule"):
        without_rule(on(mesh, X, "S0"))


@case(4)
def checkpoint_on_another_mesh(mesh: Any) -> None:
    from torch.distributed import checkpoint

    flat = init_device_mesh("cpu", (4,))
    folder = Path(sys.argv[1]) / "state"
    state = {"weight": mm(on(flat, X, "S0"), on(flat, X.t().contiguous()))}
    checkpoint.save(state, checkpoint_id=folder)
    loaded = {"weight": on(mesh, torch.zeros(4, 4), "S1 S0")}
    checkpoint.load(loaded, checkpoint_id=folder)
    same(loaded["weight"], X @ X.t())
    same(sine(loaded["weight"]), (X @ X.t()).sin())


@case(4)
def several_mesh_dimensions(mesh: Any) -> None:
    right = X.t().contiguous()
    for a, b in (("S0 S1", "R S0"), ("S1 S1", "S0 S0"), ("S0 S0", "R R"), ("P S1", "R S0")):
        same(mm(on(mesh, X, a), on(mesh, right, b)), X @ right)
    same(sine(on(mesh, X[:3, :5], "S0 S0")), X[:3, :5].sin())


@case(4)
def example_of_the_tutorial(mesh: Any) -> None:
    example = runpy.run_path(str(EXAMPLE))
    alone, together, collectives = example["train_on"](init_device_mesh("cpu", (4,)))
    assert collectives == {"c10d_functional.all_reduce": 1}
    assert alone[0] > alone[-1], alone
    torch.testing.assert_close(together, alone)


# --------------------------------------------------------------------------------------------------


def main() -> None:
    torch.set_num_threads(1)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(Path(sys.argv[1], "store")), count)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=limit)
    mesh = init_device_mesh("cpu", (2, 2) if count == 4 else (count,))
    outcomes: dict[str, str] = {}
    only = os.environ.get("CASES", "").split()
    for name, (processes, function) in CASES.items():
        if processes not in (0, count) or (only and name not in only):
            continue
        try:
            function(mesh)
            outcome = ""
        except Exception:
            outcome = f"rank {dist.get_rank()}: {traceback.format_exc()}"
        everywhere: list[Any] = [None] * count
        dist.all_gather_object(everywhere, outcome)
        outcomes[name] = "\n".join(filter(None, everywhere))
    if dist.get_rank() == 0:
        Path(sys.argv[1], "outcomes.json").write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a normal exit would abort, because threads of gloo are still running


if __name__ == "__main__":
    main()
