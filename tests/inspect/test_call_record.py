from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import torchop
from tests._support.devices import DEVICE, TYPE
from torchop.testing import TensorRecord, TypeRecord


@pytest.fixture
def recorded_arguments(namespace):
    """Return a function that defines and calls an operator, and returns the record of the call."""

    def record(schema, *args, **kwargs):
        name = f"{namespace}::op"
        torch.library.define(name, schema)
        torch.library.impl(name, "CompositeExplicitAutograd", lambda *a, **k: None)
        with torchop.record(name) as recorded:
            getattr(torch.ops, namespace).op(*args, **kwargs)
        [(call, count)] = recorded[name]
        assert count == 1
        return call

    return record


def tensors():
    x = torch.arange(24.0).reshape(2, 3, 4)
    return {
        "contiguous": x,
        "transposed": x.transpose(0, 2),
        "channels last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.ones(3, 1).expand(3, 4),
        "sliced": x[:, ::2, 1:3],
        "scalar": torch.tensor(3),
        "empty": torch.ones(2, 0, 4),
        "empty transposed": torch.ones(2, 0, 4).transpose(0, 2),
        "bool": torch.ones(2, dtype=torch.bool),
        "complex": torch.ones(2, dtype=torch.complex64),
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
        "bits": torch.ones(4, dtype=torch.uint8).view(torch.bits8),
        "meta": torch.ones(2, 3, device="meta"),
    }


@pytest.mark.parametrize("kind", tensors())
def test_an_example_looks_like_the_tensor(recorded_arguments, kind):
    tensor = tensors()[kind]
    call = recorded_arguments("(Tensor x) -> ()", tensor)
    ((example,), kwargs) = call.example()
    assert kwargs == {}
    assert example.shape == tensor.shape
    assert example.dtype == tensor.dtype
    assert example.device == tensor.device
    assert example.is_contiguous() == tensor.is_contiguous()
    if not tensor.is_contiguous():
        assert example.stride() == tensor.stride()
    assert call.args[0].nbytes == example.untyped_storage().nbytes()
    if tensor.dtype.is_floating_point and not tensor.is_meta:
        assert (example.float() == 1).all()


def test_plain_values_are_recorded_as_they_are(recorded_arguments):
    call = recorded_arguments(
        "(Scalar a, float b, str c, ScalarType d, Device e, int[] f, bool g, *, "
        "MemoryFormat h, Layout i, Tensor?[] j, int? k=1) -> ()",
        1 + 2j, float("inf"), "text", torch.float8_e5m2, torch.device("cuda:3"), (1, 2), True,
        h=torch.channels_last, i=torch.strided, j=[None, torch.ones(1)], k=None,
    )  # fmt: skip
    args = (1 + 2j, float("inf"), "text", torch.float8_e5m2, torch.device("cuda:3"), [1, 2], True)
    assert call.args == args
    tensor = TensorRecord(torch.float32, (1,), str(DEVICE), False)
    assert call.kwargs == {
        "h": torch.channels_last, "i": torch.strided, "j": [None, tensor], "k": None,
    }  # fmt: skip
    made, keywords = call.example()
    assert made == args
    assert torch.equal(keywords["j"][1], torch.ones(1))


class Plain(Tensor):
    pass


UNUSUAL = {
    "sparse_coo tensor": lambda x: x.to_sparse(),
    "quantized tensor": lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.quint8),
    "torch.testing._internal.two_tensor.TwoTensor": lambda x: TwoTensor(x, x.clone()),
    f"{__name__}.Plain": lambda x: x.as_subclass(Plain),
}


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.filterwarnings("ignore")  # quantized tensors are deprecated
def test_unusual_tensors_are_recorded_by_their_kind(recorded_arguments, kind):
    call = recorded_arguments("(Tensor x) -> ()", UNUSUAL[kind](torch.ones(2, 2)))
    assert call.args == (TypeRecord(kind),)
    assert call.example() is None


CONTEXTS = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("make", ["torch", "torchop", "low level", "list"])
def test_gradients_are_recorded_where_the_call_records_them(namespace, make, context):
    name = f"{namespace}::op"
    if make == "low level":
        torch.library.define(name, "(Tensor x) -> Tensor")
        torch.library.impl(name, TYPE, lambda x: x * 2)
        op = getattr(torch.ops, namespace).op
    elif make == "list":
        op = torch.library.custom_op(
            name, lambda xs: xs[0] * 2, mutates_args=(), schema="(Tensor[] xs) -> Tensor"
        )
        op.register_autograd(lambda ctx, g: [g])
    else:
        library = {"torch": torch.library, "torchop": torchop}[make]
        op = library.custom_op(
            name, lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        op.register_autograd(lambda ctx, g: g * 2)
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):  # the first call is dispatched, the second may be native
        with torchop.record(name) as recorded, context():
            op([x] if make == "list" else x)
        [(call, _)] = recorded[name]
        [tensor] = call.parts()
        assert tensor.requires_grad is (context is torch.enable_grad)
