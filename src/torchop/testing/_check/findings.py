"""Findings: the failures of one operator, grouped by their cause."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import NamedTuple

from torchop.testing._check.result import Result

# Checks that compare results, and so fail too if a plain call is wrong already.
_COMPARE = (
    *("memory.*", "values.*", "sharing.*", "dtypes.numbers", "dtypes.half", "dtypes.double"),
    *("contracts.state", "contracts.num_threads", "contracts.defaults", "providers.*"),
    *("subsystems.threads", "subsystems.autocast", "subsystems.inference_mode"),
    *("subsystems.subclasses", "subsystems.vmap*", "subsystems.sharding"),
    *("subsystems.compiled", "subsystems.export_dynamic", "subsystems.residuals"),
)
_OF_FAKE = (
    *("dtypes.accepted", "dtypes.promotion", "subsystems.fake_symbols", "subsystems.fake_devices"),
    *("subsystems.compiled", "subsystems.export_dynamic", "subsystems.vmap_compiled"),
)
_OF_GRADIENTS = (
    *("subsystems.gradcheck", "subsystems.gradgradcheck", "subsystems.forward_mode"),
    *("subsystems.checkpoint", "subsystems.needs_input_grad", "subsystems.saved"),
    *("subsystems.grad_strides", "subsystems.determinism", "subsystems.func"),
    *("subsystems.threads", "contracts.leaks"),
)
# A failure of the first, on a plain call, makes the others fail too.
_EXPLAINS: dict[str, tuple[str, ...]] = {
    "contracts.schema": (*_COMPARE, *_OF_GRADIENTS, "contracts.repeated"),
    "contracts.repeated": (*_COMPARE, *_OF_GRADIENTS),
    "contracts.state": (*_COMPARE, *_OF_GRADIENTS),
    "contracts.process": ("subsystems.threads", "contracts.num_threads"),
    "memory.given": _COMPARE,
    "memory.uninitialized": _COMPARE,
    "subsystems.fake": _OF_FAKE,
    "subsystems.fake_symbols": _OF_FAKE,
    "dtypes.accepted": ("dtypes.promotion",),
    "subsystems.autograd_registration": ("subsystems.compiled", "subsystems.vmap*"),
    "subsystems.determinism": _OF_GRADIENTS,
    "subsystems.gradcheck": (
        *("subsystems.gradgradcheck", "subsystems.forward_mode", "subsystems.func"),
        *("subsystems.needs_input_grad", "subsystems.compiled"),
    ),
    "subsystems.grad_strides": ("subsystems.gradgradcheck",),
    "subsystems.vmap": ("subsystems.vmap_compiled", "subsystems.func"),
    "providers.supports": ("providers.*",),
    "providers.agrees": ("providers.*", "memory.*"),
}


class Finding(NamedTuple):
    """One fault of an operator.

    Attributes:
        failure: the failure that names it best, with the program that shows it.
        others: the names of the checks that fail for the same cause.
    """

    failure: Result
    others: tuple[str, ...]


def grouped(failures: Sequence[Result]) -> tuple[Finding, ...]:
    """Return the findings: failures in the order of the table, each with those that it explains."""
    groups: list[list[Result]] = []
    for failure in failures:
        group = next((g for g in groups if any(_explains(one, failure) for one in g)), None)
        if group is None:
            groups.append([failure])
        else:
            group.append(failure)
    return tuple(Finding(g[0], tuple(other.check for other in g[1:])) for g in groups)


def _explains(one: Result, other: Result) -> bool:
    """Whether two failures have one cause, of which `one` is the clearer."""
    if one.cause and one.cause == other.cause:
        return True
    if one.provider != other.provider:
        return False
    first, second = (result.check.partition("[")[0] for result in (one, other))
    if one.group in ("plain", "gradient"):
        patterns = _EXPLAINS.get(first, ())
        return any(fnmatch.fnmatchcase(second, pattern) for pattern in patterns)
    # A kernel that ignores strides also fails for arguments that share memory. In the same
    # variants, a fault shows in results, or only in the fake kernel.
    same = (one.group, other.group) == ("layout", "sharing") or one.group == other.group
    return same and _is_of_fake(first) is _is_of_fake(second)


def _is_of_fake(check: str) -> bool:
    return check == "subsystems.fake" or check in _OF_FAKE
