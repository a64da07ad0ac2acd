"""Triton kernels. They are in a module, because Triton reads their source from its file."""

import triton
import triton.language as tl


@triton.jit
def add_one(x, result, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(result + offsets, tl.load(x + offsets, mask=inside) + 1, mask=inside)
