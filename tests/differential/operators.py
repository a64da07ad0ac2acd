"""Generated operators: their schema, their rules, and the functions that report what they see.

What a kernel or a formula does is not part of an operator but of a call: the functions ask the
script that is running. So operators with the same schema are made once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

import torchop
from tests.differential.chance import one_in
from tests.differential.describe import describe
from tests.differential.scripts import current, run_backward, run_kernel, run_setup_context
from torchop._native import low_level
from torchop._native.switch import Reason
from torchop._rules.autograd.rule import AutogradRule
from torchop._schema import naming


class Kind(NamedTuple):
    """A schema type: the annotation for it, if there is one, and (schema, value) of defaults."""

    schema: str
    annotation: str | None
    defaults: tuple[tuple[str, Any], ...] = ()

    @property
    def base(self) -> str:
        """The schema type of a single value, such as `Tensor` of `Tensor?[]`."""
        return self.schema.partition("?")[0].partition("[")[0]

    @property
    def is_list(self) -> bool:
        return "[" in self.schema

    @property
    def is_optional(self) -> bool:
        return self.schema.endswith("?")

    @property
    def holds_tensors(self) -> bool:
        return self.base == "Tensor"


_NONE = (("None", None),)
_INTS = (("3", 3), ("-1", -1), ("0", 0), (str(2**63 - 1), 2**63 - 1))
_FLOATS = (("1.5", 1.5), ("0.0", 0.0), ("2.0", 2.0), ("-1e-05", -1e-05))
_BOOLS = (("True", True), ("False", False))
_STRINGS = (('"mean"', "mean"), ('""', ""), ('"é\\n"', "é\n"))
_NUMBERS = (("2", 2), ("0.5", 0.5), ("True", True), ("0", 0))
_DTYPES = (("float", torch.float32), ("long", torch.int64))
_DEVICES = (('"cpu"', torch.device("cpu")), ('"meta"', torch.device("meta")))

KINDS: tuple[Kind, ...] = (
    Kind("Tensor", "Tensor"),
    Kind("Tensor?", "Optional[Tensor]", _NONE),
    Kind("Tensor[]", "List[Tensor]"),
    Kind("Tensor?[]", "List[Optional[Tensor]]"),
    Kind("Tensor[]?", "Optional[List[Tensor]]", _NONE),
    Kind("SymInt", "int", _INTS),
    Kind("int", None, _INTS),
    Kind("SymInt?", "Optional[int]", (*_NONE, ("4", 4))),
    Kind("float", "float", _FLOATS),
    Kind("float?", "Optional[float]", (*_NONE, ("0.25", 0.25))),
    Kind("bool", "bool", _BOOLS),
    Kind("bool?", "Optional[bool]", (*_NONE, *_BOOLS)),
    Kind("str", "str", _STRINGS),
    Kind("str?", "Optional[str]", (*_NONE, *_STRINGS)),
    Kind("Scalar", "Union[int, float, bool]", _NUMBERS),
    Kind("Scalar?", "Union[int, float, bool, None]", (*_NONE, *_NUMBERS)),
    Kind("ScalarType", "torch.dtype", _DTYPES),
    Kind("ScalarType?", "Optional[torch.dtype]", _NONE),
    Kind("Device", "torch.device", _DEVICES),
    Kind("Device?", "Optional[torch.device]", (*_NONE, *_DEVICES)),
    Kind("Layout", None),
    Kind("Layout?", None, _NONE),
    Kind("MemoryFormat", None),
    Kind("MemoryFormat?", None, _NONE),
    Kind("SymInt[]", "List[int]", (("[]", []), ("[1, 2]", [1, 2]))),
    Kind("int[]", None, (("[3]", [3]),)),
    Kind("int[2]", None, (("[1, 2]", [1, 2]), ("1", [1, 1]))),
    Kind("SymInt[]?", "Optional[List[int]]", _NONE),
    Kind("float[]", "List[float]", (("[]", []), ("[0.5, 2.0]", [0.5, 2.0]))),
    Kind("float[]?", "Optional[List[float]]", _NONE),
    Kind("bool[]", "List[bool]", (("[True]", [True]),)),
    Kind("bool[]?", "Optional[List[bool]]", _NONE),
    Kind("Scalar[]", "List[Union[int, float, bool]]"),
    Kind("Generator?", None, _NONE),
)
_KIND = {kind.schema: kind for kind in KINDS}
_MUTABLE = ("Tensor", "Tensor?", "Tensor[]", "Tensor?[]")

# How a formula is derived from what the kernel does.
DERIVED = ("recompute", "save")

# What an operator returns, and how a function is annotated that does.
RETURNS: dict[str, str] = {
    "Tensor": "Tensor",
    "(Tensor, Tensor)": "tuple[Tensor, Tensor]",
    "(Tensor, Tensor, Tensor)": "tuple[Tensor, Tensor, Tensor]",
    "()": "None",
    "Tensor[]": "List[Tensor]",
    "(Tensor, Tensor[])": "tuple[Tensor, List[Tensor]]",
    "SymInt": "int",
    "float": "float",
    "bool": "bool",
    "(Tensor, SymInt)": "tuple[Tensor, int]",
    "(float, bool)": "tuple[float, bool]",
    # Native calls leave this one to the dispatcher.
    "Scalar": "Union[int, float, bool]",
}
_NAMES = ("x", "y", "self", "other", "n", "dim", "out", "alpha")


class Parameter(NamedTuple):
    """A parameter of an operator; `default` is an index into those of its kind."""

    name: str
    kind: Kind
    keyword_only: bool = False
    mutated: bool = False
    default: int | None = None

    @property
    def has_default(self) -> bool:
        return self.default is not None

    @property
    def default_value(self) -> Any:
        assert self.default is not None
        return self.kind.defaults[self.default][1]

    def in_schema(self, alias: str) -> str:
        text = self.kind.schema
        if self.mutated:
            text = text.replace("Tensor", f"Tensor({alias}!)", 1)
        default = "" if self.default is None else f"={self.kind.defaults[self.default][0]}"
        return f"{text} {self.name}{default}"


class Override(NamedTuple):
    """A kernel that somebody else puts in the place of ours."""

    key: str
    after_first_call: bool
    falls_through: bool = False


# The second and the third, where PyTorch has tags for them.
FORMS = ["plain", *(form for form in ("inplace", "out") if hasattr(torch.Tag, form))]


class OperatorSpec(NamedTuple):
    """All there is to say of an operator but its name."""

    parameters: tuple[Parameter, ...]
    returns: str
    form: str = "plain"  # or "inplace", or "out"
    style: str = "schema"  # or "inferred", or "kernel without defaults"
    kernel: str = "plain"  # or "wrapped", "signed", "replaced defaults"
    registration: str = "custom_op"  # or "impl", "impl with keys", "two keys", "keys later"
    formula: str = "none"  # or "backward", "setup_context", or one in DERIVED
    autocast: bool = False
    fake: bool = False
    devices: str | None = None
    called_before: bool = True
    override: Override | None = None

    @property
    def schema(self) -> str:
        """The schema, without the name."""
        parts = [p.in_schema(f"a{index}") for index, p in enumerate(self.parameters)]
        keyword_only = sum(p.keyword_only for p in self.parameters)
        if keyword_only:
            parts.insert(len(parts) - keyword_only, "*")
        returns = self.returns
        if self.form != "plain":
            aliases = [f"Tensor(a{i}!)" for i, p in enumerate(self.parameters) if p.mutated]
            returns = aliases[0] if len(aliases) == 1 else f"({', '.join(aliases)})"
        return f"({', '.join(parts)}) -> {returns}"

    @property
    def mutates_args(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters if p.mutated)

    @property
    def returned_kinds(self) -> tuple[str, ...]:
        """The schema types of the results."""
        if self.form != "plain":
            return ("Tensor",) * len(self.mutates_args)
        return tuple(filter(None, self.returns.strip("()").split(", ")))

    @property
    def tags(self) -> tuple[torch.Tag, ...]:
        return () if self.form == "plain" else (getattr(torch.Tag, self.form),)

    def __repr__(self) -> str:
        rules = [f"style={self.style!r}"]
        rules += [] if self.kernel == "plain" else [f"kernel={self.kernel!r}"]
        rules += [] if self.registration == "custom_op" else [f"by {self.registration}"]
        rules += [] if self.form == "plain" else [f"tag={self.form}"]
        rules += [] if self.formula == "none" else [f"formula={self.formula}"]
        rules += ["autocast=bfloat16"] if self.autocast else []
        rules += ["fake"] if self.fake else []
        rules += [] if self.devices is None else [f"device_types={self.devices!r}"]
        rules += [] if self.called_before else ["never called before"]
        rules += [] if self.override is None else [repr(self.override)]
        return f"op{self.schema}  # {', '.join(rules)}"


class Operator:
    """An operator that was made, and the ways to call it.

    Attributes:
        function: its kernel, whatever is around it.
        fills_defaults: whether that is always given the defaults of the schema.
        register: registers the kernel again, if it was registered by itself.
    """

    def __init__(
        self,
        spec: OperatorSpec,
        name: str,
        handle: Any,
        function: Any,
        *,
        library: Any = None,
        fills_defaults: bool = False,
        register: Callable[[str, bool], None] | None = None,
    ) -> None:
        self.spec = spec
        self.name = name
        self.handle = handle
        self.library = library
        self.function = function
        self.fills_defaults = fills_defaults
        self.register = register
        self.overriding: torch.library.Library | None = None

    @property
    def overload(self) -> Any:
        return self.packet.default

    @property
    def packet(self) -> Any:
        namespace, _, name = self.name.partition("::")
        return getattr(getattr(torch.ops, namespace), name)

    def counters(self) -> tuple[int, ...]:
        """Calls by `Reason`."""
        if self.spec.registration == "custom_op":
            entry = self.handle._definition.entry
        else:
            entry = low_level.entry_of(naming.parse(self.name))
        return (0,) * len(Reason) if entry is None else entry.counters

    def restore_defaults(self) -> None:
        """Gives the kernel the defaults of the schema, as new objects."""
        _set_defaults(self.spec, self.function, lambda parameter: parameter.default_value)

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Changes the kernel as nobody is told of, until the block ends."""
        self.restore_defaults()
        if self.spec.kernel == "replaced defaults":
            _set_defaults(self.spec, self.function, _other_default)
        if self.register is not None and self.spec.registration == "keys later":
            self.register("CPU", True)
        try:
            yield
        finally:
            if self.register is not None and self.spec.registration == "keys later":
                self.register("CPU", False)
            self.restore_defaults()

    def close(self) -> None:
        if self.overriding is not None:
            self.overriding._destroy()
        if self.library is not None:
            self.library._destroy()


