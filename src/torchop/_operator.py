"""The name by which pickles of handles find `_unpickle`, wherever that is."""

from torchop._define.handle import _unpickle as _unpickle
