"""torchop.record lists the calls of a program with their arguments. Uses private names."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import in_threads
from tests._support.devices import BACKEND, DEVICE, TYPE
from torchop._inspect.record import MAX_KINDS
from torchop.testing import CallRecord, TensorRecord

T = torch.ones(2, 3)


@pytest.fixture
def op(namespace):
    @torch.library.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, sizes: list[int], k: float = 1.0, *, name: str = "a") -> Tensor:
        return x * k

    op.register_autograd(lambda ctx, g: (g, None, None))
    return op


def test_calls_are_counted_by_their_kind(op, namespace):
    with torchop.record(f"{namespace}::*") as recorded:
        op(T, [1], 2.0)
        op(T + 1, [1], 2.0)
        op(T, [1], 3.0)
        op(T.double().requires_grad_(), [1, 2], name="b")
        T.sin()
    op(T, [1], 2.0)
    tensor = TensorRecord(torch.float32, (2, 3), str(DEVICE), False)
    learnt = TensorRecord(torch.float64, (2, 3), str(DEVICE), True)
    assert dict(recorded) == {
        f"{namespace}::op": [
            (CallRecord((tensor, [1], 2.0), {}), 2),
            (CallRecord((tensor, [1], 3.0), {}), 1),
            (CallRecord((learnt, [1, 2]), {"name": "b"}), 1),
        ]
    }
    assert len(recorded) == 1


def test_an_example_has_the_recorded_kind(op, namespace):
    with torchop.record(f"{namespace}::op") as recorded:
        op(T, [1], 2.0, name="b")
    call, _ = recorded[f"{namespace}::op"][0]
    args, kwargs = call.example()
    assert torch.equal(op(*args, **kwargs), T * 2)
    assert kwargs == {"name": "b"}


def test_contents_of_tensors_are_not_recorded(op, namespace):
    secret = torch.full((2, 3), 42.125)
    with torchop.record(f"{namespace}::op") as recorded:
        op(secret, [1])
    assert "42.125" not in repr(recorded[f"{namespace}::op"])


def test_recording_does_not_change_results(op, namespace):
    with torchop.record("*"):
        assert torch.equal(op(T, [1], 3.0), T * 3)


def test_invalid_pattern_is_rejected():
    with pytest.raises(ValueError, match=r"record\(\) got no pattern"):
        torchop.record()
    with pytest.raises(ValueError, match=r"record\('mylib'\): no operator name can match"):
        torchop.record("mylib")
    with pytest.raises(TypeError, match=r"record expects patterns .*, or packages, got int: 1"):
        torchop.record(types, 1)


# --------------------------------------------------------------------------------------------------
# Recorded calls


@pytest.fixture
def inner(namespace):
    @torch.library.custom_op(f"{namespace}::inner", mutates_args=())
    def inner(x: Tensor) -> Tensor:
        return x + 1

    inner.register_fake(torch.empty_like)
    inner.register_autograd(lambda ctx, g: g)
    return inner


def counts(recorded):
    return {op.partition("::")[2]: recorded.calls(op) for op in recorded}


def test_pattern_matches_as_in_accelerate(namespace):
    library = torch.library.Library(namespace, "DEF")
    for overload in ("op", "op.scaled"):
        library.define(f"{overload}(Tensor x) -> Tensor")
        library.impl(overload, lambda x: x * 2, BACKEND)
    packet = getattr(torch.ops, namespace).op
    with torchop.record(f"{namespace}::op") as by_name, torchop.record("*") as everything:
        packet(T)
        packet.scaled(T)
    assert counts(by_name) == counts(everything) == {"op": 1, "op.scaled": 1}
    library._destroy()


@pytest.mark.parametrize("how", ["handle", "define"])
def test_calls_inside_kernels_are_recorded(namespace, inner, how):
    if how == "handle":
        outer = torch.library.custom_op(
            f"{namespace}::outer", inner, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        outer.register_autograd(lambda ctx, g: g)
    else:
        torch.library.define(f"{namespace}::outer", "(Tensor x) -> Tensor")
        torch.library.impl(f"{namespace}::outer", TYPE, lambda x: inner(x) * 1)
        outer = getattr(torch.ops, namespace).outer
    x = T.clone().requires_grad_()
    with torchop.record(f"{namespace}::*") as recorded:
        result = outer(x)
    assert torch.equal(result, x + 1)
    assert counts(recorded) == {"outer": 1, "inner": 1}
    assert result.requires_grad


# Each of these functions defines an operator with the given kernel, in a different way.
def _low(namespace, kernel):
    torch.library.define(f"{namespace}::op", "(Tensor x) -> Tensor")
    torch.library.impl(f"{namespace}::op", TYPE, kernel)
    return getattr(torch.ops, namespace).op


def _custom(library, namespace, kernel, schema="(Tensor x) -> Tensor", mutates_args=()):
    name = f"{namespace}::op"
    return library.custom_op(name, kernel, mutates_args=mutates_args, schema=schema)


def _formula(library, namespace, kernel):
    op = _custom(library, namespace, kernel)
    op.register_autograd(lambda ctx, g: g)
    return op


def _autocast(library, namespace, kernel):
    op = _formula(library, namespace, kernel)
    op.register_autocast(TYPE, torch.bfloat16)
    return op


def _mutable(library, namespace, kernel):
    def write(x):
        kernel(x)

    op = _custom(library, namespace, write, "(Tensor(a!) x) -> ()", ("x",))
    return lambda x: op(x.detach().clone())


MAKERS = {"low": _low} | {
    f"{maker.__name__[1:]} {library.__name__}": functools.partial(maker, library)
    for maker in (_custom, _formula, _autocast, _mutable)
    for library in (torch.library, torchop)
}
CONTEXTS = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": functools.partial(torch.autocast, TYPE, torch.bfloat16),
}


def _state_recorder(seen):
    def kernel(x):
        product = x @ x
        state = torch._C._dispatch_tls_local_exclude_set(), torch.is_grad_enabled()
        seen.append((*map(str, state), x.dtype, product.dtype, product.requires_grad))
        return product.float()

    return kernel


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_kernel_runs_as_without_a_recording(namespace, maker, context):
    seen = []
    op = MAKERS[maker](namespace, _state_recorder(seen))
    x = torch.ones(2, 2, requires_grad=True)

    def call():
        seen.clear()
        with CONTEXTS[context]():
            result = op(x)
            assert result is None or result.tolist() == [[2, 2], [2, 2]]
        return list(seen), result is not None and result.requires_grad

    expected = call()
    with torchop.record(f"{namespace}::op") as recorded, torchop.record("aten::m*m*") as products:
        found = call()
    assert found == expected
    assert recorded.calls(f"{namespace}::op") == 1
    assert counts(products) in ({"mm": 1}, {"matmul": 1})  # matmul calls mm


@pytest.mark.parametrize("library", [torch.library, torchop])
@pytest.mark.parametrize("device_type", torch._C._autocast_supported_devices())
def test_a_kernel_below_an_autocast_rule_runs_without_autocast(namespace, library, device_type):
    key = torch._C._parse_dispatch_key("Autocast" + torch._C._dispatch_key_for_device(device_type))
    seen, x = [], torch.ones(2, 2)
    op = _custom(library, namespace, _state_recorder(seen))
    try:
        op.register_autocast(device_type, torch.bfloat16)
    except (ValueError, AttributeError):
        assert library is torch.library
        pytest.skip("torch.library refuses a rule for this device type")
    # Set the dispatch keys that autocast would set for tensors of this device type.
    included = torch._C._dispatch_tls_local_include_set().add(key)
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        op(x)
        with torchop.record(f"{namespace}::op") as recorded:
            op(x)
    expected, found = seen
    assert found == expected
    assert torch._C._dispatch_key_name(key) in expected[0]
    assert recorded.calls(f"{namespace}::op") == 1


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_gradients_flow_through_kernels_that_compute_them(namespace):
    op = _low(namespace, lambda x: x * x)

    def gradient():
        x = torch.full((2,), 3.0, requires_grad=True)
        op(x).sum().backward()
        return x.grad

    expected = gradient()
    with torchop.record("*"):
        assert torch.equal(gradient(), expected)
    assert expected.tolist() == [6, 6]


def test_transforms_are_recorded(namespace):
    op = _formula(torchop, namespace, lambda x: x * 2)
    op.register_vmap(lambda info, dims, x: (op(x), dims[0]))
    x = torch.arange(3.0)
    with torchop.record(f"{namespace}::*") as recorded:
        assert torch.equal(torch.vmap(op)(x), x * 2)
        torch.func.grad(lambda x: op(x).sum())(x)
    assert counts(recorded) == {"op": 2}


def test_calls_before_an_exception_are_recorded(op, namespace):
    recorded = torchop.record(f"{namespace}::*")

    def program():
        with recorded:
            op(T, [1])
            raise KeyError

    with pytest.raises(KeyError):
        program()
    op(T, [1])
    assert counts(recorded) == {"op": 1}


def test_a_thread_records_if_it_enters_the_block(op, namespace):
    recorded = torchop.record(f"{namespace}::*")

    def work(thread):
        if thread == 0:
            op(T, [1])
            return
        with recorded:
            for _ in range(100):
                op(T, [2])

    with recorded:
        in_threads(work, count=4)
    assert [(call.args[1], count) for call, count in recorded[f"{namespace}::op"]] == [([2], 300)]


def test_block_must_end_in_its_own_thread():
    recorded = torchop.record("*")
    with pytest.raises(RuntimeError, match="exited in another thread than the one that entered it"):
        recorded.__exit__(None, None, None)
    with recorded:
        pass


def test_backward_is_recorded(namespace, inner):
    outer = torch.library.custom_op(
        f"{namespace}::outer", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    outer.register_autograd(lambda ctx, g: inner(g))
    x = T.clone().requires_grad_()
    with torchop.record(f"{namespace}::*") as recorded:
        outer(x).sum().backward()
    assert counts(recorded) == {"outer": 1, "inner": 1}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_stay_compiled_and_are_recorded(namespace, inner, backend):
    compiled = torch.compile(lambda x: inner(x) * 2, backend=backend, fullgraph=True, dynamic=True)
    torch._dynamo.utils.counters.clear()
    with torchop.record(f"{namespace}::*") as recorded:
        for size in (2, 3, 4):
            assert compiled(torch.ones(size)).tolist() == [4] * size
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert [call.args[0].shape for call, _ in recorded[f"{namespace}::inner"]] == [(2,), (3,), (4,)]
    # After recording, the code is not compiled again, so the recording added no guard.
    compiled(torch.ones(5))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_calls_of_tracers_are_not_recorded(namespace, inner):
    class Module(torch.nn.Module):
        def forward(self, x):
            return inner(x)

    sizes = {"x": {0: torch.export.Dim("n")}}
    with torchop.record(f"{namespace}::*") as recorded:
        program = torch.export.export(Module(), (T,), dynamic_shapes=sizes)
    assert dict(recorded) == {}
    assert program.module()(torch.ones(5, 3)).shape == (5, 3)


def test_higher_order_operators_run_as_before():
    x = torch.ones(2)

    def call():
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    with torchop.record("*"):
        assert torch.equal(call(), x.sin())


def test_kinds_are_limited_and_all_calls_counted(op, namespace):
    with torchop.record(f"{namespace}::*") as recorded:
        for k in range(MAX_KINDS + 5):
            op(T, [1], float(k))
        op(T, [1], 2.0)
    name = f"{namespace}::op"
    assert len(recorded[name]) == MAX_KINDS
    assert sum(count for _, count in recorded[name]) == MAX_KINDS + 1
    assert recorded.calls(name) == MAX_KINDS + 6
    assert repr(recorded) == f"<Recorded: calls={MAX_KINDS + 6}, operators=1>"


def test_recordings_add_up(op, namespace):
    first, second = (torchop.record(f"{namespace}::*") for _ in range(2))
    with first, second:
        op(T, [1])
    with second:
        op(T, [2])
    first.update(second)
    assert [(call.args[1], count) for call, count in first[f"{namespace}::op"]] == [
        ([1], 2),
        ([2], 1),
    ]


def test_recorded_operators_can_be_accelerated(op, namespace):
    with torchop.record(f"{namespace}::*") as recorded:
        op(T, [1])
    with torchop.accelerate(*recorded) as acceleration:
        assert [row.op for row in acceleration.operators] == [f"{namespace}::op"]


# --------------------------------------------------------------------------------------------------
# Patterns that match no operator


def test_a_pattern_without_a_match_is_reported_at_the_end(op, namespace):
    recorded = torchop.record(f"{namespace}x::*")
    with (
        pytest.warns(
            torchop.NothingToAccelerateWarning,
            match=rf"record\('{namespace}x::\*'\): no registered operator matches; the "
            rf"nearest namespaces are .*\b{namespace}\b",
        ) as caught,
        recorded,
    ):
        pass
    assert caught[0].filename == __file__
