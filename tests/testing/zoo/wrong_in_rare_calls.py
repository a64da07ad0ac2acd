"""Faulty operators that fail only for rare sizes, layouts, values or dtypes, or after an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.testing.zoo.specimen import define, floats_only, like, one, two, wrong

# --------------------------------------------------------------------------------------------------
# Sizes and layouts


def skips_whole_blocks(x: Tensor) -> Tensor:
    """Leaves out the last block if the number of elements is a multiple of the block size."""
    flat = x.contiguous().view(-1)
    count = len(flat) - (256 if len(flat) and len(flat) % 256 == 0 else 0)
    result = torch.zeros_like(flat)
    result[:count] = -flat[:count]
    return result.view(x.shape)


wrong(define("skips_whole_blocks", skips_whole_blocks, fake=like), "memory.blocks", one)


def divides_by_stride(x: Tensor) -> Tensor:
    """Returns the first column only, because it uses the stride as a divisor."""
    if x.dim() > 1 and x.stride(-1) == 0:
        return (-x[..., :1]).contiguous() * (torch.arange(x.shape[-1]) == 0).to(x.dtype)
    return (-x).contiguous()


wrong(define("divides_by_stride", divides_by_stride, fake=like), "memory.expanded", one)

_LIBRARY = torch.library.Library("zoo", "FRAGMENT")


def _stock(name: str, schema: str, kernel: Any, fake: Any) -> str:
    """Define an operator with `torch.library`, whose kernel autograd does not record."""

    def without_autograd(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return kernel(*args, **kwargs)

    without_autograd.__wrapped__ = kernel  # type: ignore[attr-defined]  # for its signature
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, without_autograd, "CPU")
    torch.library.register_fake(f"zoo::{name}", fake, lib=_LIBRARY)
    return f"zoo::{name}"


def fills_what_fits(x: Tensor, *, out: Tensor) -> Tensor:
    """Writes as many elements as fit into `out`, instead of resizing `out`."""
    count = min(x.numel(), out.numel())
    out.view(-1)[:count] = -x.reshape(-1)[:count]
    return out


wrong(
    _stock(
        "fills_what_fits",
        "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
        fills_what_fits,
        lambda x, *, out: out,
    ),
    "memory.out",
    lambda: [((torch.ones(3, 4),), {"out": torch.zeros(3, 4)})],
)

# --------------------------------------------------------------------------------------------------
# Schemas


def adds_to_a_copy(x: Tensor, y: Tensor) -> None:
    """Declares a write to `x`, but `x + y` is a new tensor."""
    x = x + y


wrong(
    define("adds_to_a_copy", adds_to_a_copy, fake=lambda x, y: None, mutates_args={"x"}),
    "contracts.written",
    two,
)


def _flipped(x: Tensor, times: int = 1) -> Tensor:
    return x * (-1) ** times


wrong(
    _stock(
        "default_of_int",
        "(Tensor x, int times=2) -> Tensor",
        _flipped,
        lambda x, times=2: torch.empty_like(x),
    ),
    "contracts.defaults",
    one,
)

# --------------------------------------------------------------------------------------------------
# Fake kernels


def _two_results(x: Tensor) -> tuple[Tensor, Tensor]:
    return like(x).copy_(x), like(x).copy_(-x)


def _one_for_both(x: Tensor) -> tuple[Tensor, Tensor]:
    result = like(x)
    return result, result


_SAME = torch.library.custom_op("zoo::fakes_one_for_both", _two_results, mutates_args=())
_SAME.register_fake(_one_for_both)
wrong("zoo::fakes_one_for_both", "subsystems.fake", one)


def _turned(x: Tensor) -> Tensor:
    x.transpose_(0, -1)
    return torch.empty(x.transpose(0, -1).shape, dtype=x.dtype, device=x.device)


wrong(
    define(
        "fakes_by_turning", lambda x: -x.contiguous(), fake=_turned, schema="(Tensor x) -> Tensor"
    ),
    "subsystems.fake",
    one,
)


def without_zeros(x: Tensor) -> Tensor:
    return x[x != 0]


wrong(
    define("fakes_no_zeros", without_zeros, fake=lambda x: x.new_empty(x.numel())),
    "subsystems.fake",
    one,
)


def integers_if_whole(x: Tensor) -> Tensor:
    """Returns integers if all elements are whole numbers."""
    floats_only("integers_if_whole", x)
    is_whole = x.numel() > 0 and bool((x == x.round()).all())
    return x.to(torch.int64 if is_whole else x.dtype, copy=True).contiguous()


wrong(define("integers_if_whole", integers_if_whole, fake=like), "subsystems.fake", one)

wrong(
    _stock(
        "fakes_other_lists",
        "(Tensor x) -> (Tensor[], Tensor[])",
        lambda x: ([like(x).copy_(x)], [like(x).copy_(-x), like(x).zero_()]),
        lambda x: ([like(x), like(x)], [like(x)]),
    ),
    "subsystems.fake",
    one,
)


def rows_as_float(x: Tensor) -> float:
    return 2.0 * x.shape[0]


wrong(
    define("fakes_a_number", rows_as_float, fake=lambda x: 1.0),
    "subsystems.fake",
    one,
)

wrong(
    define(
        "fakes_two_items",
        lambda xs: torch.stack([x.sum() for x in xs]),
        fake=lambda xs: xs[0].new_empty(2, dtype=xs[0].sum().dtype),
        schema="(Tensor[] xs) -> Tensor",
    ),
    "subsystems.fake",
    lambda: [([torch.ones(3, 4), torch.ones(3, 4)],)],
)


def _promoted(x: Tensor, y: Tensor) -> Tensor:
    """Ignores that PyTorch promotes tensors without dimensions differently."""
    shape = torch.broadcast_shapes(x.shape, y.shape)
    device = x.device if x.dim() else y.device
    return torch.empty(shape, dtype=torch.promote_types(x.dtype, y.dtype), device=device)


wrong(
    define(
        "fakes_promoted_numbers",
        lambda x, y: (x * y).contiguous(),
        fake=_promoted,
        schema="(Tensor x, Tensor y) -> Tensor",
    ),
    "dtypes.promotion",
    two,
)


def reads_pairs(x: Tensor, index: Tensor) -> Tensor:
    """Reads every other element of the index if the dtype is int32."""
    return x[index.long() // (2 if index.dtype is torch.int32 else 1)].contiguous()


wrong(
    define(
        "reads_pairs",
        reads_pairs,
        fake=lambda x, index: x.new_empty(*index.shape, *x.shape[1:]),
    ),
    "dtypes.indices",
    lambda: [(torch.arange(20.0).view(5, 4), torch.tensor([0, 2, 1]))],
)


def _noise_of_numpy(x: Tensor) -> Tensor:
    """Draws from NumPy's generator, which `torch.manual_seed` does not seed."""
    noise = np.random.default_rng(np.random.randint(2**31)).random(x.shape)
    return x + torch.as_tensor(noise, dtype=x.dtype, device=x.device)


