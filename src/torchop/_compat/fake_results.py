"""Run the fake kernel of an operator on the metadata of real tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchop._compat.classes import FakeTensorMode, OpOverload, tree_map_only


def fake_results(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run the fake kernel for real arguments. In the results, data-dependent sizes are symbols."""
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
        args, kwargs = tree_map_only(
            torch.Tensor, lambda t: mode.from_tensor(t, static_shapes=True), (args, kwargs)
        )
        return op(*args, **kwargs)


def is_builtin(op: OpOverload) -> bool:
    return bool(torch._library.utils.is_builtin(op))


def copied(tensors: Any) -> Any:
    """Return a deep copy of tensors in nested containers.

    Tensors with an autograd history are detached first, because `deepcopy` rejects them.
    """
    return copy.deepcopy(
        tree_map_only(torch.Tensor, lambda t: t if t.is_leaf else t.detach(), tensors)
    )
