"""The module in which pickles of handles look for `_unpickle`."""

from torchop._define.handle import _unpickle as _unpickle
