"""Types of the C++ extension `_call_path`, whose sources are in `csrc`."""

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from types import CodeType
from typing import Any

from torch import Tensor

from torchop._core.definition import CompiledRule, Definition
from torchop._schema.naming import OpName

class Plan:
    """A call plan compiled to C++: the kernels, gradient and checks of one operator.

    It is immutable. Registrations replace it, see `Entry.plan`.
    """

    def __new__(
        cls,
        name: str,
        overload: str,
        # (name, type, is_mutated) or (name, type, is_mutated, default) in schema order. Types as
        # PyTorch prints them, such as "Optional[List[int]]".
        parameters: tuple[tuple[Any, ...], ...],
        keyword_names: tuple[str, ...],
        # (kernel in the dispatcher's table, function that native calls run instead). Operators with
        # residuals add the author's function, which returns them; None if it is unknown.
        kernels: tuple[
            tuple[Callable[..., Any], Callable[..., Any]]
            | tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any] | None],
            ...,
        ],
        # The kernels at Autograd, ADInplaceOrView and BackendSelect, whose work native calls do.
        own_kernels: tuple[
            Callable[..., Any] | None, Callable[..., Any] | None, Callable[..., Any] | None
        ],
        returns: tuple[str, ...],
        returned_parameters: tuple[int, ...],
        are_fresh: bool,
        # (make_node, setup_context[, inputs[, look]]), or None if the dispatcher must record
        # gradients. make_node() returns a node without edges, and its ctx. The others are:
        # - setup_context(ctx, inputs, keyword_only_inputs, output).
        # - inputs(args), for a formula of torch.library. Returns the flat inputs, and a function
        #   from the result to `ctx._pt_metadata`. None if no argument is a list.
        # - look(inputs, keyword_only_inputs), for a derived formula. Runs before the kernel; its
        #   result is the last argument of setup_context.
        gradient: tuple[Callable[[], Any], Callable[..., Any] | None]
        | tuple[
            Callable[[], Any],
            Callable[..., Any] | None,
            Callable[..., tuple[list[Any], Any]] | None,
        ]
        | tuple[Callable[[], Any], Callable[..., Any], None, Callable[..., Any]]
        | None,
        finish: Callable[[tuple[Any, ...], dict[str, Any], Any], Any],
        # Values that were used to compile the plan, if they can change without a notification:
        # (dict, key, value) or (set, key, is_member). A change makes the plan outdated.
        sources: tuple[tuple[dict[Any, Any] | set[Any], str | None, Any], ...] = ...,
        # True if other packages may register kernels without a notification. A call that finds an
        # unknown kernel then makes the plan outdated.
        is_foreign: bool = ...,
        # True if kernels must not receive arguments that equal their default, like in calls from
        # the dispatcher.
        as_dispatched: bool = ...,
        # For operators that `OpOverload` dispatches in Python: converts a result of `finish` in a
        # call that enters the C++ dispatcher.
        convert: Callable[[Any], Any] | None = ...,
        # The result of `Declared.in_plan`; None for operators without residuals.
        residuals: tuple[Any, ...] | None = ...,
    ) -> Plan: ...
    @property
    def unknown_parameter(self) -> int | None: ...  # index of a type that native calls lack

class Entry:
    """The entry point of all calls of an operator, with its current plan."""

    plan: Plan | None  # None makes the next call compile a plan
    dispatch: Callable[..., Any] | None  # calls the dispatcher; set before `plan`
    def __new__(
        cls, name: OpName, refresh: Callable[[], None]
    ) -> Entry: ...  # refresh() must set `plan`
    @property
    def name(self) -> OpName: ...
    @property
    def counters(self) -> tuple[int, ...]: ...
    # Returns (reason, (passes Autograd, passes ADInplaceOrView, records a gradient), kernel, index
    # of the argument that the reason is about) without running the call.
    def explain(
        self, *args: Any, **kwargs: Any
    ) -> tuple[int, tuple[bool, bool, bool], Callable[..., Any] | None, int]: ...

# Sets observer(refresh, *args, **kwargs), which is called before the first call of an entry that
# falls back to the dispatcher for a given reason. `refresh` is the entry's.
def set_observer(observer: Callable[..., object] | None, /) -> None: ...

