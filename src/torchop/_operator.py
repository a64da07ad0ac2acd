"""The name by which pickles of handles find their way back; what it names may move, this may not."""

from torchop._define.handle import _unpickle as _unpickle