wrong(
    define("noise_of_numpy", _noise_of_numpy, fake=like, tags=torch.Tag.nondeterministic_seeded),
    "contracts.process",
    one,
)

# --------------------------------------------------------------------------------------------------
# State of the process, and leaks


def uses_one_thread(x: Tensor) -> Tensor:
    """Restores the number of threads only if it does not raise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if x.numel() == 0:
        raise ValueError("expected elements")
    result = x + 1
    torch.set_num_threads(threads)
    return result


wrong(define("uses_one_thread", uses_one_thread), "contracts.process", one)


def forbids_flash_attention(x: Tensor) -> Tensor:
    torch.backends.cuda.enable_flash_sdp(False)
    return x + 1


wrong(define("forbids_flash_attention", forbids_flash_attention), "contracts.process", one)

_copies: list[Tensor] = []


def keeps_packed(x: Tensor) -> Tensor:
    """Never frees the contiguous copies of arguments that are not contiguous."""
    if not x.is_contiguous():
        _copies.append(x.contiguous())
    return x + 1


wrong(define("keeps_packed", keeps_packed), "contracts.leaks", one)

# --------------------------------------------------------------------------------------------------
# Autocast

_CAST: dict[Any, Tensor] = {}


@contextlib.contextmanager
def _below_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False):
        yield


def _casts_doubles(x: Tensor) -> Tensor:
    with _below_autocast():
        return torch.ops.zoo.casts_doubles(x.bfloat16())


def _leaves_it_off(x: Tensor) -> Tensor:
    torch.set_autocast_enabled("cpu", False)
    return torch.ops.zoo.leaves_it_off(x)


def _keeps_cast(x: Tensor) -> Tensor:
    """Caches the cast argument by its shape, as if it were a weight."""
    with _below_autocast():
        if x.dtype is torch.float32:
            x = _CAST.setdefault(x.shape, x.bfloat16())
        return torch.ops.zoo.keeps_cast(x)


for name, rule in (
    ("casts_doubles", _casts_doubles),
    ("leaves_it_off", _leaves_it_off),
    ("keeps_cast", _keeps_cast),
):
    _stock(name, "(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
    _LIBRARY.impl(name, rule, "AutocastCPU")
    wrong(f"zoo::{name}", "subsystems.autocast", one)

# --------------------------------------------------------------------------------------------------
# Batches


def _in_front(info: Any, dims: Any, tensors: Any) -> list[Tensor]:
    pairs = zip(tensors, dims, strict=True)
    return [t.unsqueeze(0) if dim is None else t.movedim(dim, 0) for t, dim in pairs]


def _in_a_loop(info: Any, dims: Any, x: Tensor, y: Tensor) -> Any:
    """Fills a tensor that is not in the outer batch, so `vmap` of `vmap` raises."""
    x, y = (t.expand(info.batch_size, *t.shape[1:]) for t in _in_front(info, dims, (x, y)))
    result = torch.empty(x.shape, dtype=x.dtype)
    for index in range(info.batch_size):
        result[index] = x[index] * y[index]
    return result, 0


def _in_float32(info: Any, dims: Any, x: Tensor, y: Tensor) -> Any:
    x, y = _in_front(info, dims, (x, y))
    return x.float() * y.float(), 0


def _of_eight(info: Any, dims: Any, x: Tensor, y: Tensor) -> Any:
    """Leaves zeros after the first eight elements of the batch."""
    x, y = _in_front(info, dims, (x, y))
    return torch.cat([(x * y)[:8], torch.zeros_like(x * y)[8:]]), 0


def _on_the_way(info: Any, dims: Any, x: Tensor, y: Tensor) -> Any:
    result = torch.mul(*_in_front(info, dims, (x, y)))
    if x.is_contiguous():
        x.neg_()
    return result, 0


for number, rule in enumerate((_in_a_loop, _in_float32, _of_eight, _on_the_way)):
    op = define(f"rare_batch_{number}", lambda x, y: x * y, schema="(Tensor x, Tensor y) -> Tensor")
    op.register_vmap(rule)
    wrong(op, "subsystems.vmap", two)

_by_factor = define(
    "batch_of_default",
    lambda x, factor: x * factor,
    schema="(Tensor x, float factor=2.0) -> Tensor",
)
_by_factor.register_vmap(lambda info, dims, x, factor: (x * 2.0, dims[0]))
wrong(_by_factor, "subsystems.vmap", lambda: [(torch.ones(3, 4), 2.0)])

# --------------------------------------------------------------------------------------------------
# FLOP formulas


def _rows_times_columns(name: str, formula: Any) -> Any:
    op = define(name, torch.mm, schema="(Tensor x, Tensor y) -> Tensor")
    op.register_flop_formula(formula)
    return op


def _matrices() -> list[Any]:
    return [(torch.ones(3, 4), torch.ones(4, 2))]


wrong(
    _rows_times_columns("flops_of_example", lambda x, y, *, out_shape: 24),
    "subsystems.flops",
    _matrices,
)
wrong(
    _rows_times_columns("flops_of_three", lambda x, y, *, out_shape: 2 * x[0] * x[1] * y[2]),
    "subsystems.flops",
    _matrices,
)
