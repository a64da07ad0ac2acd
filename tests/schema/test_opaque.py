"""`torchop.opaque`: classes whose objects operators take and return without a conversion."""

from __future__ import annotations

import abc
import dataclasses
import enum
import math
from typing import Any, NamedTuple, Optional

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import torchop
import torchop.extend
from tests._support.opaque_types import opaque_object
from torchop import SchemaError, SchemaWarning

X = torch.ones(2)
CPU = torch.device("cpu")
BACKENDS = ["aot_eager", "inductor"]


@torchop.opaque
class Counter:
    def __init__(self) -> None:
        self.calls = 0


@torchop.opaque
class Scaler(abc.ABC):
    @abc.abstractmethod
    def scale(self) -> float: ...


class Base:
    pass


class Early(Base):
    pass


torchop.opaque(Base)


class Late(Base):
    pass


class Half(Scaler):
    def scale(self) -> float:
        return 0.5


class Color(enum.Enum):
    RED = "red"


@torchop.opaque(value=True)
@dataclasses.dataclass(frozen=True)
class Options:
    number: Any = 1
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    color: Color = Color.RED
    rest: tuple[Any, ...] = ("text", (1.5, None), float("inf"))
    named: Optional[dict[str, Any]] = dataclasses.field(default=None, hash=False)


def counting(namespace: str, **options: Any) -> Any:
    @torchop.custom_op(f"{namespace}::count", mutates_args=(), **options)
    def count(x: Tensor, counter: Counter) -> Tensor:
        counter.calls += 1
        return x * counter.calls

    count.register_fake(lambda x, counter: torch.empty_like(x))
    return count


# --------------------------------------------------------------------------------------------------
# Objects that are passed by reference


def test_the_class_itself_is_returned() -> None:
    class Local:
        pass

    assert torchop.opaque(Local) is Local
    assert torchop.opaque(Local) is Local  # registering a class again changes nothing
    assert type(Local()) is Local
    assert Local.__qualname__.endswith("<locals>.Local")


def test_a_local_class_that_pytorch_registered_is_rejected_with_a_fix(namespace: str) -> None:
    # PyTorch registers the class under a name that its parser of schemas rejects.
    class Local(opaque_object.OpaqueBase):
        pass

    opaque_object.register_opaque_type(Local, typ="reference")

    def function(x, local):
        return x.clone()

    function.__annotations__ = {"x": Tensor, "local": Local, "return": Tensor}
    with pytest.raises(SchemaError) as caught:
        torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    assert str(caught.value).startswith(f"{namespace}::op")
    assert "Register it with torchop.opaque" in str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_with_the_same_object_are_neither_merged_nor_removed(
    namespace: str, backend: str
) -> None:
    count = counting(namespace)

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(x: Tensor, counter: Counter) -> tuple[Tensor, Tensor]:
        count(x, counter)
        return count(x, counter), count(x, counter)

    counter = Counter()
    for calls in (3, 6):
        second, third = compiled(X, counter)
        assert counter.calls == calls
        assert (second[0].item(), third[0].item()) == (calls - 1, calls)


def test_a_call_without_an_effect_may_be_removed(namespace: str) -> None:
    count, counter = counting(namespace, effects="none"), Counter()
    torch.compile(lambda: (count(X, counter), X + 1)[1], backend="aot_eager")()
    assert counter.calls == 0
    assert "no effect" in repr(count)


def test_results_of_equal_calls_are_different_objects(namespace: str) -> None:
    def function(x: Tensor) -> Counter:
        return Counter()

    op = torchop.custom_op(f"{namespace}::make", function, mutates_args=())
    op.register_fake(lambda x: Counter())
    compiled = torch.compile(lambda x: (op(x), op(x)), fullgraph=True, backend="aot_eager")
    one, other = compiled(X)
    assert one is not other


@pytest.mark.parametrize("names", [("counter",), ("counter", "x")])
def test_mutates_args_can_name_an_object(namespace: str, names: tuple[str, ...]) -> None:
    def observe(x: Tensor, counter: Counter) -> None:
        counter.calls += 1

    op = torchop.custom_op(f"{namespace}::observe", observe, mutates_args=names)
    counter = Counter()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x: Tensor, counter: Counter) -> None:
        op(x, counter)
        op(x, counter)

    compiled(X.clone(), counter)
    assert counter.calls == 2
    if "x" not in names:
        with pytest.raises(SchemaError, match="mutates_args names an object"):
            torchop.custom_op(f"{namespace}::pure", observe, mutates_args=names, effects="none")


