"""What torch.library registers at Autograd, recognized."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch._library.autograd import (
    make_autograd_impl,
    not_list_of_tensor,
    supports_tensorlist,
)
from torch.utils._pytree import tree_flatten

from torchop._compat.classes import OpOverload
from torchop._compat.closures import made_by

# What a function keeps of lists that were spread out; the second is its name in 2.11.
_METADATA = ("TensorListMetadata", "Metadata")


class StockFormula(NamedTuple):
    """What torch.library registers at Autograd, with a formula or without one.

    Attributes:
        function: the `autograd.Function`.
        setup_context: the user's.
        takes_keywords: whether that takes the keyword-only arguments too.
        sources: where that was read.
        note_lists: if the function takes lists of tensors, how they are spread out for it:
            `note_lists(args, count)` returns the inputs, and what `ctx._pt_metadata` says of them
            and of so many results.
    """

    function: Any
    setup_context: Callable[..., Any] | None
    takes_keywords: bool
    sources: tuple[tuple[Any, Any, Any], ...]
    note_lists: Callable[[tuple[Any, ...], int], tuple[list[Any], Any]] | None


def recognize(kernel: Any, overload: OpOverload) -> StockFormula | None:
    """What torch.library registered at Autograd for this operator; None if it is anything else."""
    maker = make_autograd_impl
    around = made_by(kernel, maker, "autograd_impl") or {}
    # The first until 2.13, the second in 2.15. Both know the operator; `autograd_impl` itself does
    # since 2.13.
    names = ("forward_no_grad", "redispatch_no_grad")
    plain = next((made_by(around[name], maker, name) for name in names if name in around), None)
    if (plain or {}).get("op") is not overload or around.get("op", overload) is not overload:
        return None
    function = around["Generated"]
    spread = {
        name: (made_by(getattr(function, name), supports_tensorlist, f"new_{name}") or {})
        for name in ("forward", "backward", "apply")
    }
    takes_lists = all(spread.values())
    original = {
        name: spread[name][f"orig_{name}"] if takes_lists else getattr(function, name)
        for name in ("forward", "backward")
    }
    forward, backward = (made_by(original[name], maker, name) for name in original)
    if forward is None or backward is None:
        return None
    info = forward["info"]
    attributes = vars(info)
    setup_context = attributes.get("_setup_context_fn")
    sources = ((attributes, "_setup_context_fn", setup_context),)
    if forward["op"] is not overload or backward["info"] is not info:
        return None
    note_lists = None
    if takes_lists:
        metadata = next(spread["apply"][n] for n in _METADATA if n in spread["apply"])
        note_lists = functools.partial(_note_lists, metadata)
    return StockFormula(
        function, setup_context, forward["has_kwarg_only_args"], sources, note_lists
    )


def _note_lists(metadata: Any, args: tuple[Any, ...], count: int) -> tuple[list[Any], Any]:
    """What `supports_tensorlist` does before the call, and what it adds afterwards."""
    # The last is what any formula takes besides the arguments; with lists, it takes one more.
    flat, inputs = tree_flatten((*args, None), not_list_of_tensor)
    _, outputs = tree_flatten((None,) * count)
    return flat, metadata(inputs, outputs, count > 1)
