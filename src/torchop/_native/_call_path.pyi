"""Types of the C++ extension `_call_path`. The headers in `csrc` describe most functions."""

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from types import CodeType
from typing import Any

from torch import Tensor

from torchop._core.definition import CompiledRule, Definition
from torchop._native.plan import NativeCalls
from torchop._schema.naming import OpName

class Plan:
    """An operator's call plan: the kernels, gradient and checks of native calls. Immutable."""

    def __new__(
        cls,
        name: str,
        overload: str,
        # (name, type, is_mutated) or (name, type, is_mutated, default), in schema order. Types are
        # in PyTorch's spelling, such as "Optional[List[int]]".
        parameters: tuple[tuple[Any, ...], ...],
        keyword_names: tuple[str, ...],
        # (kernel in the dispatch table, function that native calls run instead). For operators with
        # residuals, the third item is the author's function, or None if it is unknown.
        kernels: tuple[
            tuple[Callable[..., Any], Callable[..., Any]]
            | tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any] | None],
            ...,
        ],
        # The kernels at Autograd, ADInplaceOrView and BackendSelect. Native calls skip these.
        own_kernels: tuple[
            Callable[..., Any] | None, Callable[..., Any] | None, Callable[..., Any] | None
        ],
        returns: tuple[str, ...],
        returned_parameters: tuple[int, ...],
        are_fresh: bool,
        # (make_node, setup_context, inputs, before_kernel, stored_defaults), or None if the
        # dispatcher must record gradients.
        # - make_node creates a node without edges.
        # - setup_context(ctx, inputs, keyword_only_inputs, output[, result of before_kernel]).
        # - inputs(args), for torch.library's formulas with lists. Returns the flat inputs, and a
        #   function that computes `ctx._pt_metadata` from the result.
        # - before_kernel(inputs, keyword_only_inputs), for derived formulas. Runs before the
        #   kernel.
        # - stored_defaults, for torch.library's formulas: the default of each parameter as the
        #   schema stores it, or None. It replaces an argument that the dispatcher would drop.
        gradient: tuple[
            Callable[[], Any],
            Callable[..., Any] | None,
            Callable[..., tuple[list[Any], Any]] | None,
            Callable[..., Any] | None,
            tuple[Any, ...] | None,
        ]
        | None,
        finish: Callable[[tuple[Any, ...], dict[str, Any], Any], Any],
        # The dicts and sets from which the plan was compiled and which may change without a
        # notification. Each item is (dict, key, value) or (set, key, whether it contains the key).
        # The plan is outdated if one of these entries has changed.
        sources: tuple[tuple[dict[Any, Any] | set[Any], str | None, Any], ...] = ...,
        # True if other packages may register kernels. The plan is then recompiled if a call finds
        # an unknown kernel.
        is_foreign: bool = ...,
        # If true, drop arguments that equal their defaults, as the dispatcher does.
        as_dispatched: bool = ...,
        # Converts a result of `finish` in calls that PyTorch would run in the C++ dispatcher. Only
        # for operators that `OpOverload` may dispatch in Python, which does not convert results.
        convert: Callable[[Any], Any] | None = ...,
        # The result of `Declared.in_plan`; None for operators without residuals.
        residuals: tuple[Any, ...] | None = ...,
        # Pairs of a parameter's index, and whether it must be channels_last and not contiguous.
        layouts: tuple[tuple[int, bool], ...] = ...,
    ) -> Plan: ...
    @property
    def unknown_parameter(self) -> int | None: ...  # index of a parameter of an unsupported type

class Entry:
    """Receives an operator's calls, and runs them natively or calls the dispatcher."""

    plan: Plan | None  # if None, the next call compiles a plan
    dispatch: Callable[..., Any] | None  # calls the dispatcher; must be set before `plan`
    def __new__(
        cls, name: OpName, refresh: NativeCalls, /
    ) -> Entry: ...  # refresh() compiles a plan and sets `plan`
    @property
    def name(self) -> OpName: ...
    @property
    def counters(self) -> tuple[int, ...]: ...
    # Returns how a call would run, without running it: (reason, (through the Autograd kernel,
    # through the ADInplaceOrView kernel, records a gradient), kernel, index of the argument for the
    # reason, dispatch key at which the dispatcher would look up the kernel).
    def explain(
        self, *args: Any, **kwargs: Any
    ) -> tuple[int, tuple[bool, bool, bool], Callable[..., Any] | None, int, str]: ...

