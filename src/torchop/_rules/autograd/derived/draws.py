"""Refusing random numbers that a backward could not draw again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torchop._compat import dispatch
from torchop._compat.classes import Tag, TorchDispatchMode
from torchop._core.call import tensors_in
from torchop._core.definition import Definition
from torchop._errors import DerivedFormulaError

Result = TypeVar("Result")

# The namespaces of operators that are not looked into: a tag says which of them draw.
_OF_PYTORCH = frozenset({"aten", "prim", "prims"})


def without_draws(definition: Definition, why: str, run: Callable[[], Result]) -> Result:
    """Returns what `run` returns, which may draw no random numbers in the body of an operator."""
    with _RefusingDraws(definition, why):
        return run()


class _RefusingDraws(TorchDispatchMode):
    def __init__(self, definition: Definition, why: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # it has no annotations
        self._definition = definition
        self._why = why

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if Tag.nondeterministic_seeded in func.tags:
            # One that consists of others may draw in some calls only, as dropout in training does.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            raise DerivedFormulaError(
                f"{self._definition}: its body draws random numbers in {func}, which its derived "
                f"formula would have to draw again. {self._why}"
            )
        tensors = list(tensors_in((*args, *kwargs.values())))
        if func.namespace in _OF_PYTORCH or not tensors:
            return func(*args, **kwargs)
        # The kernel may be Python again. A call would come back here.
        keyset = dispatch.backend_keyset_of_call(func.name(), tensors)
        with self:
            return dispatch.redispatch(func, keyset, args, kwargs)
