"""The helper operators that compiled graphs call if an operator's backward formula is derived.

`name__training` replaces the operator `name` in the forward pass. It returns the results of `name`
and a tensor with the ambient state from before the kernel ran, such as the states of random number
generators.

`name__backward` computes the gradients. It takes the gradients of the outputs, the ambient state, a
mask of the tensors that need a gradient, and the arguments of `name`. The kernel restores the
state, so the random numbers are the same wherever the compiler schedules the backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from torchop._compat import autograd, compilers, functorch
from torchop._compat.classes import Tag
from torchop._core.call import as_tuple, tensors_in
from torchop._core.define import all_or_nothing
from torchop._core.definition import Definition
from torchop._errors import GradientError
from torchop._rules.autograd.derived.backward import DerivedFormula
from torchop._rules.autograd.derived.differentiate import Rerun, output_tensors
from torchop._rules.autograd.derived.replay import (
    ForbidRandomNumbers,
    ambient_state,
    packed_size,
)
from torchop._rules.autograd.derived.saved_call import of_each_tensor, split_tensors
from torchop._rules.autograd.gradients import in_fresh_memory
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.checkpoint_modes import register_for_checkpoints
from torchop._rules.helper_operators import HelperOperator, free_name
from torchop._rules.vmap.rule import VmapRule
from torchop._rules.vmap.sequential import map_elements, with_dims
from torchop._schema.text import with_keyword_only

# If this value is passed as the argument `call_number`, `name__training` returns no ambient state
# (the states of random number generators and settings).
_WITHOUT_STATE = -1

_IN_CUDA_GRAPH = (
    "It was compiled for CUDA graphs, for example by torch.compile with mode='reduce-overhead', "
    "and CUDA graphs cannot save that state. Tag the operator with "
    "torch.Tag.nondeterministic_seeded to exclude it from CUDA graphs, or compile without them."
)


def derived_formula(definition: Definition) -> DerivedFormula:
    """Return the derived backward formula, and define the two helper operators on first use."""

    def build() -> DerivedFormula:
        return DerivedFormula(definition, (Training.of(definition), Backward.of(definition)))

    return all_or_nothing(f"the derived formula of {definition}", build)


class Training(HelperOperator):
    """The helper operator `name__training`, which replaces `name` in the forward pass."""

    kind = "training"
    error = GradientError
    # The results include the states of random number generators, so a recomputation must start from
    # the same states. This tag makes compilers restore the states when they recompute a
    # checkpointed region.
    tags = (Tag.nondeterministic_seeded,)
    further_results = ("Tensor",)

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition)
        # AOTAutograd merges calls with equal arguments, even if they draw random numbers
        # (`fx_graph_cse` in torch/_functorch/compile_utils.py). So each call gets a number, which
        # makes the arguments differ.
        self.number = free_name("call_number", definition.schema)
        self._calls = itertools.count() if self.draws_numbers else itertools.repeat(0)

    def written_arguments(self) -> list[str]:
        return with_keyword_only(super().written_arguments(), [f"int {self.number}=0"])

    def register_rules(self) -> None:
        self.helper.rule(AutogradRule).update(formula=DerivedFormula(self.helper, None))
        register_for_checkpoints(self.helper, self.definition.overload, self.number)

    @property
    def draws_numbers(self) -> bool:
        return Tag.nondeterministic_seeded in self.definition.declaration.tags

    def __call__(self, args: Any, kwargs: Any) -> tuple[Any, torch.Tensor]:
        """Call `name__training`. Return the result of the operator and the packed ambient state."""
        number = next(self._calls)
        # The state is a CPU tensor and would prevent Inductor from using CUDA graphs. So omit the
        # state if the operator does not declare that it draws random numbers.
        if (
            not self.draws_numbers
            and compilers.makes_cuda_graphs()
            and _accelerator_device((*args, *kwargs.values())) is not None
        ):
            number = _WITHOUT_STATE
        result, (packed,) = self.split(self.overload(*args, **kwargs, **{self.number: number}))
        return result, packed

    def forbid_random_numbers(self) -> None:
        if self.draws_numbers:
            raise GradientError(
                f"{self.definition} is tagged with torch.Tag.nondeterministic_seeded. Inside "
                "torch.vmap, a compiler cannot pass the generator state from the forward to the "
                "backward. Compile without vmap, or write the formula with register_autograd."
            )

    @compilers.never_traced
    def kernel(self, *args: Any, **kwargs: Any) -> Any:
        definition = self.definition
        is_without_state = kwargs.pop(self.number) == _WITHOUT_STATE
        values = (*args, *kwargs.values())
        state = ambient_state(values, in_graph=True)
        if not is_without_state:
            result = definition.overload(*args, **kwargs)
            return (*as_tuple(definition.schema, result), state.packed)
        if not state.is_plain:
            raise GradientError(
                f"{definition}: the derived formula runs the body again in the backward, but the "
                "graph does not record that autocast is enabled or that the default dtype or "
                f"device was changed. {_IN_CUDA_GRAPH}"
            )
        with ForbidRandomNumbers(definition, _IN_CUDA_GRAPH):
            result = definition.overload(*args, **kwargs)
        return (*as_tuple(definition.schema, result), _no_state(values))

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        is_without_state = kwargs.pop(self.number) == _WITHOUT_STATE
        values = (*args, *kwargs.values())
        result = self.definition.overload(*args, **kwargs)
        results = as_tuple(self.definition.schema, result)
        if is_without_state:
            return (*results, _no_state(values))
        # The last result contains the packed generator states and settings, and is a CPU tensor.
        # But if the arguments are meta tensors, all results must be on the meta device.
        is_meta = any(tensor.device.type == "meta" for tensor in tensors_in(values))
        device = "meta" if is_meta else "cpu"
        return (*results, torch.empty(packed_size(values), dtype=torch.uint8, device=device))


def _accelerator_device(values: Sequence[Any]) -> torch.device | None:
    devices = (tensor.device for tensor in tensors_in(values))
    return next((device for device in devices if device.type not in ("cpu", "meta")), None)


def _no_state(values: Sequence[Any]) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=_accelerator_device(values))


class Backward(HelperOperator):
    """The helper operator `name__backward`, which computes the gradients."""

    kind = "backward"
    error = GradientError

    def written_arguments(self) -> list[str]:
        leading = {"grad_outputs": "Tensor?[]", "state": "Tensor?", "needed": "bool[]"}
        schema = self.definition.schema
        added = [f"{kind} {free_name(name, schema)}" for name, kind in leading.items()]
        return [*added, *super().written_arguments()]

    def written_results(self) -> list[str]:
        return ["Tensor[]"]

    def register_rules(self) -> None:
        self.helper.rule(AutogradRule).update(formula=DerivedFormula(self.helper, None))
        self.helper.rule(VmapRule).register(_vmap_rule(self.definition, self.helper))

    @compilers.never_traced
    def kernel(
        self,
        grads: Sequence[Tensor | None],
        state: Tensor | None,
        needed: Sequence[bool],
        *args: Any,
        **kwargs: Any,
    ) -> list[Tensor]:
        call, tensors = split_tensors(args, kwargs)
        # If autograd is active, the gradients may be differentiated again (double backward), so
        # record a graph for them.
        create_graph = not autograd.is_excluded()
        rerun = Rerun(self.definition, call, tensors, needed, state)
        gradients = rerun.gradients(grads, create_graph=create_graph)
        return in_fresh_memory(gradients, compress(tensors, needed), (*grads, *tensors))

    def fake(self, grads: Any, state: Any, needed: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
        _, tensors = split_tensors(args, kwargs)
        return list(map(torch.empty_like, compress(tensors, needed)))


def _vmap_rule(definition: Definition, helper: Definition) -> Any:
    def backward(info: Any, in_dims: Any, *values: Any, **kwargs: Any) -> Any:
        mapped = any(dim is not None for dim in of_each_tensor(values[3:], in_dims[3:]))
        if mapped and callable(definition.plan[VmapRule]):
            return _through_rule(definition, info, in_dims, *values, **kwargs)
        # `in_dims` has no entry for trailing arguments that equal their default, so add None.
        dims = (*in_dims, *[None] * (len(values) - len(in_dims)))
        with functorch.without_randomness_of_vmap():
            arguments = list(map(with_dims, values, dims))
            stacked = map_elements(helper, info.batch_size, arguments, kwargs)
        return stacked, [0] * len(stacked)

    return backward


def _through_rule(
    definition: Definition,
    info: Any,
    in_dims: Any,
    grads: Sequence[Tensor | None],
    state: Tensor | None,
    needed: Sequence[bool],
    *args: Any,
    **kwargs: Any,
) -> tuple[list[Tensor], list[int]]:
    """Differentiate the user's vmap rule, to compute the gradients of the whole batch at once."""
    rule = definition.plan[VmapRule]
    assert callable(rule)
    call, tensors = split_tensors(args, kwargs)
    dims = of_each_tensor(args, in_dims[3:])
    size = info.batch_size
    # Expand inputs that are not batched, because they get one gradient for each batch element.
    batched = [
        _batch_first(tensor, dim, size) if need else tensor
        for tensor, dim, need in zip(tensors, dims, needed, strict=True)
    ]
    batched_dims = [0 if need else dim for dim, need in zip(dims, needed, strict=True)]
    schema = definition.schema
    in_places, _ = call.with_tensors(batched_dims)
    pairs = zip(schema.positional, in_places, strict=False)
    rule_dims = tuple(dim if argument.holds_tensors else None for argument, dim in pairs)

    def run(inputs: Sequence[Tensor]) -> list[Tensor | None]:
        rule_args, keywords = call.with_tensors(inputs)
        result, out_dims = rule(info, rule_dims, *rule_args, **keywords)
        results, out_dims = as_tuple(schema, result), as_tuple(schema, out_dims)
        outputs = output_tensors(schema.returns, results)
        return [
            None if output is None else _batch_first(output, dim, size)
            for output, dim in zip(outputs, of_each_tensor(results, out_dims), strict=True)
        ]

    grads_batched = [
        None if grad is None else _batch_first(grad, dim, size)
        for grad, dim in zip(grads, in_dims[0] or [None] * len(grads), strict=True)
    ]
    rerun = Rerun(definition, call, batched, needed, state)
    gradients = rerun.gradients(grads_batched, create_graph=torch.is_grad_enabled(), run=run)
    return gradients, [0] * len(gradients)


def _batch_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
