from __future__ import annotations

import functools
import inspect
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchop._compat import fake_tensors, stand_ins
from torchop._core.call import replace_all
from torchop._core.declaration import Site
from torchop._core.definition import Definition
from torchop._core.observers import call_signature, check_arguments
from torchop._errors import (
    ProviderError,
    ProviderWarning,
    RuleSignatureError,
    nearest,
    short_repr,
    short_text,
    users_place,
    warn,
)
from torchop._rules.providers.priority import REFERENCE, TUNED
from torchop._schema.callables import check_callable, check_no_generator
from torchop._schema.defaults import fitted, same_default
from torchop._schema.signatures import spell_function

Supported: TypeAlias = "bool | Callable[[], bool]"
# Maps a dtype to the relative and the absolute tolerance (rtol, atol) for comparisons with the
# result of the reference kernel.
Tolerance: TypeAlias = "Mapping[torch.dtype, tuple[float, float]]"
Configs: TypeAlias = "Sequence[Mapping[str, Any]]"
Function = Callable[..., Any]


class Selected(NamedTuple):
    """The kernel that was selected for a call, and the name of its provider."""

    name: str
    function: Function


class Provider(NamedTuple):
    """A named alternative to an operator's reference kernel, and the conditions for its use.

    The reference kernel is the kernel that was registered without a provider's name. See
    `register_kernel` for the attributes that are not listed here.

    Attributes:
        devices: the device types that the kernel supports. None stands for every device.
        why_unsupported: a function that returns why the kernel cannot run in this process, or None
            if it can.
        accepts: a function that returns whether the kernel supports a call. It takes the call's
            positional and keyword arguments, and whether a compiler is tracing the call. The
            attribute is None if the kernel supports all calls.
        kernels: one kernel per config, with the arguments of the config bound. If there are no
            configs, this contains only `function`.
        written: the function as the author wrote it.
    """

    name: str
    devices: tuple[str | None, ...]
    function: Callable[..., Any]
    why_unsupported: Callable[[], str | None]
    accepts: Callable[[tuple[Any, ...], Mapping[str, Any], bool], bool] | None
    batch_invariant: bool
    deterministic: bool
    tolerance: Tolerance
    configs: tuple[Mapping[str, Any], ...]
    kernels: tuple[Callable[..., Any], ...]
    written: Callable[..., Any]
    site: Site

    def takes(self, args: Any, kwargs: Any, is_traced: bool = False) -> bool:
        """Return whether the kernel supports a call. The arguments must include all defaults."""
        return self.accepts is None or self.accepts(args, kwargs, is_traced)

    def select(self, args: Any, kwargs: Any, is_traced: bool = False) -> Selected | None:
        takes = self.takes(args, kwargs, is_traced)
        return Selected(self.name, self.function) if takes else None


# A call to a provider's `supports` function counts as slow if it takes longer than this. The limit
# is far above the usual few microseconds, so that calls on a busy machine do not count as slow.
_SLOW_SECONDS = 0.05


def make_provider(
    definition: Definition,
    name: str,
    devices: Sequence[str | None],
    function: Callable[..., Any],
    *,
    supported: Supported,
    supports: Callable[..., Any] | None,
    batch_invariant: bool,
    deterministic: bool,
    tolerance: Tolerance | None,
    configs: Configs,
) -> Provider:
    what = f"{definition}: the provider {name!r}"
    check_callable(what, function)
    configurations = _checked_configs(what, definition, configs)
    names = configurations[0] if configurations else {}
    _check_parameters(what, definition, function, names)
    site = Site.of(function, users_place())
    kernels = tuple(
        definition.convention.kernel(
            definition.authored(functools.partial(function, **each) if each else function)
        )
        for each in configurations or ({},)
    )
    check_no_generator(what, kernels[0], definition.schema)
    kernels = tuple(fitted(what, kernel, definition.schema) for kernel in kernels)
    if not isinstance(supported, bool) and not callable(supported):
        raise TypeError(
            f"{what}: supported expects a bool, or a function without parameters that returns one, "
            f"got {short_repr(supported)}."
        )
    for option, flag in (("batch_invariant", batch_invariant), ("deterministic", deterministic)):
        if not isinstance(flag, bool):
            raise TypeError(f"{what}: {option} expects a bool, got {short_repr(flag)}.")
    return Provider(
        name,
        tuple(devices),
        kernels[0],
        functools.cache(functools.partial(_why_unsupported, supported)),
        None if supports is None else _support_check(what, definition, supports),
        batch_invariant,
        deterministic,
        _checked_tolerance(what, tolerance),
        configurations,
        kernels,
        function,
        site,
    )


