from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tests._support.opaque_types import CONSTANT, REFERENCE


class Kind(NamedTuple):
    """A type of parameters: its name in schemas, its annotation, and possible defaults.

    Types that are not inferred from signatures have no annotation. Each default is a pair of its
    text in the schema and its value.
    """

    schema: str
    annotation: str | None
    defaults: tuple[tuple[str, Any], ...] = ()

    @property
    def base(self) -> str:
        """The schema type of a single value, such as `Tensor` for `Tensor?[]`."""
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
    Kind(REFERENCE, None),
    Kind(f"{REFERENCE}?", None, _NONE),
    Kind(f"{REFERENCE}[]", None),
    Kind(CONSTANT, None),
    Kind("NoneType", None),
    Kind("Any", None),
    Kind("Any?", None, _NONE),
    Kind("Any[]", None),
)

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
    REFERENCE: "Reference",
    f"(Tensor, {REFERENCE})": "tuple[Tensor, Reference]",
    # Native calls do not support the result type Scalar, so calls must use the dispatcher.
    "Scalar": "Union[int, float, bool]",
}


class Parameter(NamedTuple):
    """A parameter of a generated operator. `default` is an index into the defaults of its kind."""

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
    """A kernel or a fallthrough that another library registers at `key` to override a kernel."""

    key: str
    after_first_call: bool
    falls_through: bool = False


FORMS = ["plain", *(form for form in ("inplace", "out") if hasattr(torch.Tag, form))]


class OperatorSpec(NamedTuple):
    parameters: tuple[Parameter, ...]
    returns: str
    form: str = "plain"  # or "inplace", or "out"
    style: str = "schema"  # or "inferred", or "kernel without defaults"
    kernel: str = "plain"  # or "wrapped", "signed", "replaced defaults"
    registration: str = "custom_op"  # or one of _REGISTRATIONS in generation.py
    formula: str = "none"  # or "backward", "setup_context" or "derived"
    autocast: bool = False
    fake: bool = False
    devices: str | None = None
    called_before: bool = True
    override: Override | None = None
    provider: str = "none"  # or "by priority", or "supports"

    @property
    def schema(self) -> str:
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
        rules += [] if self.provider == "none" else [f"a provider, {self.provider}"]
        return f"op{self.schema}  # {', '.join(rules)}"