def test_mutates_args_cannot_name_a_value(namespace: str) -> None:
    def function(x: Tensor, options: Options) -> Tensor:
        return x * 1

    with pytest.raises(
        SchemaError, match=r"'options' of type .*passed by reference can be mutated"
    ):
        torchop.custom_op(f"{namespace}::op", function, mutates_args=("options",))


def test_a_written_schema_counts_as_well(namespace: str) -> None:
    name = f"{Counter.__module__}.{Counter.__qualname__}"

    schema = f"(Tensor x, {name} counter) -> Tensor"

    @torchop.custom_op(f"{namespace}::op", mutates_args=("counter",), schema=schema)
    def op(x: Tensor, counter: Counter) -> Tensor:
        return x * 1

    assert "effect ORDERED" in repr(op)


def test_operators_of_a_library_have_an_effect_on_objects(namespace: str) -> None:
    library = torchop.Library(namespace, "DEF")
    name = f"{Counter.__module__}.{Counter.__qualname__}"
    library.define(f"count(Tensor x, {name} counter) -> Tensor")

    def count(x: Tensor, counter: Counter) -> Tensor:
        counter.calls += 1
        return x * counter.calls

    library.impl("count", count, "CompositeExplicitAutograd")
    op = getattr(torch.ops, namespace).count
    torchop.register_fake(f"{namespace}::count", lambda x, c: torch.empty_like(x), lib=library)
    counter = Counter()
    compiled = torch.compile(lambda x, c: (op(x, c), op(x, c))[1], backend="aot_eager")
    assert compiled(X, counter)[0].item() == 2
    with pytest.warns(UserWarning, match="already traced"):
        torchop.register_effect(f"{namespace}::count", "none", lib=library)
    assert torchop.extend.Operator(f"{namespace}::count", "a test").effect is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_may_change_the_object(namespace: str, backend: str) -> None:
    count = counting(namespace)

    @torchop.custom_op(f"{namespace}::back", mutates_args=("counter",))
    def back(grad: Tensor, counter: Counter) -> Tensor:
        counter.calls += 10
        return grad * 3

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.counter = inputs[1]

    back.register_fake(lambda grad, counter: torch.empty_like(grad))
    count.register_autograd(lambda ctx, grad: (back(grad, ctx.counter), None), setup_context=save)
    for call in (count, torch.compile(count, fullgraph=True, backend=backend)):
        x, counter = X.clone().requires_grad_(), Counter()
        call(x, counter).sum().backward()
        assert counter.calls == 11
        assert x.grad is not None
        assert x.grad[0].item() == 3


def test_isinstance_holds_in_traced_code_and_in_fake_kernels(namespace: str) -> None:
    seen = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, scaler: Scaler) -> Tensor:
        return x * scaler.scale()

    @op.register_fake
    def _(x: Tensor, scaler: Scaler) -> Tensor:
        seen.append((isinstance(scaler, Half), isinstance(scaler, Counter)))
        return torch.empty_like(x)

    def function(x: Tensor, scaler: Scaler) -> Tensor:
        return op(x, scaler) + 10 if isinstance(scaler, Half) else op(x, scaler)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X, Half()), torch.full((2,), 10.5))
    assert set(seen) == {(True, False)}


def test_subclasses_that_exist_already_are_registered_too(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, base: Base) -> Tensor:
        return x * (1 if isinstance(base, Early) else 2)

    op.register_fake(lambda x, base: torch.empty_like(x))

    def function(x: Tensor, base: Base) -> Tensor:
        return op(x, base) + 10 if isinstance(base, Early) else op(x, base)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert compiled(X, Early())[0].item() == 11
    assert compiled(X, Late())[0].item() == 2


def test_classes_of_pytorch_need_no_registration(namespace: str) -> None:
    def function(
        x: Tensor,
        group: torch.distributed.ProcessGroup,
        mesh: Optional[DeviceMesh],
        generator: torch.Generator,
    ) -> Tensor:
        return torch.rand(2, generator=generator) * x

    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    for name in ("ProcessGroup group", "DeviceMesh? mesh", "Generator generator"):
        assert name in op._schema


