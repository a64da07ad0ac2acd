from __future__ import annotations

import inspect
import threading

import pytest
import torch
from torch import Tensor

import torchop


def adding(namespace: str, count: int):
    names = [f"x{index}" for index in range(count)]

    def add(*args: Tensor) -> Tensor:
        return torch.stack(args).sum(0)

    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
        for name in names
    ]
    add.__signature__ = inspect.Signature(parameters, return_annotation=Tensor)
    op = torchop.custom_op(f"{namespace}::op", add, mutates_args=())
    op.register_fake(lambda *args: torch.empty_like(args[0]))
    return op


@pytest.mark.parametrize("method", ["derive_autograd", "derive_out"])
def test_too_many_arguments_for_a_derived_operator(namespace, method):
    op = adding(namespace, 64)
    expected = (
        rf"{namespace}::op: this needs an operator {namespace}::op\S+ with \d+ arguments, but"
    )
    with pytest.raises(torchop.SchemaError, match=expected):
        getattr(op, method)()
    assert op(*[torch.ones(1)] * 64).tolist() == [64]
    assert [name for name in torch._C._dispatch_get_all_op_names() if f"{namespace}::" in name] == [
        str(op.name)
    ]


def test_as_many_arguments_as_pytorch_supports(namespace):
    op = adding(namespace, 63)
    op.derive_out()
    result = torch.zeros(1)
    op.out(*[torch.ones(1)] * 63, out=result)
    assert result.tolist() == [63]


def test_two_threads_derive_the_same_helper_operators(namespace):
    """The second thread needs a helper operator that the first one has not finished defining."""
    attached, may_continue = threading.Event(), threading.Event()

    class Waiting(torchop.Rule):
        def of_derived(self, op, kind, origin, value):
            return value

        def attach(self, op):
            if "__training" in str(op):
                attached.set()
                assert may_continue.wait(30)

    waiting = Waiting(f"waiting_{namespace}")

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.sin()

    op.register_fake(torch.empty_like)
    waiting.register(op, lambda x: x)
    errors = []

    def derive():
        try:
            op.derive_autograd()
        except BaseException as error:
            errors.append(error)

    first = threading.Thread(target=derive)
    first.start()
    assert attached.wait(30)
    second = threading.Thread(target=derive)
    second.start()
    second.join(30)
    may_continue.set()
    first.join()
    assert not second.is_alive()
    assert errors == []
    x = torch.ones(2, requires_grad=True)
    torch.compile(op, backend="aot_eager", fullgraph=True)(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(2).cos())
