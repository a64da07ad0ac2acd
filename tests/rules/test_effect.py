"""Effects: what compilers must neither drop nor reorder."""

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.effects import has_effects
from torch.fx.experimental.proxy_tensor import make_fx

import torchop
from support import on_both

ORDERED = torchop.EffectType.ORDERED


def define(namespace, library=torchop):
    @library.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.clone()

    op.register_fake(lambda x: torch.empty_like(x))
    return op


def test_effect_is_the_one_that_pytorch_sees(namespace):
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


def test_calls_with_an_effect_stay_in_a_traced_graph(namespace):
    op = define(namespace)
    op.register_effect(ORDERED)
    calls = []
    op.register_kernel("cpu")(lambda x: calls.append(x) or x.clone())

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x):
        op(x)  # the result is not used
        op(x)
        return x + 1

    function(torch.ones(2))
    assert len(calls) == 2


def test_calls_without_an_effect_are_dropped_if_unused(namespace):
    op = define(namespace)
    graph = make_fx(lambda x: (op(x), x + 1)[1])(torch.ones(2))
    graph.graph.eliminate_dead_code()
    assert "op" not in {str(node.target) for node in graph.graph.nodes}
    assert len([node for node in graph.graph.nodes if node.op == "call_function"]) == 1


@pytest.mark.parametrize("effect", ["ORDERED", 1, True])
def test_what_is_no_effect_is_refused(namespace, effect):
    with pytest.raises(ValueError, match="expects an EffectType or None"):
        define(namespace).register_effect(effect)


def test_mutation_is_no_effect(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=("x",))
    def op(x: Tensor) -> None:
        x.add_(1)

    with pytest.raises(ValueError, match=f"{namespace}::op: PyTorch ignores the effect"):
        op.register_effect(ORDERED)
    assert not has_effects(op.overload)


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


def test_operator_that_nobody_defined_is_refused(namespace):
    with pytest.raises(torchop.OperatorNotFoundError):
        torchop.register_effect(f"{namespace}::absent", ORDERED)


def test_handle_says_its_effect(namespace):
    op = define(namespace)
    op.register_effect(ORDERED)
    assert "effect ORDERED" in repr(op)
