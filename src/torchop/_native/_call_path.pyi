"""The C++ extension as Python sees it."""

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from types import CodeType
from typing import Any

from torch import Tensor

from torchop._core.definition import CompiledRule, Definition
from torchop._schema.naming import OpName

class Plan:
    """The plan of an operator, compiled for native calls."""

    def __new__(
        cls,
        name: str,
        overload: str,
        # (name, type, is_mutated) or (name, type, is_mutated, default), with PyTorch's spelling of
        # types; keyword-only ones last.
        parameters: tuple[tuple[Any, ...], ...],
        keyword_names: tuple[str, ...],
        # (kernel in the dispatcher's table, function to call). For an operator with residuals also
        # the author's function, which returns them; None if the kernel is not made from one.
        kernels: tuple[
            tuple[Callable[..., Any], Callable[..., Any]]
            | tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any] | None],
            ...,
        ],
        # The dispatcher kernels for Autograd, ADInplaceOrView and BackendSelect.
        own_kernels: tuple[
            Callable[..., Any] | None, Callable[..., Any] | None, Callable[..., Any] | None
        ],
        returns: tuple[str, ...],
        returned_parameters: tuple[int, ...],
        are_fresh: bool,
        # A function that makes a node without a history, and setup_context(ctx, inputs,
        # keyword_only_inputs, output). For a function of torch.library also inputs(args), which
        # returns its flat inputs, and a function from a result to the description of lists in
        # `ctx`; None without lists. For a derived formula also look(inputs, keyword_only_inputs),
        # called before the kernel; its result is one more argument of setup_context.
        gradient: tuple[Callable[[], Any], Callable[..., Any] | None]
        | tuple[
            Callable[[], Any],
            Callable[..., Any] | None,
            Callable[..., tuple[list[Any], Any]] | None,
        ]
        | tuple[Callable[[], Any], Callable[..., Any], None, Callable[..., Any]]
        | None,
        finish: Callable[[tuple[Any, ...], dict[str, Any], Any], Any],
        # Where values above were read, if they can change without a notice: (dict, key, value), or
        # (set, key, whether it has the key).
        sources: tuple[tuple[dict[Any, Any] | set[Any], str | None, Any], ...] = ...,
        # Whether kernels can change without a notice, so that an unknown kernel outdates the plan.
        is_foreign: bool = ...,
        # Whether kernels get no argument that equals its default, as from the dispatcher.
        as_dispatched: bool = ...,
        # Converts unusual results of calls that enter the dispatcher in C++, where PyTorch
        # dispatches other calls in Python.
        convert: Callable[[Any], Any] | None = ...,
        # See `Declared.in_plan`.
        residuals: tuple[Any, ...] | None = ...,
    ) -> Plan: ...
    @property
    def unknown_parameter(self) -> int | None: ...  # of a type that only the dispatcher converts

class Entry:
    """The entry of the native calls of an operator."""

    plan: Plan | None
    dispatch: Callable[..., Any] | None  # calls the dispatcher; set before the first plan
    def __new__(cls, name: OpName, refresh: Callable[[], None]) -> Entry: ...  # sets `plan`
    @property
    def name(self) -> OpName: ...
    @property
    def counters(self) -> tuple[int, ...]: ...
    def explain(
        self, *args: Any, **kwargs: Any
    ) -> tuple[int, tuple[bool, bool, bool], Callable[..., Any] | None, int]: ...

# Called with the `refresh` of an entry, and the arguments of a call, before the dispatcher gets the
# first call for a reason.
def set_observer(observer: Callable[..., object] | None, /) -> None: ...

