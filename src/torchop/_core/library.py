"""The library of an operator of ours: whoever still holds that gets an error when it goes."""

from __future__ import annotations

import torch.library

from torchop._compat import libraries, retirement
from torchop._core.lock import registration_lock
from torchop._schema import naming


class OwnLibrary(torch.library.Library):
    def _destroy(self) -> None:
        names = [naming.parse(qualname) for qualname in self._op_defs]
        with registration_lock, retirement.emptied(names, gone_with_library):
            libraries.forget_definitions(self)
            super()._destroy()  # type: ignore[no-untyped-call]


def gone_with_library(name: str) -> str:
    return f"The operator {name} is gone: the library that defined it was closed."