def check_name(op: object, name: object, devices: Sequence[str | None]) -> None:
    if name == TUNED:
        raise ProviderError(
            f"{op}: in an order, {TUNED!r} stands for the provider that was measured as the "
            "fastest. Choose another name."
        )
    if name == REFERENCE:
        raise ProviderError(
            f"{op}: {REFERENCE!r} is the name of the kernels that are registered without a "
            "provider. Leave provider out, or choose another name."
        )
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][\w.+-]*", name):
        raise ProviderError(
            f"{op}: the name of a provider must consist of letters, digits and _ . + -, and start "
            f"with a letter, such as 'triton'; got {short_repr(name)}."
        )
    if "meta" in devices:
        raise ValueError(
            f"{op}: a provider cannot be for the device type 'meta'. Meta tensors use the fake "
            "kernel for all providers: use register_fake."
        )


def _why_unsupported(supported: Supported) -> str | None:
    if isinstance(supported, bool):
        return None if supported else "it is registered with supported=False"
    try:
        answer: object = supported()
    except Exception as error:
        return f"`supported` raised {type(error).__name__}: {short_text(error)}"
    if not isinstance(answer, bool):
        return f"`supported` returned {short_repr(answer)}, not a bool"
    return None if answer else "`supported` returned False"


def _checked_configs(
    what: str, definition: Definition, configs: Configs
) -> tuple[Mapping[str, Any], ...]:
    is_list = isinstance(configs, Sequence) and not isinstance(configs, str)
    if not is_list or not all(map(_is_config, configs)):
        raise TypeError(
            f"{what}: configs expects a list of dicts, each with keyword arguments of the "
            f"kernel, such as [{{'block': 64}}, {{'block': 128}}]; got {short_repr(configs)}."
        )
    own = {name for names in definition.schema.parameters for name in names}
    for config in configs:
        if taken := sorted(own & config.keys()):
            raise ValueError(
                f"{what}: {taken[0]!r} is an argument of the operator. Names in configs must be "
                "arguments of this kernel alone."
            )
        if config.keys() != configs[0].keys():
            raise ValueError(
                f"{what}: all configs must have the same names, but {short_repr(config)} and "
                f"{short_repr(configs[0])} differ."
            )
    return tuple(map(dict, configs))


def _is_config(config: object) -> bool:
    return isinstance(config, Mapping) and all(isinstance(name, str) for name in config)


def _checked_tolerance(what: str, tolerance: Tolerance | None) -> Tolerance:
    pairs: Any = tolerance or {}
    if not isinstance(pairs, Mapping) or not all(map(_is_tolerance, pairs.items())):
        raise TypeError(
            f"{what}: tolerance expects a dict of (rtol, atol) by dtype, such as "
            f"{{torch.float16: (1e-3, 1e-5)}}, got {short_repr(tolerance)}."
        )
    return dict(pairs)


def _is_tolerance(item: tuple[Any, Any]) -> bool:
    dtype, pair = item
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    is_valid = is_pair and all(isinstance(each, (int, float)) and each >= 0 for each in pair)
    return isinstance(dtype, torch.dtype) and is_valid


