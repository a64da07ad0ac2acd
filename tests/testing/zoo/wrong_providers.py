"""Operators with a correct reference kernel, and a faulty kernel of the provider `fast`."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.testing.zoo.specimen import (
    Examples,
    define,
    like,
    one,
    positive,
    raw,
    rows_and_weights,
    save,
    two,
    wrong,
)


def enter(
    name: str,
    reference: Callable[..., Any],
    kernel: Callable[..., Any],
    check: str,
    examples: Examples = one,
    options: dict[str, Any] | None = None,
    **said: Any,
) -> Any:
    """Add an operator to the zoo, whose provider `fast` must be reported by the given check."""
    op = define(name, reference, **(options or {}))
    op.register_kernel("cpu", kernel, provider="fast", **said)
    return wrong(op, f"{check}[fast]", examples)


def doubled(x: Tensor) -> Tensor:
    return (x + x).contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-2) -> Tensor:
    if not x.is_floating_point():
        raise TypeError(f"rms_norm takes floating-point tensors, got {x.dtype}")
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


# --------------------------------------------------------------------------------------------------
# Results that differ from the reference


def without_eps(x: Tensor, weight: Tensor, eps: float = 1e-2) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * weight


def address(x: Tensor) -> Tensor:
    """Ignores strides, so it reads the elements in the order of memory."""
    memory = raw(x)[x.storage_offset() :][: x.numel()]
    return (memory + memory).view(x.shape)


def in_blocks(x: Tensor) -> Tensor:
    """Processes blocks of 256 elements, and leaves out the elements after the last whole block."""
    flat = x.flatten()
    whole = flat.numel() // 256 * 256 or flat.numel()
    return torch.cat([flat[:whole] * 2, flat[whole:]]).view(x.shape)


def in_singles(x: Tensor) -> Tensor:
    return x.float() * 2 if x.is_floating_point() else x * 2


def keeps_zeros(x: Tensor) -> Tensor:
    """Returns 0 for NaN, where the reference returns NaN."""
    return torch.where(x > 0, x, torch.zeros_like(x))


enter("fast_without_eps", rms_norm, without_eps, "providers.agrees", rows_and_weights)
enter("fast_address", doubled, address, "providers.agrees", options={"fake": like})
enter("fast_in_blocks", doubled, in_blocks, "providers.agrees", options={"fake": like})
enter("fast_in_singles", doubled, in_singles, "providers.agrees", options={"fake": like})
enter(
    "fast_keeps_zeros",
    torch.relu,
    keeps_zeros,
    "providers.agrees",
    options={"schema": "(Tensor x) -> Tensor"},
)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(-1), x.square().mean(-1)


def variances(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the variance, where the reference returns the mean square.

    The tolerance that is declared for bfloat16 must not hide this for other dtypes.
    """
    return x.mean(-1), (x - x.mean(-1, keepdim=True)).square().mean(-1)


enter(
    "fast_second_result",
    moments,
    variances,
    "providers.agrees",
    tolerance={torch.bfloat16: (10.0, 10.0)},
)


def scaled_(x: Tensor, factor: float) -> None:
    x.mul_(factor)


def scaled_but_the_last_(x: Tensor, factor: float) -> None:
    (x[:-1] if x.dim() and len(x) > 1 else x).mul_(factor)


enter(
    "fast_in_place",
    scaled_,
    scaled_but_the_last_,
    "providers.agrees",
    lambda: [(torch.ones(3, 4), 3.0)],
    options={"mutates_args": {"x"}},
)


def sums(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.sum() for x in xs])


