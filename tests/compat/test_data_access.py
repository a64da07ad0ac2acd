"""Reading the data of a tensor that has none is told from every other failure."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torchop
from torchop._compat.fake_tensors import reads_data

SIN = torch.ops.aten.sin.default


def branch(x):
    return 1 if x.sum() > 0 else 2


READINGS = {
    "item": lambda x: x.sum().item(),
    "int": lambda x: int(x[0]),
    "branch": branch,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
}


def error_of(function, *args) -> Exception:
    with pytest.raises(Exception) as caught:
        function(*args)
    return caught.value


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_reading_a_meta_tensor_is_recognized(reading):
    assert reads_data(error_of(reading, torch.ones(3, device="meta")), SIN)


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_reading_a_fake_tensor_is_recognized(reading):
    with FakeTensorMode():
        assert reads_data(error_of(reading, torch.ones(3)), SIN)


@pytest.mark.parametrize("reading", ["int", "branch", "numpy", "asarray"])
def test_reading_under_a_shape_environment_is_recognized(reading):
    # `item` alone gives a symbol there; what needs its value fails.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(3))
    with mode:
        error = error_of(lambda: range(READINGS[reading](x)))
    assert reads_data(error, SIN)


def test_copying_out_of_a_meta_tensor_is_recognized():
    assert reads_data(error_of(lambda: torch.ones(3, device="meta").cpu()), SIN)


@pytest.mark.parametrize(
    "failure",
    [
        lambda: torch.ones(2) + torch.ones(3),
        lambda: torch.ones(2).undefined,
        lambda: [][0],
        lambda: torch.ones(2, device="meta") @ torch.ones(3, device="meta"),
    ],
    ids=["shapes", "attribute", "index", "meta shapes"],
)
def test_other_failures_are_not_mistaken_for_it(failure):
    assert not reads_data(error_of(failure), SIN)


def test_refusal_by_the_context_of_the_operator_itself_is_not_a_reading(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.nonzero()

    op.register_fake(lambda x: x.new_empty(torchop.get_ctx().new_dynamic_size(), 1))
    with FakeTensorMode():
        x = torch.ones(3)
        error = error_of(op, x)
    assert "DynamicOutputShape" in type(error).__name__
    assert not reads_data(error, op.overload)
    assert reads_data(error, SIN)
