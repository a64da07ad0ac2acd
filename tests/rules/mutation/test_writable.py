"""A mutation that PyTorch forbids raises before the kernel runs.

Each test makes the same call with an operator of PyTorch, and compares the error messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from torchop import MutationError

pytestmark = pytest.mark.parametrize("route", ["native", "dispatched"])


@pytest.fixture(autouse=True)
def _route(route: str) -> Iterator[None]:
    if route == "native":
        yield
    else:
        with torchop.native.disabled():
            yield


@pytest.fixture
def add_(namespace: str) -> Any:
    @torchop.custom_op(
        f"{namespace}::add_", mutates_args=("x",), schema="(Tensor(a!) x, Tensor y) -> Tensor(a!)"
    )
    def add_(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    add_.register_autograd(
        lambda ctx, grad: (grad, grad.sum_to_size(ctx.shape)), setup_context=_shape
    )
    return add_


def _shape(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shape = inputs[1].shape


@pytest.fixture
def store(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::store", mutates_args=("out",))
    def store(x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    return store


@pytest.fixture
def sincos(namespace: str) -> Any:
    @torchop.custom_op(
        f"{namespace}::sincos",
        mutates_args=("s", "c"),
        schema="(Tensor x, *, Tensor(a!) s, Tensor(b!) c) -> (Tensor(a!), Tensor(b!))",
    )
    def sincos(x: Tensor, *, s: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(x, out=s), torch.cos(x, out=c)

    return sincos


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)


def grown() -> Tensor:
    return torch.ones(4, requires_grad=True) * 2


def _in_no_grad(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor[:2]


def _in_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor[:2]


def _through_function(tensor: Tensor) -> Tensor:
    class Slice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x[:2]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.cat([grad, grad])

    return Slice.apply(tensor)


WITHOUT_HISTORY = {
    "a leaf": lambda: torch.ones(2, requires_grad=True),
    "a view of a leaf": lambda: torch.ones(4, requires_grad=True)[:2],
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "a view from no_grad": lambda: _in_no_grad(grown()),
    "a view from inference mode": lambda: _in_inference_mode(grown()),
    "one of several views": lambda: grown().split(2)[1],
    "a view from a function": lambda: _through_function(grown()),
}


@pytest.mark.parametrize("make", WITHOUT_HISTORY.values(), ids=WITHOUT_HISTORY)
def test_forbidden_mutation_raises_pytorchs_message(make: Callable[[], Tensor], add_: Any) -> None:
    native, ours = make(), make()
    words = refusal(lambda: native.add_(torch.ones(2)))
    message = refusal(lambda: add_(ours, torch.ones(2)))
    assert message.startswith(f"{add_.name}: argument 'x': ")
    ended = re.compile("Backward0?")  # the end of an autograd node's name
    problem = ended.sub("", message.split("'x': ")[1])
    # Our message starts with PyTorch's words, and goes on with how to fix the problem.
    assert problem.startswith(ended.sub("", words))
    assert torch.equal(ours, make())
    assert ours._version == make()._version
    with torch.no_grad():
        assert add_(ours, torch.ones(2)) is ours
    assert torch.equal(ours, make() + 1)


def test_a_leaf_is_refused_although_the_operator_has_no_formula(namespace: str) -> None:
    @torchop.custom_op(
        f"{namespace}::double_", mutates_args=("x",), schema="(Tensor(a!) x) -> Tensor(a!)"
    )
    def double_(x: Tensor) -> Tensor:
        return x.mul_(2)

    leaf = torch.ones(2, requires_grad=True)
    words = refusal(lambda: leaf.mul_(2))
    message = refusal(lambda: double_(leaf))
    assert message.startswith(f"{double_.name}: argument 'x': {words}")
    assert torch.equal(leaf, torch.ones(2))


def test_history_matters_as_soon_as_any_input_requires_grad(add_: Any) -> None:
    view = _in_no_grad(torch.ones(4))
    words = refusal(lambda: view.add_(torch.ones(2, requires_grad=True)))
    assert refusal(lambda: add_(view, torch.ones(2, requires_grad=True))).endswith(words)
    add_(view, torch.ones(2))
    assert torch.equal(view, torch.full((2,), 2.0))


def test_an_operator_in_another_form_writes_nothing_that_requires_grad(store: Any) -> None:
    out = grown()
    with pytest.raises(
        MutationError,
        match=r"store: argument 'out': .*lose the gradient.*functional one\..*, pass x\.det",
    ):
        store(torch.ones(4), out)
    assert torch.equal(out, torch.full((4,), 2.0))
    with pytest.raises(MutationError, match="'out': a leaf Variable that requires grad"):
        store(torch.ones(4), torch.zeros(4, requires_grad=True))
    store(torch.ones(4), out.detach())
    assert torch.equal(out, torch.ones(4))


def test_buffer_without_grad_accepts_a_value_with_grad(store: Any) -> None:
    """The gradient of the value is lost, so the first such call warns."""
    out = torch.zeros(4)
    with torch.no_grad():
        store(grown(), torch.zeros(4))
    store(grown().detach(), torch.zeros(4))
    with pytest.warns(UserWarning, match=rf"^{store.name}: input 'x' requires grad.*x\.detach\(\)"):
        store(grown(), out)
    store(grown(), out)  # warnings are errors here
    assert torch.equal(out, torch.full((4,), 2.0))
    assert not out.requires_grad


def test_elements_that_share_memory_are_refused(add_: Any, store: Any, sincos: Any) -> None:
    wide = torch.zeros(1).expand(3)
    words = refusal(lambda: wide.sin_())
    assert refusal(lambda: add_(wide, torch.ones(3))) == f"{add_.name}: argument 'x': {words}"
    assert refusal(lambda: store(torch.ones(3), wide)) == f"{store.name}: argument 'out': {words}"
    message = refusal(lambda: sincos(torch.ones(3), s=torch.empty(3), c=wide))
    assert message == f"{sincos.name}: argument 'c': {words}"
    assert torch.equal(wide, torch.zeros(3))


def test_part_of_an_input_is_refused(add_: Any, sincos: Any) -> None:
    x = torch.arange(6.0)
    words = refusal(lambda: x[2:].add_(x[:4]))
    message = refusal(lambda: add_(x[2:], x[:4]))
    assert message == f"{add_.name}: argument 'x' and input 'y': {words}"
    message = refusal(lambda: sincos(x[1:5], s=torch.empty(4), c=x[:4]))
    assert message == f"{sincos.name}: argument 'c' and input 'x': {words}"
    assert torch.equal(x, torch.arange(6.0))


def test_a_whole_input_and_memory_outside_it_are_allowed(add_: Any, sincos: Any) -> None:
    x = torch.arange(6.0)
    assert torch.equal(add_(x, x), 2 * torch.arange(6.0))
    assert torch.equal(add_(x[3:], x[:3]), torch.tensor([6.0, 10.0, 14.0]))
    angle = torch.ones(2)
    sincos(angle, s=torch.empty(2), c=angle)
    assert torch.equal(angle, torch.ones(2).cos())


def test_one_tensor_cannot_be_two_outputs(sincos: Any) -> None:
    out = torch.zeros(2)
    with pytest.raises(MutationError, match="argument 's' and argument 'c': unsupported"):
        sincos(torch.ones(2), s=out, c=out)
    assert torch.equal(out, torch.zeros(2))


def test_an_operator_with_buffers_may_share_their_memory(namespace: str) -> None:
    # Input and output may share memory, because some kernels, such as this one, read the whole
    # input before they write.
    @torchop.custom_op(f"{namespace}::shift", mutates_args=("out",))
    def shift(x: Tensor, out: Tensor) -> None:
        out.copy_(x.clone())

    x = torch.arange(4.0)
    shift(x[:3], x[1:])
    assert x.tolist() == [0.0, 0.0, 1.0, 2.0]


def test_inference_tensors_are_refused_outside_of_inference_mode(add_: Any, store: Any) -> None:
    with torch.inference_mode():
        x = torch.zeros(2)
        other = torch.zeros(2)
    words = refusal(lambda: other.add_(1))
    sentence = "Inplace update to inference tensor outside InferenceMode is not allowed."
    assert words.startswith(sentence)
    assert refusal(lambda: add_(x, torch.ones(2))).startswith(
        f"{add_.name}: argument 'x': {sentence}"
    )
    assert sentence in refusal(lambda: store(torch.ones(2), x))
    assert torch.equal(x, torch.zeros(2))
    with torch.inference_mode():
        assert torch.equal(add_(x, torch.ones(2)), torch.ones(2))


def test_no_version_counts_if_one_of_several_tensors_is_refused(sincos: Any) -> None:
    with torch.inference_mode():
        frozen = torch.zeros(2)
    free = torch.zeros(2)
    with pytest.raises(MutationError, match="argument 'c': Inplace update"):
        sincos(torch.ones(2), s=free, c=frozen)
    assert free._version == 0


@pytest.mark.parametrize("xs", ["Tensor[]", "Tensor?[]"])
def test_the_entry_of_a_list_is_named(xs: str, namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda xs: None,
        mutates_args=("xs",),
        schema=f"({xs.replace('Tensor', 'Tensor(a!)')} xs) -> ()",
    )
    with pytest.raises(MutationError, match=r"argument 'xs\[1\]': a leaf Variable"):
        op([torch.ones(1), torch.ones(1, requires_grad=True)])
    with pytest.raises(MutationError, match=r"argument 'xs\[1\]': unsupported operation"):
        op([torch.ones(1), torch.ones(1).expand(2)])