class Operator:
    """Replaces the C++ function of an object of torch.ops.

    Without an entry, it calls that function and counts the call as one of all `overloads`, given by
    name. If one of them was deregistered, it calls `next` instead.
    """

    entry: Entry | None
    dispatch: Callable[..., Any]
    next: Callable[..., Any] | None
    def __new__(
        cls,
        owner: object,  # of torch.ops
        entry: Entry | None,
        dispatch: Callable[..., Any],
        next: Callable[..., Any] | None = ...,
        overloads: Iterable[str] = ...,
    ) -> Operator: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class Choice:
    """Calls one of several kernels, chosen by `select`."""

    def __new__(
        cls,
        # What its value starts with is one object for the same open blocks.
        blocks: ContextVar[tuple[Any, ...]],
        # Given that object, and whether only deterministic kernels are allowed: what has a
        # `function` for all calls, or None, and then `answer(args, kwargs)`, which returns the
        # function for a call, and whether it is the one for all that are like it.
        select: Callable[[Any, bool], Any],
        asks_for_determinism: bool,  # whether a kernel is not deterministic
    ) -> Choice: ...
    @property
    def count(self) -> int: ...  # of the calls that it has a function for
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def learn_kernels(plain: str, with_keys: str, kernel: Callable[..., Any]) -> bool: ...
def is_plain_kernel(name: str, overload: str, key: str) -> bool: ...
def python_kernel(name: str, overload: str, key: str) -> Callable[..., Any] | None: ...
def make_handle_type(base: type, traceable: dict[str, Any]) -> type: ...
def shorten_calls(cls: type, before_first_call: Callable[[Any], None]) -> None: ...
def shorten_handle_calls(cls: type) -> None: ...
def adopt(handle: Any, entry: Entry) -> None: ...
def is_evidently_fresh(
    args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, like: Any = ..., /
) -> bool: ...
def are_plain(gradients: Any, count: int, ctx: Any) -> bool: ...

# What is to be `apply` of the nodes of a function, and what reads their saved tensors. The formula
# is that of `definition.compiled(rule)`. `failed(error, ctx, *grads)` raises a better error, or
# adds to this one. `checked(ctx, result)` is for all that is not plain. The next three return the
# saved tensors of a `ctx`: where a gradient is recorded; where none is, which is a descriptor; and
# outside of these calls.
def make_backward(
    definition: Definition,
    rule: type[CompiledRule[Any]],
    hold_tensors: tuple[bool, ...],  # which arguments do
    failed: Callable[..., None],
    checked: Callable[[Any, Any], tuple[Any, ...]],
    guarded: Callable[[Any], tuple[Any, ...]],
    raw: Any,
    saved_tensors: Callable[[Any], tuple[Any, ...]],
    contiguous: CodeType,  # of formulas from `with_contiguous_grads`
    /,
) -> tuple[Callable[..., Any], Callable[[Any], tuple[Any, ...]]]: ...

# See `replay._packed_if_plain`.
def pack_plain(values: Sequence[Any], latest: Tensor | None, count: int, /) -> Tensor | None: ...

# Whether a node comes from applying a function, and what that function does with its `ctx`;
# otherwise a node comes from calling its class.
nodes_come_from_apply: int
# The dispatch keys of the devices whose tensors a native call takes, such as "CPU".
backends: tuple[str, ...]

# Returns None if another kernel is at the key, else a function to call at deregistration.
def bypass(name: str, overload: str, key: str, kernel: Any) -> Callable[[], None] | None: ...
def take_node(ctx: Any, /) -> object: ...

# `_records` and `_returned` of `_rules/residuals/handover.py`.
def make_handover(
    returned: type, recording: dict[int, tuple[Any, bool]], /
) -> tuple[Callable[[], bool], Callable[[Any, tuple[Any, ...]], Any]]: ...
def switch_off(blocks: int, /) -> None: ...  # opens this many blocks; closes them if negative
def make_entering(lock: Any, /) -> Callable[[], bool]: ...
def hold_calls(names: Iterable[str], /) -> object: ...  # while the result lives
def end_calls(names: Iterable[str], /) -> None: ...
def running() -> list[Entry]: ...  # of the native calls that this thread is in
