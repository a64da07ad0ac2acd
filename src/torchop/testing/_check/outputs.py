"""A variant that changes the shape of `out=` arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from torch import Tensor

from torchop.testing._check.calls import CannotCheck, Example
from torchop.testing._check.cases import Case
from torchop.testing._check.sizes import with_size
from torchop.testing._check.subject import Subject


def other_out(subject: Subject, example: Example) -> Iterator[Case]:
    """Give the `out=` arguments no elements, or one column less."""
    # Operators defined with torch.library often lack torch.Tag.out, so look at the schema instead.
    schema = subject.op._schema
    writes = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    returns_them = all(each.alias_info is not None for each in schema.returns)
    is_out = all(each.kwarg_only for each in writes) and len(schema.returns) == len(writes) > 0
    if not (is_out and returns_them):
        raise CannotCheck("no argument is an out= argument")
    places = subject.written_places(example)

    def narrowed(columns: Callable[[int], int], example: Example) -> Example:
        def change(place: int, tensor: Tensor) -> Tensor:
            if place not in places or not tensor.dim() or not tensor.numel():
                return tensor
            return with_size(tensor, tensor.dim() - 1, columns(tensor.shape[-1])).clone()

        return example.with_tensors([change(*each) for each in enumerate(example.tensors)])

    yield Case("empty out= arguments", example, functools.partial(narrowed, lambda count: 0))
    yield Case("smaller out= arguments", example, functools.partial(narrowed, lambda n: n - 1))
