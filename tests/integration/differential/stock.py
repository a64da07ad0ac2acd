"""Compare an example with the same operator of torch.library, if it supports the example."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from torch._ops import OpOverload

from tests._support.devices import DEVICE, STOCK_AUTOCASTS_ALL
from tests.integration.differential.describe import Described
from tests.integration.differential.observe import Example

# Since 2.14, torch.library makes some calls in Python, without the dispatcher.
DISPATCHES_IN_PYTHON = hasattr(OpOverload, "_enable_pyobj_dispatch")


class Deliberate(NamedTuple):
    """An intended difference between torchop and torch.library.

    `ours` and `stock` are patterns for the error messages of the two libraries. `when` returns
    whether an example is affected.
    """

    reason: str
    ours: str | None = None
    stock: str | None = None
    when: Callable[[Example], bool] = lambda example: True

    def covers(self, example: Example, ours: str, stock: str) -> bool:
        return (
            self.when(example)
            and (self.ours is None or re.search(self.ours, ours) is not None)
            and (self.stock is None or re.search(self.stock, stock) is not None)
        )


def _has_optional_lists(example: Example) -> bool:
    kinds = {parameter.kind.schema for parameter in example.operator.parameters}
    return not kinds.isdisjoint(("Tensor?[]", "Tensor[]?"))


def _has_history(example: Example) -> bool:
    return any(words in repr(example) for words in ("leaf", "require grad", "parameter"))


DELIBERATE: tuple[Deliberate, ...] = (
    Deliberate("A kernel never gets None for a Tensor.", ours="is None, but the schema says"),
    Deliberate("A tensor is no number.", ours=r"instead found type 'Tensor'"),
    Deliberate("No silent zero tangents.", ours="does not support forward-mode"),
    Deliberate(
        "No result without data of tensors with data.", ours="made the fake kernel run, but"
    ),
    Deliberate(
        "A tensor that is written does not lose its gradient.", ours="would lose the gradient"
    ),
    Deliberate(
        "Leaves that require grad are not written.", ours="leaf Variable that requires grad"
    ),
    Deliberate(
        "No writing where elements share memory.", ours="refers? to a single memory location"
    ),
    Deliberate(
        "What is written in place gets the operator as its history.",
        when=lambda example: example.operator.form == "inplace" and _has_history(example),
    ),
    Deliberate(
        "Inference tensors are written in inference mode only.",
        ours="Inplace update to inference tensor",
    ),
    Deliberate("Transforms of torch.func differentiate.", stock="setup_context staticmethod"),
    Deliberate("History that cannot be rewritten is not.", ours="is being modified inplace"),
    Deliberate(
        "Gradients of the last inputs may be left out.",
        when=lambda example: "gradients='too few'" in repr(example),
    ),
    Deliberate("Results are checked against the schema.", ours="must return"),
    Deliberate(
        "A tensor is no list of tensors, as in the dispatcher.",
        ours=r"Expected a value of type '(Optional\[)?List\[",
        when=lambda example: DISPATCHES_IN_PYTHON,
    ),
    Deliberate("Any name goes for a parameter.", stock="multiple values for argument 'self'"),
    Deliberate("Autocast rules take keywords.", stock="do not support kwargs yet"),
    Deliberate(
        "Autocast rules do not iterate over objects of the user's own classes.",
        stock="somebody asked an object",
        when=lambda example: example.operator.autocast,
    ),
    Deliberate(
        "Autocast rules do not cast what is written, so that the caller's tensor is.",
        when=lambda example: (
            example.operator.autocast
            and bool(example.operator.mutates_args)
            and "autocast" in example.situation
        ),
    ),
    Deliberate(
        "Fake calls do not hash objects of the user's own classes, for PyTorch's cache.",
        stock="somebody asked an object",
        when=lambda example: "FakeTensorMode" in repr(example),
    ),
    Deliberate("Gradients flow through lists that hold None.", when=_has_optional_lists),
    Deliberate(
        "Conjugated and negated tensors in lists are written.",
        stock="doesn't currently support mutable TensorLists",
    ),
    Deliberate(
        "Conjugated and negated tensors that are passed by name are written.",
        stock=r"cloned_mutable_input\.is_same\(returned_output\) INTERNAL ASSERT FAILED",
    ),
    Deliberate(
        "Conjugated and negated tensors are written by operators that return numbers.",
        stock="Expected Tensor but got ",
    ),
    Deliberate(
        "Mutated arguments that are left out are no error, as in PyTorch since 2.12.",
        stock="tuple index out of range",
        when=lambda example: bool(example.operator.mutates_args),
    ),
)


def is_comparable(example: Example) -> bool:
    operator = example.operator
    if operator.formula == "derived" or (operator.formula != "none" and operator.mutates_args):
        return False
    if operator.autocast and not (STOCK_AUTOCASTS_ALL or DEVICE.type == "cpu"):
        return False
    if example.script.result == "too many":
        return False  # PyTorch reads past the end of the results and may crash
    if operator.provider != "none":
        return False
    return operator.override is None and operator.called_before


def is_wanted_of_accelerated(example: Example, stock: dict[str, Described], line: str) -> bool:
    """Return whether it is intended that `accelerate` causes this difference.

    Accelerated operators accept a parameter called `self`, which torch.library rejects. And if a
    kernel mutates a list argument, native calls pass the original list to setup_context, but since
    2.14 PyTorch passes the mutated one.
    """
    if "multiple values for argument 'self'" in str(stock.get("error")):
        return True
    events = re.match(r"/events/.*/(keyword_only_)?inputs/", line)
    return DISPATCHES_IN_PYTHON and example.script.grows_lists and events is not None


def outcome(seen: dict[str, Described]) -> Described:
    """Return the results of a run, in which every exception is replaced by "an error"."""
    if "error" in seen:
        return "an error"
    return [_essence(seen["result"]), _essence(seen["arguments"]), _essence(seen["backward"])]


def _essence(value: Described) -> Described:
    if isinstance(value, dict) and "message" in value:
        return "an error"
    if isinstance(value, dict) and "contents" in value:
        kept = ("type", "same as", "dtype", "shape", "strides", "requires_grad", "contents")
        return {key: value.get(key) for key in kept}
    if isinstance(value, list):
        return [_essence(item) for item in value]
    return value


def is_deliberate(
    example: Example, ours: dict[str, Described], stock: dict[str, Described]
) -> bool:
    messages = [str(seen.get("error", "")) + str(seen["backward"]) for seen in (ours, stock)]
    return any(entry.covers(example, *messages) for entry in DELIBERATE)