def _function(spec: OperatorSpec, origin: str, *, annotated: bool, defaults: bool) -> Any:
    """A function with the parameters of an operator, written as a user would."""
    written, names = [], []
    for parameter in spec.parameters:
        text = parameter.name
        if annotated:
            text += f": {parameter.kind.annotation}"
        if defaults and parameter.has_default:
            text += f" = default_{parameter.name}"
        if parameter.keyword_only and "*" not in written:
            written.append("*")
        written.append(text)
        names.append(f"{parameter.name!r}: {parameter.name}")
    returns = RETURNS[spec.returns]
    source = f"def f({', '.join(written)}){f' -> {returns}' if annotated else ''}:\n"
    source += f"    return run(spec, origin, {{{', '.join(names)}}})\n"
    module: dict[str, Any] = {"run": run_kernel, "spec": spec, "origin": origin}
    module |= {f"default_{p.name}": _new(p.default_value) for p in spec.parameters if p.has_default}
    # dont_inherit: not this file's own __future__ import, which makes every annotation a string.
    exec(compile(_HEADER + source, "<generated operator>", "exec", dont_inherit=True), module)
    return module["f"]


def _new(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _other_default(parameter: Parameter) -> Any:
    defaults = parameter.kind.defaults
    assert parameter.default is not None
    return defaults[(parameter.default + 1) % len(defaults)][1]


def _set_defaults(spec: OperatorSpec, function: Any, default: Callable[[Parameter], Any]) -> None:
    having = [p for p in spec.parameters if p.has_default]
    if function.__defaults__ is not None:
        function.__defaults__ = tuple(_new(default(p)) for p in having if not p.keyword_only)
    if function.__kwdefaults__ is not None:
        function.__kwdefaults__ = {p.name: _new(default(p)) for p in having if p.keyword_only}


def _dressed(spec: OperatorSpec, function: Any) -> Any:
    """The kernel to register: the function, or one that pretends to have its signature."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch._C.DispatchKeySet):
            current().report("with keys")
            args = args[1:]
        current().report("passed", describe([args, kwargs], current().names))
        return function(*args, **kwargs)

    if spec.kernel == "signed":
        kernel.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        kernel.__annotations__ = function.__annotations__
        return kernel
    if spec.kernel == "wrapped" or "key" in spec.registration:
        return functools.wraps(function)(kernel)
    return function


_HEADER = """\
import torch
from torch import Tensor
from typing import List, Optional, Union
"""
_numbers = itertools.count()


def make(spec: OperatorSpec, library: Any, stock: bool = False) -> Operator:
    """Makes an operator, of `torch.library` if `stock`."""
    maker: Any = torch.library if stock else torchop
    name = f"differential::op{next(_numbers)}"
    if spec.registration != "custom_op":
        return _implemented(spec, name, maker)
    # PyTorch's inference knows fewer types and defaults than its schemas do.
    inferred = spec.style == "inferred" and not stock
    # PyTorch passes no defaults to a kernel: its own must stand in.
    defaults = stock or spec.style != "kernel without defaults"
    function = _function(spec, "kernel", annotated=inferred, defaults=defaults)
    options = {} if inferred else {"schema": spec.schema}
    if not stock:
        options["lib"] = library
    if spec.tags:
        options["tags"] = spec.tags
    handle = maker.custom_op(
        name,
        _dressed(spec, function),
        mutates_args=spec.mutates_args,
        device_types=spec.devices,
        **options,
    )
    if spec.fake and spec.form != "inplace":  # which needs none, and says so
        handle.register_fake(_function(spec, "fake", annotated=False, defaults=True))
    if spec.formula in DERIVED:
        handle.derive_autograd(spec.formula)
    elif spec.formula != "none":
        setup = _setup_context(spec) if spec.formula == "setup_context" else None
        handle.register_autograd(functools.partial(_backward, spec), setup_context=setup)
    if spec.autocast:
        handle.register_autocast("cpu", torch.bfloat16)
    operator = Operator(spec, name, handle, function, fills_defaults=not stock)
    if spec.called_before and not stock:
        _prepare(handle)
    if spec.kernel == "replaced defaults" and not stock:  # where it changes nothing
        _set_defaults(spec, function, _other_default)
    if spec.override is not None:
        _override(operator, spec.override)
    return operator


def _implemented(spec: OperatorSpec, name: str, maker: Any) -> Operator:
    """The same, by `define` and `impl` of a library."""
    library = maker.Library("differential", "FRAGMENT")
    local = name.partition("::")[2]
    library.define(local + spec.schema)
    function = _function(spec, "kernel", annotated=False, defaults=True)
    kernel = _dressed(spec, function)

    def register(key: str, with_keyset: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may replace another
            library.impl(local, kernel, key, with_keyset=with_keyset, allow_override=True)

    register("CPU", spec.registration == "impl with keys")
    if spec.registration == "two keys":
        register("AutogradCPU", True)
    operator = Operator(spec, name, None, function, library=library, register=register)
    operator.handle = operator.overload
    return operator


def _prepare(handle: Any) -> None:
    """Brings an operator to where calls bring it: nothing is made for the first time after that."""
    definition = handle._definition
    assert definition.rule(AutogradRule).function is not None
    assert definition.plan is not None
    assert definition.entry is not None


def _backward(spec: OperatorSpec, ctx: Any, *grads: Any) -> Any:
    return run_backward(spec, ctx, grads)


def _setup_context(spec: OperatorSpec) -> Callable[..., None]:
    if any(p.keyword_only for p in spec.parameters):

        def with_keywords(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
            run_setup_context(spec, ctx, inputs, keyword_only_inputs, output)

        return with_keywords

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        run_setup_context(spec, ctx, inputs, {}, output)

    return setup_context


def _override(operator: Operator, override: Override) -> None:
    operator.overriding = torch.library.Library("differential", "IMPL")
    if override.falls_through:
        function = torch.library.fallthrough_kernel
    elif override.key in ("Autograd", "AutogradCPU", "ADInplaceOrView"):
        function = _passing_on(operator, override.key)
    else:
        function = _function(operator.spec, override.key, annotated=False, defaults=True)
    operator.overriding.impl(operator.overload, function, override.key, allow_override=True)


def _passing_on(operator: Operator, key: str) -> Callable[..., Any]:
    """A kernel for a key of autograd, that calls what comes after it."""
    below: Any = {
        "Autograd": torch._C._AutoDispatchBelowAutograd,
        "AutogradCPU": torch._C._AutoDispatchBelowAutograd,
        "ADInplaceOrView": lambda: torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
            | torch._C._dispatch_tls_local_exclude_set()
        ),
    }[key]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        run_kernel(operator.spec, key, {"args": args, "kwargs": kwargs})
        with below():
            return operator.overload(*args, **kwargs)

    return kernel


class Workshop:
    """Makes operators, keeps those that calls leave as they were, and forgets all when too many."""

    def __init__(self, limit: int = 2000) -> None:
        self._limit = limit
        self._library = torchop.Library("differential", "FRAGMENT")
        self._kept: dict[tuple[OperatorSpec, bool], Operator] = {}

    def operator(self, spec: OperatorSpec, stock: bool = False) -> Operator:
        if spec.override is not None or not spec.called_before or spec.registration != "custom_op":
            return make(spec, self._library, stock)
        if len(self._kept) >= self._limit:
            self.close()
        # By its text: Python has 1 == True == 1.0, and a default of one is not that of another.
        key = (repr(spec), stock)
        if key not in self._kept:
            self._kept[key] = make(spec, self._library, stock)
        return self._kept[key]

    def release(self, operator: Operator) -> None:
        """Undoes what only one example may see."""
        operator.close()

    def close(self) -> None:
        for (_, stock), operator in self._kept.items():
            if stock:
                operator.handle._lib._destroy()
        self._library._destroy()
        self._kept.clear()
        self._library = torchop.Library("differential", "FRAGMENT")


# --------------------------------------------------------------------------------------------------
# Strategies


def _kinds(*schemas: str) -> st.SearchStrategy[Kind]:
    return st.sampled_from([_KIND[schema] for schema in schemas])


# Mostly what users write, and mostly a tensor first: without one, the dispatcher chooses by other
# arguments, and native calls do not.
_first = st.one_of(
    *[_kinds("Tensor")] * 12, _kinds("Tensor[]"), _kinds("Tensor?"), _kinds("Tensor?[]")
)
_common = _kinds("Tensor", "Tensor", "Tensor?", "Tensor[]", "SymInt", "float", "bool", "SymInt[]")
_any = st.one_of(_common, st.sampled_from(KINDS))


def _keyword_kinds() -> st.SearchStrategy[Kind]:
    return st.sampled_from([kind for kind in KINDS if not kind.holds_tensors])


@st.composite
def _parameters(draw: DrawFn, *, tensors: bool) -> tuple[Parameter, ...]:
    names = iter(_NAMES)
    result = []
    if tensors:
        result.append(Parameter(next(names), draw(_first)))
    needs_default = False
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(_any if tensors else _keyword_kinds())
        default = _default(draw, kind, needs_default)
        if needs_default and default is None:
            break
        needs_default = default is not None
        result.append(Parameter(next(names), kind, default=default))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        kind = draw(_keyword_kinds())
        result.append(
            Parameter(next(names), kind, keyword_only=True, default=_default(draw, kind, False))
        )
    return tuple(result)


def _default(draw: DrawFn, kind: Kind, needed: bool) -> int | None:
    if not kind.defaults or not (needed or draw(st.booleans())):
        return None
    return draw(st.integers(0, len(kind.defaults) - 1))


def _inferable(parameters: tuple[Parameter, ...]) -> bool:
    # A default of "1" for int[2] means [1, 1], and a float's is written by Python's rules.
    return all(p.kind.annotation is not None for p in parameters)


@st.composite
def operators(draw: DrawFn, focus: str = "plain") -> OperatorSpec:
    """Operators; `focus` is what the example is about, and needs the operator for."""
    parameters = draw(_parameters(tensors=focus != "no tensors"))
    form = "plain"
    if focus == "mutation":
        form = draw(st.sampled_from(["plain", *FORMS]))
    elif draw(one_in(10)):
        form = draw(st.sampled_from(FORMS))
        focus = "mutation"
    returns = draw(
        st.one_of(
            *[st.just("Tensor")] * 3,
            st.sampled_from([text for text in RETURNS if text != "Scalar"]),
        )
    )
    if focus == "mutation" and parameters:
        parameters, returns = _mutating(draw, parameters, form, returns)
    elif form != "plain":
        form = "plain"
    if focus == "operator":
        returns = "Scalar"
    style = draw(st.sampled_from(["schema", "kernel without defaults", "inferred"]))
    if style == "inferred" and not _inferable(parameters):
        style = "schema"
    formula = "none"
    if focus in ("gradient", "anomaly") or draw(st.booleans()):
        formula = draw(st.sampled_from(["setup_context", "setup_context", "backward", "none"]))
    if not _differentiable(parameters, form, returns):
        formula = "none"
    elif formula != "none" and _derivable(parameters, form, returns) and draw(one_in(4)):
        formula = draw(st.sampled_from(DERIVED))
    devices = None
    if any(p.kind.holds_tensors for p in parameters) and draw(one_in(4)):
        devices = "cpu"
    override = None
    if focus == "override":
        override = Override(
            draw(st.sampled_from(_OVERRIDDEN)), draw(st.booleans()), draw(one_in(4))
        )
    if focus == "kernel" and form == "plain":
        kernel = draw(st.sampled_from(["wrapped", "signed", "replaced defaults", "plain"]))
        registration = draw(st.sampled_from(_REGISTRATIONS))
        if registration != "custom_op":
            return OperatorSpec(parameters, returns, kernel=kernel, registration=registration)
    else:
        kernel = draw(st.sampled_from(["plain"] * 8 + ["wrapped", "signed", "replaced defaults"]))
    return OperatorSpec(
        parameters,
        returns,
        kernel=kernel,
        form=form,
        style=style,
        formula=formula,
        autocast=focus == "autocast" or draw(one_in(8)),
        fake=draw(one_in(4)),
        devices=devices,
        called_before=not draw(one_in(8)),
        override=override,
    )


_REGISTRATIONS = (
    *("custom_op", "custom_op", "impl", "impl"),
    *("impl with keys", "two keys", "keys later"),
)
_OVERRIDDEN = (
    *("CPU", "CPU", "Autograd", "AutogradCPU", "ADInplaceOrView"),
    *("CompositeExplicitAutograd", "BackendSelect"),
)


def _mutating(
    draw: DrawFn, parameters: tuple[Parameter, ...], form: str, returns: str
) -> tuple[tuple[Parameter, ...], str]:
    if form == "inplace":
        first = Parameter(parameters[0].name, _KIND["Tensor"], mutated=True)
        return (first, *parameters[1:]), "Tensor"
    if form == "out":
        count = draw(st.integers(1, 2))
        names = ("out0", "out1")[:count]
        outs = [Parameter(name, _KIND["Tensor"], keyword_only=True, mutated=True) for name in names]
        return (*parameters, *outs), ("Tensor", "(Tensor, Tensor)")[count - 1]
    places = [i for i, p in enumerate(parameters) if p.kind.schema in _MUTABLE]
    if not places:
        return parameters, returns
    chosen = draw(st.lists(st.sampled_from(places), min_size=1, unique=True))
    changed = tuple(p._replace(mutated=i in chosen) for i, p in enumerate(parameters))
    return changed, draw(st.sampled_from(["()", "()", "Tensor", "(Tensor, Tensor)", "SymInt"]))


def _derivable(parameters: tuple[Parameter, ...], form: str, returns: str) -> bool:
    takes_tensors = any(p.kind.holds_tensors and not p.keyword_only for p in parameters)
    mutates = any(p.mutated for p in parameters)
    return form == "plain" and takes_tensors and not mutates and "Tensor" in returns


def _differentiable(parameters: tuple[Parameter, ...], form: str, returns: str) -> bool:
    if form != "plain":
        return form == "inplace"
    kept = any(p.kind.holds_tensors and not p.mutated for p in parameters)
    return returns != "()" and (kept or not any(p.mutated for p in parameters))
