"""Check the operator with torchop.testing.check, and compare the results with PyTorch's."""

import mykernels
import pytest
import torch


# The marker creates one test for each check of torchop.testing.check. The checks use the registered
# examples, so exclude `softcap_` and `softcap.out`, because they have none.
@pytest.mark.torchop("mykernels::*", exclude=["*_", "*.out"])
def test_operators(torchop_check):
    torchop_check()


def test_softcap_is_a_scaled_tanh():
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)
    expected = 30 * torch.tanh(x / 30)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    compiled = torch.compile(lambda x: mykernels.softcap(x), fullgraph=True, backend="aot_eager")
    for call in (mykernels.softcap, compiled):
        result = call(x)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(torch.autograd.grad(result.sum(), x)[0], gradient)


def test_softcap_writes_into_its_output():
    x = torch.randn(3, 7).t()
    out = torch.empty(7, 3)
    assert mykernels.softcap(x, 2.0, out=out) is out
    torch.testing.assert_close(out, 2 * torch.tanh(x / 2))


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="softcap takes float32"):
        mykernels.softcap(torch.ones(2, dtype=torch.float64))
