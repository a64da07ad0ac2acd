"""What users ask for with the environment variable TORCHOP_NATIVE."""

from __future__ import annotations

import os
from typing import Literal, get_args

Mode = Literal["auto", "0", "require"]
_MODES: dict[str, Mode] = {mode: mode for mode in get_args(Mode)}


def mode() -> Mode:
    """What TORCHOP_NATIVE asks for; "auto" if it is not set.

    Raises:
        ValueError: it is none of the three.
    """
    value = os.environ.get("TORCHOP_NATIVE") or "auto"
    try:
        return _MODES[value]
    except KeyError:
        raise ValueError(
            f"the environment variable TORCHOP_NATIVE is {value!r}, and must be one of: auto (use "
            "the native call path when it is there, and compile it in the background when it is "
            "not), 0 (never), require (wait for it, and fail without it)."
        ) from None
