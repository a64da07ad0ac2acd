"""Whether an exception means that traced code touched the data of a tensor that has none."""

from __future__ import annotations

from torchop._compat import fake_tensors
from torchop._compat.classes import OpOverload

# PyTorch has no exception type for these; the words are those of its C++ and Python checks.
_PHRASES = (
    "numpy() is not supported for tensor subclasses",
    "Cannot access data pointer of Tensor",
    "The tensor has a non-zero number of elements, but its data is not allocated yet",
    "Cannot copy out of meta tensor",
    "Tensor.item() cannot be called on meta tensors",
    "aten::_local_scalar_dense",
    "a correct data-independent implementation does not exist",
    "can't convert meta device type tensor to numpy",
    "Could not guard on data-dependent expression",
    "Could not extract specialized integer from data-dependent expression",
)


def reads_data(error: Exception, op: OpOverload) -> bool:
    """Whether `error` came from reading data; the context's own refusals of `op` do not count."""
    data_dependent, dynamic_shape = fake_tensors.data_dependent_errors()
    if isinstance(error, (data_dependent, dynamic_shape)):
        return getattr(error, "func", None) is not op
    text = str(error)
    return any(phrase in text for phrase in _PHRASES)
