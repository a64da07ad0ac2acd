"""Compilers neither drop nor reorder calls with an effect. Uses private names."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.effects import has_effects
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchop
from tests._support.common import on_both
from tests._support.devices import BACKEND
from tests.rules.support import cloning
from torchop._compat import registries

ORDERED = torchop.EffectType.ORDERED


def define(namespace, library=torchop):
    op = cloning(namespace, library)
    op.register_fake(lambda x: torch.empty_like(x))
    return op


def test_pytorch_finds_the_effect(namespace):
    op = define(namespace)
    assert not has_effects(op.overload)
    op.register_effect(ORDERED)
    assert has_effects(op.overload)
    op.register_effect(None)
    assert not has_effects(op.overload)


@pytest.mark.parametrize("way", ["handle", "name", "overload", "packet"])
def test_operator_may_be_given_in_any_way(namespace, way):
    op = define(namespace)
    packet = getattr(torch.ops, namespace).op
    ways = {"handle": op, "name": op.name, "overload": op.overload, "packet": packet}
    torchop.register_effect(ways[way], ORDERED)
    assert has_effects(op.overload)


def test_handle_is_refused_by_pytorch(namespace):
    def scenario(library, namespace):
        op = define(namespace, library)
        register = getattr(library, "register_effect", None) or library._register_effectful_op
        register(op, ORDERED)
        return "accepted"

    both = on_both(scenario, namespace)
    assert both.ours == "accepted"
    assert isinstance(both.stock, AssertionError)


def test_calls_without_an_effect_are_dropped_if_unused(namespace):
    op = define(namespace)
    graph = make_fx(lambda x: (op(x), x + 1)[1])(torch.ones(2))
    graph.graph.eliminate_dead_code()
    assert "op" not in {str(node.target) for node in graph.graph.nodes}
    assert len([node for node in graph.graph.nodes if node.op == "call_function"]) == 1


def test_call_with_an_effect_is_not_removed_as_dead_code(namespace):
    op = define(namespace)
    op.register_effect(ORDERED)
    graph = make_fx(lambda x: (op(x), x + 1)[1])(torch.ones(2))
    graph.graph.eliminate_dead_code()
    assert op.overload in [node.target for node in graph.graph.nodes]


@pytest.mark.parametrize("effect", ["ORDERED", 1, True])
def test_invalid_effect_is_rejected(namespace, effect):
    with pytest.raises(ValueError, match=r"expects EffectType\.ORDERED, also written"):
        define(namespace).register_effect(effect)


def test_mutation_is_no_effect(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=("x",))
    def op(x: Tensor) -> None:
        x.add_(1)

    with pytest.raises(ValueError, match=f"{namespace}::op: PyTorch ignores the effect"):
        op.register_effect(ORDERED)
    assert not has_effects(op.overload)


@pytest.mark.parametrize("effects", ["ordered", ORDERED])
def test_effect_is_declared_at_the_definition(namespace, effects):
    op = torchop.custom_op(
        f"{namespace}::op", torch.clone, schema=SAME, mutates_args=(), effects=effects
    )
    assert has_effects(op.overload)
    assert "effect ORDERED" in repr(op)
    none = torchop.custom_op(
        f"{namespace}::none", torch.clone, schema=SAME, mutates_args=(), effects="none"
    )
    assert "no effect" in repr(none)
    assert not has_effects(none.overload)


SAME = "(Tensor x) -> Tensor"


@pytest.mark.parametrize(
    ("schema", "mutates_args", "effects", "words"),
    [
        (SAME, (), "ORDERED", "effects expects EffectType.ORDERED, also written 'ordered'"),
        (SAME, (), 1, "got 1"),
        ("(Tensor(a!) x) -> ()", ("x",), "ordered", "PyTorch ignores the effect"),
        ("(Tensor(a) x) -> Tensor(a)", (), ORDERED, "PyTorch ignores the effect"),
    ],
)
def test_wrong_effect_at_the_definition_leaves_nothing_behind(
    namespace, schema, mutates_args, effects, words
):
    def define(**options):
        return torchop.custom_op(
            f"{namespace}::op", torch.clone, schema=schema, mutates_args=mutates_args, **options
        )

    with pytest.raises(ValueError, match=f"{namespace}::op: .*{words}"):
        define(effects=effects)
    assert not hasattr(getattr(torch.ops, namespace), "op")
    op = define()
    with pytest.raises(ValueError, match=words):
        define(effects=effects)
    assert op.overload is getattr(torch.ops, namespace).op.default


@pytest.mark.parametrize("effects", ["ordered", "none"])
def test_definition_with_an_effect_does_not_warn(namespace, effects):
    torchop.custom_op(
        f"{namespace}::op", print, schema="(Tensor x) -> ()", mutates_args=(), effects=effects
    )


def test_definition_without_results_mutation_or_effect_warns(namespace):
    def function(x: Tensor) -> None:
        pass

    words = f'{namespace}::op returns nothing and mutates nothing.*effects="ordered"'
    for define in (
        lambda: torchop.custom_op(f"{namespace}::op", function, mutates_args=()),
        lambda: torchop.custom_op(f"{namespace}::op", mutates_args=())(function),
    ):
        with pytest.warns(torchop.SchemaWarning, match=words) as caught:
            define()
        assert caught[0].filename == __file__


def test_warning_that_is_an_error_leaves_nothing_behind(namespace):
    with pytest.raises(torchop.SchemaWarning):
        torchop.custom_op(f"{namespace}::op", print, schema="() -> ()", mutates_args=())
    assert not hasattr(getattr(torch.ops, namespace), "op")


def test_composite_kernel_would_be_traced_through(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> ()")
        library.impl("op", lambda x: None, "CompositeImplicitAutograd")
        with pytest.raises(ValueError, match=f"{namespace}::op: .*CompositeExplicitAutograd"):
            torchop.register_effect(f"{namespace}::op", ORDERED)
        torchop.register_effect(f"{namespace}::op", None)


def test_effect_of_a_low_level_operator_is_registered_or_rejected(namespace):
    calls = []
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> ()")
        library.impl("op", calls.append, BACKEND)
        library.impl("op", lambda x: None, "Meta")
        op = getattr(torch.ops, namespace).op
        torchop.register_effect(op, "ordered", lib=library)

        def branches(x):
            return torch.cond(x.sum() > 0, lambda x: (op(x), x.sin())[1], torch.cos, (x,))

        torch.compile(lambda x: (op(x), x + 1)[1], backend="aot_eager")(torch.ones(2))
        assert len(calls) == 1
        with pytest.raises(Exception, match="from a graph inside a graph"):
            torch.compile(branches, backend="aot_eager")(torch.ones(2))
        with pytest.raises(torchop.TracingError, match="vmap does not define"):
            torch.vmap(lambda x: (op(x), x)[1])(torch.ones(2, 2))


def test_effect_that_pytorch_finds_in_a_schema_is_found_here_too(namespace):
    def scenario(library, namespace):
        schema = "(Tensor x, __torch__.torch.classes.c10d.ProcessGroup group) -> Tensor"
        return has_effects(define_with(library, namespace, schema))

    def define_with(library, namespace, schema):
        kernel = lambda x, group: x.clone()  # noqa: E731  (a lambda has no annotations)
        return library.custom_op(
            f"{namespace}::op", kernel, mutates_args=(), schema=schema
        )._opoverload

    assert on_both(scenario, namespace) == (True, True)


def test_rule_of_the_user_for_functionalization_replaces_the_guard(namespace):
    op = define(namespace)
    seen = []

    @op.register_torch_dispatch(FunctionalTensorMode)
    def _(mode, func, types, args, kwargs):
        seen.append(func)
        with mode:
            return args[0] * 2

    function = torch.compile(lambda x: op(x) + 1, backend="aot_eager")
    assert function(torch.ones(2)).tolist() == [3.0, 3.0]
    assert set(seen) == {op.overload}


def test_effect_ends_with_the_library_that_holds_it(namespace):
    op = define(namespace)
    with torchop.Library(namespace, "FRAGMENT") as library:
        torchop.register_effect(op, ORDERED, lib=library)
        assert has_effects(op.overload)
    assert not has_effects(op.overload)


def test_closing_library_brings_back_the_effect_before(namespace):
    op = define(namespace)
    op.register_effect(ORDERED)
    with torchop.Library(namespace, "FRAGMENT") as library:
        torchop.register_effect(op, None, lib=library)
        assert not has_effects(op.overload)
    assert has_effects(op.overload)


def test_library_with_an_effect_is_freed(namespace):
    torchop.define(f"{namespace}::log", "(Tensor x) -> Tensor")
    library = torchop.Library(namespace, "FRAGMENT")
    torchop.register_effect(f"{namespace}::log", ORDERED, lib=library)
    reference = weakref.ref(library)
    del library
    gc.collect()
    assert reference() is None
    assert registries.effect_of(f"{namespace}::log") is None


def test_handle_repr_shows_the_effect(namespace):
    op = define(namespace)
    op.register_effect(ORDERED)
    assert "effect ORDERED" in repr(op)


def test_the_guard_of_a_call_stays_as_long_as_some_library_declares_the_effect(namespace):
    def guarded():
        return registries.torch_dispatch_rule(f"{namespace}::log", FunctionalTensorMode) is not None

    owner = torch.library.Library(namespace, "DEF")
    owner.define("log(Tensor x) -> ()")
    with torchop.Library(namespace, "FRAGMENT") as first:
        torchop.register_effect(f"{namespace}::log", ORDERED, lib=first)
        with torchop.Library(namespace, "FRAGMENT") as second:
            torchop.register_effect(f"{namespace}::log", ORDERED, lib=second)
            assert guarded()
        assert guarded()
    assert not guarded()
    owner._destroy()


def test_closing_the_older_of_two_libraries_keeps_the_effect_of_the_other(namespace):
    torchop.define(f"{namespace}::log", "(Tensor x) -> ()")
    first, second = (torchop.Library(namespace, "FRAGMENT") for _ in range(2))
    for library in (first, second):
        torchop.register_effect(f"{namespace}::log", ORDERED, lib=library)
    first.close()
    assert registries.effect_of(f"{namespace}::log") is ORDERED
    second.close()
    assert registries.effect_of(f"{namespace}::log") is None


def test_the_rule_of_define_stays_after_an_effect_is_withdrawn(namespace):
    def guarded():
        return registries.torch_dispatch_rule(f"{namespace}::log", FunctionalTensorMode) is not None

    torchop.define(f"{namespace}::log", "(Tensor x) -> ()")
    with torchop.Library(namespace, "FRAGMENT") as library:
        torchop.register_effect(f"{namespace}::log", ORDERED, lib=library)
    assert guarded()
