from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Optional

import pytest
import torch
from torch import Tensor

import torchop
from tests.schema.structure.structures import Frozen, WithTensor
from torchop import SchemaError


@dataclasses.dataclass
class Recursive:
    inner: Optional[Recursive] = None


@dataclasses.dataclass
class WithGiven:
    given: bool


@dataclasses.dataclass
class OtherInit:
    size: int

    def __init__(self, half: int) -> None:
        self.size = 2 * half


@dataclasses.dataclass
class WithInitVar:
    size: dataclasses.InitVar[int]


Many = dataclasses.make_dataclass("Many", [(f"field_{index}", int) for index in range(64)])


def too_many(x: Tensor, cfg: Many) -> Tensor: ...  # type: ignore[valid-type]


def collides(x: Tensor, cfg: Frozen, cfg_scale: float) -> Tensor: ...


def recursive(x: Tensor, cfg: Recursive) -> Tensor: ...


def flag_collides(x: Tensor, cfg: Optional[WithGiven]) -> Tensor: ...


def other_init(x: Tensor, cfg: OtherInit) -> Tensor: ...


def init_var(x: Tensor, cfg: WithInitVar) -> Tensor: ...


def heterogeneous(x: Tensor, cfg: tuple[int, float]) -> Tensor: ...


class Device(NamedTuple):
    device: torch.device


def several(x: Tensor, cfg: list[Device]) -> Tensor: ...


def optional_items(x: Tensor, cfg: list[Optional[int]]) -> Tensor: ...


def function_argument(x: Tensor, cfg: Frozen, f: Callable[[int], int]) -> Tensor: ...


def mixed_literal(x: Tensor, cfg: Literal["a", 1]) -> Tensor: ...


def bad_default(x: Tensor, cfg: Frozen = 3) -> Tensor: ...  # type: ignore[assignment]


def none_default(x: Tensor, cfg: Frozen = None) -> Tensor: ...  # type: ignore[assignment]


def wrong_return(x: Tensor, cfg: Frozen) -> object: ...


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "many fields": (too_many, "the schema has 65 arguments, but PyTorch takes at most 64"),
    "collision": (collides, r"'cfg.scale' and 'cfg_scale' would both be the argument 'cfg_scale'"),
    "collision with a flag": (
        flag_collides,
        "'cfg' and 'cfg.given' would both be the argument 'cfg_given'",
    ),
    "recursion": (recursive, r"cfg.inner is a .*Recursive inside a .*Recursive"),
    "__init__": (other_init, r"__init__ does not take the fields \(size\) by name"),
    "InitVar": (init_var, "does not store the InitVar 'size'"),
    "heterogeneous": (
        heterogeneous,
        r"type tuple\[int, float\]; the nearest supported type is: a NamedTuple\.",
    ),
    "several": (several, r"cfg.device is a field .* no list of its type, Device\. Move it out of"),
    "optional items": (optional_items, "unsupported type"),
    "function": (function_argument, r"parameter 'f' has unsupported type Callable"),
    "Literal": (mixed_literal, "unsupported type"),
    "default": (bad_default, "cfg has a default of type int; expected .*Frozen"),
    "None": (none_default, r"cfg defaults to None; annotate it as Optional\["),
    "return": (wrong_return, "return has unsupported type object"),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_a_signature_is_refused_with_its_place_and_defines_nothing(
    namespace: str, what: str
) -> None:
    function, message = REFUSED[what]
    with pytest.raises(SchemaError, match=message) as caught:
        torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    assert len(str(caught.value)) < 400
    assert not hasattr(getattr(torch.ops, namespace), "op")


def test_tensors_of_a_structure_by_keyword_only_are_refused(namespace: str) -> None:
    def function(x: Tensor, *, cfg: WithTensor) -> Tensor: ...

    with pytest.raises(NotImplementedError, match=r"kwarg-only Tensor args \(cfg.*Move it before"):
        torchop.custom_op(f"{namespace}::op", function, mutates_args=())


def test_infer_schema_rejects_structures_with_an_explanation(namespace: str) -> None:
    def function(x: Tensor, cfg: Frozen) -> Tensor: ...

    with pytest.raises(SchemaError, match=r"unsupported type .*Frozen.*one argument per field"):
        torchop.infer_schema(function, mutates_args=())
