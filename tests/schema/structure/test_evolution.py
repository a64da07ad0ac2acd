"""Exported programs still work after fields are added to the classes of their arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

import torchop


@dataclasses.dataclass(frozen=True)
class Old:
    weight: Tensor
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class New:
    mode: str = "sum"  # a new field before the existing ones
    weight: Tensor = None  # type: ignore[assignment]  # needs some default, as `mode` has one
    scale: float = 5.0
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])
    limit: float = float("inf")
    sizes: tuple[int, int] = (1, 2)
    bias: Optional[Tensor] = None
    inner: Old | None = None


Kernel = Callable[[Tensor, Any], Tensor]


def define(namespace: str, config: Any, kernel: Kernel, **options: Any) -> Any:
    def function(x: Tensor, cfg: Any) -> Tensor:
        return kernel(x, cfg)

    function.__annotations__["cfg"] = config
    op: Any = torchop.custom_op(f"{namespace}::op", function, mutates_args=(), **options)
    op.register_fake(lambda x, cfg: torch.empty_like(x))
    return op


def export(
    namespace: str, config: Any, kernel: Kernel, value: Callable[[Tensor], Any], file: Path
) -> None:
    """Export a program that calls the operator, save it, and deregister the operator."""
    with torchop.Library(namespace, "FRAGMENT") as library:
        op = define(namespace, config, kernel, lib=library)

        class Model(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return op(x, value(x))  # type: ignore[no-any-return]

        torch.export.save(torch.export.export(Model(), (torch.ones(2),)), file)


def test_a_field_with_a_default_can_be_added(namespace: str, tmp_path: Path) -> None:
    file = tmp_path / "given.pt2"
    export(
        namespace, Old, lambda x, cfg: x * cfg.weight * cfg.scale, lambda x: Old(x * 2, 3.0), file
    )
    seen: list[New] = []

    def kernel(x: Tensor, cfg: New) -> Tensor:
        seen.append(cfg)
        return x * cfg.weight * cfg.scale

    define(namespace, New, kernel)
    assert torch.export.load(file).module()(torch.ones(2)).tolist() == [6, 6]
    (cfg,) = seen
    assert (cfg.mode, cfg.names, cfg.limit, cfg.sizes, cfg.bias, cfg.inner) == (
        *("sum", ["a"], float("inf"), (1, 2)),
        *(None, None),
    )


def test_saved_program_omits_fields_that_equalled_the_default(
    namespace: str, tmp_path: Path
) -> None:
    # A saved program does not contain arguments that equal their default. So changing a default
    # changes the program's results, as for every operator of PyTorch.
    file = tmp_path / "default.pt2"
    export(namespace, Old, lambda x, cfg: x * cfg.scale, Old, file)
    define(namespace, New, lambda x, cfg: x * cfg.scale)
    assert torch.export.load(file).module()(torch.ones(2)).tolist() == [5, 5]


def test_missing_field_without_a_default_is_named(namespace: str, tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Longer:
        count: int
        weight: Tensor
        scale: float = 1.0

    file = tmp_path / "model.pt2"
    globals()["Longer"] = Longer
    export(namespace, Old, lambda x, cfg: x * cfg.scale, Old, file)
    define(namespace, Longer, lambda x, cfg: x * cfg.scale)
    with pytest.raises(Exception, match="cfg_count"):
        torch.export.load(file).module()(torch.ones(2))
