"""Exported programs outlive the classes that they were made with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Optional, TypedDict

import pytest
import torch
from torch import Tensor
from typing_extensions import NotRequired

import torchop


@dataclasses.dataclass(frozen=True)
class Old:
    weight: Tensor
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class New:
    mode: str = "sum"  # in front of what there was
    weight: Tensor = None  # type: ignore[assignment]  # a field with a default stands before it
    scale: float = 5.0
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])
    limit: float = float("inf")
    sizes: tuple[int, int] = (1, 2)
    bias: Optional[Tensor] = None
    inner: Old | None = None


class OldOptions(TypedDict):
    scale: float


class NewOptions(OldOptions):
    count: NotRequired[int]


def export(op: Any, call: Any, file: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return call(op, x)  # type: ignore[no-any-return]

    op.register_fake(lambda x, cfg: torch.empty_like(x))
    torch.export.save(torch.export.export(Model(), (torch.ones(2),)), file)


def test_a_field_with_a_default_can_be_added(namespace: str, tmp_path: Path) -> None:
    with torchop.Library(namespace, "FRAGMENT") as library:

        @torchop.custom_op(f"{namespace}::op", mutates_args=(), lib=library)
        def old(x: Tensor, cfg: Old) -> Tensor:
            return x * cfg.weight * cfg.scale

        export(old, lambda op, x: op(x, Old(x * 2, 3.0)), tmp_path / "given.pt2")

    seen: list[New] = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def new(x: Tensor, cfg: New) -> Tensor:
        seen.append(cfg)
        return x * cfg.weight * cfg.scale

    new.register_fake(lambda x, cfg: torch.empty_like(x))
    loaded = torch.export.load(tmp_path / "given.pt2").module()
    assert loaded(torch.ones(2)).tolist() == [6, 6]
    (cfg,) = seen
    assert (cfg.mode, cfg.names, cfg.limit, cfg.sizes, cfg.bias, cfg.inner) == (
        *("sum", ["a"], float("inf"), (1, 2)),
        *(None, None),
    )


def test_a_file_leaves_out_what_equalled_the_default(namespace: str, tmp_path: Path) -> None:
    # As with every operator of PyTorch: a default that changes, changes what old files mean.
    with torchop.Library(namespace, "FRAGMENT") as library:

        @torchop.custom_op(f"{namespace}::op", mutates_args=(), lib=library)
        def old(x: Tensor, cfg: Old) -> Tensor:
            return x * cfg.scale

        export(old, lambda op, x: op(x, Old(x)), tmp_path / "default.pt2")

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def new(x: Tensor, cfg: New) -> Tensor:
        return x * cfg.scale

    new.register_fake(lambda x, cfg: torch.empty_like(x))
    loaded = torch.export.load(tmp_path / "default.pt2").module()
    assert loaded(torch.ones(2)).tolist() == [5, 5]


def test_a_key_that_is_not_required_can_be_added(namespace: str, tmp_path: Path) -> None:
    with torchop.Library(namespace, "FRAGMENT") as library:

        @torchop.custom_op(f"{namespace}::op", mutates_args=(), lib=library)
        def old(x: Tensor, cfg: OldOptions) -> Tensor:
            return x * cfg["scale"]

        export(old, lambda op, x: op(x, {"scale": 3.0}), tmp_path / "model.pt2")

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def new(x: Tensor, cfg: NewOptions) -> Tensor:
        return x * cfg["scale"] * cfg.get("count", 7)

    new.register_fake(lambda x, cfg: torch.empty_like(x))
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    assert loaded(torch.ones(2)).tolist() == [21, 21]


def test_a_field_without_a_default_is_missed_by_name(namespace: str, tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Longer:
        count: int
        weight: Tensor
        scale: float = 1.0

    globals()["Longer"] = Longer
    with torchop.Library(namespace, "FRAGMENT") as library:

        @torchop.custom_op(f"{namespace}::op", mutates_args=(), lib=library)
        def old(x: Tensor, cfg: Old) -> Tensor:
            return x * cfg.scale

        export(old, lambda op, x: op(x, Old(x)), tmp_path / "model.pt2")

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def new(x: Tensor, cfg: Longer) -> Tensor:
        return x * cfg.scale

    new.register_fake(lambda x, cfg: torch.empty_like(x))
    with pytest.raises(Exception, match="cfg_count"):
        torch.export.load(tmp_path / "model.pt2").module()(torch.ones(2))