class Operator:
    """Replaces the C++ function in the `_op` of an OpOverload or OpOverloadPacket.

    With an entry, calls are native, and calls of a packet try the overload of `next` if PyTorch
    would skip this one. Without an entry, calls go to `dispatch`, and `overloads` (qualified names)
    cannot be deregistered meanwhile. If one of them was deregistered before, calls go to `next`.
    """

    entry: Entry | None
    dispatch: Callable[..., Any]
    next: Callable[..., Any] | None
    def __new__(
        cls,
        owner: object,  # the OpOverload or OpOverloadPacket
        entry: Entry | None,
        dispatch: Callable[..., Any],
        next: Callable[..., Any] | None = ...,
        overloads: Iterable[str] = ...,
    ) -> Operator: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class Choice:
    """A kernel that calls the kernel of the selected provider."""

    def __new__(
        cls,
        # The first item of its value is the combined settings of the open blocks, compared by `is`.
        blocks: ContextVar[tuple[Any, ...]],
        # select(settings, is_deterministic) returns an object with the attribute `function`, the
        # kernel of all calls. If it is None, `answer(args, kwargs)` returns the kernel of a call.
        select: Callable[[Any, bool], Any],
        asks_for_determinism: bool,  # True if a kernel is nondeterministic
    ) -> Choice: ...
    @property
    def count(self) -> int: ...  # of cached calls
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

# Returns the functions for `apply` and `saved_tensors` of a node class. `apply` runs the formula of
# `definition.compiled(rule)`. The callbacks are:
# - failed(error, ctx, *grads) raises a better error, or adds a note to this one.
# - checked(ctx, result) checks and converts a result that C++ does not accept.
# - guarded(ctx) returns the saved tensors if the backward itself is recorded.
# - raw is the descriptor of PyTorch's `saved_tensors`, for a backward that is not recorded.
# - saved_tensors(ctx) returns them outside of a formula.
def make_backward(
    definition: Definition,
    rule: type[CompiledRule[Any]],
    hold_tensors: tuple[bool, ...],  # by argument
    failed: Callable[..., None],
    checked: Callable[[Any, Any], tuple[Any, ...]],
    guarded: Callable[[Any], tuple[Any, ...]],
    raw: Any,
    saved_tensors: Callable[[Any], tuple[Any, ...]],
    contiguous: CodeType,  # code of the wrapper in `with_contiguous_grads`
    /,
) -> tuple[Callable[..., Any], Callable[[Any], tuple[Any, ...]]]: ...

# See `replay._packed_if_plain`.
def pack_plain(values: Sequence[Any], latest: Tensor | None, count: int, /) -> Tensor | None: ...

# 1 if nodes are made by applying a function whose forward calls `take_node` (PyTorch 2.11 and
# 2.12), 0 if they are made by calling the node class.
nodes_come_from_apply: int
# The dispatch keys of the devices that native calls support, such as "CPU".
backends: tuple[str, ...]

# Makes the dispatcher skip `kernel` at a key when it has nothing to do. Returns a function that
# undoes this, or None if another kernel is at the key.
def bypass(name: str, overload: str, key: str, kernel: Any) -> Callable[[], None] | None: ...
def take_node(ctx: Any, /) -> object: ...

# Returns C++ versions of `_records` and `_returned` in `_rules/residuals/handover.py`.
def make_handover(
    returned: type, recording: dict[int, tuple[Any, bool]], /
) -> tuple[Callable[[], bool], Callable[[Any, tuple[Any, ...]], Any]]: ...
def switch_off(blocks: int, /) -> None: ...  # opens this many blocks; closes them if negative
def make_entering(lock: Any, /) -> Callable[[], bool]: ...

# Keeps calls of operators out of the dispatcher during the lifetime of the result.
def hold_calls(names: Iterable[str], /) -> object: ...

# Makes new calls of operators raise, and waits for calls in the dispatcher.
def end_calls(names: Iterable[str], /) -> None: ...
def running() -> list[Entry]: ...  # entries of the calls that this thread is running
