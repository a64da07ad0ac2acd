"""Kernels and rules get the schema's defaults, even if their own defaults differ."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torchop
from tests._support.common import on_both
from tests._support.devices import TYPE

SCHEMA = (
    "(Tensor x, int n=3, float f=0.5, bool b=True, str s='text', ScalarType dtype=float64, "
    "Device device='cpu', int[] sizes=[1, 2], int? none=None, *, ScalarType? key_dtype=int32, "
    "int key=7) -> Tensor"
)
EXPECTED = {
    "n": 3,
    "f": 0.5,
    "b": True,
    "s": "text",
    "dtype": torch.float64,
    "device": torch.device("cpu"),
    "sizes": [1, 2],
    "none": None,
    "key_dtype": torch.int32,
    "key": 7,
}


def original(x, n, f, b, s, dtype, device, sizes, none, *, key_dtype, key):
    return x.clone()


class Recorder:
    """Functions to register as kernels and rules, which record their arguments.

    The defaults of these functions differ from the schema's.
    """

    def __init__(self):
        self.seen = None

    def kernel(
        self, x, n=0, f=0.0, b=None, s="", dtype=None, device=None, sizes=(), none=5, *,
        key_dtype=None, key=0,
    ):  # fmt: skip
        self.seen = {name: value for name, value in locals().items() if name in EXPECTED}
        return torch.empty_like(x)

    def vmap(self, info, in_dims, *args, **kwargs):
        return self.kernel(*args, **kwargs), 0

    def setup_context(self, ctx, inputs, keyword_only_inputs, output):
        self.kernel(*inputs, **keyword_only_inputs)


def call(op):
    op(torch.ones(2))


def call_meta(op):
    op(torch.ones(2, device="meta"))


def call_fake(op):
    with FakeTensorMode():
        op(torch.ones(2))


def call_with_gradient(op):
    op(torch.ones(2, requires_grad=True))


def backward(ctx, grad):
    return grad, *(None,) * 8


REGISTRATIONS = {
    "kernel": (lambda op, r: op.register_kernel(TYPE)(r.kernel), call),
    "fake kernel on meta": (lambda op, r: op.register_fake(r.kernel), call_meta),
    "fake kernel": (lambda op, r: op.register_fake(r.kernel), call_fake),
    "vmap rule": (lambda op, r: op.register_vmap(r.vmap), lambda op: torch.vmap(op)(torch.ones(2))),
    "setup_context": (
        lambda op, r: op.register_autograd(backward, setup_context=r.setup_context),
        call_with_gradient,
    ),
}


@pytest.mark.parametrize(("register", "run"), REGISTRATIONS.values(), ids=REGISTRATIONS)
def test_omitted_arguments_have_the_defaults_of_the_schema(namespace, register, run):
    def scenario(library, namespace):
        op = library.custom_op(f"{namespace}::op", original, mutates_args=(), schema=SCHEMA)
        recorder = Recorder()
        register(op, recorder)
        run(op)
        return recorder.seen

    both = on_both(scenario, namespace)
    assert both.ours == EXPECTED
    assert both.stock != EXPECTED


@pytest.mark.parametrize(("register", "run"), REGISTRATIONS.values(), ids=REGISTRATIONS)
def test_defaults_of_annotations_are_seen_too(namespace, register, run):
    def annotated(
        x: Tensor,
        n: int = 3,
        f: float = 0.5,
        b: bool = True,
        s: str = "text",
        dtype: torch.dtype = torch.float64,
        device: torch.device = "cpu",
        sizes: list[int] = [1, 2],  # noqa: B006  (a schema may have this default)
        none: int | None = None,
        *,
        key_dtype: torch.dtype | None = torch.int32,
        key: int = 7,
    ) -> Tensor:
        return x.clone()

    op = torchop.custom_op(f"{namespace}::op", annotated, mutates_args=())
    recorder = Recorder()
    register(op, recorder)
    run(op)
    assert recorder.seen == EXPECTED


@pytest.mark.parametrize(("register", "run"), REGISTRATIONS.values(), ids=REGISTRATIONS)
def test_argument_that_is_passed_is_not_replaced_by_a_default(namespace, register, run):
    op = torchop.custom_op(f"{namespace}::op", original, mutates_args=(), schema=SCHEMA)
    recorder = Recorder()
    register(op, recorder)
    run(lambda x: op(x, 4, key=8))
    assert recorder.seen == {**EXPECTED, "n": 4, "key": 8}
