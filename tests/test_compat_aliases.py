"""If results share memory, operators behave as if the engine had registered them itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.library
from torch import Tensor
from torch._functorch import config as aot_config
from torch._inductor import config as inductor_config

import torchop
from torchop.compat import direct_register_custom_op


def engines_helper(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: list[str],
    fake_impl: Callable[..., Any],
    target_lib: torch.library.Library,
) -> None:
    """Register an operator like `direct_register_custom_op` of vLLM."""
    schema = torch.library.infer_schema(op_func, mutates_args=mutates_args)
    target_lib.define(op_name + schema)
    target_lib.impl(op_name, op_func, "CompositeExplicitAutograd")
    target_lib._register_fake(op_name, fake_impl)


def itself(x: Tensor) -> Tensor:
    return x


def view(x: Tensor) -> Tensor:
    return x[1:]


def out(x: Tensor, out: Tensor) -> Tensor:
    return out.copy_(x * 2)


def sometimes(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else x + 1


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    result = x * 2
    return result, result


def fresh(x: Tensor) -> Tensor:
    return x * 2


def fresh_pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def empty_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    result = torch.empty_like(x)
    return result, result


# Maps each kernel to a fake kernel whose results alias in the same way, to a fake kernel whose
# results do not alias, and to the words that describe the alias in messages.
KERNELS: dict[Callable[..., Any], tuple[Callable[..., Any], Callable[..., Any], str]] = {
    itself: (itself, torch.empty_like, "output 0 is input 'x' itself"),
    view: (view, lambda x: x.new_empty(x.shape[0] - 1), "output 0 shares memory with input 'x'"),
    out: (lambda x, out: out, lambda x, out: torch.empty_like(x), "output 0 is input 'out' itself"),
    sometimes: (itself, torch.empty_like, "output 0 is input 'x' itself"),
    twice: (empty_twice, fresh_pair, "output 1 shares memory with output 0"),
    fresh: (torch.empty_like, torch.empty_like, ""),
}
ALIASING = [kernel for kernel in KERNELS if kernel is not fresh]
EACH = pytest.mark.parametrize("kernel", KERNELS)
ERROR = "error_on_custom_op_aliasing"  # the name of an option of AOTAutograd
FAKE_ALIASES = pytest.mark.parametrize("fake_aliases", [True, False])
GRAD = pytest.mark.parametrize("requires_grad", [False, True])


def both(
    namespace: str, kernel: Callable[..., Any], fake_aliases: bool
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Register the kernel with the engine's function and with torchop's.

    Return both operators, and the handle of torchop's.
    """
    fake = KERNELS[kernel][0 if fake_aliases else 1]
    mutates_args = ["out"] if kernel is out else []
    packets = []
    handle: Any = None
    for register, suffix in ((engines_helper, "_helper"), (direct_register_custom_op, "")):
        library = torch.library.Library(namespace + suffix, "FRAGMENT")
        LIBRARIES.append(library)
        handle = register("op", kernel, mutates_args, fake, library)
        packets.append(getattr(torch.ops, namespace + suffix).op)
    return packets[0], packets[1], handle


LIBRARIES: list[torch.library.Library] = []


@pytest.fixture
def aliasing_is_no_error() -> Iterator[None]:
    """Make PyTorch only warn about results that share memory. If CI=1, it raises an error."""
    with aot_config.patch({ERROR: False}) if hasattr(aot_config, ERROR) else nullcontext():
        yield


def arguments(kernel: Callable[..., Any], sign: int, requires_grad: bool) -> list[Tensor]:
    x = (torch.arange(1.0, 4.0) * sign).requires_grad_(requires_grad)
    return [x, torch.zeros(3)] if kernel is out else [x]


def described(result: Any, args: list[Tensor]) -> list[Any]:
    """Return the values of the arguments and results, and which of them share memory."""
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    everything = [*args, *results]
    return [
        (
            t.tolist(),
            [n for n, other in enumerate(everything) if other is t],
            [
                n
                for n, other in enumerate(everything)
                if other.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
            ],
            (t.requires_grad, t.is_leaf, t._is_view(), type(t.grad_fn).__name__),
        )
        for t in everything
    ]


