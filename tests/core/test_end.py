"""Deregistered operators are freed, and a later operator of the same name inherits no state."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.operator_schemas import normalize_function
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

import torchop
from tests._support.common import on_both
from tests._support.devices import BACKEND, TYPE
from tests._support.forking import run_forked

T = torch.ones(2)
SCHEMA = "(Tensor x) -> Tensor"
OTHER_SCHEMA = "(Tensor x, Tensor y, int n) -> Tensor"


def packet(namespace: str) -> Any:
    return getattr(torch.ops, namespace).op


def overload(namespace: str) -> Any:
    return packet(namespace).default


def normalized(op: Any, *args: Any) -> Any:
    """Return the argument names that FX finds for a call, or None if no signature fits the call."""
    result = normalize_function(op, args, {}, normalize_to_only_use_kwargs=True)
    return None if result is None else set(result.kwargs)


def quietly(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


@pytest.fixture(autouse=True, scope="module")
def frozen_compilers(frozen_objects: None) -> None:
    """Exclude the objects of PyTorch's compilers from garbage collection, which makes it faster."""
    torch.compile(torch.sin, backend="aot_eager")(T)
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


# Functions that deregister an operator. Each removes the object that owned the operator from
# `held`.


def close(held: dict[str, Any]) -> None:
    held.pop("library").close()


def collect(held: dict[str, Any]) -> None:
    held.clear()
    gc.collect()


def destroy(held: dict[str, Any]) -> None:
    held.pop("library")._destroy()


EVERY_END = pytest.mark.parametrize("end", [close, collect, destroy])


def define(namespace: str, held: dict[str, Any], schema: str) -> None:
    held["library"].define(f"op{schema}")


def custom_op(namespace: str, held: dict[str, Any], schema: str) -> None:
    held["op"] = torchop.custom_op(
        f"{namespace}::op",
        lambda x, *rest: x + 1,
        mutates_args=(),
        schema=schema,
        lib=held["library"],
    )


EVERY_DEFINITION = pytest.mark.parametrize("make", [define, custom_op])


@EVERY_END
@EVERY_DEFINITION
def test_signature_belongs_to_the_current_operator(namespace, make, end):
    held = {"library": torchop.Library(namespace, "FRAGMENT")}
    make(namespace, held, "(Tensor x, float a) -> Tensor")
    assert normalized(overload(namespace), T, 2.0) == {"x", "a"}
    end(held)
    held["library"] = torchop.Library(namespace, "FRAGMENT")
    make(namespace, held, OTHER_SCHEMA)
    assert normalized(overload(namespace), T, T, 3) == {"x", "y", "n"}
    held["library"].close()


def test_signature_after_a_redefinition(namespace):
    def scenario(library, namespace):
        for schema in (SCHEMA, OTHER_SCHEMA):
            op = quietly(
                lambda schema=schema: library.custom_op(
                    f"{namespace}::op", lambda x, *rest: x + 1, mutates_args=(), schema=schema
                )
            )
            args = (T,) if schema is SCHEMA else (T, T, 3)
            last = normalized(overload(namespace), *args)
        del op
        return last

    both = on_both(scenario, namespace)
    assert both.ours == {"x", "y", "n"}
    assert both.stock is None


def test_signature_of_an_operator_deregistered_by_another_library(namespace):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x, float a) -> Tensor")
    assert normalized(overload(namespace), T, 2.0) == {"x", "a"}
    library._destroy()  # PyTorch forgets the signature only when it is freed
    with torchop.Library(namespace, "FRAGMENT") as next_library:
        next_library.define(f"op{OTHER_SCHEMA}")
        assert normalized(overload(namespace), T, T, 3) == {"x", "y", "n"}
    del library


