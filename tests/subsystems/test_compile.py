"""Operators under torch.compile: what is in the graph, what is not, and what is computed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import pytest
import torch
import torch._dynamo.config
import torch._dynamo.exc
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests.subsystems.graphs import AotRecorder, Recorder, operators
from tests.support import on_both

BACKENDS = ["eager", "aot_eager", "inductor"]


class Case(NamedTuple):
    """An operator and a call of it."""

    function: Callable[..., Any]
    fake: Callable[..., Any]
    call: Callable[[Any, Tensor], Any]


def _scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


def _like_first(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(x)


def _minmax(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.amin(0), x.amax(0)


def _minmax_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[1:]), x.new_empty(x.shape[1:])


def _weighted_sum(xs: list[Tensor], weights: Sequence[float]) -> Tensor:
    return sum(x * w for x, w in zip(xs, weights, strict=True))


def _halves(x: Tensor) -> list[Tensor]:
    return [x[: len(x) // 2].clone(), x[len(x) // 2 :].clone()]


def _halves_fake(x: Tensor) -> list[Tensor]:
    half = x.shape[0] // 2
    rest = x.shape[1:]
    return [x.new_empty(half, *rest), x.new_empty(x.shape[0] - half, *rest)]


def _masked(x: Tensor, mask: Optional[Tensor] = None, fill: Optional[float] = None) -> Tensor:
    mask = x > 0 if mask is None else mask
    return torch.where(mask, x, 0.0 if fill is None else fill)


def _clipped(x: Tensor, *, low: float = -1.0, high: float) -> Tensor:
    return x.clip(low, high)


def _converted(x: Tensor, rounding: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    rounded = {"up": torch.ceil, "down": torch.floor}[rounding](x)
    return rounded.to(dtype=dtype, device=device, copy=True)


def _converted_fake(x: Tensor, rounding: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_like(x, dtype=dtype, device=device)


def _two_and_a_list(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x.exp(), [x + 1, x + 2]


def _two_and_a_list_fake(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(x), [torch.empty_like(x), torch.empty_like(x)]


CASES = {
    "a default left out": Case(_scaled, _like_first, lambda op, x: op(x)),
    "a default given": Case(_scaled, _like_first, lambda op, x: op(x, 3.0)),
    "an argument by name": Case(_scaled, _like_first, lambda op, x: op(x=x, factor=0.5)),
    "several outputs": Case(_minmax, _minmax_fake, lambda op, x: op(x)[0] * op(x)[1]),
    "a list of tensors": Case(
        _weighted_sum,
        lambda xs, weights: torch.empty_like(xs[0]),
        lambda op, x: op([x, -x], [1, 2]),
    ),
    "a list of outputs": Case(_halves, _halves_fake, lambda op, x: op(x)[1] - op(x)[0]),
    "a tensor and a list of outputs": Case(
        _two_and_a_list, _two_and_a_list_fake, lambda op, x: op(x)[0] + op(x)[1][1]
    ),
    "optionals left out": Case(_masked, _like_first, lambda op, x: op(x)),
    "an optional tensor given": Case(_masked, _like_first, lambda op, x: op(x, x < 0)),
    "an optional number given": Case(_masked, _like_first, lambda op, x: op(x, None, 7.0)),
    "keyword-only arguments": Case(_clipped, _like_first, lambda op, x: op(x, high=0.5)),
    "a string, a dtype and a device": Case(
        _converted, _converted_fake, lambda op, x: op(x, "up", torch.float64, torch.device("cpu"))
    ),
    "a device by its name": Case(
        _converted, _converted_fake, lambda op, x: op(x, "down", torch.int32, "cpu")
    ),
}


def define(namespace: str, case: Case) -> torchop.CustomOp:
    op = torchop.custom_op(f"{namespace}::op", case.function, mutates_args=())
    op.register_fake(case.fake)
    return op


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_one_graph_holds_the_operator_and_computes_what_eager_mode_does(namespace, name, backend):
    case = CASES[name]
    op = define(namespace, case)
    recorder = Recorder(backend)

    def function(x: Tensor) -> Tensor:
        return case.call(op, x.sin()) + 1

    compiled = torch.compile(function, backend=recorder, fullgraph=True)
    x = torch.randn(4, 3)
    assert_close(compiled(x), function(x))
    assert op.overload in recorder.targets

    # The same again, with other data: nothing is compiled a second time.
    x = torch.randn(4, 3)
    assert_close(compiled(x), function(x))
    assert len(recorder.graphs) == 1


# --------------------------------------------------------------------------------------------------
# Effects and mutation


def _logging_operator(namespace: str, log: list[float]) -> torchop.CustomOp:
    @torchop.custom_op(f"{namespace}::log", mutates_args=())
    def record(x: Tensor, label: float) -> None:
        log.append(label + float(x.sum()))

    record.register_fake(lambda x, label: None)
    return record


# Such an operator is told to say at its definition what it does; here it says so afterwards.
says_later = pytest.mark.filterwarnings("ignore::torchop.MissingEffectWarning")


@says_later
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_effect_keeps_every_call_and_their_order(namespace, backend, requires_grad):
    log: list[float] = []
    record = _logging_operator(namespace, log)
    record.register_effect(torchop.EffectType.ORDERED)

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor) -> Tensor:
        record(x, 1.0)
        y = x * 2
        record(y, 10.0)
        record(y, 10.0)
        record(x, 5.0)
        return y

    x = torch.ones(2, requires_grad=requires_grad)
    assert_close(function(x).detach(), torch.full((2,), 2.0))
    assert log == [3.0, 14.0, 14.0, 7.0]
    function(torch.zeros(2, requires_grad=requires_grad))
    assert log[4:] == [1.0, 10.0, 10.0, 5.0]


@says_later
def test_without_an_effect_a_call_that_returns_nothing_is_refused_not_dropped(namespace):
    def scenario(library, namespace):
        log = []

        @library.custom_op(f"{namespace}::log", mutates_args=())
        def record(x: Tensor, label: float) -> None:
            log.append(label)

        record.register_fake(lambda x, label: None)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def function(x: Tensor) -> Tensor:
            record(x, 1.0)
            return x * 2

        function(torch.ones(2))
        return log

    ours, stock = on_both(scenario, namespace)
    assert isinstance(ours, torch._dynamo.exc.BackendCompilerFailed)
    assert f"{namespace}::log returns nothing and mutates nothing" in str(ours)
    assert f"torchop.register_effect('{namespace}::log'" in str(ours)
    assert stock == []


@says_later
def test_an_effect_can_be_taken_back(namespace):
    record = _logging_operator(namespace, [])
    record.register_effect(torchop.EffectType.ORDERED)
    record.register_effect(None)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: Tensor) -> Tensor:
        record(x, 1.0)
        return x * 2

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="would remove it"):
        function(torch.ones(2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mutated_argument_is_written_in_the_callers_memory(namespace, backend):
    @torchop.custom_op(f"{namespace}::accumulate", mutates_args={"total"})
    def accumulate(x: Tensor, total: Tensor) -> None:
        total.add_(x)

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor, total: Tensor) -> Tensor:
        accumulate(x, total)
        before = total * 10
        accumulate(x, total)
        return before + total

    total = torch.zeros(3)
    result = function(torch.ones(3), total)
    assert_close(total, torch.full((3,), 2.0))
    assert_close(result, torch.full((3,), 12.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_mutating_a_view_shows_in_its_base(namespace, backend):
    @torchop.custom_op(f"{namespace}::zero_row", mutates_args={"row"})
    def zero_row(row: Tensor) -> None:
        row.zero_()

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor) -> Tensor:
        y = x + 1
        zero_row(y[1])
        zero_row(x[0])
        return y

    x = torch.ones(2, 2)
    assert_close(function(x), torch.tensor([[2.0, 2.0], [0.0, 0.0]]))
    assert_close(x, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_mutated_lists_and_optionals_beside_a_result(namespace, backend):
    @torchop.custom_op(f"{namespace}::scale_all", mutates_args={"xs", "maybe"})
    def scale_all(xs: list[Tensor], maybe: Optional[Tensor], factor: float) -> Tensor:
        total = sum(x.sum() for x in xs)
        for x in (*xs, *([] if maybe is None else [maybe])):
            x.mul_(factor)
        return total

    scale_all.register_fake(lambda xs, maybe, factor: xs[0].new_empty(()))

    @torch.compile(backend=backend, fullgraph=True)
    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        first = scale_all([a, b], None, 2.0)
        return first + scale_all([a], c, 3.0)

    a, b, c = torch.ones(2), torch.ones(2), torch.ones(2)
    assert_close(function(a, b, c), torch.tensor(8.0))
    assert [t[0].item() for t in (a, b, c)] == [6.0, 2.0, 3.0]


def _clip_in_place(namespace: str) -> torchop.CustomOp:
    @torchop.custom_op(
        f"{namespace}::clip_",
        mutates_args={"x"},
        schema="(Tensor(a!) x, float limit) -> Tensor(a!)",
    )
    def clip_(x: Tensor, limit: float) -> Tensor:
        return x.clamp_(-limit, limit)

    return clip_


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_in_place_operator_writes_into_an_input_and_returns_it(namespace, backend):
    clip_ = _clip_in_place(namespace)

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = clip_(x, 1.0)
        return y, y + 1

    x = torch.tensor([3.0, -5.0, 0.25])
    y, z = function(x)
    assert y.tolist() == x.tolist() == [1.0, -1.0, 0.25]
    assert z.tolist() == [2.0, 0.0, 1.25]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_in_place_operator_writes_into_a_tensor_made_before(namespace, backend):
    clip_ = _clip_in_place(namespace)

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        z = clip_(y, 1.0)
        return y, z + 1

    y, z = function(torch.tensor([3.0, -5.0, 0.25]))
    assert y.tolist() == [1.0, -1.0, 0.5]
    assert z.tolist() == [2.0, 0.0, 1.5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_operator_with_out_fills_the_buffers_of_the_caller(namespace, backend):
    @torchop.custom_op(
        f"{namespace}::minmax",
        mutates_args={"low", "high"},
        schema="(Tensor x, *, Tensor(a!) low, Tensor(b!) high) -> (Tensor(a!), Tensor(b!))",
    )
    def minmax(x: Tensor, *, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return torch.amin(x, 0, out=low), torch.amax(x, 0, out=high)

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        first, second = minmax(x, low=low, high=high)
        return second - first

    low, high = torch.zeros(2), torch.zeros(2)
    assert function(torch.tensor([[1.0, 5.0], [4.0, 2.0]]), low, high).tolist() == [3.0, 3.0]
    assert (low.tolist(), high.tolist()) == ([1.0, 2.0], [4.0, 5.0])


# --------------------------------------------------------------------------------------------------
# Training


def _differentiable(namespace: str) -> torchop.CustomOp:
    @torchop.custom_op(f"{namespace}::product", mutates_args=())
    def product(xs: list[Tensor], scale: float = 2.0) -> tuple[Tensor, Tensor]:
        return xs[0] * xs[1] * scale, xs[0] + xs[1]

    @product.register_fake
    def _(xs, scale=2.0):
        return torch.empty_like(xs[0]), torch.empty_like(xs[0])

    def setup_context(ctx, inputs, output):
        xs, ctx.scale = inputs
        ctx.save_for_backward(*xs)

    @product.register_autograd(setup_context=setup_context)
    def backward(ctx, grad_product, grad_sum):
        first, second = ctx.saved_tensors
        return [
            grad_product * second * ctx.scale + grad_sum,
            grad_product * first * ctx.scale + grad_sum,
        ], None

    return product


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_gives_the_gradients_of_eager_mode(namespace, backend):
    product = _differentiable(namespace)
    recorder = Recorder(backend)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        first, second = product([a.sin(), b])
        return (first * second.cos()).sum()

    compiled = torch.compile(loss, backend=recorder, fullgraph=True)
    inputs = [torch.randn(5, requires_grad=True) for _ in range(2)]
    expected = torch.autograd.grad(loss(*inputs), inputs)
    for _ in range(2):
        assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)
    assert len(recorder.graphs) == 1


# --------------------------------------------------------------------------------------------------
# Ways to call


def _cube(namespace: str) -> torchop.CustomOp:
    @torchop.custom_op(f"{namespace}::cube", mutates_args=())
    def cube(x: Tensor, shift: float = 0.0) -> Tensor:
        return x**3 + shift

    cube.register_fake(lambda x, shift=0.0: torch.empty_like(x))
    return cube


class _Module(torch.nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x, 1.0)


class _Holder:
    def __init__(self, op: Any) -> None:
        self.op = op


def _closure(op: Any) -> Callable[[Tensor], Tensor]:
    holder = _Holder(op)
    return lambda x: holder.op(x, shift=1.0)


WAYS = {
    "the handle itself": lambda op: op,
    "a closure": _closure,
    "a partial": lambda op: functools.partial(op, shift=1.0),
    "a partial inside a function": lambda op: lambda x: functools.partial(op, shift=1.0)(x),
    "the method __call__": lambda op: lambda x: op.__call__(x, 1.0),
    "a module": _Module,
    "the overload": lambda op: lambda x: op.overload(x, 1.0),
    "the packet of torch.ops": lambda op: lambda x: op.overload.overloadpacket(x, 1.0),
    "getattr on torch.ops": lambda op: (
        lambda x: getattr(torch.ops, op.overload.namespace).cube.default(x, 1.0)
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_call_puts_the_overload_into_one_graph(namespace, way):
    cube = _cube(namespace)
    call = WAYS[way](cube)
    recorder = AotRecorder()
    compiled = torch.compile(call, backend=recorder, fullgraph=True)
    for _ in range(2):
        x = torch.randn(3)
        assert_close(compiled(x), call(x))
    (graph,) = recorder.forward
    assert operators(graph) == [cube.overload]


def test_dynamo_traces_nothing_between_a_call_and_its_overload(namespace, traced):
    def scenario(library, namespace):
        op = library.custom_op(f"{namespace}::op", _scaled, mutates_args=())
        op.register_fake(_like_first)
        traced.clear()
        torch.compile(lambda x: op(op(x)), backend="eager", fullgraph=True)(torch.ones(2))
        return list(traced)

    ours, stock = on_both(scenario, namespace)
    assert ours == []
    assert stock == ["__call__"] * 2


def test_a_graph_of_a_handle_that_is_replaced_is_compiled_again(namespace):
    cube = _cube(namespace)
    holder = _Holder(cube)
    recorder = Recorder()
    compiled = torch.compile(lambda x: holder.op(x), backend=recorder)
    compiled(torch.ones(2))
    holder.op = _cube(f"{namespace}_other")
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    assert recorder.targets == [cube.overload, holder.op.overload]
    _cube(f"{namespace}_other")
    with pytest.raises(torchop.OperatorGoneError):
        compiled(torch.ones(2))


def test_a_handle_held_in_a_list_and_chosen_by_index_is_in_the_graph(namespace):
    cube, other = _cube(namespace), _cube(f"{namespace}_other")
    recorder = Recorder()

    @torch.compile(backend=recorder, fullgraph=True)
    def function(x: Tensor, which: int) -> Tensor:
        return [cube, other][which](x)

    function(torch.ones(2), 1)
    assert recorder.targets == [other.overload]


# --------------------------------------------------------------------------------------------------
# Kernels are opaque


def test_compiling_does_not_depend_on_whether_the_operator_ran_before(namespace):
    cube = _cube(namespace)
    recorder = Recorder()
    compiled = torch.compile(lambda x: cube(x), backend=recorder, fullgraph=True)
    compiled(torch.ones(2))
    cube(torch.ones(2))
    cube(torch.ones(2, requires_grad=True))
    compiled(torch.ones(2))
    assert len(recorder.graphs) == 1


def test_a_kernel_registered_after_compilation_runs_without_compiling_again(namespace):
    cube = _cube(namespace)
    recorder = Recorder("aot_eager")
    compiled = torch.compile(lambda x: cube(x), backend=recorder, fullgraph=True)
    compiled(torch.ones(2))
    cube.register_kernel("cpu", lambda x, shift=0.0: torch.full_like(x, 5.0))
    assert_close(compiled(torch.ones(2)), torch.full((2,), 5.0))
    assert len(recorder.graphs) == 1


# What Dynamo does to make an attribute of a tensor known to be absent; it hides the warning itself,
# unless warnings are errors.
_reads_grad = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)


def _opaque(namespace: str) -> Any:
    """An operator whose kernel, fake kernel and formula call functions that nothing else calls."""

    @torchop.custom_op(f"{namespace}::opaque", mutates_args=())
    def opaque(x: Tensor) -> Tensor:
        return torch.erfinv(x)

    @opaque.register_fake
    def _(x):
        return torch.empty_like(torch.digamma(x))

    opaque.register_autograd(
        lambda ctx, grad: torch.polygamma(1, grad),
        setup_context=lambda ctx, inputs, output: torch.lgamma(output),
    )
    return opaque


def _a_graph(op: Any, x: Tensor) -> Tensor:
    return op(x * 0.5)


def _a_resumed_frame(op: Any, x: Tensor) -> Tensor:
    y = x * 0.5
    torch._dynamo.graph_break()
    return op(y)


def _a_frame_left_to_python(op: Any, x: Tensor) -> Tensor:
    y = x
    for _ in range(2):
        with torch._dynamo.error_on_graph_break(False):
            torch._dynamo.graph_break()  # in a loop and a context: Dynamo gives up on the frame
        y = op(y * 0.5)
    return y


FRAMES = [_a_graph, _a_resumed_frame, _a_frame_left_to_python]


@_reads_grad
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("through", ["handle", "overload"])
@pytest.mark.parametrize("frame", FRAMES)
def test_rules_are_never_traced_wherever_the_call_stands(namespace, frame, through, requires_grad):
    handle = _opaque(namespace)
    op = handle if through == "handle" else handle.overload
    recorder = Recorder()
    compiled = torch.compile(lambda x: frame(op, x), backend=recorder)
    x = torch.full((2,), 0.5, requires_grad=requires_grad)
    assert_close(compiled(x), frame(op, x))
    assert _functions(recorder) <= {"mul", "opaque.default"}


def test_a_kernel_that_nobody_protects_is_traced(namespace):
    """The test above can fail: this is what Dynamo does below a frame, if it may."""
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("bare(Tensor x) -> Tensor")
    library.impl("bare", lambda x: torch.erfinv(x), "CPU")
    recorder = Recorder()
    op = getattr(torch.ops, namespace).bare.default
    torch.compile(lambda x: _a_frame_left_to_python(op, x), backend=recorder)(torch.zeros(2))
    assert "erfinv" in _functions(recorder)


def test_a_kernel_of_a_library_is_not_traced_either(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("protected(Tensor x) -> Tensor")
        library.impl("protected", lambda x: torch.erfinv(x), "CPU")
        recorder = Recorder()
        op = getattr(torch.ops, namespace).protected.default
        torch.compile(lambda x: _a_frame_left_to_python(op, x), backend=recorder)(torch.zeros(2))
        assert "erfinv" not in _functions(recorder)


def _functions(recorder: Recorder) -> set[str]:
    """The names of what the graphs call."""
    called = [node for g in recorder.graphs for node in g.graph.nodes if node.op.startswith("call")]
    return {getattr(node.target, "__name__", node.target) for node in called}


def test_a_compiled_function_called_inside_a_kernel_is_compiled(namespace):
    inner, outer = Recorder(), Recorder()
    compiled_inside = torch.compile(lambda x: x.cos() + 1, backend=inner)

    @torchop.custom_op(f"{namespace}::compiles", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return compiled_inside(x)

    op.register_fake(lambda x: torch.empty_like(x))
    function = torch.compile(lambda x: op(x) * 2, backend=outer, fullgraph=True)
    x = torch.randn(3)
    assert_close(op(x), x.cos() + 1)
    assert_close(function(x), 2 * (x.cos() + 1))
    assert len(inner.graphs) == len(outer.graphs) == 1
    assert _functions(inner) == {"cos", "add"}


# --------------------------------------------------------------------------------------------------
# Dynamic shapes


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_every_size_of_a_dynamic_dimension(namespace, backend):
    case = CASES["a list of outputs"]
    op = define(namespace, case)
    recorder = Recorder(backend)

    def function(x: Tensor) -> Tensor:
        first, second = op(x)
        return first.sum(0) + second.sum(0)

    compiled = torch.compile(function, backend=recorder, fullgraph=True, dynamic=True)
    for size in (6, 9, 20):
        x = torch.randn(size, 3)
        assert_close(compiled(x), function(x))
    assert len(recorder.graphs) == 1


def test_an_int_argument_that_varies_becomes_symbolic(namespace):
    @torchop.custom_op(f"{namespace}::repeat", mutates_args=())
    def repeat(x: Tensor, times: int) -> Tensor:
        return x.repeat(times)

    repeat.register_fake(lambda x, times: x.new_empty(x.shape[0] * times))
    recorder = Recorder("aot_eager")
    compiled = torch.compile(lambda x, n: repeat(x, n) + 1, backend=recorder, fullgraph=True)
    for times in (2, 3, 4, 5, 6):
        assert_close(compiled(torch.ones(2), times), torch.full((2 * times,), 2.0))
    # Once for the number it saw, and once for any number.
    assert len(recorder.graphs) == 2


def test_a_size_of_the_input_can_be_an_argument(namespace):
    @torchop.custom_op(f"{namespace}::first", mutates_args=())
    def first(x: Tensor, count: int) -> Tensor:
        return x[:count].clone()

    first.register_fake(lambda x, count: x.new_empty(count))
    recorder = Recorder("aot_eager")
    compiled = torch.compile(
        lambda x: first(x, x.shape[0] // 2), backend=recorder, fullgraph=True, dynamic=True
    )
    assert [compiled(torch.ones(n)).shape[0] for n in (4, 10, 13)] == [2, 5, 6]
    assert len(recorder.graphs) == 1


def _nonzero(namespace: str, **bounds: int) -> torchop.CustomOp:
    @torchop.custom_op(f"{namespace}::nonzero", mutates_args=())
    def nonzero(x: Tensor) -> Tensor:
        return torch.nonzero(x).squeeze(1)

    @nonzero.register_fake
    def _(x):
        return x.new_empty(torchop.get_ctx().new_dynamic_size(**bounds), dtype=torch.int64)

    return nonzero


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_size_of_an_output_may_depend_on_data(namespace, backend):
    nonzero = _nonzero(namespace)
    recorder = Recorder(backend)
    compiled = torch.compile(lambda x: nonzero(x) * 2, backend=recorder, fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for ones in ([], [3], [0, 2, 4]):
            x = torch.zeros(5)
            x[ones] = 1
            assert compiled(x).tolist() == [2 * index for index in ones]
    assert len(recorder.graphs) == 1


def test_the_bounds_of_a_size_are_known_to_the_compiler(namespace):
    nonzero = _nonzero(namespace, min=2, max=4)
    recorder = Recorder()

    @torch.compile(backend=recorder, fullgraph=True)
    def function(x: Tensor) -> Tensor:
        found = nonzero(x)
        # Without the bounds, these comparisons could not be decided in one graph.
        return found + (1 if found.shape[0] < 5 else 2) + (10 if found.shape[0] >= 2 else 20)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert function(torch.tensor([0.0, 1.0, 1.0])).tolist() == [12, 13]


def test_a_size_that_depends_on_data_breaks_the_graph_where_that_is_not_captured(namespace):
    nonzero = _nonzero(namespace)
    recorder = Recorder()
    compiled = torch.compile(lambda x: nonzero(x + 1) * 2, backend=recorder)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False):
        assert compiled(torch.tensor([-1.0, 0.0])).tolist() == [2]
    assert nonzero.overload not in recorder.targets
    assert len(recorder.graphs) == 2


# --------------------------------------------------------------------------------------------------
# Errors


# What Dynamo raises when an operator does. Since 2.14 it quotes that once more under vmap.
FAILED = (torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.Unsupported)
quotes_once = pytest.mark.needs_torch("2.11", "Dynamo quotes errors once", before="2.14")


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_fake_kernel_the_error_names_the_operator_and_shows_one(namespace, backend):
    @torchop.custom_op(f"{namespace}::bare", mutates_args=())
    def bare(x: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        return x * scale, x + scale

    with pytest.raises(FAILED) as caught:
        torch.compile(lambda x: bare(x, scale=2.0), backend=backend, fullgraph=True)(torch.ones(2))
    message = str(caught.value)
    assert f"There was no fake impl registered for {namespace}::bare" in message
    assert f"@torchop.register_fake('{namespace}::bare')" in message
    assert "def _(x, *, scale):" in message
    assert "return torch.empty_like(x), torch.empty_like(x)" in message


READERS = {
    "item": lambda x: x.new_empty(int(x.sum().item())),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "a condition": lambda x: torch.empty_like(x) if (x > 0).all() else x.new_empty(0),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_fake_kernel_that_reads_data_is_named_and_told_what_it_may_use(namespace, reader):
    @torchop.custom_op(f"{namespace}::reads", mutates_args=())
    def reads(x: Tensor) -> Tensor:
        return x.clone()

    reads.register_fake(READERS[reader])
    with pytest.raises(RuntimeError) as caught:
        torch.compile(lambda x: reads(x), backend="eager", fullgraph=True)(torch.ones(2))
    message = str(caught.value)
    assert f"{namespace}::reads: the fake kernel read the data of a tensor" in message
    assert "torchop.get_ctx().new_dynamic_size()" in message


def _with_numpy_backward(library: Any, namespace: str) -> Any:
    @library.custom_op(f"{namespace}::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return x**3

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.from_numpy(3 * x.detach().numpy() ** 2)

    cube.register_fake(lambda x: torch.empty_like(x))
    cube.register_autograd(backward, setup_context=setup_context)
    return cube


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_formula_that_cannot_be_traced_is_named_with_the_remedy(namespace, backend):
    cube = _with_numpy_backward(torchop, namespace)
    x = torch.tensor([2.0], requires_grad=True)
    with pytest.raises(RuntimeError) as caught:
        torch.compile(lambda x: cube(x).sum(), backend=backend, fullgraph=True)(x)
    message = str(caught.value)
    assert f"{namespace}::cube: the backward formula cannot be traced" in message
    assert "Put the part that needs data into an operator" in message


def test_a_formula_that_cannot_be_traced_works_in_eager_mode(namespace):
    cube = _with_numpy_backward(torchop, namespace)
    x = torch.tensor([2.0], requires_grad=True)
    cube(x).sum().backward()
    assert_close(x.grad, torch.tensor([12.0]))


def test_the_remedy_for_a_formula_that_cannot_be_traced_works(namespace):
    cube = _with_numpy_backward(torchop, namespace)

    @torchop.custom_op(f"{namespace}::cube_backward", mutates_args=())
    def cube_backward(x: Tensor, grad: Tensor) -> Tensor:
        return grad * torch.from_numpy(3 * x.numpy() ** 2)

    cube_backward.register_fake(lambda x, grad: torch.empty_like(grad))
    cube.register_autograd(
        lambda ctx, grad: cube_backward(ctx.saved_tensors[0], grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    x = torch.tensor([2.0], requires_grad=True)
    torch.compile(lambda x: cube(x).sum(), backend="aot_eager", fullgraph=True)(x).backward()
    assert_close(x.grad, torch.tensor([12.0]))


def test_a_fake_kernel_that_returns_its_input_works_where_stock_computes_nonsense(namespace):
    def scenario(library, namespace):
        @library.custom_op(f"{namespace}::double", mutates_args=())
        def double(x: Tensor) -> Tensor:
            return x * 2

        double.register_fake(lambda x: x)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def function(x: Tensor) -> Tensor:
            y = x + 1
            return double(y) + y

        return function(torch.zeros(2)).tolist()

    ours, stock = on_both(scenario, namespace)
    assert ours == [3.0, 3.0]
    assert stock == [4.0, 4.0]


def _same_tensor_twice(x: Tensor) -> list[Tensor]:
    return [torch.empty_like(x)] * 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("fake", [_same_tensor_twice, lambda x: [x, x]], ids=["same", "input"])
def test_outputs_that_a_fake_kernel_describes_by_one_tensor_stay_apart(namespace, fake, backend):
    def scenario(library, namespace):
        @library.custom_op(f"{namespace}::two", mutates_args=())
        def two(x: Tensor) -> list[Tensor]:
            return [x * 2, x * 3]

        two.register_fake(fake)

        @torch.compile(backend=backend, fullgraph=True)
        def function(x: Tensor) -> Tensor:
            first, second = two(x + 1)
            return first * 10 + second

        return function(torch.zeros(1)).item()

    ours, stock = on_both(scenario, namespace)
    assert ours == 23
    assert stock == 33


def test_a_store_whose_fake_kernel_returns_the_caches_compiles_and_exports(namespace):
    """As serving packages write it; a kernel must not return what it mutates, here as there."""

    def scenario(library, namespace):
        @library.custom_op(f"{namespace}::store", mutates_args=("keys", "values"))
        def store(keys: Tensor, values: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
            keys[0], values[0] = new, 2 * new
            return keys.clone(), values.clone()

        store.register_fake(lambda keys, values, new: (keys, values))

        class Program(torch.nn.Module):
            def forward(self, keys: Tensor, values: Tensor, new: Tensor) -> Tensor:
                stored, others = store(keys, values, new)
                return stored + others + keys + values

        def run(program):
            inputs = torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(1)
            return [tensor.tolist() for tensor in (program(*inputs), *inputs[:2])]

        inputs = torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(1)
        exported = torch.export.export(Program(), inputs)
        return (
            run(Program()),
            run(torch.compile(Program(), backend="aot_eager", fullgraph=True)),
            run(exported.module()),
            run(exported.run_decompositions({}).module()),
        )

    ours, stock = on_both(scenario, namespace)
    assert ours == stock
    assert ours == (ours[0],) * 4


def test_an_exception_of_a_fake_kernel_says_whose_it_is(namespace):
    inner = torchop.custom_op(f"{namespace}::inner", torch.clone, mutates_args=(), schema=_UNARY)
    outer = torchop.custom_op(f"{namespace}::outer", torch.clone, mutates_args=(), schema=_UNARY)

    @inner.register_fake
    def fake(x):
        raise ValueError("three words here")

    outer.register_fake(lambda x: inner(x))

    with pytest.raises(FAILED) as raised:
        torch.compile(lambda x: outer(x), backend="eager", fullgraph=True)(torch.ones(2))
    text = str(raised.value)
    place = f"{__file__}:{fake.__code__.co_firstlineno}"
    assert f"three words here (in the fake kernel of {namespace}::inner, {place})" in text
    assert f"(in the fake kernel of {namespace}::outer, {__file__}" in text


_UNARY = "(Tensor x) -> Tensor"


class OwnError(ValueError):
    pass


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (ValueError("one 'word'\ntwo"), ["one 'word'", "two ({})"]),
        (OwnError("one 'word'\ntwo"), ["one 'word'", "two ({})"]),
        (KeyError("a 'b'"), ["a 'b' ({})"]),
        (OwnError(), ["({})"]),
    ],
)
@pytest.mark.parametrize(
    "place",
    ["the fake kernel", "setup_context", pytest.param("the vmap rule", marks=quotes_once)],
)
def test_an_exception_of_a_users_function_stands_on_lines_of_its_own(
    namespace, place, error, lines
):
    op = torchop.custom_op(f"{namespace}::op", torch.clone, mutates_args=(), schema=_UNARY)

    def fails(*args, **kwargs):
        raise copy.copy(error)  # or the next call would see what this one told it

    op.register_fake(fails if place == "the fake kernel" else torch.empty_like)
    op.register_autograd(
        lambda ctx, grad: grad, setup_context=fails if place == "setup_context" else None
    )
    op.register_vmap(fails)
    call = torch.vmap(op) if place == "the vmap rule" else op
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError) as raised:
        torch.compile(lambda x: call(x), backend="eager", fullgraph=True)(
            torch.ones(2, 2, requires_grad=place == "setup_context")
        )
    told = [line.strip() for line in str(raised.value).splitlines()]
    (start,) = [n for n, line in enumerate(told) if line.endswith(f"got {type(error).__name__}(")]
    expected = [line.format(f"in {place} of {namespace}::op") for line in lines]
    shown = told[start + 1 : start + 1 + len(lines)]
    assert [line.partition(f", {__file__}")[0].rstrip(")") for line in shown] == [
        line.rstrip(")") for line in expected
    ]
    assert "\\n" not in str(raised.value)


def test_an_error_of_ours_stands_on_lines_of_its_own(namespace):
    op = torchop.custom_op(f"{namespace}::op", torch.clone, mutates_args=(), schema=_UNARY)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError) as raised:
        torch.compile(lambda x: op(x), backend="eager", fullgraph=True)(torch.ones(2))
    lines = str(raised.value).splitlines()
    start = f"    torchop.MissingFakeError: There was no fake impl registered for {namespace}::op."
    (first,) = [index for index, line in enumerate(lines) if line.startswith(start)]
    assert lines[first + 2].strip() == f"@torchop.register_fake('{namespace}::op')"
    assert "\\n" not in str(raised.value)
