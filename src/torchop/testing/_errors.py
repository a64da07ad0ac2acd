"""The exception of `opcheck`, `check` and `check_sharding`."""


class OpCheckError(Exception):
    """Raised by `opcheck`, `check` and `check_sharding` if a check fails."""

    __module__ = "torchop.testing"