def compiled_with_lists(library: Any, namespace: str) -> list[Tensor]:
    """Define an operator in a library, compile it with Inductor, and repeat with a new library.

    The two operators have the same name.
    """

    def add(x: Tensor, a: float) -> None:
        x.add_(a)

    first_library = library.Library(namespace, "FRAGMENT")
    first_library.define("op(Tensor(a!) x, float a) -> ()")
    first_library.impl("op", add, BACKEND)
    library.register_fake(f"{namespace}::op", lambda x, a: None, lib=first_library)
    first = torch.ones(2)
    torch.compile(lambda x: packet(namespace)(x, 2.0), fullgraph=True)(first)
    first_library._destroy()
    torch._dynamo.reset()

    def kernel(x: Tensor, ys: list[Tensor], z: Tensor) -> None:
        for y in (*ys, z):
            y.add_(x)

    lists = library.Library(namespace, "FRAGMENT")
    lists.define("op(Tensor x, Tensor(a!)[] ys, Tensor(b!) z) -> ()")
    lists.impl("op", kernel, BACKEND)
    library.register_fake(f"{namespace}::op", lambda x, ys, z: None, lib=lists)
    y, z = torch.zeros(2), torch.zeros(2)
    try:
        torch.compile(lambda x, y, z: packet(namespace)(x, [y], z), fullgraph=True)(T, y, z)
    finally:
        lists._destroy()
        del first_library
    return [first, y, z]


# PyTorch warns that its caches are disabled.
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_operators_of_two_libraries_compile_one_after_another(namespace):
    # Disable the caches, because with a graph from an earlier run, Inductor would not lower the
    # operator.
    with torch._inductor.config.patch(force_disable_caches=True):
        both = on_both(compiled_with_lists, namespace)
    assert [tensor.tolist() for tensor in both.ours] == [[3, 3], [1, 1], [1, 1]]
    assert isinstance(both.stock, Exception)


# Operators with every kind of rule, because each rule could keep its operator alive.


def with_rules(namespace: str, held: dict[str, Any], schema: str = SCHEMA) -> None:
    custom_op(namespace, held, schema)
    op = held["op"]
    op.register_kernel(TYPE, lambda x: x + 2)
    op.register_fake(lambda x: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: grad)
    op.register_vmap(lambda info, in_dims, x: (op(x), in_dims[0]))
    op.register_autocast(TYPE, torch.bfloat16)
    op.register_torch_dispatch(FakeTensorMode, lambda mode, func, types, args, kwargs: args[0] + 1)
    op.register_flop_formula(lambda x: 1)


def with_effect(namespace: str, held: dict[str, Any], schema: str = SCHEMA) -> None:
    custom_op(namespace, held, schema)
    held["op"].register_fake(lambda x: torch.empty_like(x))
    held["op"].register_effect("ordered")


def with_derived(namespace: str, held: dict[str, Any], schema: str = SCHEMA) -> None:
    custom_op(namespace, held, schema)
    held["op"].register_fake(lambda x: torch.empty_like(x))
    held["op"].derive_autograd()
    held["op"].derive_inplace()
    held["op"].derive_out()


def mutating(namespace: str, held: dict[str, Any]) -> None:
    def add_one(x: Tensor) -> None:
        x.add_(1)

    held["op"] = torchop.custom_op(
        f"{namespace}::op",
        add_one,
        mutates_args={"x"},
        schema="(Tensor(a!) x) -> ()",
        lib=held["library"],
    )
    held["op"].register_fake(lambda x: None)


def low_level(namespace: str, held: dict[str, Any]) -> None:
    define(namespace, held, SCHEMA)
    kernel = held["op"] = lambda x: x + 1
    held["library"].impl("op", kernel, BACKEND)
    torchop.register_fake(f"{namespace}::op", lambda x: torch.empty_like(x), lib=held["library"])


def plain(namespace: str, held: dict[str, Any]) -> None:
    custom_op(namespace, held, SCHEMA)
    held["op"].register_fake(lambda x: torch.empty_like(x))


