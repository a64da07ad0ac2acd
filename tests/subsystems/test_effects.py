"""An operator with an effect: called as often as the program says, in order, or refused."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch._inductor.utils
import torch.utils.checkpoint
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close

import torchop
from torchop._compat.effects import effect_of

CALLS: list[Any] = []
compiled_with = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


@pytest.fixture(autouse=True)
def _no_calls() -> Iterator[None]:
    CALLS.clear()
    yield
    CALLS.clear()


@pytest.fixture
def cached() -> Iterator[None]:
    """Lets compilers remember graphs, in files of this test."""
    with (
        torch._inductor.utils.fresh_cache(),
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        yield


@pytest.fixture
def log(namespace: str) -> Any:
    """Returns nothing, and needs no other registration."""

    @torchop.custom_op(f"{namespace}::log", mutates_args=(), effects="ordered")
    def log(x: Tensor, label: int) -> None:
        CALLS.append(label)

    return log


@pytest.fixture
def logged(namespace: str) -> Any:
    """Returns what it logs, and can be trained through."""

    @torchop.custom_op(f"{namespace}::logged", mutates_args=(), effects="ordered")
    def logged(x: Tensor, label: int) -> Tensor:
        CALLS.append(label)
        return x * 2

    logged.register_fake(lambda x, label: torch.empty_like(x))
    logged.register_autograd(lambda ctx, grad: (grad * 2, None))
    return logged


def trained(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Any]]:
    """The gradient, and the calls of forward and backward."""
    CALLS.clear()
    x = torch.linspace(0.1, 0.5, 3, requires_grad=True)
    function(x).sum().backward()
    assert x.grad is not None
    return x.grad, list(CALLS)


# --------------------------------------------------------------------------------------------------
# Kept


@compiled_with
def test_every_call_is_kept_in_order_in_inference(log: Any, logged: Any, backend: str) -> None:
    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor) -> Tensor:
        log(x, 1)
        logged(x, 2)  # the result is not used
        y = x + 1
        log(y, 3)
        log(y, 3)
        return y

    assert function(torch.ones(2)).tolist() == [2.0, 2.0]
    assert CALLS == [1, 2, 3, 3]


@compiled_with
def test_every_call_is_kept_in_order_around_a_backward(
    log: Any, logged: Any, namespace: str, backend: str
) -> None:
    through = torchop.custom_op(f"{namespace}::through", lambda x: x.clone(), schema=SAME, **PURE)
    through.register_fake(lambda x: torch.empty_like(x))

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        log(grad, 10)
        log(grad, 11)
        return grad

    through.register_autograd(backward)

    def function(x: Tensor) -> Tensor:
        log(x, 1)
        y = through(logged(x.sin(), 2)).cos()
        logged(y, 3)
        return y

    expected, calls = trained(function)
    assert calls == [1, 2, 3, 10, 11]
    gradient, compiled = trained(torch.compile(function, backend=backend, fullgraph=True))
    assert compiled == calls
    assert_close(gradient, expected)


SAME = "(Tensor x) -> Tensor"
PURE: dict[str, Any] = {"mutates_args": ()}


@compiled_with
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_checkpointed_call_happens_once_when_compiled(
    log: Any, logged: Any, backend: str, reentrant: bool, blocks: int
) -> None:
    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)

    def block(x: Tensor) -> Tensor:
        y = logged(x.sin(), 1)
        log(y, 2)
        return logged(y.cos(), 3).sin()

    def function(x: Tensor) -> Tensor:
        for _ in range(blocks):
            x = checkpoint(block, x)
        return x

    expected, calls = trained(function)
    assert calls == [1, 2, 3] * 2 * blocks  # eager mode computes a block again, and so calls again
    gradient, compiled = trained(torch.compile(function, backend=backend, fullgraph=True))
    assert compiled == [1, 2, 3] * blocks
    assert_close(gradient, expected)


@compiled_with
@pytest.mark.filterwarnings("ignore:.*context_fn.*")
def test_a_policy_cannot_make_a_compiled_call_happen_again(logged: Any, backend: str) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE

    contexts = functools.partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts, policy
    )

    def function(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda x: logged(logged(x.sin(), 1).cos(), 2).sin(),
            x,
            use_reentrant=False,
            context_fn=contexts,
        )

    expected, _ = trained(function)
    gradient, calls = trained(torch.compile(function, backend=backend, fullgraph=True))
    assert calls == [1, 2]
    assert_close(gradient, expected)


def test_a_policy_decides_about_calls_in_eager_mode(logged: Any) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        policies = torch.utils.checkpoint.CheckpointPolicy
        return policies.MUST_SAVE if op is logged.overload else policies.PREFER_RECOMPUTE

    contexts = functools.partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts, policy
    )

    def function(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda x: logged(x.sin(), 1).cos(), x, use_reentrant=False, context_fn=contexts
        )

    assert trained(function)[1] == [1]


@compiled_with
@pytest.mark.parametrize("outputs", ["several", "list", "none without tensors"])
def test_calls_of_every_shape_are_kept(namespace: str, backend: str, outputs: str) -> None:
    def several(xs: list[Tensor], n: int, *, m: int = 3) -> tuple[Tensor, Tensor]:
        CALLS.append((n, m))
        return xs[0] + 1, xs[1] * 2

    def listed(xs: list[Tensor], n: int, *, m: int = 3) -> list[Tensor]:
        CALLS.append((n, m))
        return [xs[0] + 1, xs[1] * 2]

    def nothing(n: int, *, m: int = 3) -> None:
        CALLS.append((n, m))

    kernel: Any = {"several": several, "list": listed, "none without tensors": nothing}[outputs]
    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), effects="ordered")
    if kernel is not nothing:
        op.register_fake(lambda xs, n, *, m=3: kernel(xs, n, m=m))

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor) -> Tensor:
        tensors = () if kernel is nothing else ([x, x],)
        op(*tensors, 1)
        result = op(*tensors, 2, m=4)
        return x if result is None else result[0] + result[1]

    expected = [1.0, 1.0] if kernel is nothing else [4.0, 4.0]
    function(torch.ones(2))
    CALLS.clear()  # the fake kernel is the kernel here
    assert function(torch.ones(2)).tolist() == expected
    assert CALLS == [(1, 3), (2, 4)]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_an_exported_program_keeps_the_calls_when_it_is_saved_and_loaded(
    log: Any, logged: Any, strict: bool, decomposed: bool
) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            log(x, 1)
            logged(x, 2)
            log(x, 3)
            return x + 1

    program = torch.export.export(Model(), (torch.ones(2),), strict=strict)
    if decomposed:
        program = program.run_decompositions()
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    CALLS.clear()
    assert torch.export.load(file).module()(torch.ones(2)).tolist() == [2.0, 2.0]
    assert CALLS == [1, 2, 3]


@compiled_with
def test_transforms_and_other_regions_keep_the_calls(log: Any, backend: str) -> None:
    def regions(x: Tensor) -> Tensor:
        log(x, 1)
        with torch.no_grad():
            log(x, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            log(x, 3)
        return (x * x).sum()

    function = torch.compile(torch.func.grad(regions), backend=backend, fullgraph=True)
    assert function(torch.ones(2)).tolist() == [2.0, 2.0]
    assert CALLS == [1, 2, 3]


def _nested_regions(log: Any) -> Callable[[Tensor], Tensor]:
    @torch.compiler.nested_compile_region
    def region(x: Tensor) -> Tensor:
        log(x, 1)
        return x.sin()

    return lambda x: region(region(x))


@compiled_with
@pytest.mark.filterwarnings("ignore:Please add support for subgraph args")
def test_a_nested_region_keeps_the_calls_in_inference(log: Any, backend: str) -> None:
    function = torch.compile(_nested_regions(log), backend=backend, fullgraph=True)
    assert_close(function(torch.ones(2)), torch.ones(2).sin().sin())
    assert CALLS == [1, 1]


def test_caches_of_graphs_keep_the_calls(cached: None, log: Any) -> None:
    def function(x: Tensor) -> Tensor:
        log(x, 1)
        return x + 1

    for _ in range(2):
        torch.compile(function, fullgraph=True)(torch.ones(2))
        torch._dynamo.reset()
    assert CALLS == [1, 1]


@compiled_with
def test_calls_are_dropped_where_it_is_said_that_nothing_is_lost(
    namespace: str, backend: str
) -> None:
    @torchop.custom_op(f"{namespace}::check", mutates_args=(), effects="none")
    def check(x: Tensor) -> None:
        CALLS.append(1)

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor) -> Tensor:
        check(x)
        return x + 1

    function(torch.ones(2))
    assert CALLS == []
    check(torch.ones(2))
    assert CALLS == [1]


# --------------------------------------------------------------------------------------------------
# Refused


def _in_a_branch(log: Any, x: Tensor) -> Tensor:
    def taken(x: Tensor) -> Tensor:
        log(x, 1)
        return x.sin()

    return torch.cond(x.sum() > 0, taken, lambda x: x.cos(), (x,))


def _in_a_loop(log: Any, x: Tensor) -> Tensor:
    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        log(x, 1)
        return i + 1, x + 1

    start = torch.zeros((), dtype=torch.long)
    return torch._higher_order_ops.while_loop(lambda i, x: i < 3, body, (start, x))[1]


def _in_a_scan(log: Any, x: Tensor) -> Tensor:
    def body(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        log(x, 1)
        return carry + x, carry * x

    return torch._higher_order_ops.scan(body, torch.zeros(()), x)[1]


def _in_a_map(log: Any, x: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        log(x, 1)
        return x + 1

    return torch._higher_order_ops.map(body, x)


INSIDE = {"cond": _in_a_branch, "while": _in_a_loop, "scan": _in_a_scan, "map": _in_a_map}
IN_A_GRAPH = "::log has an effect, and is called in a graph inside a graph"


@compiled_with
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
def test_a_call_in_a_graph_that_would_drop_it_is_refused(
    log: Any, backend: str, inside: Any, called_before: bool
) -> None:
    def function(x: Tensor) -> Tensor:
        if called_before:
            log(x, 0)
        return inside(log, x)

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=IN_A_GRAPH) as caught:
        torch.compile(function, backend=backend, fullgraph=True)(torch.ones(3))
    assert isinstance(caught.value.inner_exception, torchop.EffectError)
    assert "torch.compiler.disable" in str(caught.value)
    assert CALLS == []


@compiled_with
def test_a_nested_region_that_is_differentiated_is_refused(log: Any, backend: str) -> None:
    function = torch.compile(_nested_regions(log), backend=backend, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=IN_A_GRAPH):
        trained(function)


def test_an_exported_branch_keeps_its_calls_until_it_is_decomposed(log: Any) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _in_a_branch(log, x)

    program = torch.export.export(Model(), (torch.ones(2),))
    CALLS.clear()
    program.module()(torch.ones(2))
    assert CALLS == [1]
    with pytest.raises(torchop.EffectError, match=IN_A_GRAPH):
        program.run_decompositions()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["log", "logged"])
def test_vmap_is_refused(request: pytest.FixtureRequest, name: str, compiled: bool) -> None:
    op = request.getfixturevalue(name)

    def function(x: Tensor) -> Tensor:
        return torch.vmap(lambda x: (op(x, 1), x.sin())[1])(x)

    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    with pytest.raises(
        RuntimeError, match=f"::{name} has an effect, and vmap cannot know"
    ) as error:
        function(torch.ones(3, 2))
    assert f"register_vmap('{op.name}'" in str(error.value)
    assert CALLS == []


@pytest.mark.parametrize("first", ["effect", "rule"])
def test_a_vmap_rule_decides_what_an_effect_means(namespace: str, first: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: CALLS.append(len(x)), schema="(Tensor x) -> ()", **NO_EFFECT
    )
    steps: list[Callable[[], Any]] = [
        lambda: op.register_effect("ordered"),
        lambda: op.register_vmap(lambda info, in_dims, x: (op(x), None)),
    ]
    for step in steps if first == "effect" else reversed(steps):
        step()
    torch.vmap(lambda x: (op(x), x)[1])(torch.ones(3, 2))
    assert CALLS == [3]


NO_EFFECT: dict[str, Any] = {"mutates_args": (), "effects": "none"}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_maps_again_when_the_effect_is_taken_back(logged: Any) -> None:
    logged.register_effect(None)
    torch.vmap(lambda x: logged(x, 1))(torch.ones(3, 2))
    assert CALLS == [1, 1, 1]


def test_vmap_over_what_is_not_batched_calls_once(log: Any) -> None:
    y = torch.ones(2)
    torch.vmap(lambda x: (log(y, 1), x)[1])(torch.ones(3, 2))
    assert CALLS == [1]


# --------------------------------------------------------------------------------------------------
# Too late


def _compile(op: Any) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: Tensor) -> Tensor:
        op(x)
        return x + 1

    function(torch.ones(2))


def _define(namespace: str, **options: Any) -> Any:
    def kernel(x: Tensor) -> Tensor:
        return x.clone()

    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), **options)
    op.register_fake(lambda x: torch.empty_like(x))
    return op


def test_an_effect_is_refused_after_the_operator_was_compiled(namespace: str) -> None:
    op = _define(namespace)
    _compile(op)
    with pytest.raises(torchop.EffectError, match=f"{namespace}::op: a compiler has already") as e:
        op.register_effect(torchop.EffectType.ORDERED)
    assert 'custom_op(..., effects="ordered")' in str(e.value)
    op.register_effect(None)  # says nothing new
    assert "effect" not in repr(op)


def test_an_effect_is_removed_after_the_operator_was_compiled(namespace: str) -> None:
    op = _define(namespace, effects="ordered")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is compiled: there is nothing to tell
        op.register_effect(None)
        op.register_effect("ordered")
    _compile(op)
    for nothing in (None, "none"):
        with pytest.warns(UserWarning, match=f"{namespace}::op.* still keep every call, in order"):
            op.register_effect(nothing)
        assert effect_of(f"{namespace}::op") is None
    torch.compiler.reset()
    _compile(op)
    with pytest.raises(torchop.EffectError, match="traced the operator without an effect"):
        op.register_effect("ordered")


def test_a_graph_keeps_its_calls_after_the_effect_is_removed(namespace: str) -> None:
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: CALLS.append(x) or x.clone(), "CPU")
        torchop.register_fake(f"{namespace}::op", torch.empty_like, lib=library)
        torchop._register_effectful_op(f"{namespace}::op", torchop.EffectType.ORDERED)
        op, graphs = getattr(torch.ops, namespace).op, []

        def function(x: Tensor) -> Tensor:
            op(x)
            return x + 1

        def keep_graph(graph: Any, inputs: Any) -> Any:
            graphs.append(str(graph.graph))
            return graph

        backend = aot_autograd(fw_compiler=keep_graph)
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        compiled(torch.ones(2))
        with pytest.warns(UserWarning, match="graphs that were compiled before still keep"):
            torchop._register_effectful_op(f"{namespace}::op", None)
        compiled(torch.ones(2))
        assert len(CALLS) == 2
        torch.compiler.reset()
        compiled(torch.ones(2))
        assert ["with_effects" in graph for graph in graphs] == [True, False]


def test_running_and_faking_an_operator_is_not_too_early(namespace: str) -> None:
    op = _define(namespace)
    op(torch.ones(2))
    with torch._subclasses.FakeTensorMode():
        op(torch.ones(2))
    torch.export.export(torch.nn.Identity(), (op(torch.ones(2)),))
    op.register_effect("ordered")


def test_a_refused_compilation_is_not_too_early(namespace: str) -> None:
    with pytest.warns(torchop.MissingEffectWarning):
        op = torchop.custom_op(
            f"{namespace}::op", CALLS.append, mutates_args=(), schema="(Tensor x) -> ()"
        )
    op.register_fake(lambda x: None)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="a compiler would remove it"):
        _compile(op)
    op.register_effect("ordered")
    _compile(op)
    assert len(CALLS) == 1


def test_a_definition_with_another_effect_is_refused_too(namespace: str) -> None:
    op = _define(namespace)
    _compile(op)
    with pytest.raises(torchop.EffectError, match="traced the operator without an effect"):
        _define(namespace, effects="ordered")
    assert op(torch.ones(1)).item() == 1  # it is still the one that was there
    _define(namespace)


def test_stock_hands_out_a_graph_without_the_effect(cached: None, namespace: str) -> None:
    # What the refusal is for: a reset alone does not help, because the cache knows but the name.
    @torch.library.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        CALLS.append(1)
        return x.clone()

    op.register_fake(lambda x: torch.empty_like(x))

    def function(x: Tensor) -> Tensor:
        op(x)
        return x + 1

    torch.compile(function, fullgraph=True)(torch.ones(2))
    op.register_effect(torchop.EffectType.ORDERED)
    torch._dynamo.reset()
    torch.compile(function, fullgraph=True)(torch.ones(2))
    assert CALLS == []
