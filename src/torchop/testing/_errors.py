"""The exception of checks, apart from them, because opcheck and check_sharding raise it."""


class OpCheckError(Exception):
    """A check of `opcheck`, or of `check`, failed."""

    __module__ = "torchop.testing"
