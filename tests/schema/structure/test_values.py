"""Structured results: tensors, which the flat operator returns, and values, which it does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from torchop import DataDependentError, FakeKernelError, ResultError, SchemaError


class Sorted(NamedTuple):
    values: Tensor
    order: Optional[Tensor]


@dataclasses.dataclass
class Split:
    whole: Tensor
    parts: tuple[Tensor, ...]


class Described(NamedTuple):
    values: Tensor
    total: int
    shape: list[int]
    name: str
    is_vector: bool
    limit: Optional[float]


def optional(x: Tensor, given: bool = True) -> Optional[Tensor]:
    return x + 1 if given else None


def with_optional(x: Tensor, given: bool = True) -> tuple[Tensor, Optional[Tensor]]:
    return x + 1, x + 2 if given else None


def several(x: Tensor, given: bool = True) -> tuple[Tensor, ...]:
    return (x + 1, x + 2) if given else ()


def named(x: Tensor, given: bool = True) -> Sorted:
    return Sorted(x + 1, x + 2 if given else None)


def split(x: Tensor, given: bool = True) -> Split:
    return Split(x + 1, (x + 2, x + 3) if given else ())


def nested(x: Tensor, given: bool = True) -> tuple[Sorted, list[Tensor]]:
    return named(x, given), [x + 3]


def described(x: Tensor, given: bool = True) -> Described:
    return Described(
        x + 1, x.numel() + 1, [n * 2 for n in x.shape], str(x.dtype), x.dim() == 1, 2.5
    )


def only_values(x: Tensor, given: bool = True) -> list[int]:
    return [n + 1 for n in x.shape]


FORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "Optional[Tensor]": (optional, "Tensor?"),
    "optional entry": (with_optional, "(Tensor, Tensor?)"),
    "tuple[Tensor, ...]": (several, "Tensor[]"),
    "NamedTuple": (named, "(Tensor, Tensor?)"),
    "dataclass": (split, "(Tensor, Tensor[])"),
    "nested": (nested, "(Tensor, Tensor?, Tensor[])"),
    "values": (described, "Tensor"),
    "values only": (only_values, "()"),
}


def fake_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """These functions compute nothing that depends on data, so they describe themselves."""
    return lambda x, given=True: function(torch.empty_like(x), given)


def define(namespace: str, form: str) -> tuple[Any, Callable[..., Any]]:
    function, returned = FORMS[form]
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    assert op._schema.endswith(f") -> {returned}")
    op.register_fake(fake_of(function))
    return op, function


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if dataclasses.is_dataclass(expected):
        assert_same(tuple(vars(found).items()), tuple(vars(expected).items()))
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Split(torch.ones(1), ()), Split(torch.zeros(1), ())),
        ((1, "a"), (1, "b")),
        ((torch.ones(1),), [torch.ones(1)]),
        ((1,), (1, 2)),
    ],
)
def test_the_comparison_can_fail(found: Any, expected: Any) -> None:
    assert_same(expected, expected)
    with pytest.raises(AssertionError):
        assert_same(found, expected)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("form", list(FORMS))
def test_a_call_returns_what_the_function_returns(namespace: str, form: str, given: bool) -> None:
    op, function = define(namespace, form)
    x = torch.arange(3.0)
    for _ in range(2):
        assert_same(op(x, given), function(x, given))
    with torchop.native.disabled():
        assert_same(op(x, given=given), function(x, given))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: op(x, given), fullgraph=True, backend="aot_eager")
    assert_same(compiled(x), function(x, given))
    with FakeTensorMode() as mode:
        fake = op(mode.from_tensor(x), given)
    assert isinstance(fake, type(function(x, given)))


def test_values_follow_the_shapes_of_a_compiled_program(namespace: str) -> None:
    op, function = define(namespace, "values")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: op(x).values * op(x).total, fullgraph=True, backend="aot_eager", dynamic=True
    )
    for size in (3, 5):
        x = torch.arange(float(size))
        torch.testing.assert_close(compiled(x), function(x).values * (size + 1))


class UsesValues(torch.nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        result = self.op(x)
        return result.values * result.total + result.shape[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("strict", [False, True])
def test_values_follow_the_shapes_of_an_exported_program(
    namespace: str, tmp_path: Path, strict: bool
) -> None:
    op, _ = define(namespace, "values")
    sizes = ({0: torch.export.Dim("size", min=2)},)
    program = torch.export.export(
        UsesValues(op), (torch.arange(3.0),), dynamic_shapes=sizes, strict=strict
    )
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    x = torch.arange(5.0)
    torch.testing.assert_close(loaded(x), (x + 1) * 6 + 10)


def test_gradients_flow_through_structures(namespace: str) -> None:
    op, _ = define(namespace, "dataclass")
    seen = []

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        seen.append(output)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx: Any, grad: Any) -> Any:
        seen.append(grad)
        return grad.whole + sum(grad.parts), None

    x = torch.ones(2, requires_grad=True)
    result = op(x)
    (result.whole * 2 + result.parts[0] * 3 + result.parts[1] * 4).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [9, 9]
    assert [type(value) for value in seen] == [Split, Split]


def test_values_have_no_gradient(namespace: str) -> None:
    def function(x: Tensor) -> tuple[Tensor, str, Tensor]:
        return x * 2, "text", x * 3

    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    op.register_fake(lambda x: (torch.empty_like(x), "text", torch.empty_like(x)))
    seen = []

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        seen.append(output[1])

    @op.register_autograd(setup_context=setup_context)
    def _(ctx: Any, first: Any, text: Any, second: Any) -> Any:
        assert text is None
        return first * 2 + second * 3

    def loss(x: Tensor) -> Tensor:
        first, _, second = op(x)
        return (first + second).sum()

    torch._dynamo.reset()
    for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        x = torch.ones(2, requires_grad=True)
        call(x).backward()
        assert x.grad is not None
        assert x.grad.tolist() == [5, 5]
    assert set(seen) == {"text"}


def test_vmap_of_structures(namespace: str) -> None:
    op, function = define(namespace, "nested")

    @op.register_vmap
    def _(info: Any, in_dims: Any, x: Tensor, given: bool = True) -> Any:
        return function(x.movedim(in_dims[0], 0), given), 0

    x = torch.arange(6.0).reshape(3, 2)
    mapped = torch.vmap(op, in_dims=1)(x)
    assert_same(mapped, function(x.t()))


def test_vmap_without_a_rule_returns_a_value_that_is_the_same_for_all(namespace: str) -> None:
    def function(x: Tensor) -> tuple[Tensor, str]:
        return x * 2, "positive" if x.sum() > 0 else "negative"

    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    texts = []

    def call(x: Tensor) -> Tensor:
        result, text = op(x)
        texts.append(text)
        return result

    torch.testing.assert_close(torch.vmap(call)(torch.ones(2, 3)), torch.full((2, 3), 2.0))
    assert texts == ["positive"]
    with pytest.raises(DataDependentError, match=r"differ between elements.*Register a vmap rule"):
        torch.vmap(call)(torch.tensor([[1.0], [-1.0]]))


# --------------------------------------------------------------------------------------------------
# Values that depend on data


def sign(x: Tensor) -> tuple[Tensor, str]:
    return x * 2, "positive" if x.sum() > 0 else "negative"


def test_a_value_that_depends_on_data_is_refused_by_tracers_with_the_reason(
    namespace: str,
) -> None:
    op = torchop.custom_op(f"{namespace}::op", sign, mutates_args=())
    op.register_fake(lambda x: (torch.empty_like(x), torchop.data_dependent))
    assert op(torch.ones(1))[1] == "positive"
    assert op(-torch.ones(1))[1] == "negative"
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a result depends on the data"):
        torch.compile(op, fullgraph=True, backend="eager")(torch.ones(1))

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x)[0]

    with pytest.raises(DataDependentError, match=f"{namespace}::op: a result depends on the data"):
        torch.export.export(Model(), (torch.ones(1),))
    with FakeTensorMode(), pytest.raises(DataDependentError, match=r"torchop\.data_dependent"):
        op(torch.ones(1))
    torchop.opcheck(op, (torch.ones(1),), test_utils="test_schema")


def test_without_a_fake_kernel_values_work_in_eager_mode_only(namespace: str) -> None:
    op = torchop.custom_op(f"{namespace}::op", sign, mutates_args=())
    assert op(torch.ones(1))[1] == "positive"
    torch._dynamo.reset()
    with pytest.raises(Exception, match="There was no fake impl registered"):
        torch.compile(op, fullgraph=True, backend="eager")(torch.ones(1))


@dataclasses.dataclass
class Scale:
    factor: float
    weight: Tensor


def scaled_size(config: Scale, *, times: int = 1) -> tuple[Tensor, int]:
    return config.weight * config.factor, times


def labelled(config: Scale) -> tuple[Tensor, str]:
    return config.weight * config.factor, "text"


def scaled(config: Scale) -> Tensor:
    return config.weight * config.factor


def cleared(x: Tensor) -> str:
    x.zero_()
    return "cleared"


@pytest.mark.parametrize(
    ("function", "mutates_args", "shown"),
    [
        (scaled, (), r"def _\(config\):\n.*\n *return torch\.empty_like\(config\.weight\)\n"),
        (scaled_size, (), r"def _\(config, \*, times\):\n.*\n *return torch.*weight\), \.\.\.\n"),
        (labelled, (), r"return \.\.\.  # tuple\[.*Tensor, str\], as the kernel does\n"),
        (cleared, ("x",), r"def _\(x\):\n.*\n *return \.\.\.  # str, as the kernel does\n"),
    ],
)
def test_a_missing_fake_kernel_is_shown_as_its_author_has_to_write_it(
    namespace: str, function: Callable[..., Any], mutates_args: tuple[str, ...], shown: str
) -> None:
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=mutates_args)
    meta = torch.empty(2, device="meta")
    with pytest.raises(torchop.MissingFakeError, match=shown):
        op(meta if function is cleared else Scale(2.0, meta))


def length(x: Tensor) -> tuple[Tensor, int, str]:
    return x * 2, len(x), "text"


def wrong_fake(x: Tensor) -> tuple[Tensor, int, str]:
    return torch.empty_like(x), 3, "text"


def test_a_real_run_is_compared_with_the_fake_kernel(namespace: str) -> None:
    op = torchop.custom_op(f"{namespace}::op", length, mutates_args=())
    op.register_fake(wrong_fake)
    op(torch.ones(3))
    op(torch.ones(3))
    with pytest.raises(FakeKernelError, match=r"the result\[1\] is 4, but the fake kernel says 3"):
        op(torch.ones(4))
    with torchop.checking(), pytest.raises(FakeKernelError, match="a compiled program would see"):
        op(torch.ones(4))  # seen before, and not believed in there
    with pytest.raises(torchop.OpCheckError, match="is 5, but the fake kernel says 3"):
        torchop.opcheck(op, (torch.ones(5),), test_utils="test_faketensor")
    op.register_fake(lambda x: (torch.empty_like(x), len(x), "text"))
    assert op(torch.ones(4))[1] == 4
    torchop.opcheck(op, (torch.ones(5),), test_utils="test_faketensor")


def test_a_fake_kernel_with_sizes_that_depend_on_data_is_compared_too(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, int, str]:
        found = x.nonzero()
        return found, len(found), "kernel"

    @op.register_fake
    def _(x: Tensor) -> tuple[Tensor, int, str]:
        count = torchop.get_ctx().new_dynamic_size()
        return x.new_empty(count, x.dim(), dtype=torch.int64), count, "fake"

    with pytest.raises(FakeKernelError, match=r"result\[2\] is 'kernel', but .* says 'fake'"):
        op(torch.ones(3))


def test_what_a_list_holds_is_compared_item_by_item(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, list[int], list[float]]:
        found = x.nonzero()
        return found, [len(found), 1], [float("nan"), 2.0]

    @op.register_fake
    def _(x: Tensor) -> tuple[Tensor, list[int], list[float]]:
        count = torchop.get_ctx().new_dynamic_size()
        return x.new_empty((count, 1), dtype=torch.int64), [count, 1], [float("nan"), 2.0]

    _, sizes, numbers = op(torch.ones(3))
    assert sizes == [3, 1]
    assert numbers[1] == 2
    op.register_fake(lambda x: (x.new_empty(1, 1), [torchop.data_dependent, 2], [0.0, 2.0]))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(3))
        with pytest.raises(DataDependentError, match="a result depends on the data"):
            op(fake)
    with pytest.raises(FakeKernelError, match=r"the result\[1\] is \[4, 1\], but the fake kernel"):
        op(torch.ones(4))


def test_a_fake_kernel_that_is_refused_is_not_used(namespace: str) -> None:
    op = torchop.custom_op(f"{namespace}::op", length, mutates_args=())
    op.register_fake(lambda x: (torch.empty_like(x), len(x), "text"))
    with pytest.raises(RuntimeError, match="already has a fake impl"):
        torchop.register_fake(op, wrong_fake, allow_override=False)
    assert op(torch.ones(7))[1] == 7


def test_an_exception_in_a_kernel_leaves_nothing_behind(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::inner", mutates_args=())
    def inner(x: Tensor) -> tuple[Tensor, str]:
        if x.numel() == 0:
            raise ValueError("empty")
        return x * 2, "inner"

    @torchop.custom_op(f"{namespace}::outer", mutates_args=())
    def outer(x: Tensor) -> tuple[Tensor, str]:
        try:
            inner(x[:0])
        except ValueError:
            result, text = inner(x)
        inner.overload(x)  # flat: nobody waits for its value
        return result + 1, f"outer of {text}"

    for _ in range(2):
        assert outer(torch.ones(1))[1] == "outer of inner"
        with pytest.raises(ValueError, match="empty"):
            inner(torch.ones(0))


def test_a_mode_gets_the_structures_and_calls_with_them(namespace: str) -> None:
    class Doubling(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    op, function = define(namespace, "values")
    seen = []

    @op.register_torch_dispatch(Doubling)
    def _(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        seen.append((func == op.overload, func.namespace, args[1]))
        return func(*args, **kwargs)._replace(name="mode")

    with Doubling():
        result = op(torch.ones(2))
    assert result.name == "mode"
    assert result.shape == function(torch.ones(2)).shape
    assert seen == [(True, namespace, True)]


# --------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((torch.ones(1),), "the result: expected Sorted, but the function returned a tuple of 1"),
        (None, "the result: expected Sorted, but the function returned a NoneType"),
        (Sorted(1.0, None), r"must return 2 values \(Tensor, Optional\[Tensor\]\)"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_result_is_refused(namespace: str, result: Any, message: str) -> None:
    def function(x: Tensor) -> Sorted:
        return result  # type: ignore[no-any-return]

    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    with pytest.raises(ResultError, match=message):
        op(torch.ones(1))


@dataclasses.dataclass
class Validated:
    values: Tensor
    rows: int
    double: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.double = 2 * int(self.rows)


@dataclasses.dataclass
class Unmade:
    values: Tensor
    rows: int = dataclasses.field(init=False, default=3)


@dataclasses.dataclass
class Endless:
    values: Tensor
    rest: Endless


def test_a_result_with_code_of_its_own_is_made_again_by_it(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Validated:
        return Validated(x * 3, x.shape[0])

    op.register_autograd(lambda ctx, grad: grad.values * 3)  # which __post_init__ has no part in
    x = torch.ones(2, requires_grad=True)
    result = op(x)
    assert (result.rows, result.double) == (2, 4)
    result.values.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Unmade, r"Unmade cannot be a result: its __init__ does not take the field 'rows'"),
        (
            Endless,
            r"the result\.rest is a .*Endless inside a .*Endless, so the schema would",
        ),
    ],
)
def test_a_result_that_cannot_be_made_again_is_refused(
    namespace: str, cls: type, message: str
) -> None:
    def function(x: Tensor) -> Any: ...

    function.__annotations__["return"] = cls
    with pytest.raises(SchemaError, match=message):
        torchop.custom_op(f"{namespace}::op", function, mutates_args=())


def test_results_that_are_neither_tensors_nor_values_are_refused(namespace: str) -> None:
    def function(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]: ...

    with pytest.raises(SchemaError, match=r"unsupported type dict\[str, torch.Tensor\]; supported"):
        torchop.custom_op(f"{namespace}::op", function, mutates_args=())