def _check_parameters(
    what: str, definition: Definition, function: Callable[..., Any], configs: Mapping[str, Any]
) -> None:
    """Raise if a kernel's parameter names or defaults differ from the operator's.

    The kernel receives all arguments by position, including default values, so different names and
    defaults would have no effect and would only mislead readers of the kernel. Builtins and
    functions with `*args` are not checked.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    own = signature.parameters
    if not any(p.kind is p.VAR_KEYWORD for p in own.values()):
        named = {n for n, p in own.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        for name in configs.keys() - named:
            raise RuleSignatureError(
                f"{what}: configs has {name!r}, which {spell_function(function)}"
                f"{short_text(signature)} does not take by keyword{nearest(name, named)}."
            )
    parameters = [p for p in own.values() if p.name not in configs]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    keywords = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    expected = call_signature(definition.overload).parameters.values()
    by_position = (p for p in expected if p.kind is not p.KEYWORD_ONLY)
    pairs = list(zip(by_position, positional, strict=False))
    pairs += [
        (p, keywords[p.name]) for p in expected if p.kind is p.KEYWORD_ONLY and p.name in keywords
    ]
    arguments = {argument.name: argument for argument in definition.schema.arguments}

    def is_same(declared: inspect.Parameter, default: Any) -> bool:
        if definition.structure is None:
            argument = arguments[declared.name]
            return argument.has_default and same_default(default, argument)
        return declared.default is default or bool(declared.default == default)

    for declared, parameter in pairs:
        name, default = declared.name, parameter.default
        if name != parameter.name and parameter.kind is not parameter.POSITIONAL_ONLY:
            problem = f"calls the parameter {name!r} of the operator {parameter.name!r}"
        elif default is not parameter.empty and not is_same(declared, default):
            has_none = declared.default is parameter.empty
            spelled = "none" if has_none else short_repr(declared.default)
            problem = f"has the default {short_repr(default)} for {name!r}, the operator {spelled}"
        else:
            continue
        raise RuleSignatureError(
            f"{what}: {spell_function(function)}{short_text(signature)} {problem}. Give it the "
            f"names and defaults of the operator: {definition.schema.text}."
        )


def _support_check(
    what: str, definition: Definition, supports: Callable[..., Any]
) -> Callable[[tuple[Any, ...], Mapping[str, Any], bool], bool]:
    """Wrap a provider's `supports` function so that it receives tensors without data.

    The wrapper also checks that `supports` returns a bool, and warns if it is slow.
    """
    check_arguments(f"{what}: supports", definition.overload, supports)
    check_no_generator(f"{what}: supports", supports, None)
    convention = definition.convention
    # The durations of the latest slow calls in a row, or None once the user has been warned
    slow: list[float] | None = []

    def note(taken: float) -> None:
        """Warn once after three slow calls in a row. A single slow call may just import modules."""
        nonlocal slow
        if slow is not None:
            slow = [*slow, taken] if taken > _SLOW_SECONDS else []
            if len(slow) == 3:
                milliseconds, slow = 1000 * min(slow), None
                warn(
                    f"{what}: supports is slow: it took {milliseconds:.0f} ms or more three "
                    "times in a row, and runs for every call with new shapes or values. Move "
                    "conditions that do not depend on the call to `supported`, because that "
                    "runs only once.",
                    ProviderWarning,
                )

    def accepts(args: tuple[Any, ...], kwargs: Mapping[str, Any], is_traced: bool) -> bool:
        if not is_traced:  # traced tensors have no data, and comparing their sizes must add guards
            args, kwargs = replace_all(args, kwargs, Tensor, stand_ins.stand_in)
        objects, keywords = convention.arguments(args, dict(kwargs))
        start = time.perf_counter()
        try:
            with stand_ins.ReadingStandIns():
                answer = supports(*objects, **keywords)
        except Exception as error:
            may = (
                "It may read shapes, strides, dtypes, devices and plain values, because the "
                "answer is cached for all calls with the same ones"
            )
            if isinstance(error, stand_ins.StandInError):
                problem = f"read {error} of a tensor. {may}"
            elif fake_tensors.reads_data(error, None):
                problem = f"read the data of a tensor. {may}"
            else:
                problem = f"raised {type(error).__name__}: {short_text(error)}"
            raise ProviderError(f"{what}: supports {problem}.") from error
        note(time.perf_counter() - start)
        if isinstance(answer, torch.SymBool) and is_traced:
            return bool(answer)
        if not isinstance(answer, bool):
            got = "a tensor" if isinstance(answer, Tensor) else short_repr(answer)
            raise ProviderError(f"{what}: supports must return a bool, but returned {got}.")
        return answer

    return accepts
