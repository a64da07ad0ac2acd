"""Turn NumPy's sin into an operator that writes to a buffer, and into one with all usual forms."""

import numpy as np
import torch
from torch import Tensor

import torchop


# This operator writes to `out` and returns nothing. Autograd and compilers only know about the
# write because of `mutates_args`.
@torchop.custom_op("examples::numpy_sin", mutates_args=("out",), device_types="cpu")
def numpy_sin(x: Tensor, out: Tensor) -> None:
    np.sin(x.numpy(), out=out.numpy())


# This operator has the same forms as torch.sin: sin(x), sin(x, out=buffer), and sin_(x) in place.
# `elementwise` says that the kernel reads each element before it writes the result, so `out` may be
# the input.
@torchop.out_op("examples::sin", like="x", inplace=True, elementwise=True, device_types="cpu")
def sin(x: Tensor, *, out: Tensor) -> None:
    np.sin(x.numpy(), out=out.numpy())


def keep_input(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


@sin.register_autograd(setup_context=keep_input)
def backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad * x.cos()


@torch.compile(fullgraph=True)
def sine_and_double(x: Tensor) -> tuple[Tensor, Tensor]:
    buffer = torch.empty_like(x)
    numpy_sin(x, buffer)
    return buffer, 2 * buffer


@torch.compile(fullgraph=True)
def all_forms(x: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    allocated = sin(x)
    written = sin(allocated, out=buffer)
    overwritten = x.clone()
    sin.inplace(overwritten)
    return allocated, written, overwritten


def main() -> None:
    x = torch.linspace(0, 3, 4, dtype=torch.double)

    buffer = torch.empty_like(x)
    numpy_sin(x, buffer)
    torch.testing.assert_close(buffer, x.sin())
    print("eager:   ", buffer)

    # In a compiled graph too, the buffer is read only after the operator has written to it.
    sine, double = sine_and_double(x)
    torch.testing.assert_close(sine, buffer)
    torch.testing.assert_close(double, 2 * buffer)
    print("compiled:", sine, "and doubled:", double)

    # The write bumps the buffer's version, so a backward that needs the old values raises an error.
    weight = torch.ones(4, dtype=torch.double, requires_grad=True)
    product = weight * buffer
    numpy_sin(x, buffer)
    try:
        product.sum().backward()
    except RuntimeError as error:
        print("backward after the buffer was overwritten:", str(error).partition(":")[0])
    else:
        raise AssertionError("backward used an overwritten buffer")

    # All three forms return the same results, in eager mode and compiled.
    eager = sin(x), sin(sin(x), out=torch.empty_like(x)), sin.inplace(x.clone())
    compiled = all_forms(x, buffer)
    torch.testing.assert_close(eager, (x.sin(), x.sin().sin(), x.sin()))
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(buffer, x.sin().sin())
    print(sin, "agree, eager and compiled")

    # The same formula is used for all forms, here for the in-place form.
    angle = torch.tensor([0.0, 1.0], dtype=torch.double, requires_grad=True)
    doubled = angle * 2
    sin.inplace(doubled)
    doubled.sum().backward()
    torch.testing.assert_close(angle.grad, 2 * (2 * angle.detach()).cos())
    print("gradient through sin_:", angle.grad)

    # If the buffer has the wrong shape, the call raises an error before it writes anything.
    try:
        sin(x, out=torch.empty(3))
    except torchop.MutationError as error:
        print("rejected:", error)
    else:
        raise AssertionError("a buffer of another shape was written")

    for sample in (
        torch.randn(3),
        torch.empty(0, 3),
        torch.randn(2, 3, dtype=torch.double).t(),
        torch.randn(10)[3:],
    ):
        torchop.opcheck(numpy_sin, (sample, torch.empty_like(sample)))
        torchop.opcheck(sin.functional, (sample,))
        torchop.opcheck(sin.out, (sample,), {"out": torch.empty_like(sample)})
        torchop.opcheck(sin.inplace, (sample,))
    torchop.opcheck(sin.functional, (torch.randn(3, requires_grad=True),))


if __name__ == "__main__":
    main()
