"""The training form of an operator: in compiled graphs, the operator and what its body found.

It returns the states of the random number generators, and of autocast, with which the body ran. The
backward gets them as an argument, so it draws the same numbers wherever a compiler moves it.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from torchop._compat import checkpointing, compilers, libraries, registries
from torchop._compat.classes import Tag
from torchop._core.contract import tensors_in
from torchop._core.definition import Definition
from torchop._errors import DerivedFormulaError
from torchop._rules.autograd.derived.replay import pack, packed_size, surroundings
from torchop._rules.companions import define_companion, free_name
from torchop._rules.functionalization.counterparts import parts_of_schema
from torchop._rules.user.checkpoint_policy import standing_for


class TrainingForm:
    """The operator `name__training`, and how to call it."""

    __slots__ = ("_calls", "_definition", "_number", "companion")

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        schema = definition.schema
        arguments, result = parts_of_schema(schema.written)
        # PyTorch makes one call of two that look the same, even if they draw random numbers.
        self._number = free_name("call_number", schema)
        self._calls = itertools.count() if _draws_numbers(definition) else itertools.repeat(0)
        if "*" not in arguments:
            arguments.append("*")
        arguments.append(f"int {self._number}=0")
        results = result.removeprefix("(").removesuffix(")")
        self.companion = define_companion(
            definition,
            "training",
            f"({', '.join(arguments)}) -> ({results}, Tensor)",
            self._kernel(definition),
            self._fake(definition),
            # It returns the state of the generators, so it depends on that. Checkpoints in compiled
            # graphs, which call it again, put the state back for operators that say so.
            tags=(Tag.nondeterministic_seeded,),
            error=DerivedFormulaError,
        )
        self._install_policies()

    @property
    def draws_numbers(self) -> bool:
        """Whether the operator says that it draws random numbers."""
        return _draws_numbers(self._definition)

    def __call__(self, args: Any, kwargs: Any) -> tuple[Any, torch.Tensor]:
        """Calls it, and returns the result as the operator returns it, and the surroundings."""
        number = {self._number: next(self._calls)}
        *results, found = self.companion.overload(*args, **kwargs, **number)
        return results[0] if len(results) == 1 else tuple(results), found

    def refuse_random_numbers(self) -> None:
        """Refuses an operator whose body draws random numbers, where it cannot draw them again.

        Raises:
            DerivedFormulaError: it has the tag that says so.
        """
        if self.draws_numbers:
            raise DerivedFormulaError(
                f"{self._definition} is tagged with torch.Tag.nondeterministic_seeded, and a "
                "compiler cannot tell its backward inside torch.vmap which numbers it drew. "
                "Compile without vmap, or write the formula with register_autograd."
            )

    def _install_policies(self) -> None:
        mode = checkpointing.checkpoint_mode()
        if mode is None:
            return
        companion = self.companion
        hook = standing_for(self._definition.overload, self._number)
        registries.offer_torch_dispatch(str(companion), mode, hook)
        withdraw = functools.partial(registries.withdraw_torch_dispatch, str(companion), mode, hook)
        libraries.on_close(companion.library, withdraw)

    def _kernel(self, definition: Definition) -> Any:
        number = self._number

        @compilers.never_traced
        def training(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop(number)
            found = surroundings((*args, *kwargs.values()))
            result = definition.overload(*args, **kwargs)
            return (*_several(definition, result), pack(found))

        return training

    def _fake(self, definition: Definition) -> Any:
        number = self._number

        def training(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop(number)
            values = (*args, *kwargs.values())
            # Tensors on the device meta stay among themselves.
            is_meta = any(tensor.device.type == "meta" for tensor in tensors_in(values))
            device = "meta" if is_meta else "cpu"
            found = torch.empty(packed_size(values), dtype=torch.uint8, device=device)
            return (*_several(definition, definition.overload(*args, **kwargs)), found)

        return training


def _draws_numbers(definition: Definition) -> bool:
    return Tag.nondeterministic_seeded in definition.declaration.tags


def _several(definition: Definition, result: Any) -> tuple[Any, ...]:
    return result if len(definition.schema.returns) > 1 else (result,)
