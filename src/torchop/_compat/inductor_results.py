"""Check the results of operators in programs that Inductor compiles.

Inductor's `codegen_size_asserts` (torch/_inductor/ir.py) only checks sizes and strides. So if a
kernel returned a different dtype than its fake kernel, the program would misread the memory as the
fake kernel's dtype, possibly past the end. AOTInductor packages also check sizes and strides only
if the variable AOTI_RUNTIME_CHECK_INPUTS is set, so they would access memory past the end of a
result that is too small.
"""

from __future__ import annotations

import sys
from typing import Any

from torch._ops import OpOverload

from torchop._compat import import_hooks

_IR = "torch._inductor.ir"
# PyTorch's own namespaces, whose operators need no checks because PyTorch's tests cover them.
_OWN_NAMESPACES = frozenset({"aten", "prim", "prims", "inductor", "quantized", "mkldnn"})


def check_results() -> None:
    """Check operators' results in all programs that Inductor compiles from now on."""
    import_hooks.when_imported(_IR, _connect)


def _connect() -> None:
    kernel: Any = sys.modules[_IR].ExternKernel
    write_size_asserts = kernel.codegen_size_asserts

    def codegen_size_asserts(self: Any, wrapper: Any) -> None:
        operator = _operator(self)
        if operator is not None:
            _write_check(self, wrapper, operator.name().removesuffix(".default"))
        write_size_asserts(self, wrapper)

    kernel.codegen_size_asserts = codegen_size_asserts


def _operator(node: Any) -> OpOverload | None:
    # Each result of a multi-output operator is a separate node, whose only input is the call.
    ir: Any = sys.modules[_IR]
    call = node.inputs[0] if isinstance(node, ir.MultiOutput) else node
    operator = getattr(call, "op_overload", None)
    if not isinstance(operator, OpOverload) or not isinstance(call, ir.FallbackKernel):
        return None
    name = operator.namespace
    return None if name in _OWN_NAMESPACES or name.startswith("_") else operator


def _write_check(node: Any, wrapper: Any, operator: str) -> None:
    from torch._inductor.virtualized import V  # imports Inductor

    name, dtype, device = node.get_name(), node.get_dtype(), node.get_device()
    sizes, strides = node.get_size(), node.get_stride()
    expected = f"{dtype} on {device.type} with shape {[*sizes]} and strides {[*strides]}"
    if not V.graph.cpp_wrapper:
        differs = (
            f"{name}.dtype is not {dtype} or {name}.device.type != {device.type!r} "
            f"or {name}.ndim != {len(sizes)}"
        )
        message = _message(operator, "dtype, device or number of dimensions", expected)
        wrapper.writeline(f"if {differs}: raise RuntimeError({message!r})")
        return
    if V.graph.aot_mode and V.graph.is_const_graph:
        return
    message = _message(operator, "dtype, device, size or stride", expected)
    expected_dtype = wrapper.codegen_dtype(dtype)
    expected_device = wrapper.codegen_device(device).partition(",")[0]
    wrapper.writeline(
        f"{{ int32_t dtype, device; int64_t dim, numel, *sizes, *strides; "
        f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype({name}, &dtype)); "
        f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type({name}, &device)); "
        f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim({name}, &dim)); "
        f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel({name}, &numel)); "
        f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes({name}, &sizes)); "
        f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides({name}, &strides)); "
        f"const std::initializer_list<int64_t> "
        f"expected_sizes = {wrapper.codegen_shape_tuple(sizes)}, "
        f"expected_strides = {wrapper.codegen_shape_tuple(strides)}; "
        f"bool agrees = dtype == {expected_dtype} && device == {expected_device} "
        f"&& dim == {len(sizes)}; "
        # The stride of a dimension of size 0 or 1 has no effect.
        f"for (int64_t d = 0; agrees && d < dim; ++d) "
        f"agrees = sizes[d] == expected_sizes.begin()[d] && "
        f"(numel == 0 || sizes[d] == 1 || strides[d] == expected_strides.begin()[d]); "
        f'if (!agrees) throw std::runtime_error("{message}"); }}'
    )


def _message(operator: str, compared: str, expected: str) -> str:
    return (
        f"{operator}: the kernel returned a tensor with another {compared} than the fake kernel, "
        f"which returned {expected}. Make both agree, and compile again."
    )
