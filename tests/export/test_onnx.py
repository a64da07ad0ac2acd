"""Programs as ONNX: run by onnxruntime, with the results of eager mode."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.library
from torch import Tensor
from torch.export import Dim
from torch.onnx._internal.exporter._registration import ONNXRegistry

import torchop
import torchop.export
from tests.define.families import sine
from torchop._compat import functional_traces, registries
from torchop._compat.classes import FunctionalTensorMode

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
opset20 = pytest.importorskip("onnxscript", reason="onnxscript is not installed").opset20

pytestmark = [
    # PyTorch's exporter, of itself.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def translations_read_once() -> Iterator[None]:
    """Keeps each export from reading PyTorch's own translations, which takes most of its time.

    They are hundreds of functions, whose signatures are taken from their sources.
    """
    read = functools.cache(ONNXRegistry.from_torchlib)

    @staticmethod
    def copied(**options: int) -> ONNXRegistry:
        registry = copy.copy(read(**options))
        # Each export adds translations of its own.
        registry.functions = {target: [*found] for target, found in registry.functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", copied)
        yield


@dataclasses.dataclass(frozen=True)
class Options:
    scale: float = 2.0
    shift: Tensor | None = None


class Pair(NamedTuple):
    low: Tensor
    high: Tensor


class Model(torch.nn.Module):
    """A module with a function of the test's for its forward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def exported(function: Callable[..., Any], x: Tensor, **options: Any) -> Any:
    return torchop.export.onnx(Model(function), (x,), **options)


def run(program: Any, x: Tensor) -> list[Any]:
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    (parameter,) = session.get_inputs()
    return session.run(None, {parameter.name: x.numpy()})


def assert_same(program: Any, function: Callable[..., Any], x: Tensor) -> None:
    expected = function(x.clone())
    expected = expected if isinstance(expected, tuple) else (expected,)
    results = run(program, x)
    assert len(results) == len(expected)
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, value.numpy(), rtol=1e-6, atol=1e-6)
        assert result.shape == value.shape


def nodes(program: Any) -> list[tuple[str, str]]:
    return [(node.domain, node.op_type) for node in program.model.graph]


def scalar(value: float) -> Any:
    return opset20.Constant(value_float=value)


BATCH = {"x": {0: Dim("batch", min=3)}}