OPERATORS = [plain, with_rules, with_effect, with_derived, mutating, low_level]
EVERY_OPERATOR = pytest.mark.parametrize("make", OPERATORS)


def use(op: Any) -> None:
    """Call an operator in every way that eager mode offers."""
    op(T.clone())
    op(T.clone())
    with FakeTensorMode() as mode:
        op(mode.from_tensor(T))


def use_in_compilers(op: Any) -> None:
    use(op)
    make_fx(lambda x: op(x.clone()), tracing_mode="fake")(T)
    torch.compile(lambda x: op(x.clone()), backend="aot_eager")(T)
    torch._dynamo.reset()
    normalize_function(op, (T,), {})


def definition_of(held: dict[str, Any]) -> Any:
    return getattr(held["op"], "_definition", held["op"])


# Dynamo frees a graph when the Python code from which it was compiled is freed.
frees_code = pytest.mark.needs_gil("code is freed, and what Dynamo compiled with it")


@pytest.mark.pairwise
@EVERY_OPERATOR
@pytest.mark.parametrize(
    "calls", [lambda op: None, use, pytest.param(use_in_compilers, marks=frees_code)]
)
@EVERY_END
def test_a_deregistered_operator_is_freed(namespace, make, calls, end):
    held = {"library": torchop.Library(namespace, "FRAGMENT")}
    make(namespace, held)
    calls(overload(namespace))
    references = [weakref.ref(each) for each in (definition_of(held), overload(namespace))]
    end(held)
    held.clear()
    gc.collect()
    # A collected library's rules are detached by the next registration, not by the collector.
    torchop.define(f"{namespace}::next", "() -> ()")
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@frees_code
def test_replaced_operator_is_garbage_collected(namespace):
    def scenario(library, namespace):
        references = []
        for _ in range(2):
            op = quietly(
                lambda: library.custom_op(
                    f"{namespace}::op", lambda x: x + 1, mutates_args=(), schema=SCHEMA
                )
            )
            op.register_fake(lambda x: torch.empty_like(x))
            use_in_compilers(overload(namespace))
            references.append(weakref.ref(overload(namespace)))
        gc.collect()
        return [reference() is None for reference in references]

    both = on_both(scenario, namespace)
    assert both.ours == [True, False]
    assert both.stock == [False, False]


def objects_per_operator(make: Callable[[int], None], rounds: int = 40) -> float:
    """Return how many objects remain for each operator that `make` defines and deregisters."""
    for number in range(rounds):
        make(number)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(rounds, 2 * rounds):
        make(number)
    gc.collect()
    return (len(gc.get_objects()) - before) / rounds


@EVERY_OPERATOR
def test_operators_under_new_names_leave_no_objects(namespace, make):
    def one(number: int) -> None:
        # PyTorch never frees three objects for each namespace, so the limit below is 3.5.
        held = {"library": torchop.Library(f"{namespace}_{number}", "FRAGMENT")}
        make(f"{namespace}_{number}", held)
        use(overload(f"{namespace}_{number}"))
        held.pop("library").close()

    assert objects_per_operator(one) < 3.5


def test_kernel_of_another_library_still_runs_under_modes(namespace):
    """A kernel that another library registered remains when the operator is defined again.

    Under a mode, PyTorch looks up this kernel by its name.
    """
    other = torchop.Library(namespace, "IMPL")
    held = {"library": torchop.Library(namespace, "FRAGMENT")}
    define(namespace, held, SCHEMA)
    held["library"].impl("op", lambda x: x + 1, BACKEND)
    quietly(lambda: other.impl("op", lambda x: x + 5, BACKEND))
    close(held)
    held["library"] = torchop.Library(namespace, "FRAGMENT")
    define(namespace, held, SCHEMA)
    with FlopCounterMode(display=False):
        assert packet(namespace)(T).tolist() == [6, 6]
    close(held)
    other.close()