def sums_of_pairs(xs: Sequence[Tensor]) -> Tensor:
    """Sums tensors in pairs, and returns 0 for the last one if the number of tensors is odd."""
    found = [x.sum() for x in xs]
    return torch.stack(
        found[: len(xs) // 2 * 2] + [torch.zeros_like(x) for x in found[len(xs) // 2 * 2 :]]
    )


enter(
    "fast_list",
    sums,
    sums_of_pairs,
    "providers.agrees",
    lambda: [([torch.ones(2), torch.ones(3), torch.ones(4)],)],
)


class Ends(NamedTuple):
    low: Tensor
    high: Tensor


def ends(x: Tensor) -> Ends:
    return Ends(x.amin(-1), x.amax(-1))


def swapped_ends(x: Tensor) -> Ends:
    return Ends(x.amax(-1), x.amin(-1))


enter("fast_structure", ends, swapped_ends, "providers.agrees")

# --------------------------------------------------------------------------------------------------
# Faulty `supports` functions


def pairs(x: Tensor) -> Tensor:
    return (x + x.roll(1, -1)) if x.dim() else x + x


def pairs_of_rows(x: Tensor) -> Tensor:
    rows, columns = x.shape
    halves = x.reshape(rows, columns // 2, 2)
    shifted = torch.cat([x[:, -1:], x[:, :-1]], 1).reshape(halves.shape)
    return (halves + shifted).view(x.shape)


def has_columns(x: Tensor) -> bool:
    return x.shape[1] % 2 == 0


def is_matrix(x: Tensor) -> bool:
    return x.dim() == 2


enter("fast_has_columns", pairs, pairs_of_rows, "providers.supports", supports=has_columns)
enter("fast_is_matrix", pairs, pairs_of_rows, "providers.supports", supports=is_matrix)


def is_positive(x: Tensor) -> bool:
    return bool((x > 0).all())


def answers_a_tensor(x: Tensor) -> Any:
    return torch.tensor(x.dim() == 2)


_asked = [0]


def changes_its_mind(x: Tensor) -> bool:
    _asked[0] += 1
    return _asked[0] % 3 != 0


def needs_no_gradient(x: Tensor) -> bool:
    """Depends on the grad mode, although the results of `supports` are cached."""
    return not torch.is_grad_enabled()


def needs_the_default(x: Tensor) -> bool:
    return x.dtype is torch.get_default_dtype()


def seeds(x: Tensor) -> bool:
    torch.manual_seed(0)
    return True


def knows_numbers(x: Tensor) -> bool:
    """Returns False for symbolic sizes, so a compiled call uses a different kernel than eagerly."""
    return all(type(size) is int for size in x.shape)


_sizes: set[Any] = set()


def knows_sizes(x: Tensor) -> bool:
    """Returns False in the first call with a shape, and True in later calls."""
    known = tuple(x.shape) in _sizes
    _sizes.add(tuple(x.shape))
    return known


for question in (
    is_positive,
    answers_a_tensor,
    changes_its_mind,
    needs_no_gradient,
    needs_the_default,
    seeds,
    knows_numbers,
    knows_sizes,
):
    enter(
        f"fast_{question.__name__}",
        doubled,
        doubled,
        "providers.supports",
        supports=question,
        options={"fake": like},
    )


# --------------------------------------------------------------------------------------------------
# Batches


def row_sums(x: Tensor) -> Tensor:
    return x.sum(-1)


def in_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """Add the columns in the given order, which determines how the sum is rounded."""
    total = torch.zeros(x.shape[:-1], dtype=x.dtype)
    for column in order:
        total = total + x[..., column]
    return total


def sums_by_batch(x: Tensor) -> Tensor:
    """Adds the columns in reverse order if there are more than four rows."""
    columns = range(x.shape[-1])
    return in_order(x, columns if x.dim() < 2 or len(x) <= 4 else columns[::-1])


def sums_by_place(x: Tensor) -> Tensor:
    """Adds columns in a different order for the rows after the last whole block of four rows."""
    columns = range(x.shape[-1])
    if x.dim() < 2 or len(x) < 4:
        return in_order(x, columns)
    whole = len(x) // 4 * 4
    return torch.cat([in_order(x[:whole], columns[::-1]), in_order(x[whole:], columns)])


def numbers() -> list[Any]:
    return [(torch.rand(3, 37, generator=torch.Generator().manual_seed(0)),)]


def has_rows(x: Tensor) -> bool:
    return x.dim() > 0 and x.is_floating_point()


for kernel in (sums_by_batch, sums_by_place):
    enter(
        f"fast_{kernel.__name__}",
        row_sums,
        kernel,
        "providers.batch_invariant",
        numbers,
        supports=has_rows,
        batch_invariant=True,
    )

_chance = random.Random(0)


def sums_by_chance(x: Tensor) -> Tensor:
    columns = list(range(x.shape[-1]))
    _chance.shuffle(columns)
    return in_order(x, columns)


enter(
    "fast_by_chance",
    row_sums,
    sums_by_chance,
    "contracts.repeated",
    numbers,
    supports=has_rows,
)

# --------------------------------------------------------------------------------------------------
# Configurations of a provider's kernel


def in_tiles(x: Tensor, tile: int) -> Tensor:
    """Processes whole tiles, and leaves out the elements after the last whole tile."""
    flat = x.flatten()
    tiles = [2 * flat[at : at + tile] for at in range(0, flat.numel() - tile + 1, tile)]
    rest = flat[flat.numel() // tile * tile :]
    return torch.cat([*tiles, rest]).view(x.shape)


def in_few_tiles(x: Tensor, tiles: int) -> Tensor:
    if x.numel() % tiles:
        raise RuntimeError("out of shared memory")
    return torch.cat([2 * part for part in x.flatten().tensor_split(tiles)]).view(x.shape)


enter(
    "fast_in_tiles",
    doubled,
    in_tiles,
    "providers.configs",
    configs=[{"tile": 1}, {"tile": 8}],
    options={"fake": like},
)
enter(
    "fast_in_few_tiles",
    doubled,
    in_few_tiles,
    "providers.configs",
    configs=[{"tiles": 1}, {"tiles": 7}],
    options={"fake": like},
)

# --------------------------------------------------------------------------------------------------
# Gradients: the backward is an operator, with a kernel of the same provider


def cubed(x: Tensor) -> Tensor:
    return x**3


def cubed_backward(grad: Tensor, x: Tensor) -> Tensor:
    return 3 * grad * x**2


def cubed_backward_too_small(grad: Tensor, x: Tensor) -> Tensor:
    return 2.99 * grad * x**2


_backward = define("fast_cubed_backward", cubed_backward)
_backward.register_kernel("cpu", cubed_backward_too_small, provider="fast")
_cubed = enter("fast_cubed", cubed, lambda x: x * x * x, "providers.gradients", positive)
_cubed.register_autograd(lambda ctx, grad: _backward(grad, *ctx.saved_tensors), setup_context=save)

# --------------------------------------------------------------------------------------------------
# Requirements for all kernels


def writes_its_input(x: Tensor) -> Tensor:
    return x.mul_(2).clone()


def leaves_the_end(x: Tensor) -> Tensor:
    """Leaves the last element uninitialized if there are more than two rows."""
    result = torch.empty(x.shape, dtype=x.dtype)
    count = x.numel() - (x.dim() > 1 and len(x) > 2)
    result.view(-1)[:count] = (x.contiguous() * 2).view(-1)[:count]
    return result


def transposes(x: Tensor) -> Tensor:
    return (x.mT + x.mT).contiguous().mT if x.dim() > 1 else x + x


_last: list[Tensor] = []


def keeps_its_input(x: Tensor) -> Tensor:
    _last[:] = [x]
    return doubled(x)


def sets_the_default(x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return doubled(x)


_scratch: dict[str, Tensor] = {}


def shares_scratch(x: Tensor, y: Tensor) -> Tensor:
    mine = threading.get_ident()
    _scratch["sum"] = (x + y).clone()
    _scratch["owner"] = torch.tensor(mine)
    time.sleep(0.002)
    return (_scratch["sum"] + float(int(_scratch["owner"]) != mine)).contiguous()


for kernel, check in (
    (writes_its_input, "contracts.schema"),
    (leaves_the_end, "memory.uninitialized"),
    (transposes, "subsystems.fake"),
    (keeps_its_input, "contracts.kept"),
    (sets_the_default, "contracts.process"),
):
    enter(f"fast_{kernel.__name__}", doubled, kernel, check, options={"fake": like})
enter(
    "fast_shares_scratch",
    torch.add,
    shares_scratch,
    "subsystems.threads",
    two,
    options={"schema": "(Tensor x, Tensor y) -> Tensor"},
)
