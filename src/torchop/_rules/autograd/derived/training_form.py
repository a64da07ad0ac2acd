"""The training form of an operator, which compiled graphs call instead of the operator.

It also returns the surroundings of the body: the states of the random number generators, and of
autocast. The backward takes them as an argument, so that it draws the same numbers wherever a
compiler moves it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from torchop._compat import checkpointing, compilers, registries
from torchop._compat.classes import Tag
from torchop._core.call import tensors_in
from torchop._core.definition import Definition
from torchop._errors import DerivedFormulaError
from torchop._rules.autograd.derived.draws import without_draws
from torchop._rules.autograd.derived.replay import current_surroundings, packed_size
from torchop._rules.companions import define_companion, free_name
from torchop._rules.user.checkpoint_policy import standing_for
from torchop._schema.text import arguments_of, results_of, write, write_results

# The number of a call that keeps no state of random number generators.
_WITHOUT_STATE = -1

_IN_CUDA_GRAPH = (
    "It was compiled for CUDA graphs, such as by torch.compile with mode='reduce-overhead', which "
    "have no place for that. Give the operator the tag torch.Tag.nondeterministic_seeded, which "
    "leaves it out of CUDA graphs; or compile without them."
)


class TrainingForm:
    """The operator `name__training`, and how to call it."""

    __slots__ = ("_calls", "_definition", "companion", "number")

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        schema = definition.schema
        arguments = arguments_of(schema.written)
        # Compilers merge two calls with the same arguments, even if they draw random numbers. The
        # number of the call makes them different.
        self.number = free_name("call_number", schema)
        self._calls = itertools.count() if self.draws_numbers else itertools.repeat(0)
        if "*" not in arguments:
            arguments.append("*")
        arguments.append(f"int {self.number}=0")
        self.companion = define_companion(
            definition,
            "training",
            write(arguments, write_results([*results_of(schema.written), "Tensor"])),
            self._kernel(definition),
            self._fake(definition),
            # Its result depends on the state of the generators. Checkpoints in compiled graphs,
            # which call it again, restore that state for operators with this tag.
            tags=(Tag.nondeterministic_seeded,),
            error=DerivedFormulaError,
        )
        self._install_policies()

    @property
    def draws_numbers(self) -> bool:
        """Whether the operator says that it draws random numbers."""
        return Tag.nondeterministic_seeded in self._definition.declaration.tags

    def __call__(self, args: Any, kwargs: Any) -> tuple[Any, torch.Tensor]:
        """Calls it, and returns the result of the operator, and the packed surroundings."""
        number = {self.number: next(self._calls)}
        if self._device_of_cuda_graph((*args, *kwargs.values())) is not None:
            number[self.number] = _WITHOUT_STATE
        *results, packed = self.companion.overload(*args, **kwargs, **number)
        return results[0] if len(results) == 1 else tuple(results), packed

    def _device_of_cuda_graph(self, values: Sequence[Any]) -> torch.device | None:
        """The device on which this call becomes part of a CUDA graph; None if it does not.

        A compiler makes no CUDA graph of what returns a tensor on the CPU. So the state is left out
        there, unless the operator says that it draws random numbers.
        """
        if self.draws_numbers or not compilers.makes_cuda_graphs():
            return None
        return _device_beside_cpu(values)

    def refuse_random_numbers(self) -> None:
        """Refuses an operator that draws random numbers, where the backward cannot repeat them."""
        if self.draws_numbers:
            raise DerivedFormulaError(
                f"{self._definition} is tagged with torch.Tag.nondeterministic_seeded, and a "
                "compiler cannot tell its backward inside torch.vmap which numbers it drew. "
                "Compile without vmap, or write the formula with register_autograd."
            )

    def _install_policies(self) -> None:
        companion = self.companion
        hook = standing_for(self._definition.overload, self.number)
        name = str(companion)
        for mode in checkpointing.POLICY_MODES:
            registries.offer_torch_dispatch(name, mode, hook)

    def _kernel(self, definition: Definition) -> Any:
        number = self.number

        @compilers.never_traced
        def training(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            is_without_state = kwargs.pop(number) == _WITHOUT_STATE
            surroundings = current_surroundings(values, in_graph=True)
            if not is_without_state:
                result = definition.overload(*args, **kwargs)
                return (*_as_tuple(definition, result), surroundings.packed)
            if not surroundings.are_plain:
                raise DerivedFormulaError(
                    f"{definition}: its derived formula runs the body again in the backward, but "
                    "nothing in this graph keeps that autocast is on here, or another default "
                    f"dtype or device than in a new process. {_IN_CUDA_GRAPH}"
                )
            result = without_draws(
                definition, _IN_CUDA_GRAPH, lambda: definition.overload(*args, **kwargs)
            )
            return (*_as_tuple(definition, result), _no_state(_device_beside_cpu(values)))

        return training

    def _fake(self, definition: Definition) -> Any:
        number = self.number

        def training(*args: Any, **kwargs: Any) -> Any:
            is_without_state = kwargs.pop(number) == _WITHOUT_STATE
            values = (*args, *kwargs.values())
            results = _as_tuple(definition, definition.overload(*args, **kwargs))
            if is_without_state:
                return (*results, _no_state(_device_beside_cpu(values)))
            # A result on the CPU beside meta tensors would mix devices.
            is_meta = any(tensor.device.type == "meta" for tensor in tensors_in(values))
            device = "meta" if is_meta else "cpu"
            packed = torch.empty(packed_size(values), dtype=torch.uint8, device=device)
            return (*results, packed)

        return training


def _device_beside_cpu(values: Sequence[Any]) -> torch.device | None:
    devices = (tensor.device for tensor in tensors_in(values))
    return next((device for device in devices if device.type not in ("cpu", "meta")), None)


def _no_state(device: torch.device | None) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


def _as_tuple(definition: Definition, result: Any) -> tuple[Any, ...]:
    return result if len(definition.schema.returns) > 1 else (result,)
