"""The exception that `opcheck`, `check` and `check_sharding` raise."""


class OpCheckError(Exception):
    """Raised by `opcheck`, `check` and `check_sharding` if a check fails."""

    __module__ = "torchop.testing"