# If enabled, `log_fallback` of an operator's NativeCalls is called before a call falls back to the
# dispatcher, once per operator and reason.
def log_fallbacks(enabled: bool, /) -> None: ...

class Operator:
    """Replaces the C++ function in `_op` of an OpOverload or OpOverloadPacket.

    If an Operator has an entry, the entry receives its calls. In a packet, `next` is the Operator
    of the next overload, which is called if PyTorch would skip the current overload. If an Operator
    has no entry, its calls go to `dispatch`, and it only preserves the owner's hash.
    """

    entry: Entry | None
    dispatch: Callable[..., Any]
    next: Operator | None
    def __new__(
        cls,
        owner: object,  # the OpOverload or OpOverloadPacket
        entry: Entry | None,
        dispatch: Callable[..., Any],
        next: Operator | None = ...,
        /,
    ) -> Operator: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class Choice:
    """Selects a provider for each call, and runs that provider's kernel."""

    def __new__(
        cls,
        # The value is (combined settings of the open blocks, open blocks).
        blocks: ContextVar[tuple[Any, ...]],
        # resolve(settings, is_deterministic) returns a function, and True if it is the kernel for
        # all calls. Otherwise, the function takes the arguments of a call and returns its kernel.
        resolve: Callable[[Any, bool], tuple[Callable[..., Any], bool]],
        /,
    ) -> Choice: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def probe_kernels(plain: str, with_keys: str, kernel: Callable[..., Any]) -> bool: ...
def is_plain_kernel(name: str, overload: str, key: str) -> bool: ...
def python_kernel(name: str, overload: str, key: str) -> Callable[..., Any] | None: ...
def make_handle_type(base: type, traceable: dict[str, Any]) -> type: ...
def patch_calls(cls: type, /) -> None: ...
def patch_handle_calls(cls: type) -> None: ...
def adopt(handle: Any, entry: Entry) -> None: ...
def is_evidently_fresh(
    args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, like: Any = ..., /
) -> bool: ...
def are_plain(gradients: Any, count: int, ctx: Any) -> bool: ...

# Returns the functions for the attributes `apply` and `saved_tensors` of a node class. `apply` runs
# the formula `definition.compiled(rule)`. The callbacks are:
# - failed(error, ctx, *grads) raises a better error, or adds a note to `error`.
# - checked(ctx, result) checks and converts gradients that C++ does not accept.
# - guarded(ctx) returns the saved tensors if the backward is itself recorded.
# - raw, PyTorch's descriptor `saved_tensors`, is used if the backward is not recorded.
# - saved_tensors(ctx) returns the saved tensors outside of a formula.
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
    in_python: Callable[..., Any],  # restores the autocast state of the forward
    /,
) -> tuple[Callable[..., Any], Callable[[Any], tuple[Any, ...]]]: ...
def pack_plain(values: Sequence[Any], latest: Tensor | None, count: int, /) -> Tensor | None: ...

nodes_come_from_apply: int  # 0 or 1
backends: tuple[str, ...]  # dispatch keys, such as "CPU"

def bypass(name: str, overload: str, key: str, kernel: Any) -> Callable[[], None] | None: ...
def take_node(ctx: Any, /) -> object: ...
def make_handover(
    returned: type, recording: dict[int, tuple[Any, bool]], /
) -> tuple[Callable[[], bool], Callable[[Any, tuple[Any, ...]], Any]]: ...
def switch_off(blocks: int, /) -> None: ...  # opens this many blocks; a negative number closes them
def keep_memory(
    defined: Iterable[str], implemented: Iterable[str], frees_functions: bool, /
) -> Callable[[], None]: ...
