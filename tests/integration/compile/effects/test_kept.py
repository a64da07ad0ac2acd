"""Compilers preserve the number and order of calls with an effect."""

from __future__ import annotations

import functools
import io
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests.integration.compile.effects.calls import CALLS, compiled_with, nested_regions, trained


@compiled_with
def test_inference_makes_every_call_in_order(log: Any, logged: Any, backend: str) -> None:
    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor) -> Tensor:
        log(x, 1)
        logged(x, 2)  # the result is unused, so a compiler might remove the call
        y = x + 1
        log(y, 3)
        log(y, 3)
        return y

    assert function(torch.ones(2)).tolist() == [2.0, 2.0]
    assert CALLS == [1, 2, 3, 3]


@compiled_with
def test_training_makes_every_call_in_order(
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


@pytest.mark.parametrize("dynamic", [False, True])
def test_calls_with_inputs_of_different_sizes_keep_their_order(
    log: Any, logged: Any, dynamic: bool
) -> None:
    # A pass of Inductor moves kernels to reduce the peak memory.
    @torch.compile(fullgraph=True, dynamic=dynamic)
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first, second = logged(x * 2, 0).sum(), logged(y * 3, 1).sum()
        log(y * 5, 2)
        return first, second, logged(x + 1, 3).sum(), logged(y + 1, 4).sum()

    function(torch.ones(300), torch.ones(4))
    assert CALLS == [0, 1, 2, 3, 4]


def test_a_call_without_tensors_keeps_its_place(namespace: str, logged: Any) -> None:
    @torchop.custom_op(f"{namespace}::note", mutates_args=(), effects="ordered")
    def note(label: int) -> None:
        CALLS.append(label)

    note.register_fake(lambda label: None)

    @torch.compile(fullgraph=True)
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        total = logged(x, 0).sum()
        note(1)
        return total, logged(x, 2)

    assert function(torch.ones(7))[0] == 14
    assert CALLS == [0, 1, 2]


def test_memory_of_an_argument_that_the_operator_stores_is_not_reused(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::store", mutates_args=(), effects="ordered")
    def store(x: Tensor) -> None:
        CALLS.append(x)

    @torch.compile(fullgraph=True)
    def function(x: Tensor) -> Tensor:
        store(x * 2)
        y = x.flip(0) + 1
        store(y)
        return (y.cumsum(0) * 3).flip(0)

    function(torch.ones(100))
    assert [value.unique().tolist() for value in CALLS] == [[2.0], [2.0]]


@pytest.mark.pairwise
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
    # In eager mode, a checkpoint runs its block a second time in the backward, so the calls are
    # made twice. A compiler must not repeat calls with an effect.
    assert calls == [1, 2, 3] * 2 * blocks
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
def test_calls_with_every_signature_are_made(namespace: str, backend: str, outputs: str) -> None:
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
    CALLS.clear()  # tracing called the fake kernel, which here is the kernel itself
    assert function(torch.ones(2)).tolist() == expected
    assert CALLS == [(1, 3), (2, 4)]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_saved_and_loaded_program_makes_the_calls(
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
def test_transforms_and_other_regions_make_the_calls(log: Any, backend: str) -> None:
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


@compiled_with
@pytest.mark.filterwarnings("ignore:Please add support for subgraph args")
def test_nested_region_makes_the_calls_in_inference(log: Any, backend: str) -> None:
    function = torch.compile(nested_regions(log), backend=backend, fullgraph=True)
    assert_close(function(torch.ones(2)), torch.ones(2).sin().sin())
    assert CALLS == [1, 1]


def test_cached_graphs_make_the_calls(cached: None, log: Any) -> None:
    def function(x: Tensor) -> Tensor:
        log(x, 1)
        return x + 1

    for _ in range(2):
        torch.compile(function, fullgraph=True)(torch.ones(2))
        torch._dynamo.reset()
    assert CALLS == [1, 1]


@compiled_with
def test_unused_calls_declared_without_effect_are_dropped(namespace: str, backend: str) -> None:
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
