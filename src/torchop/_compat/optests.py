"""The tests of `torch.library.opcheck`, and a tensor subclass for testing operators."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import _prims_common
from torch._library.simple_registry import singleton

from torchop._compat import registries
from torchop._compat.classes import tree_map_only


@functools.cache
def opcheck_error(base: type[Exception]) -> type[Exception]:
    from torch.testing._internal.optests import generate_tests

    return type(base.__name__, (base, generate_tests.OpCheckError), {"__module__": base.__module__})


@functools.cache
def opcheck_tests() -> Mapping[str, Callable[..., Any]]:
    """Return the tests of `torch.library.opcheck` by name. The first call takes two seconds.

    Workaround for pytorch/pytorch#149468: before 2.13, `test_faketensor` does not compare the
    strides of CPU tensors, so replace it with a test that does. Remove this once 2.13 is the oldest
    supported release.
    """
    from torch.testing._internal.optests import generate_tests

    tests = cast("Mapping[str, Callable[..., Any]]", generate_tests.ALL_TEST_UTILS)
    if _strides_are_compared():
        return tests
    return {**tests, "test_faketensor": _comparing_strides(tests["test_faketensor"])}


def _strides_are_compared() -> bool:
    tensor = torch.empty(2, 2)
    try:
        _prims_common.compare_tensor_meta(tensor, tensor.t(), check_strides=True)
    except Exception:  # the class of this error differs between releases
        return True
    return False


def _comparing_strides(check: Callable[..., Any]) -> Callable[..., Any]:
    from unittest import mock  # slow import

    compare = _prims_common.check_significant_strides

    @functools.wraps(check)
    def checked(*args: Any, **kwargs: Any) -> Any:
        everywhere = functools.partial(compare, only_cuda=False)
        with mock.patch.object(_prims_common, "check_significant_strides", everywhere):
            return check(*args, **kwargs)

    return checked


def without_autograd_fallback() -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which operators without a backward formula record no gradient.

    By default, PyTorch's fallback kernel for such operators makes the results require grad, and
    then warns in the backward pass (torch/csrc/autograd/autograd_not_implemented_fallback.cpp).
    """
    from torch.testing._internal.optests import autograd_registration

    return autograd_registration.set_autograd_fallback_mode("nothing")


@contextlib.contextmanager
def default_device_of_fake(qualname: str, device: str) -> Iterator[None]:
    """Make `device` the default device inside an operator's fake kernel.

    Wrapping the call in `with torch.device(...)` would not work, because PyTorch disables
    TorchFunctionModes before it runs a fake kernel.
    """
    kernel = singleton.find(qualname).fake_impl.kernel

    def fake(*args: Any, **kwargs: Any) -> Any:
        with torch.device(device):
            return kernel(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        if kernel is not None:
            _, remove = registries.register_fake(qualname, fake, __name__)
            stack.callback(remove)
        yield


class PassingTensor(torch.Tensor):
    """A tensor subclass that runs every operator on the tensor that it wraps."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> PassingTensor:
        wrapper: PassingTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )
        wrapper.wrapped = inner
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]  # without an argument that nobody passes
        return f"PassingTensor({self.wrapped!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared as the function that disables it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        wrappers = {}

        def unwrap(wrapper: PassingTensor) -> torch.Tensor:
            wrappers[id(wrapper.wrapped)] = wrapper
            return wrapper.wrapped

        plain_args, plain_kwargs = tree_map_only(cls, unwrap, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)

        def wrap(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, cls):
                return tensor
            return wrappers[id(tensor)] if id(tensor) in wrappers else cls(tensor)

        return tree_map_only(torch.Tensor, wrap, result)
