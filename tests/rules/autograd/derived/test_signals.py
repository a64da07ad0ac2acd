"""A signal handler that raises, at each point where Python calls one, while a formula is used."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import torchop
from tests.rules.autograd.derived.support import derived
from tests.rules.support import leaf_of
from torchop import DerivedFormulaError


class Interrupt(BaseException):
    """What the handler raises."""


def interrupted(run: Callable[[], Any], number: int) -> bool:
    """Whether the run came as far as this point, where an Interrupt was raised.

    The interpreter calls handlers where a Python function begins, and where a call has ended. That
    is also where it tells a profiler, which may raise an exception in their place.
    """
    left = number

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise Interrupt

    sys.setprofile(profile)
    try:
        run()
    except Interrupt:
        return True
    except Exception as error:
        # Autograd's engine and the dispatcher hand on what was raised in them.
        if left >= 0:
            raise
        del error
        return True
    finally:
        sys.setprofile(None)
    return left < 0


def state() -> dict[str, Any]:
    functions: Any = torch._C._functorch
    return {
        "grad mode": torch.is_grad_enabled(),
        "forward mode": forward_ad._is_fwd_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "included keys": torch._C._dispatch_tls_local_include_set().raw_repr(),
        "excluded keys": torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "leaves": functions.get_inplace_requires_grad_allowed(),
        "levels": functions.get_single_level_autograd_function_allowed(),
    }


def check_at_each_point(run: Callable[[], Any], *, draws: bool = True) -> None:
    """Checks the state of the thread, and of random numbers unless the run `draws` some."""
    run()
    gc.collect()
    before, random = state(), torch.get_rng_state()
    for number in itertools.count():
        reached = interrupted(run, number)
        assert state() == before, number
        gc.collect(0)  # what the traceback held
        assert state() == before, number
        assert draws or torch.equal(torch.get_rng_state(), random), number
        if not reached:
            break
    assert number > 20


def body(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.sin() * torch.rand(x.shape), x.cos(), x.detach() * 2


def backward(op: Any) -> None:
    x = leaf_of(0.5, 1.5)
    torch.autograd.grad(op(x)[0].sum(), x)


def second_derivative(op: Any) -> None:
    x = leaf_of(0.5, 1.5)
    (gradient,) = torch.autograd.grad(op(x)[1].sum(), x, create_graph=True)
    torch.autograd.grad(gradient.sum(), x)


def refused(op: Any) -> None:
    x = leaf_of(0.5, 1.5)
    with contextlib.suppress(DerivedFormulaError):
        torch.autograd.grad(op(x)[2].sum(), x)


@pytest.mark.pairwise
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("scenario", [backward, second_derivative, refused])
# An exception in a generator that is closed is lost, whoever raises it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_thread_is_as_before(namespace, native, scenario):
    op = derived(f"{namespace}::f", body)
    with contextlib.nullcontext() if native else torchop.native.disabled():
        check_at_each_point(functools.partial(scenario, op))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_thread_is_as_before_after_a_forward_with_autocast(namespace):
    op = derived(f"{namespace}::f", body)
    x = leaf_of(0.5, 1.5)
    with torch.autocast("cpu"):
        y = op(x)[0].sum()
    check_at_each_point(lambda: torch.autograd.grad(y, x, retain_graph=True), draws=False)


def test_the_thread_is_as_before_where_calls_are_checked(namespace):
    op = derived(f"{namespace}::f", body)
    with torchop.checking():
        check_at_each_point(lambda: op(torch.ones(2)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_thread_is_as_before_inside_of_a_transform(namespace):
    op = derived(f"{namespace}::f", body)

    def function(x: Tensor) -> Tensor:
        # Here, because functions of the transform itself are not safe from signals.
        check_at_each_point(lambda: op(x))
        return op(x)[0].sum()

    torch.func.grad(function)(torch.rand(2))
    torch.vmap(torch.func.grad(function), randomness="same")(torch.rand(1, 2))
