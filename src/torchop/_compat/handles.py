"""The handles that `torch.library.custom_op` hands out, and where its functions look for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.library
from torch._library.custom_ops import OPDEF_TO_LIB, OPDEFS

from torchop._compat.classes import CustomOpDef

# The logger that users of torch.library already configure and test against.
LOGGER_NAME = "torch._library.custom_ops"
# The handle that torch.library's functions consult for a name, and the library behind it, whether
# our `custom_op` or PyTorch's made them.
published_handle: Callable[[str], CustomOpDef | None] = OPDEFS.get
published_library: Callable[[str], torch.library.Library | None] = OPDEF_TO_LIB.get


def published_handles() -> dict[str, CustomOpDef]:
    """Every handle that torch.library's functions could find at the moment."""
    # Without `items`, each key would be looked up again, and a handle may be gone by then.
    return dict(OPDEFS.items())


def publish(qualname: str, handle: CustomOpDef, library: torch.library.Library) -> None:
    """Puts a handle where torch.library's functions, and its own custom_op, look for it."""
    OPDEF_TO_LIB[qualname] = library  # before the handle: `unpublish` goes by it
    OPDEFS[qualname] = handle


def unpublish(qualname: str, library: torch.library.Library) -> None:
    """Takes a handle out again, unless another definition has taken the name since."""
    if OPDEF_TO_LIB.get(qualname) is library:
        OPDEFS.pop(qualname, None)
        del OPDEF_TO_LIB[qualname]


def published_function(qualname: str) -> Callable[..., Any] | None:
    """The function that `custom_op`, ours or PyTorch's, made an operator of."""
    handle = published_handle(qualname)
    return None if handle is None else handle._init_fn


def returns_what_it_writes(handle: CustomOpDef) -> bool:
    """Whether `custom_op` requires an operator to return what it mutates."""
    return getattr(handle, "_is_inplace", False) or getattr(handle, "_is_out", False)


def handle_calls_forward() -> bool:
    """Whether all that calling a handle of torch.library does is to call its overload."""
    code = getattr(vars(CustomOpDef)["__call__"], "__code__", None)
    return getattr(code, "co_names", None) == ("_opoverload",)