@EACH
@GRAD
@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.filterwarnings("ignore:.*returns such results anyway")
def test_eager_calls_behave_as_with_the_engines_helper(
    namespace: str, kernel: Any, requires_grad: bool, context: Any
) -> None:
    theirs, ours, handle = both(namespace, kernel, fake_aliases=True)
    for sign in (-1, 1, -1):

        def seen(op: Any, sign: int = sign) -> list[Any]:
            with context():
                args = arguments(kernel, sign, requires_grad)
                return described(op(*args), args)

        expected = seen(theirs)
        assert seen(ours) == expected
        assert seen(handle) == expected
        with torchop.native.disabled():
            assert seen(ours) == expected
    if not requires_grad:
        assert torchop.explain(handle, *arguments(kernel, 1, False)).native


@pytest.mark.pairwise
@EACH
@FAKE_ALIASES
@pytest.mark.parametrize(
    ("backend", "requires_grad"),
    [("aot_eager", True), ("inductor", False)],
)
@pytest.mark.usefixtures("aliasing_is_no_error")
@pytest.mark.filterwarnings("ignore:.*returns such results anyway")
# PyTorch itself warns about both operators.
@pytest.mark.filterwarnings("ignore:.*The output of this custom operator")
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_compiled_calls_behave_as_with_the_engines_helper(
    namespace: str, kernel: Any, fake_aliases: bool, backend: str, requires_grad: bool
) -> None:
    theirs, ours, _ = both(namespace, kernel, fake_aliases)

    def seen(op: Any) -> list[Any]:
        def add_one(*args: Tensor) -> Any:
            result = op(*args)
            if isinstance(result, tuple):
                return [t + 1 for t in result]
            return result + 1

        found = []
        for function in (lambda *args: op(*args), add_one):
            torch._dynamo.reset()
            compiled = torch.compile(function, backend=backend, fullgraph=True)
            args = arguments(kernel, 1, requires_grad)
            # Turn off the caches on disk, which identify code by the operator's name. They would
            # return code that was compiled for a different kernel.
            with (
                inductor_config.patch(fx_graph_cache=False),
                aot_config.patch(enable_autograd_cache=False),
            ):
                found.append(described(compiled(*args), args))
        return found

    assert seen(ours) == seen(theirs)


@pytest.mark.skipif(not hasattr(aot_config, ERROR), reason="this PyTorch does not check it")
@pytest.mark.parametrize("kernel", [itself, view, sometimes, twice])
@pytest.mark.filterwarnings("ignore:.*returns such results anyway")
def test_pytorch_raises_the_same_error_as_for_the_engines_helper(
    namespace: str, kernel: Any
) -> None:
    def raised(op: Any) -> str:
        torch._dynamo.reset()
        compiled = torch.compile(lambda *args: op(*args), backend="aot_eager", fullgraph=True)
        with (
            aot_config.patch(**{ERROR: True, "enable_autograd_cache": False}),
            pytest.raises(RuntimeError, match="may not alias any inputs") as caught,
        ):
            compiled(*arguments(kernel, 1, False))
        return str(caught.value)

    theirs, ours, _ = both(namespace, kernel, fake_aliases=False)
    assert raised(ours) == raised(theirs).replace("_helper::", "::")


@pytest.mark.parametrize("kernel", ALIASING)
@pytest.mark.parametrize("is_native", [True, False])
def test_first_result_that_shares_memory_raises_a_warning(
    namespace: str, kernel: Any, is_native: bool
) -> None:
    _, _, op = both(namespace, kernel, fake_aliases=True)
    with nullcontext() if is_native else torchop.native.disabled():
        if kernel is sometimes:
            op(*arguments(kernel, -1, False))  # with -1, the result does not alias
        with pytest.warns(UserWarning, match="returns such results anyway") as caught:
            op(*arguments(kernel, 1, False))
        message = str(caught[0].message)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert message.startswith(f"{namespace}::op: ")
        assert KERNELS[kernel][2] in message
        assert "Return a copy, .clone()" in message or "Return None" in message
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            op(*arguments(kernel, 1, False))


def test_warning_turned_into_an_error_is_raised_again(namespace: str) -> None:
    _, _, op = both(namespace, itself, fake_aliases=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(UserWarning, match="returns such results anyway"):
                op(torch.ones(1))


def test_autograd_formula_can_be_registered(namespace: str) -> None:
    _, packet, op = both(namespace, fresh, fake_aliases=True)
    op.register_autograd(lambda ctx, grad: grad * 7)
    x = torch.ones(2, requires_grad=True)
    for call in (packet, op):
        (gradient,) = torch.autograd.grad(call(x).sum(), x)
        assert gradient.tolist() == [7, 7]
