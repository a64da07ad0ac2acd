"""Train the layer of `linear.py` with several options, in eager mode and compiled."""

import itertools

import torch
from linear import Inputs, Quantizer, linear


class Linear(torch.nn.Module):
    def __init__(self, options: dict[str, Quantizer], *, has_bias: bool) -> None:
        super().__init__()
        self.options = options
        self.weight = torch.nn.Parameter(torch.randn(4, 8))
        self.bias = torch.nn.Parameter(torch.zeros(4)) if has_bias else None

    def forward(self, x):
        inputs = Inputs(x, self.weight, self.bias, **self.options, saves=self.training)
        return linear(inputs).y


def losses(options: dict[str, Quantizer], *, has_bias: bool, backend: str | None) -> list[float]:
    torch.manual_seed(0)
    layer, x = Linear(options, has_bias=has_bias), torch.randn(16, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    call = layer if backend is None else torch.compile(layer, fullgraph=True, backend=backend)
    found = []
    for _ in range(5):
        loss = call(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    names = ("x_quantizer", "weight_quantizer", "grad_quantizer")
    for is_quantized, has_bias in itertools.product((False, True), repeat=2):
        options = dict.fromkeys(names, Quantizer()) if is_quantized else {}
        eager = losses(options, has_bias=has_bias, backend=None)
        torch._dynamo.reset()
        compiled = losses(options, has_bias=has_bias, backend="aot_eager")
        torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager))
        print(
            f"quantized: {is_quantized}, bias: {has_bias}. The loss falls from {eager[0]:.3f} to "
            f"{eager[-1]:.3f}, in eager mode and compiled."
        )
    print(linear.schema)
