import pytest
import torch
from torch import Tensor

import torchop
from tests._support.devices import BACKEND, TYPE
from tests.rules.support import adding_one as define


def missing(call) -> str:
    with pytest.raises(NotImplementedError) as caught:
        call()
    assert isinstance(caught.value, torchop.MissingKernelError)
    return str(caught.value)


OTHERS = [
    device
    for device in ("cuda", "privateuseone", "xpu")
    if torch._C._dispatch_key_for_device(device) != BACKEND
]


@pytest.mark.parametrize("device", OTHERS)
def test_missing_kernel_names_both_devices_and_the_remedy(namespace, device):
    op = define(namespace, device_types=device)
    message = missing(lambda: op(torch.zeros(1)))
    assert f"{namespace}::op does not have a kernel registered for {TYPE}" in message
    assert f"it has kernels for: {device}" in message
    assert f"@op.register_kernel('{TYPE}')" in message
    op.register_kernel(TYPE)(lambda x: x + 10)
    assert op(torch.zeros(1)).item() == 10


def test_missing_kernel_is_named_for_a_factory_of_another_device(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=(), device_types="cpu")
    def op(n: int, device: torch.device) -> Tensor:
        return torch.ones(n, device=device)

    message = missing(lambda: op(2, "cuda"))
    assert "does not have a kernel registered for cuda; it has kernels for: cpu" in message


@pytest.mark.parametrize(
    ("convert", "layout", "device"),
    [
        (lambda x: x.to_sparse(), "torch.sparse_coo", TYPE),
        (lambda x: x.to_mkldnn(), "torch._mkldnn", "cpu"),
        (lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8), "quantized", "cpu"),
    ],
    ids=["sparse", "mkldnn", "quantized"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # quantized tensors are deprecated
def test_missing_kernel_for_a_tensor_that_is_not_dense_names_the_layout(
    namespace, convert, layout, device
):
    op = define(namespace, device_types=device)
    tensor = convert(torch.zeros(1, device=device))
    message = missing(lambda: op(tensor))
    assert f"does not have a kernel registered for {device} with the layout {layout}" in message
    assert f"it has kernels for: {device}, but only for dense tensors" in message
    assert "register_kernel(None)" in message


@pytest.mark.parametrize("arguments", [(None, []), (None, [None])])
def test_call_without_any_tensor_says_that_there_is_no_device(namespace, arguments):
    @torchop.custom_op(f"{namespace}::op", mutates_args=(), device_types=TYPE)
    def op(x: Tensor | None, xs: list[Tensor | None]) -> Tensor:
        return torch.zeros(1)

    message = missing(lambda: op(*arguments))
    assert "was called without a tensor" in message
    assert f"it has kernels for: {TYPE}" in message
    assert "register_kernel(None)" in message
    assert op(torch.zeros(1), []).item() == 0


def test_operator_defined_for_no_device_says_so(namespace):
    op = define(namespace, device_types=[])
    assert "it has no kernel at all" in missing(lambda: op(torch.zeros(1)))
