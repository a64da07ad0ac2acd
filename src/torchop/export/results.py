"""Check that kernels and fake kernels agree, before AOTInductor compiles a program.

Compiled code relies on the dtypes, shapes and strides that fake kernels return, so a wrong fake
kernel would make the compiled program return wrong results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.export import ExportedProgram

import torchop
from torchop._compat import graphs
from torchop._compat.classes import TorchDispatchMode
from torchop._compat.fake_results import copied, fake_results, is_builtin
from torchop.extend import OpOverload, named_outputs, short_text, warn

# The result types that AOTInductor supports (`export_extern_kernel_node` in torch/_inductor/ir.py).
# For other types, we raise our own error, because AOTInductor's error does not name the operator.
_SUPPORTED = ("Tensor", "Optional[Tensor]", "List[Tensor]", "NoneType")


def check_results(ep: ExportedProgram) -> None:
    """Run a program on its example inputs, and compare kernels with their fake kernels."""
    if ep.example_inputs is None:
        return
    module = ep.module()
    try:
        # The program may mutate its buffers and inputs, so run it on copies of them.
        buffers, (args, kwargs) = copied((dict(module.named_buffers()), ep.example_inputs))
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _Comparing():
            torch.func.functional_call(module, buffers, args, kwargs)
    except torchop.FakeKernelError:
        raise
    except Exception as error:
        warn(
            "aoti_package: the results of operators were not compared with their fake kernels, "
            f"because the program raised {type(error).__name__} with its example inputs: "
            f"{short_text(error)}",
            UserWarning,
        )


def unsupported_results(ep: ExportedProgram) -> Iterator[str]:
    """Yield a message for each custom operator with result types AOTInductor does not support."""
    for op in filter(_is_custom, graphs.operators_in(ep.graph_module)):
        kinds = [str(result.real_type) for result in op._schema.returns]
        if any(kind not in _SUPPORTED for kind in kinds):
            yield f"{op.name()} returns {', '.join(kinds)}"


def _is_custom(op: OpOverload) -> bool:
    return not is_builtin(op)


class _Comparing(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # has no annotations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or not _is_custom(func):
            return func(*args, **kwargs)
        # Run the fake kernel before the real call, which may mutate the arguments.
        expected = [*named_outputs(fake_results(func, args, kwargs))]
        result = func(*args, **kwargs)
        actual = [*named_outputs(result)]
        places = [[place for place, _ in results] for results in (expected, actual)]
        if places[0] != places[1]:
            raise _error(func, *(", ".join(each) or "no tensor" for each in places))
        for (where, expected_result), (_, tensor) in zip(expected, actual, strict=True):
            for name, one, other in _metadata(expected_result, tensor):
                if one != other:
                    raise _error(func, f"{name} {one} for {where}", f"{other}")
        return result


def _metadata(
    expected_result: torch.Tensor, tensor: torch.Tensor
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, expected, actual) for each kind of metadata, without data-dependent sizes."""
    yield "dtype", expected_result.dtype, tensor.dtype
    yield "device", expected_result.device, tensor.device
    yield "layout", expected_result.layout, tensor.layout
    yield "number of dimensions", expected_result.ndim, tensor.ndim
    yield "shape", *_known(expected_result.shape, tensor.shape)
    if tensor.layout is torch.strided and tensor.numel():
        # The strides of dimensions with size 1 are arbitrary, so ignore these dimensions.
        long = [index for index, size in enumerate(tensor.shape) if size > 1]
        strides = ([each.stride(index) for index in long] for each in (expected_result, tensor))
        yield "strides", *_known(*strides)


def _known(expected_result: Any, actual: Any) -> tuple[list[Any], list[Any]]:
    pairs = [
        (one, other)
        for one, other in zip(expected_result, actual, strict=False)
        if not isinstance(one, torch.SymInt)
    ]
    return [one for one, _ in pairs], [other for _, other in pairs]


def _error(op: OpOverload, expected_result: str, returned: str) -> Exception:
    return torchop.FakeKernelError(
        f"{op.name()}: its fake kernel returned {expected_result}, but the kernel returned "
        f"{returned}. A package relies on the metadata of the fake kernel. Correct one of the two "
        "kernels, and export the program again."
    )
