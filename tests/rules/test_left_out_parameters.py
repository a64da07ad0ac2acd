"""Kernels and rules may leave out the operator's last parameters if these have defaults."""

from __future__ import annotations

from typing import Optional

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torchop
from tests._support.common import on_both
from tests._support.devices import OTHER, TYPE

X = torch.ones(2, 3)


def define(namespace, library):
    @library.custom_op(f"{namespace}::op", mutates_args=(), device_types=OTHER)
    def op(x: Tensor, n: int = 2, y: Optional[Tensor] = None, *, scale: float = 0.5) -> Tensor:
        raise AssertionError("there is no such device here")

    return op


def on_meta(op, *args, **kwargs):
    return op(*(a.to("meta") if isinstance(a, Tensor) else a for a in args), **kwargs).shape


def on_fake(op, *args, **kwargs):
    with FakeTensorMode() as mode:
        args = (mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args)
        return op(*args, **kwargs).shape


def directly(op, *args, **kwargs):
    return op(*args, **kwargs).tolist()


def natively(op, *args, **kwargs):
    op(X)
    return op(*args, **kwargs).tolist()


def batched(op, *args, **kwargs):
    return torch.vmap(lambda x: op(x, *args[1:], **kwargs))(args[0]).tolist()


def short_fake(op):
    op.register_fake(lambda x: torch.empty_like(x))


def short_kernel(op):
    op.register_kernel(TYPE, lambda x: x + 1)


def short_vmap_rule(op):
    op.register_vmap(lambda info, in_dims, x: (x + 1, in_dims[0]))


def up_to_n(op):
    op.register_kernel(TYPE, lambda x, n=7: x + n)


def keyword_alone(op):
    op.register_kernel(TYPE, lambda x, *, scale: x + scale)


CASES = {
    "meta": (short_fake, on_meta, "a fake kernel"),
    "fake": (short_fake, on_fake, "a fake kernel"),
    "kernel": (short_kernel, directly, "a kernel"),
    "native": (short_kernel, natively, "a kernel"),
    "vmap": (short_vmap_rule, batched, "a vmap rule"),
}
ALL = pytest.mark.parametrize(("register", "run", "what"), CASES.values(), ids=CASES)


@ALL
@pytest.mark.parametrize("given", [(), (2,), (2, None)])
def test_a_call_with_the_defaults_does_not_need_them(namespace, register, run, what, given):
    def scenario(library, namespace):
        op = define(namespace, library)
        register(op)
        results = [run(op, X, *given)]
        if library is torchop or run is not batched:  # under vmap, torch.library rejects keywords
            results.append(run(op, X, *given, scale=0.5))
        return results

    both = on_both(scenario, namespace)
    expected = X.shape if register is short_fake else [[2, 2, 2], [2, 2, 2]]
    assert both.ours == [expected] * 2
    assert both.stock == both.ours[: len(both.stock)]


@ALL
@pytest.mark.parametrize(
    ("given", "keywords", "name", "default"),
    [((3,), {}, "n", "2"), ((2, X), {}, "y", "None"), ((), {"scale": 1.5}, "scale", "0.5")],
)
def test_the_error_for_another_value_names_the_parameter(
    namespace, register, run, what, given, keywords, name, default
):
    def scenario(library, namespace):
        op = define(namespace, library)
        register(op)
        return run(op, X, *given, **keywords)

    both = on_both(scenario, namespace)
    assert isinstance(both.stock, Exception)
    assert isinstance(both.ours, torchop.RuleSignatureError)
    message = str(both.ours)
    assert f"{namespace}::op: {what} does not take the parameter {name!r}" in message
    assert f"other than the default {default}" in message
    assert f"Add the parameter {name!r} to " in message
    assert f"{register.__name__}.<locals>.<lambda>" in message


def test_symbolic_value_is_not_compared(namespace):
    def scenario(library, namespace):
        op = define(namespace, library)
        short_fake(op)
        shapes = ShapeEnv()
        mode = FakeTensorMode(shape_env=shapes)
        x = mode.from_tensor(torch.ones(2, 3))
        with mode:
            try:
                # The symbolic size happens to equal the default of `n`, 2. torchop must not compare
                # the size with the default, because that would add a guard.
                op(x, x.shape[0])
            finally:
                assert not shapes.guards

    both = on_both(scenario, namespace)
    assert isinstance(both.stock, TypeError)
    assert "does not take the parameter 'n'" in str(both.ours)


@pytest.mark.parametrize(
    ("register", "call", "expected"),
    [(up_to_n, (X, 3), 4), (up_to_n, (X,), 3), (keyword_alone, (X,), 1.5)],
)
def test_parameters_of_the_function_get_the_schemas_defaults(namespace, register, call, expected):
    op = define(namespace, torchop)
    register(op)
    assert directly(op, *call) == torch.full((2, 3), expected).tolist()


@pytest.mark.parametrize("short", [lambda: X, lambda *, x: x, lambda x, *, other: x])
@pytest.mark.parametrize("method", ["register_fake", "register_kernel"])
def test_function_that_no_call_can_use_is_rejected_at_registration(namespace, short, method):
    op = define(namespace, torchop)
    register = getattr(op, method)
    with pytest.raises(torchop.RuleSignatureError, match=r"is called with \(x, n, y, \*, scale\)"):
        register(*((TYPE,) if method == "register_kernel" else ()), short)


def test_an_operator_of_a_library(namespace):
    # fbgemm registers `masked_select_jagged_1d` in this way: its kernel lacks the last parameter.
    library = torchop.Library(namespace, "FRAGMENT")
    library.define("select(Tensor x, Tensor mask, bool? check=True) -> Tensor")
    torchop.register_fake(f"{namespace}::select", lambda x, mask: torch.empty_like(x), lib=library)
    select = getattr(torch.ops, namespace).select
    assert on_fake(select, X, X).numel() == 6
    with pytest.raises(torchop.RuleSignatureError, match="the parameter 'check', but this call"):
        on_fake(select, X, X, False)
    library.close()
