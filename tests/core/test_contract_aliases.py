import ctypes

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import on_both
from tests._support.devices import BACKEND


def define(namespace, kernel, signature="(Tensor x, Tensor?[] ys) -> Tensor"):
    return torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), schema=signature)


TWO = "(Tensor x, Tensor?[] ys) -> (Tensor, Tensor)"
LISTED = "(Tensor x, Tensor?[] ys) -> Tensor[]"


def same(t):
    return [t, t]


ALIASES = {
    "an input": (lambda x, ys: x, None, "output 0 is input 'x' itself"),
    "a view": (lambda x, ys: x[:1], None, "output 0 shares memory with input 'x'"),
    "a transpose": (lambda x, ys: x.view(1, -1).T, None, "output 0 shares memory with input 'x'"),
    "a detached input": (lambda x, ys: x.detach(), None, "output 0 shares memory with input 'x'"),
    "an input of a list": (lambda x, ys: ys[1], None, r"output 0 is input 'ys\[1\]' itself"),
    "a view of a list": (lambda x, ys: ys[1][:1], None, r"output 0 shares .* input 'ys\[1\]'"),
    "the second output": (lambda x, ys: (x + 1, x), TWO, "output 1 is input 'x' itself"),
    "two equal outputs": (
        lambda x, ys: tuple(same(x + 1)),
        TWO,
        "output 1 shares memory with output 0",
    ),
    "two overlapping outputs": (
        lambda x, ys: (x + 1).split(1),
        TWO,
        "output 1 shares memory with output 0",
    ),
    "an output of a list": (lambda x, ys: [x + 1, x], LISTED, r"output 0\[1\] is input 'x' itself"),
    "a view in a list": (
        lambda x, ys: [x + 1, x[:1]],
        LISTED,
        r"output 0\[1\] shares memory with input 'x'",
    ),
    "overlapping outputs of a list": (
        lambda x, ys: [*(x + 1).split(1)],
        LISTED,
        r"output 0\[1\] shares memory with output 0\[0\]",
    ),
    "equal outputs of a list": (
        lambda x, ys: same(x + 1),
        LISTED,
        r"output 0\[1\] shares memory with output 0\[0\]",
    ),
}


