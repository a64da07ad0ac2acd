"""NumPy's sin as an operator that writes its result into a buffer of the caller's."""

import numpy as np
import torch
from torch import Tensor

import torchop


# Whoever reads `mutates_args` (autograd, the compiler) knows that `out` is another one afterwards.
# Nothing is returned, so there is nothing that a fake kernel would have to describe.
@torchop.custom_op("examples::numpy_sin", mutates_args=("out",), device_types="cpu")
def numpy_sin(x: Tensor, out: Tensor) -> None:
    np.sin(x.numpy(), out=out.numpy())


@torch.compile(fullgraph=True)
def sine_and_double(x: Tensor) -> tuple[Tensor, Tensor]:
    buffer = torch.empty_like(x)
    numpy_sin(x, buffer)
    return buffer, 2 * buffer


def main() -> None:
    x = torch.linspace(0, 3, 4, dtype=torch.double)

    buffer = torch.empty_like(x)
    numpy_sin(x, buffer)
    torch.testing.assert_close(buffer, x.sin())
    print("eager:   ", buffer)

    # The compiler keeps the order of writing the buffer and reading it.
    sine, double = sine_and_double(x)
    torch.testing.assert_close(sine, buffer)
    torch.testing.assert_close(double, 2 * buffer)
    print("compiled:", sine, "and doubled:", double)

    # Autograd counts the write: what it saved before it is not used silently.
    weight = torch.ones(4, dtype=torch.double, requires_grad=True)
    product = weight * buffer
    numpy_sin(x, buffer)
    try:
        product.sum().backward()
    except RuntimeError as error:
        print("backward after the buffer was overwritten:", str(error).partition(":")[0])
    else:
        raise AssertionError("backward used an overwritten buffer")

    for shape in [(3,), (0, 3), (1, 2, 3, 4)]:
        torchop.opcheck(numpy_sin, (torch.randn(shape), torch.empty(shape)))


if __name__ == "__main__":
    main()
