"""What stands in `torch.ops` where the operator is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchop._compat.classes import OpOverload, OpOverloadPacket


def is_retired(op: OpOverload | OpOverloadPacket) -> bool:
    """Whether the operator behind an object of `torch.ops` was destroyed, or is about to be."""
    return isinstance(vars(op).get("_op"), Gone)


class Gone:
    """Stands where the C++ callable of a destroyed operator stood."""

    def __init__(self, original_hash: int, reason: Callable[[], str]) -> None:
        self._hash = original_hash
        self._reason = reason

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torchop._errors import OperatorGoneError

        raise OperatorGoneError(self._reason())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class GonePacket(Gone):
    """A packet is a name: it finds the operator that has the name now, if there is one."""

    def __init__(
        self, original_hash: int, namespace: str, name: str, reason: Callable[[], str]
    ) -> None:
        super().__init__(original_hash, reason)
        self._namespace = namespace
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        packet = getattr(getattr(torch.ops, self._namespace), self._name, None)
        if packet is None or packet._op is self:  # destroyed, or just about to be
            return super().__call__(*args, **kwargs)
        return packet(*args, **kwargs)