def test_a_generator_gives_an_operator_no_effect(namespace: str) -> None:
    def noisy(x: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
        return x * torch.rand(x.shape, generator=generator)

    op = torchop.custom_op(f"{namespace}::op", noisy, mutates_args=())
    op.register_fake(lambda x, generator=None: torch.empty_like(x))
    op.derive_autograd()
    assert torch.vmap(op, randomness="different")(torch.ones(2, 3)).shape == (2, 3)
    assert "effect" not in repr(op)
    changing = torchop.custom_op(f"{namespace}::changing", noisy, mutates_args={"generator"})
    assert "effect" in repr(changing)


# --------------------------------------------------------------------------------------------------
# Objects that are passed by value

EQUAL_NUMBERS = [1, True, 1.0, 0, False, 0.0, -0.0]


def _kind(number: Any) -> float:
    kinds = [bool, int, float]
    return 10 * kinds.index(type(number)) + number + (math.copysign(1, number) < 0) * 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_type_or_sign_is_another_value(namespace: str, backend: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, options: Options) -> Tensor:
        return x + _kind(options.number)

    op.register_fake(lambda x, options: torch.empty_like(x))
    compiled = torch.compile(op, fullgraph=True, backend=backend)
    for number in EQUAL_NUMBERS:
        assert torch.equal(compiled(X, Options(number)), op(X, Options(number)))
    assert len({_kind(number) for number in EQUAL_NUMBERS}) == len(EQUAL_NUMBERS)
    assert Options(1) == Options(1)
    assert Options(1) != Options(True)


def test_traced_code_and_fake_kernels_can_read_a_value(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, options: Options) -> Tensor:
        return x.repeat(options.number)

    op.register_fake(lambda x, options: x.new_empty(x.shape[0] * options.number))

    def function(x: Tensor, options: Options) -> Tensor:
        return op(x, options) * options.number

    compiled = torch.compile(function, fullgraph=True, backend="inductor")
    for number in (2, 3):
        assert torch.equal(compiled(X, Options(number)), function(X, Options(number)))


def test_a_value_becomes_a_constant_of_an_exported_program(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, options: Options) -> Tensor:
        return x * options.number

    op.register_fake(lambda x, options: torch.empty_like(x))

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x, Options(3, named={"a": [1, 2]}))

    program = torch.export.export(Module(), (X,))
    assert program.module()(X)[0].item() == 3


def test_a_field_that_no_graph_can_contain_is_named() -> None:
    with pytest.raises(TypeError, match=r"Options\.rest has the type .*Counter, which cannot be"):
        Options(rest=(Counter(),)).__fx_repr__()  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------
# Classes that cannot be registered


class Slotted:
    __slots__ = ("number",)


class Mutable:
    def __init__(self) -> None:
        self.number = 1


@dataclasses.dataclass
class Data:
    number: int = 1


class Unhashable:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Unwritable:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


class Traced:
    @property
    def tracing_mode(self) -> str:
        return "real"


class Pair(NamedTuple):
    one: int


@pytest.mark.parametrize(
    ("cls", "value", "message"),
    [
        (Slotted, False, r"Slotted has no weak references.*'__weakref__' to __slots__"),
        (Traced, False, r"Traced has the attribute 'tracing_mode'"),
        (Pair, False, r"Pair is a subclass of tuple"),
        (torch.nn.Linear, False, r"Linear is a subclass of .*Module"),
        (dict, False, r"dict is a built-in class"),
        (Color, True, r"Color is an Enum\. Operators support Enums"),
        (Mutable, True, r"Mutable has no __eq__.*@dataclass\(frozen=True\)"),
        (Data, True, r"Data is a dataclass whose objects can change.*@dataclass\(frozen=True\)"),
        (Unhashable, True, r"Unhashable has no __hash__"),
        (Unwritable, True, r"Unwritable has no __fx_repr__"),
        (Counter, True, r"Counter is already registered to be passed by reference"),
        (Options, False, r"Options is already registered to be passed by value"),
        (3, False, r"expects a class, got int"),
    ],
)
def test_the_error_names_the_problem_and_the_fix(cls: Any, value: bool, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        torchop.opaque(cls, value=value)


def test_an_object_of_another_class_is_refused(namespace: str) -> None:
    count = counting(namespace)
    with pytest.raises(torchop.ArgumentError, match=r"counter: expected .*Counter, got .*Half"):
        count(X, Half())


@pytest.mark.filterwarnings("ignore", category=SchemaWarning)
def test_an_inlined_operator_has_no_effect_unless_declared(namespace: str) -> None:
    def function(x: Tensor, counter: Counter) -> Tensor:
        return x * 2

    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=(), compile="inline")
    assert "effect" not in repr(op)


def test_an_operator_that_no_backend_inlines_has_an_effect(namespace: str) -> None:
    assert "effect ORDERED" in repr(counting(namespace, compile={"inductor": "opaque"}))


def test_a_derived_formula_needs_the_declaration_that_no_object_is_changed(namespace: str) -> None:
    op = counting(namespace)
    with pytest.raises(torchop.GradientError, match='pass effects="none" to custom_op'):
        op.derive_autograd()
