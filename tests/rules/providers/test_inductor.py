"""Providers as choices of Inductor."""

import pytest
import torch
import torch._inductor.config
from torch import Tensor

import torchop
from tests.devices import TYPE

needs_autotuning = pytest.mark.needs_torch(
    "2.12", "register_custom_op_autotuning that takes any operator"
)


def define(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, w: Tensor, factor: float, eps: float = 1.0) -> Tensor:
        return x * factor + w * eps

    op.register_fake(lambda x, w, factor, eps: torch.empty_like(x))
    return op


@needs_autotuning
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_inductor_measures_what_supports_takes(namespace):
    op = define(namespace)
    traced = []

    def kernel(x, w, factor, eps, *, block):
        traced.append((block, factor, eps))
        return torch.add(w * eps, x, alpha=factor)

    blocks = [{"block": 1}, {"block": 2}]
    op.register_kernel(TYPE, kernel, provider="add", configs=blocks)
    op.register_kernel(TYPE, lambda x, w, factor, eps: x, provider="gone", supported=False)

    @op.register_kernel(TYPE, provider="vast", supports=lambda x, w, factor, eps: x.numel() > 1e9)
    def _(x, w, factor, eps):
        raise AssertionError("its supports says no")

    torchop.autotune_in_inductor(op, ["add", "vast", "gone"])
    compiled = torch.compile(lambda x, w: op(x, w, 3.0), fullgraph=True)
    x, w = torch.arange(6.0), torch.ones(6)
    with torch._inductor.config.patch(fx_graph_cache=False):  # where nothing would be measured
        torch.testing.assert_close(compiled(x, w), x * 3 + 1)
    assert {block for block, *_ in traced} == {1, 2}
    assert {call[1:] for call in traced} == {(3.0, 1.0)}


@needs_autotuning
def test_the_choice_ends_with_the_operator(namespace):
    from torch._inductor.lowering import user_lowerings

    op = define(namespace)
    op.register_kernel(TYPE, lambda x, w, factor, eps: x, provider="add")
    overload = getattr(torch.ops, namespace).op.default
    torchop.autotune_in_inductor(op, ["add"])
    assert overload in user_lowerings
    define(namespace)
    assert overload not in user_lowerings


@pytest.mark.parametrize(
    ("providers", "error", "words"),
    [
        ("add", TypeError, "expects a list of names of providers"),
        (["ad"], torchop.ProviderNameError, "has no provider 'ad'.*did you mean 'add'"),
        (["reference"], torchop.ProviderNameError, "has no provider 'reference'"),
        (["gone"], ValueError, r"no kernel that can run here \(gone: .*supported=False\)"),
        ([], ValueError, "no kernel that can run here"),
    ],
)
def test_choices_that_are_none(namespace, providers, error, words):
    op = define(namespace)
    op.register_kernel(TYPE, lambda x, w, factor, eps: x, provider="add")
    op.register_kernel(TYPE, lambda x, w, factor, eps: x, provider="gone", supported=False)
    with pytest.raises(error, match=f"^autotune_in_inductor.*{words}"):
        torchop.autotune_in_inductor(op, providers)


@pytest.mark.parametrize(
    "schema",
    [
        "(Tensor[] xs) -> Tensor",
        "(Tensor x, Tensor? y) -> Tensor",
        "(Tensor x, int n, Tensor y) -> Tensor",
        "(Tensor(a!) x) -> Tensor",
    ],
)
def test_operators_that_inductor_cannot_hand_on(namespace, schema):
    mutates = ("x",) if "!" in schema else ()
    op = torchop.custom_op(
        f"{namespace}::op", lambda *args: args[0].clone(), mutates_args=mutates, schema=schema
    )
    op.register_kernel(TYPE, lambda *args: args[0].clone(), provider="add")
    with pytest.raises(NotImplementedError, match="takes its tensors first, and does not mutate"):
        torchop.autotune_in_inductor(op, ["add"])
