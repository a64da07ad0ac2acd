"""Libraries that own operators and rules, and deregister them when closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.library

from torchop._compat import libraries, torch_ops
from torchop._core.lock import registration_lock, then_run_hooks


class OwnLibrary(torch.library.Library):
    """A library whose operators raise OperatorGoneError once the library is closed."""

    def _destroy(self) -> None:
        with then_run_hooks():
            torch_ops.invalidate(libraries.closing_reasons(self._op_defs))
            try:
                libraries.end(self)
            finally:
                super()._destroy()  # type: ignore[no-untyped-call]


# The class of the libraries that `process_library` creates. `_define.library` sets this to
# `torchop.Library`, which cannot be imported here because the import would be circular.
process_library_type: type[OwnLibrary] = OwnLibrary
_process_libraries: dict[str, OwnLibrary] = {}


def process_library(namespace: str) -> Any:
    """Return the library that owns registrations made without `lib=`, and is never closed."""
    with registration_lock:
        if namespace not in _process_libraries:
            _process_libraries[namespace] = process_library_type(namespace, "FRAGMENT")
        return _process_libraries[namespace]


# A library stores its definitions for operators from other packages in this attribute, as a dict
# from operator names to definitions.
DEFINITIONS = "_torchop_definitions"


def process_definitions(namespace: str) -> Mapping[str, Any]:
    """Map operators to their definitions in the namespace's library that is never closed.

    These definitions hold the kernels, fake kernels and other rules that were registered without
    `lib=` for operators from other packages.
    """
    library = _process_libraries.get(namespace)
    return {} if library is None else library.__dict__.get(DEFINITIONS, {})


def all_process_definitions() -> list[str]:
    # Copy each dict before iterating over it, because another thread may add a definition to the
    # dict in the meantime, and the iteration would then raise RuntimeError.
    return [
        name
        for namespace in list(_process_libraries)
        for name in list(process_definitions(namespace))
    ]