def squash(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::squash", mutates_args=())
    def squash(x: Tensor, slope: float = 2.0) -> Tensor:
        return torch.tanh(x * slope)

    squash.register_fake(like="x")
    return squash


def add_into(namespace: str) -> Any:
    """Writes into its second argument, and returns a fresh tensor besides."""

    @torchop.custom_op(f"{namespace}::add_into", mutates_args=("out",))
    def add_into(x: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        out.add_(x * factor)
        return out.sum(-1)

    add_into.register_fake(lambda x, out, factor: out.new_empty(out.shape[:-1]))

    @add_into.register_onnx
    def _(x: Any, out: Any, factor: float) -> Any:
        value = opset20.Add(out, opset20.Mul(x, scalar(factor)))
        return opset20.ReduceSum(value, opset20.Constant(value_ints=[-1]), keepdims=0), value

    return add_into


# --------------------------------------------------------------------------------------------------
# With translations


def test_sizes_vary_and_the_file_is_written(namespace: str, tmp_path: Path) -> None:
    op = squash(namespace)
    op.register_onnx(lambda x, slope: opset20.Tanh(opset20.Mul(x, scalar(slope))))

    def function(x: Tensor) -> Tensor:
        return op(x) + op(x, 3.0)

    path = tmp_path / "model.onnx"
    program = exported(function, torch.randn(4, 3), f=path, dynamic_shapes=BATCH)
    assert_same(program, function, torch.randn(7, 3))
    session = onnxruntime.InferenceSession(path)
    assert session.run(None, {"x": np.zeros((5, 3), np.float32)})[0].shape == (5, 3)


def test_structured_arguments_and_results(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::bounds", mutates_args=())
    def bounds(x: Tensor, options: Options) -> Pair:
        y = x * options.scale
        if options.shift is not None:
            y = y + options.shift
        return Pair(y - 1, y + 1)

    bounds.register_fake(lambda x, options: Pair(torch.empty_like(x), torch.empty_like(x)))

    @bounds.register_onnx
    def _(x: Any, options: Options) -> Pair:
        y = opset20.Mul(x, scalar(options.scale))
        if options.shift is not None:
            y = opset20.Add(y, options.shift)
        return Pair(opset20.Sub(y, scalar(1.0)), opset20.Add(y, scalar(1.0)))

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        first = bounds(x, Options(3.0))
        second = bounds(first.low, Options(shift=first.high))
        return first.high, second.low

    assert_same(exported(function, torch.randn(2, 3)), function, torch.randn(2, 3))


def test_an_operator_that_writes_through_views_of_sizes_that_vary(namespace: str) -> None:
    op = add_into(namespace)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        total = op(x[1:], y[1:], 3.0)
        op(x, y)
        return y, total

    program = torch.export.export(Model(function), (torch.randn(4, 3),), dynamic_shapes=BATCH)
    before = str(program.graph)
    assert_same(torchop.export.onnx(program), function, torch.randn(6, 3))
    assert str(program.graph) == before  # the caller's program stays as it is


def test_every_way_of_writing(namespace: str) -> None:
    @torchop.custom_op(
        f"{namespace}::double_", mutates_args=("x",), schema="(Tensor(a!) x) -> Tensor(a!)"
    )
    def double_(x: Tensor) -> Tensor:
        return x.mul_(2)

    double_.register_onnx(lambda x: opset20.Mul(x, scalar(2.0)))

    @torchop.custom_op(f"{namespace}::shift", mutates_args=("tensors", "other"))
    def shift(tensors: list[Tensor], other: Tensor | None = None) -> list[Tensor]:
        for tensor in (*tensors, *([] if other is None else [other])):
            tensor.add_(1)
        return [tensor * 3 for tensor in tensors]

    shift.register_fake(lambda tensors, other=None: [torch.empty_like(t) for t in tensors])

    @shift.register_onnx
    def _(tensors: list[Any], other: Any) -> Any:
        values = [opset20.Add(t, scalar(1.0)) for t in tensors]
        results = [opset20.Mul(value, scalar(3.0)) for value in values]
        return *results, *values, *([] if other is None else [opset20.Add(other, scalar(1.0))])

    @torchop.custom_op(f"{namespace}::shift_all", mutates_args=("first", "second"))
    def shift_all(first: Tensor | None, second: Tensor | None = None) -> None:
        for tensor in (first, second):
            if tensor is not None:
                tensor.add_(1)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        a, b, c = x + 1, x + 2, x + 3
        shift_all(None)
        d = double_(a)
        results = shift([a, b], c)
        more = shift([b])
        return a, b, c, d, *results, *more

    assert_same(exported(function, torch.randn(2)), function, torch.randn(2))


def test_a_form_of_a_family_needs_the_translation_of_the_functional_one(namespace: str) -> None:
    family = sine(namespace)

    def function(x: Tensor) -> Tensor:
        y = x * 2
        assert family.inplace is not None
        family.inplace(y[1:])
        return y

    with pytest.raises(torchop.MissingRuleError, match=f"^{namespace}::sin has no ONNX"):
        exported(function, torch.randn(3))
    family.functional.register_onnx(lambda x: opset20.Sin(x))
    assert_same(exported(function, torch.randn(3)), function, torch.randn(3))


def test_other_traces_are_those_of_the_operator_itself(namespace: str) -> None:
    op = add_into(namespace)
    name = f"{namespace}::add_into"
    before = registries.torch_dispatch_rule(name, FunctionalTensorMode)

    def function(x: Tensor) -> Tensor:
        y = x + 1
        return op(x, y) + y.sum(-1)

    program = torch.export.export(Model(function), (torch.ones(2, 2),))

    torchop.export.onnx(program)
    assert registries.torch_dispatch_rule(name, FunctionalTensorMode) is before

    def rule(*call: Any) -> Any:
        raise ValueError("this thread exports")

    with (
        functional_traces.traced_by(op._opoverload, rule),
        concurrent.futures.ThreadPoolExecutor(1) as executor,
    ):
        other = executor.submit(program.run_decompositions, {}).result()
        with pytest.raises(ValueError, match="this thread exports"):
            program.run_decompositions({})
    assert "auto_functionalized" in str(other.graph)


def test_a_rule_that_somebody_registers_during_an_export_stays(namespace: str) -> None:
    with torchop.Library(namespace, "DEF") as library:
        library.define("write(Tensor(a!) x) -> ()")
        op = getattr(torch.ops, namespace).write.default

        def rule(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> None:
            return None

        with functional_traces.traced_by(op, rule):
            torchop.register_torch_dispatch(op, FunctionalTensorMode, rule)
        found = registries.torch_dispatch_rule(op.name(), FunctionalTensorMode)
        assert found is not None
        assert not isinstance(found, registries.Offer)


def test_operators_of_others_have_translations_by_name(namespace: str) -> None:
    @torch.library.custom_op(f"{namespace}::negate_", mutates_args=("x",))
    def negate_(x: Tensor) -> None:
        x.neg_()

    def function(x: Tensor) -> Tensor:
        y = x + 1
        negate_(y)
        return y

    torchop.get_rule("onnx").register(f"{namespace}::negate_", lambda x: opset20.Neg(x))
    assert_same(exported(function, torch.randn(3)), function, torch.randn(3))
    # The caller's own table goes first.
    packet = getattr(torch.ops, namespace).negate_.default
    table = {packet: lambda x: opset20.Identity(x)}
    program = exported(function, torch.randn(3), custom_translation_table=table)
    assert ("", "Neg") not in nodes(program)


# --------------------------------------------------------------------------------------------------
# Without


def test_an_operator_without_a_translation_is_named_or_a_node(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::mix.three", mutates_args=("state",))
    def mix(
        tensors: list[Tensor],
        state: Tensor,
        bias: Tensor | None = None,
        count: int = 2,
        weights: list[float] = (0.5, 1.0),  # type: ignore[assignment]
        mode: str = "a",
        exact: bool = True,
    ) -> Tensor:
        return tensors[0] + state.add_(count)

    mix.register_fake(lambda tensors, state, *others: torch.empty_like(state))

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        state = x * 2
        return mix([x, state], state, mode="b"), state

    with pytest.raises(
        torchop.MissingRuleError,
        match=rf"^{namespace}::mix.three has no ONNX translation.*register_onnx.*missing='node'",
    ):
        exported(function, torch.randn(3))
    program = exported(function, torch.randn(3), missing="node")
    (node,) = [node for node in program.model.graph if node.domain == namespace]
    assert node.op_type == "mix_three"
    assert [value.name for value in node.inputs if value is not None] == ["x", "mul", "mul"]
    assert len(node.outputs) == 2
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    attributes["weights"] = list(attributes["weights"])
    assert attributes == {
        "tensors_size": 2,
        "count": 2,
        "weights": [0.5, 1.0],
        "mode": "b",
        "exact": 1,
    }
    assert program.model.opset_imports[namespace] == 1


def test_what_cannot_be_exported_is_refused_by_name(namespace: str) -> None:
    op = squash(namespace)
    with pytest.raises(ValueError, match="missing is 'error' or 'node', got 'nodes'"):
        exported(op, torch.ones(2), missing="nodes")
    op.register_onnx(lambda x, slope: (x, x))
    with pytest.raises(torchop.ResultError, match=f"^{op.name}.*returned 2 values.* return 1"):
        exported(op, torch.ones(2))

    @torchop.custom_op(f"{namespace}::log", mutates_args=(), effects="ordered")
    def log(x: Tensor) -> None: ...

    def logging(x: Tensor) -> Tensor:
        log(x)
        return x + 1

    with pytest.raises(torchop.EffectError, match=f"^{log.name} has an effect"):
        exported(logging, torch.ones(2))

    writing = add_into(namespace)

    def function(x: Tensor) -> Tensor:
        y = x + 1
        return writing(x, y)

    @torchop.custom_op(f"{namespace}::count", mutates_args=("x",))
    def count(x: Tensor) -> int:
        x.add_(1)
        return 1

    count.register_fake(lambda x: 1)

    def counting(x: Tensor) -> Tensor:
        y = x + 1
        count(y)
        return y

    with pytest.raises(torchop.FunctionalizationError, match=f"{count.name}.* more than tensors"):
        exported(counting, torch.ones(2))

    program = torch.export.export(Model(function), (torch.ones(2, 2),)).run_decompositions({})
    with pytest.raises(torchop.FunctionalizationError, match=f"passes {writing.name} to auto_func"):
        torchop.export.onnx(program)


def test_a_module_without_arguments() -> None:
    message = r"^onnx\(Linear\): .*with the arguments of a call, as in onnx\(module, \(x,\)\), but"
    with pytest.raises(TypeError, match=message):
        torchop.export.onnx(torch.nn.Linear(2, 2))
