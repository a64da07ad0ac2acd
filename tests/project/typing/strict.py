# pyright: strict
"""In pyright's strict mode, the types of a lambda's parameters must be inferred.

A parameter without a type would be an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

import torchop


@torchop.custom_op("typed::crop", mutates_args=())
def crop(pic: Tensor, box: list[int], *, pad: bool = False) -> Tensor: ...


@torchop.out_op("typed::sine", allocate=lambda x: torch.empty_like(x))
def sine(x: Tensor, *, out: Tensor) -> Tensor: ...


@crop.register_autograd(setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))
def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]: ...


crop.register_kernel("cpu", lambda pic, box, pad: pic.crop(box, pad))
crop.register_fake(lambda pic, box, pad: pic.new_empty(box))
crop.register_fake(shape=lambda pic: (pic.shape[0],))
crop.register_autograd(
    lambda ctx, grad: (ctx.saved_tensors[0] * grad, None),
    setup_context=lambda ctx, inputs, keyword_only_inputs, output: ctx.save_for_backward(inputs[0]),
)
crop.register_jvp(lambda ctx, tangent, _: ctx.factor * tangent)
crop.register_vmap(lambda info, in_dims, pic, box, pad: (pic.clone(), in_dims[0]))
crop.register_torch_dispatch(Tensor, lambda mode, func, types, args, kwargs: func(*args))
crop.register_examples(lambda: [(torch.ones(3), [0, 1])])
crop.register_inverse(lambda output, box, pad: output.clone())
crop.register_flop_formula(lambda pic, box, pad: box[0].numel())
crop.register("cost", lambda pic, box: pic.numel())
torchop.register_fake(crop, lambda pic, box, pad: pic.new_empty(box))
sine.register_autograd(lambda ctx, grad: grad * ctx.factor)
print(crop(torch.ones(3), [0, 1]).shape, sine(torch.ones(3)).shape)
