"""What tests operators: the checks of `torch.library.opcheck`, and a Tensor that passes all on."""

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
    """An exception that is `base`, and PyTorch's own OpCheckError too."""
    from torch.testing._internal.optests import generate_tests

    return type(base.__name__, (base, generate_tests.OpCheckError), {"__module__": "torchop"})


@functools.cache
def opcheck_tests() -> Mapping[str, Callable[..., Any]]:
    """PyTorch's checks, by name; imported only when asked for, because they take two seconds."""
    from torch.testing._internal.optests import generate_tests

    tests = cast("Mapping[str, Callable[..., Any]]", generate_tests.ALL_TEST_UTILS)
    if _strides_are_compared():
        return tests
    return {**tests, "test_faketensor": _comparing_strides(tests["test_faketensor"])}


@contextlib.contextmanager
def quick_inductor() -> Iterator[dict[str, Any]]:
    """The options of `torch.compile` with which Inductor compiles one small program quickest.

    It would compile six other programs first, to see which vector instructions it may use, and
    headers that pay off after ten programs, and would start processes that import PyTorch. For an
    operator it is all the same, because it is called and not compiled.
    """
    from unittest import mock  # milliseconds, as below

    from torch._inductor import cpu_vec_isa  # it takes a second

    with mock.patch.object(cpu_vec_isa, "supported_vec_isa_list", []):
        yield {"compile_threads": 1, "cpp.simdlen": 1, "cpp_cache_precompile_headers": False}


def _strides_are_compared() -> bool:
    """Whether the check of fake kernels compares strides on the CPU, which it does since 2.13."""
    tensor = torch.empty(2, 2)
    try:
        _prims_common.compare_tensor_meta(tensor, tensor.t(), check_strides=True)
    except Exception:  # the class has moved
        return True
    return False


def _comparing_strides(check: Callable[..., Any]) -> Callable[..., Any]:
    from unittest import mock  # milliseconds, which only opcheck should take

    compare = _prims_common.check_significant_strides

    @functools.wraps(check)
    def checked(*args: Any, **kwargs: Any) -> Any:
        everywhere = functools.partial(compare, only_cuda=False)
        with mock.patch.object(_prims_common, "check_significant_strides", everywhere):
            return check(*args, **kwargs)

    return checked


@contextlib.contextmanager
def default_device_of_fake(qualname: str, device: str) -> Iterator[None]:
    """Runs the fake kernel of an operator where this device is the default one.

    PyTorch leaves a mode such as `torch.device` before it runs the kernel.
    """
    kernel = singleton.find(qualname).fake_impl.kernel

    def fake(*args: Any, **kwargs: Any) -> Any:
        with torch.device(device):
            return kernel(*args, **kwargs)

    registration = registries.FakeRegistration(qualname, fake, __name__)
    if kernel is not None:
        registration.push()
    try:
        yield
    finally:
        if kernel is not None:
            registration.remove()


class PassingTensor(torch.Tensor):
    """Wraps a tensor, and passes every operator on to it."""

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

    def __repr__(self) -> str:  # type: ignore[override]  # which has an argument nobody passes
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

        # An argument that is returned has the wrapper that was passed, as in-place calls need.
        def wrap(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, cls):
                return tensor
            return wrappers[id(tensor)] if id(tensor) in wrappers else cls(tensor)

        return tree_map_only(torch.Tensor, wrap, result)
