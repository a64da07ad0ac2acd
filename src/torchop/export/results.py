"""Checks of what operators return, before a package of AOTInductor relies on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.export import ExportedProgram

import torchop
from torchop._compat.classes import TorchDispatchMode
from torchop._compat.fake_results import copied, fake_results, is_builtin
from torchop.extend import OpOverload, named_outputs, short_text, warn

# What AOTInductor can take from an operator, by `export_extern_kernel_node` in
# torch/_inductor/ir.py. It does not name the operator of which it cannot.
_SUPPORTED = ("Tensor", "Optional[Tensor]", "List[Tensor]", "NoneType")


def check_results(ep: ExportedProgram) -> None:
    """Run a program on its example inputs, and compare results of operators with fake kernels.

    Compiled code reads the memory of a result by the metadata that the fake kernel returned.

    Raises:
        FakeKernelError: they differ.
    """
    if ep.example_inputs is None:
        return
    module = ep.module()
    try:
        # Of buffers too, because a program may write into its buffers.
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
    """The operators of a program whose results AOTInductor cannot take, and these results."""
    for op in dict.fromkeys(filter(_is_custom, _operators(ep))):
        kinds = [str(result.real_type) for result in op._schema.returns]
        if any(kind not in _SUPPORTED for kind in kinds):
            yield f"{op.name()} returns {', '.join(kinds)}"


def _operators(ep: ExportedProgram) -> Iterator[OpOverload]:
    for module in ep.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            called = (node.target, *node.args)  # a higher-order operator gets it as an argument
            yield from (item for item in called if isinstance(item, OpOverload))


def _is_custom(op: OpOverload) -> bool:
    return not is_builtin(op)


class _Comparing(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # it has no annotations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or not _is_custom(func):
            return func(*args, **kwargs)
        # Before the call, which may write into its arguments.
        expected = [*named_outputs(fake_results(func, args, kwargs))]
        result = func(*args, **kwargs)
        actual = [*named_outputs(result)]
        places = [[place for place, _ in results] for results in (expected, actual)]
        if places[0] != places[1]:
            raise _error(func, *(", ".join(each) or "no tensor" for each in places))
        for (where, promised), (_, tensor) in zip(expected, actual, strict=True):
            for name, one, other in _metadata(promised, tensor):
                if one != other:
                    raise _error(func, f"{name} {one} for {where}", f"{other}")
        return result


def _metadata(promised: torch.Tensor, tensor: torch.Tensor) -> Iterator[tuple[str, Any, Any]]:
    """The metadata of two tensors, without sizes that depend on data."""
    yield "dtype", promised.dtype, tensor.dtype
    yield "device", promised.device, tensor.device
    yield "layout", promised.layout, tensor.layout
    yield "number of dimensions", promised.ndim, tensor.ndim
    yield "shape", *_known(promised.shape, tensor.shape)
    if tensor.layout is torch.strided and tensor.numel():
        # The stride of a dimension of size 1 has no meaning.
        long = [index for index, size in enumerate(tensor.shape) if size > 1]
        strides = ([each.stride(index) for index in long] for each in (promised, tensor))
        yield "strides", *_known(*strides)


def _known(promised: Any, actual: Any) -> tuple[list[Any], list[Any]]:
    pairs = [
        (one, other)
        for one, other in zip(promised, actual, strict=False)
        if not isinstance(one, torch.SymInt)
    ]
    return [one for one, _ in pairs], [other for _, other in pairs]


def _error(op: OpOverload, promised: str, returned: str) -> Exception:
    return torchop.FakeKernelError(
        f"{op.name()}: its fake kernel returned {promised}, but the kernel returned {returned}. "
        "A package reads results by what the fake kernel returned. Correct the fake kernel or the "
        "kernel, and export the program again."
    )