def test_kernel_of_the_next_operator_runs_under_modes(namespace):
    for amount in (1, 5):
        held = {"library": torchop.Library(namespace, "FRAGMENT")}
        define(namespace, held, SCHEMA)
        held["library"].impl("op", lambda x, amount=amount: x + amount, BACKEND)
        with FlopCounterMode(display=False):
            assert packet(namespace)(T).tolist() == [1 + amount] * 2
        close(held)


# State of an operator that the next operator of the same name could inherit by mistake.


def effect(namespace: str) -> Any:
    return torch._library.simple_registry.singleton.find(f"{namespace}::op").effect.effect


WITH_CLASS = "(Tensor x, __torch__.torch.classes.rnn.CellParamsBase y) -> Tensor"


@pytest.mark.parametrize(("first", "then"), [(SCHEMA, WITH_CLASS), (WITH_CLASS, SCHEMA)])
def test_effect_belongs_to_the_current_operator(namespace, first, then):
    """PyTorch assigns an effect to an operator whose schema has a TorchScript class."""
    effects = {SCHEMA: None, WITH_CLASS: torch.library.EffectType.ORDERED}
    # `other` registers a fake kernel, which remains, so PyTorch keeps its registry entry.
    other = torch.library.Library(namespace, "FRAGMENT")
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define(f"op{first}")
        torch.library.register_fake(f"{namespace}::op", lambda x, *rest: x.clone(), lib=other)
        assert effect(namespace) == effects[first]
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define(f"op{then}")
        assert effect(namespace) == effects[then]
    other._destroy()


def test_deregistering_removes_the_declared_effect(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define(f"op{SCHEMA}")
        torch.library._register_effectful_op(f"{namespace}::op", torch.library.EffectType.ORDERED)
        assert effect(namespace) is not None
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define(f"op{SCHEMA}")
        assert effect(namespace) is None


def test_deregistering_removes_the_flop_formula(namespace):
    def count() -> int:
        with FlopCounterMode(display=False) as mode:
            packet(namespace)(T)
        return mode.get_total_flops()

    def make() -> Any:
        return torchop.custom_op(
            f"{namespace}::op", lambda x: x + 1, mutates_args=(), schema=SCHEMA
        )

    op = make()
    register_flop_formula(packet(namespace))(lambda *args, **kwargs: 7)
    assert count() == 7
    op = quietly(make)
    with pytest.warns(UserWarning, match="counts 0 operations"):
        assert count() == 0
    assert op(T).tolist() == [2, 2]


def test_torchscript_does_not_mistake_another_object_for_a_packets_function(namespace):
    table = torch.jit._builtins._get_builtin_table()
    held = {"library": torchop.Library(namespace, "FRAGMENT")}
    with_rules(namespace, held)
    use(packet(namespace))
    before = [key for key, name in table.items() if name == f"{namespace}::op"]
    assert before
    close(held)
    assert f"{namespace}::op" not in table.values()


@pytest.mark.exhaustive
def test_dtensor_does_not_mistake_an_operator_for_a_freed_one():
    program = """
    import gc
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.experimental import register_sharding
    from torch.testing._internal.distributed.fake_pg import FakeStore
    import torchop

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    accepted = [([Shard(0)], [Shard(0)]), ([Replicate()], [Replicate()])]

    def placements(number, is_sharded):
        with torchop.Library("mylib", "FRAGMENT") as library:
            op = torchop.custom_op(
                f"mylib::op{number % 3}",
                lambda x: x + 1,
                mutates_args=(),
                schema="(Tensor x) -> Tensor",
                lib=library,
            )
            op.register_fake(torch.empty_like)
            register_sharding(op.overload)(lambda x: accepted[1 - is_sharded :])
            return op(x).placements

    for number in range(12):
        assert placements(number, True) == (Shard(0),), number
        assert placements(number, False) == (Replicate(),), number
    print("right")
    """
    assert run_forked(program).stdout == "right\n"
