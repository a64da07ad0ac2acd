"""The exception of `opcheck`, `check` and `check_sharding`."""


class OpCheckError(Exception):
    """A check of `opcheck`, or of `check`, failed."""

    __module__ = "torchop.testing"
