"""Register many operators in one library, as inference engines do."""

import torch
from torch import Tensor

import torchop

engine = torchop.Library("engine", "FRAGMENT")


def register(function, fake, mutates_args=()) -> None:
    """Define an operator with a CPU kernel and a fake kernel, as the helpers of engines do."""
    name = function.__name__
    engine.define(name + torchop.infer_schema(function, mutates_args=mutates_args))
    engine.impl(name, function, "CPU")
    torchop.register_fake(f"engine::{name}", fake, lib=engine)


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def write_cache(key: Tensor, cache: Tensor, slots: Tensor) -> None:
    cache[slots] = key


register(silu_and_mul, lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
register(write_cache, lambda key, cache, slots: None, mutates_args=("cache",))


# The same library can contain operators of `custom_op`. For these, torchop infers the schema and
# checks the results of the kernel.
@torchop.custom_op("engine::rms_norm", mutates_args=(), lib=engine)
def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


rms_norm.register_fake(lambda x, weight, epsilon=1e-6: torch.empty_like(x))


def block(x: Tensor, weight: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    torch.ops.engine.write_cache(torch.ops.engine.silu_and_mul(rms_norm(x, weight)), cache, slots)
    return cache.sum(0)


if __name__ == "__main__":
    x, weight, slots = torch.randn(3, 8), torch.ones(8), torch.tensor([4, 0, 2])
    cache, compiled_cache = torch.zeros(5, 4), torch.zeros(5, 4)
    result = torch.compile(block, fullgraph=True)(x, weight, compiled_cache, slots)
    torch.testing.assert_close((result, compiled_cache), (block(x, weight, cache, slots), cache))
    print("compiled without a graph break, equal to eager, cache included:", result)

    engine.close()  # deregisters all operators, for example to unload a plugin
    assert not hasattr(torch.ops.engine, "silu_and_mul")
    try:
        rms_norm(x, weight)
        raise AssertionError("an operator outlived its library")
    except torchop.OperatorGoneError as error:
        print("after closing the library:", error)
