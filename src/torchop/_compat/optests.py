"""The checks behind `torch.library.opcheck`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast


@functools.cache
def opcheck_error(base: type[Exception]) -> type[Exception]:
    """An exception that is `base`, and PyTorch's own OpCheckError too."""
    from torch.testing._internal.optests import generate_tests

    return type(base.__name__, (base, generate_tests.OpCheckError), {"__module__": "torchop"})


def opcheck_tests() -> Mapping[str, Callable[..., Any]]:
    """PyTorch's checks, by name; imported only when asked for, because they take two seconds."""
    from torch.testing._internal.optests import generate_tests

    return cast("Mapping[str, Callable[..., Any]]", generate_tests.ALL_TEST_UTILS)
