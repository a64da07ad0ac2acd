"""The rows of the table: a function with rules, arguments, and the active PyTorch modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import _contexts
from _functions import (
    CLONE,
    CLONE_FIRST,
    CLONE_FIRST_OF_4,
    PASS_ON,
    SAVE_ONE,
    ZERO_AND_CLONE_FIRST,
    ZERO_IN_PLACE,
    ZERO_THREE_OF_21,
    Arguments,
    CloneFirst,
    CloneFirstAndSave,
    Formula,
    clone_typed,
    leaves,
    negate,
    nine_arguments,
    non_leaves,
    one_and_out,
    parameter,
    tensors,
    wrapped_first,
)


class Case(NamedTuple):
    """One row of the table.

    Attributes:
        name: the local name of the operators.
        title: the title of the row.
        function: the function from which the operators are made.
        arguments: creates the arguments of the calls.
        formula: the autograd formula, if any.
        mutates_args: the arguments that the function mutates.
        tags: the names of the operators' tags.
        context: a context manager that is active during the calls.
        written: an equivalent `torch.autograd.Function`.
        cpp: the name of an equivalent operator in clone_first.cpp.
        backward: whether each call also runs the backward.
        ways: the counters of `torchop.native` that each call increments.
    """

    name: str
    title: str
    function: Callable[..., Tensor]
    arguments: Callable[[], Arguments]
    formula: Formula | None = None
    mutates_args: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    written: type[torch.autograd.Function] | None = None
    cpp: str | None = None
    backward: bool = False
    ways: tuple[str, ...] = ("native",)


FOURTEEN = Case("fourteen", "14 tensors", CLONE_FIRST, tensors(14), cpp="fourteen")
FOUR = Case("four", "4 tensors", CLONE_FIRST_OF_4, tensors(4), cpp="four")
ONE = Case("one", "1 tensor", CLONE, tensors(1), cpp="one")
INFERENCE = FOURTEEN._replace(
    name="inference", title="inference mode", context=torch.inference_mode
)
TYPED = Case("typed", "9 typed arguments", clone_typed, nine_arguments)
MUTATION = Case(
    "mutation",
    "mutates one",
    ZERO_AND_CLONE_FIRST,
    tensors(14),
    mutates_args=("x1",),
    cpp="mutation",
)
MUTATION_OF_3 = MUTATION._replace(
    name="mutation_of_3",
    title="mutates 3 of 21",
    function=ZERO_THREE_OF_21,
    arguments=tensors(21),
    mutates_args=("x1", "x2", "x3"),
    cpp=None,
)
# Like the update of a key-value cache.
MUTATION_INFERENCE = MUTATION._replace(
    name="mutation_inference", title="inference, mutates", context=torch.inference_mode
)
IN_PLACE = Case(
    "in_place",
    "in place",
    ZERO_IN_PLACE,
    tensors(14),
    mutates_args=("x1",),
    tags=("inplace",),
)
OUT = Case("out", "out=", negate, one_and_out, mutates_args=("out",), tags=("out",))
GRAD = Case(
    "grad", "grad, 14 leaves", CLONE_FIRST, leaves(14), PASS_ON, written=CloneFirst, cpp="grad"
)
GRAD_1 = GRAD._replace(
    name="leaf", title="grad, 1 leaf", function=CLONE, arguments=leaves(1), cpp=None
)
PARAMETER = GRAD_1._replace(name="parameter", title="grad, 1 parameter", arguments=parameter)
GRAD_NON_LEAVES = GRAD._replace(name="inner", title="grad, 14 non-leaves", arguments=non_leaves)
SAVES = GRAD._replace(
    name="saves", title="grad, saves one", formula=SAVE_ONE, written=CloneFirstAndSave, cpp=None
)
TRAINING = GRAD._replace(name="training", title="forward + backward", backward=True)
# These have a formula, because without one torch.library.define registers no autograd kernel, and
# the comparison would be unfair.
RULES = Case("rules", "", CLONE_FIRST, tensors(14), PASS_ON)
PROFILED = RULES._replace(
    name="profiled", title="profiler", context=_contexts.profiler, ways=("profiler",)
)
# The handlers of the mode and the subclass call the operator again, also through the dispatcher.
IN_MODE = RULES._replace(
    name="in_mode", title="dispatch mode", context=_contexts.PassOn, ways=("mode", "mode")
)
SUBCLASS = RULES._replace(
    name="subclass",
    title="tensor subclass",
    arguments=wrapped_first,
    ways=("tensor_subclass", "mode"),
)
_ALL = (
    *(FOURTEEN, FOUR, ONE, INFERENCE, TYPED),
    *(MUTATION, MUTATION_OF_3, MUTATION_INFERENCE, IN_PLACE, OUT),
    *(GRAD_1, PARAMETER, GRAD, GRAD_NON_LEAVES, SAVES, TRAINING),
    *(PROFILED, IN_MODE, SUBCLASS),
)
# torch.Tag.inplace and torch.Tag.out exist since 2.13.
CASES = tuple(case for case in _ALL if all(hasattr(torch.Tag, tag) for tag in case.tags))