@pytest.mark.parametrize(("kernel", "schema", "words"), ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_output_that_shares_memory_is_refused_with_the_place_and_the_remedy(
    namespace, mode, kernel, schema, words
):
    op = define(namespace, kernel, *filter(None, [schema]))
    x, y = torch.ones(2), torch.ones(2)
    with mode(), pytest.raises(RuntimeError, match=f"{namespace}::op: {words}") as caught:
        op(x, [None, y])
    assert isinstance(caught.value, torchop.AliasError)
    message = str(caught.value)
    assert "may not alias" in message
    assert ".clone()" in message
    assert "mutates_args" in message


@pytest.mark.parametrize("path", ["handle", "overload", "packet"])
def test_operator_stays_usable_after_an_alias(namespace, path):
    op = define(namespace, lambda x, ys: x if ys else x.clone())
    packet = getattr(torch.ops, namespace).op
    call = {"handle": op, "overload": op.overload, "packet": packet}[path]
    x = torch.ones(2)
    with pytest.raises(torchop.AliasError):
        call(x, [None])
    assert call(x, []).tolist() == [1, 1]


def test_input_that_requires_grad_may_not_be_returned_either(namespace):
    op = define(namespace, lambda x, ys: x)
    with pytest.raises(torchop.AliasError, match="input 'x'"):
        op(torch.ones(2, requires_grad=True), [])


def test_message_of_pytorch_names_neither_output_nor_input(namespace):
    def scenario(library, namespace):
        op = library.custom_op(
            f"{namespace}::op", lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        op(torch.ones(2))

    both = on_both(scenario, namespace)
    assert "output 0 is input 'x' itself" in str(both.ours)
    assert "output 0" not in str(both.stock)
    assert "may not alias" in str(both.stock)
    assert isinstance(both.stock, RuntimeError)


def test_mutable_operator_may_not_return_its_mutated_argument(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=("x",))
    def op(x: Tensor) -> Tensor:
        return x.add_(1)

    x = torch.ones(2)
    message = r"output 0 is input 'x' itself, and the operator mutates it.*torch\.Tag\.inplace"
    with pytest.raises(torchop.AliasError, match=message):
        op(x)


def test_view_operator_may_return_a_view(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x: x[:1],
        mutates_args=(),
        schema="(Tensor(a) x) -> Tensor(a)",
    )
    x = torch.ones(2)
    assert op(x).untyped_storage()._cdata == x.untyped_storage()._cdata


def test_operator_of_a_library_may_return_a_view(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x[:1], BACKEND)
        assert getattr(torch.ops, namespace).op(torch.ones(2)).shape == (1,)


def test_results_that_are_no_tensors_alias_nothing(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda n: (n, n),
        mutates_args=(),
        schema="(SymInt n) -> (SymInt, SymInt)",
    )
    assert op(3) == (3, 3)


@pytest.mark.parametrize("size", [0, 3])
def test_fresh_outputs_are_accepted(namespace, size):
    op = define(namespace, lambda x, ys: (x.clone(), torch.empty_like(x)), TWO)
    first, second = op(torch.ones(size), [torch.ones(size), None])
    assert first.shape == second.shape == (size,)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_input_may_not_be_returned_either(namespace):
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    with pytest.raises(torchop.AliasError, match="output 0 is input 'x' itself"):
        op(torch.eye(2).to_sparse())


@pytest.mark.parametrize(
    ("shape", "words"),
    [((2, 3), "'x' of shape [2, 3]."), ((0, 3), "'x' of shape [0, 3] (empty).")],
)
def test_an_alias_error_names_the_shapes_of_the_call(namespace, shape, words):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.contiguous()

    with pytest.raises(torchop.AliasError) as caught:
        op(torch.ones(shape))
    assert f"output 0 is input 'x' itself, in a call with {words}" in str(caught.value)


# --------------------------------------------------------------------------------------------------
# Memory that tensors share through another library, so that their storages differ


def through_numpy(tensor):
    return torch.from_numpy(tensor.numpy())


def through_dlpack(tensor):
    return torch.from_dlpack(tensor.numpy())


def through_a_buffer(tensor):
    return torch.frombuffer(memoryview(tensor.numpy()), dtype=tensor.dtype)


def through_an_address(tensor):
    values = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return torch.frombuffer(values, dtype=tensor.dtype)


SHARING = [through_numpy, through_dlpack, through_a_buffer, through_an_address]


FOREIGN_ALIASES = {
    "an input": (lambda share: lambda x, ys: share(x), None, "output 0 shares .* input 'x'"),
    "a part": (lambda share: lambda x, ys: share(x)[1:], None, "output 0 shares .* input 'x'"),
    "an input of a list": (
        lambda share: lambda x, ys: share(ys[1]),
        None,
        r"output 0 shares .* input 'ys\[1\]'",
    ),
    "the second output": (
        lambda share: lambda x, ys: (x + 1, share(x)),
        TWO,
        "output 1 shares memory with input 'x'",
    ),
    "two outputs": (
        lambda share: lambda x, ys: (lambda y: (y, share(y)))(x + 1),
        TWO,
        "output 1 shares memory with output 0",
    ),
    "an output of a list": (
        lambda share: lambda x, ys: [x + 1, share(x)],
        LISTED,
        r"output 0\[1\] shares memory with input 'x'",
    ),
    "two outputs of a list": (
        lambda share: lambda x, ys: (lambda y: [share(y), share(y)])(x + 1),
        LISTED,
        r"output 0\[1\] shares memory with output 0\[0\]",
    ),
}


@pytest.mark.parametrize(("make", "schema", "words"), FOREIGN_ALIASES.values(), ids=FOREIGN_ALIASES)
@pytest.mark.parametrize("share", SHARING)
def test_memory_shared_through_another_library_is_an_alias(namespace, make, schema, words, share):
    op = define(namespace, make(share), *filter(None, [schema]))
    x, ys = torch.ones(4), [None, torch.ones(4)]
    for call in (op, op.overload, getattr(torch.ops, namespace).op):
        with pytest.raises(torchop.AliasError, match=words):
            call(x, ys)


@pytest.mark.parametrize("share", [through_numpy, through_dlpack])
def test_fresh_memory_of_another_library_is_no_alias(namespace, share):
    buffer = torch.arange(8.0).numpy()

    def kernel(x, ys):
        if not x.numel():
            return [share(x), x.detach().clone()]
        return [share(x * 2), share(x * 3), torch.from_numpy(buffer[4:])]

    op = define(namespace, kernel, LISTED)
    results = op(torch.from_numpy(buffer[:4]), [])
    assert [result[1].item() for result in results] == [2, 3, 5]
    assert [result.numel() for result in op(torch.ones(0), [])] == [0, 0]
    assert [result.numel() for result in op(torch.ones(0, 3), [])] == [0, 0]


def test_a_lazy_copy_is_no_alias(namespace):
    op = define(namespace, lambda x, ys: torch._lazy_clone(x))
    assert op(torch.ones(2), []).tolist() == [1, 1]
