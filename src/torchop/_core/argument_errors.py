"""Add a suggested fix to the errors that the dispatcher raises for invalid arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import dtensor
from torchop._core.call import values_by_name
from torchop._errors import ArgumentError, nearest, short_text
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema


def tensor_for_number(
    name: OpName,
    schema: Schema,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    others: Sequence[Schema] = (),
) -> ArgumentError | None:
    """Return an error if a call passes a tensor where the schema expects a number.

    Without this check, the dispatcher would silently convert the tensor to a number and drop the
    gradient, and for an int argument also the fraction. In compiled code, the same call would fail.

    `others` holds the schemas of the operator's other overloads. If one of them accepts a tensor
    for this argument, PyTorch may select it for the call, so there is no error.
    """
    values = values_by_name(schema, args, kwargs)
    for argument in schema.numbers:
        value = values.get(argument.name)
        is_list = isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value)
        if any(a.name == argument.name and a not in o.numbers for o in others for a in o.arguments):
            continue
        if is_list or isinstance(value, Tensor):
            return ArgumentError(
                f"{name.packet}() Expected a value of type '{argument.kind}' for argument "
                f"'{argument.name}' but instead found type '{type(value).__name__}'"
                f"{' with a Tensor' * is_list}. Schema: {schema.text}. Pass "
                + (
                    f"numbers: {argument.name}=[tensor.item(), ...]."
                    if is_list
                    else f"a number: {argument.name}=tensor.item()."
                )
            )
    return None


def argument_error(
    name: OpName, error: RuntimeError, keywords: Iterable[str] = ()
) -> ArgumentError | None:
    """Return the dispatcher's error with a suggested fix, or None if `error` has another origin.

    `keywords` are the names of the call's keyword arguments.
    """
    if type(error) is not RuntimeError:
        return None
    if dtensor.is_mixed(error):
        return ArgumentError(
            f"{name}: the call mixes DTensors and plain tensors. Convert all of them to DTensors, "
            "such as with torch.distributed.tensor.distribute_tensor(tensor, mesh, [Replicate()]). "
            "Or call the operator on local tensors, inside "
            "torch.distributed.tensor.experimental.local_map or with tensor.to_local()."
        )
    text = str(error)
    if (counted := _COUNT.match(text)) and counted["name"] == name.packet:
        # The dispatcher checks for missing arguments before it checks for unknown keywords. So for
        # a misspelled keyword, the message reports a missing argument and not the misspelled name.
        known = _PARAMETER.findall(counted["schema"])
        for keyword in keywords:
            if keyword not in known:
                sentence = f"Unknown keyword argument '{keyword}' for operator '{name}'"
                close = nearest(keyword, known)
                return ArgumentError(f"{sentence}{close}. Schema: {counted['schema']}.")
        return _count_error(**counted.groupdict())
    if (unknown := _UNKNOWN.match(text)) and unknown["name"] == str(name):
        close = nearest(unknown["keyword"], _PARAMETER.findall(unknown["schema"]))
        return ArgumentError(f"{unknown['sentence']}{close}. Schema: {unknown['schema']}.")
    if _TWICE.match(text) and f" Schema: {name}(" in text:
        return ArgumentError(f"{name}: {text}")
    start = f"{name.packet}() Expected a value of type "
    if not text.startswith(start) or "\nValue: " not in text:
        return None
    sentence, _, rest = text.partition("\nPosition: ")
    value, _, declaration = rest.partition("\nValue: ")[2].rpartition("\nDeclaration: ")
    schema = declaration.partition("\n")[0]
    sentence = _with_python_type(sentence, schema)
    return ArgumentError(
        f"{sentence} Value: {short_text(value)}. Schema: {schema}."
        f"{_fix_of_argument(sentence, value)}"
    )


# These patterns match the error messages of createStackForSchema
# (torch/csrc/jit/python/pybind_utils.h) and FunctionSchema::findErrorInKwargs.
_COUNT = re.compile(
    r"(?P<sentence>(?P<name>\S+)\(\) (?P<problem>takes|expected at most|is missing).*?)\.? +"
    r"Declaration: (?P<schema>.*)"
)
_UNKNOWN = re.compile(
    r"(?P<sentence>Unknown keyword argument '(?P<keyword>\w+)' for operator '(?P<name>\S+)')\. "
    r"Schema: (?P<schema>.*)"
)
_TWICE = re.compile(r"Argument '\w+' specified both as positional and keyword argument\.")
_PARAMETER = re.compile(r" (\w+)(?==|,|\))")


def _count_error(sentence: str, name: str, problem: str, schema: str) -> ArgumentError:
    keywords = _PARAMETER.findall(schema.partition("*,")[2].partition(" -> ")[0])
    fix = f" Pass {', '.join(keywords)} by keyword: {keywords[0]}=..." if keywords else ""
    return ArgumentError(f"{sentence}. Schema: {schema}.{fix * (problem != 'is missing')}")


_VALUE = re.compile(
    r".* of type '(?P<expected>.*)' for argument '(?P<name>.*)' but instead "
    r"found type '(?P<got>.*)'"
)


# The dispatcher stores these types as integers and calls them "int" in messages. In our messages,
# replace "int" with the type that users pass.
_STORED_AS_INT = {
    "ScalarType": "torch.dtype",
    "Layout": "torch.layout",
    "MemoryFormat": "torch.memory_format",
}


_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def _with_python_type(sentence: str, schema: str) -> str:
    match = _VALUE.match(sentence)
    if match is None:
        return sentence
    declared = re.search(rf"(\w+)[?\[\]\d]* {re.escape(match['name'])}(?==|,|\))", schema)
    python_type = _STORED_AS_INT.get(declared[1]) if declared else None
    if python_type is None:
        return sentence
    start, end = match.span("expected")
    return sentence[:start] + match["expected"].replace("int", python_type) + sentence[end:]


def _fix_of_argument(sentence: str, value: str) -> str:
    match = _VALUE.match(sentence)
    if match is None:
        return ""
    expected, name, got = match["expected"], match["name"], match["got"]
    expected = expected.removeprefix("Optional[") if got != "NoneType" else expected
    if expected.startswith("List[") and got != "list":
        return f" Pass a list, even for one: {name}=[...]."
    if expected == "List[Tensor]" and re.search(r"[\[( ]None[,)\]]", value):
        return (
            f" Remove None from {name}, or declare it as Tensor?[] (annotated as "
            "list[Tensor | None])."
        )
    if expected.startswith("Tensor"):
        if got == "ndarray":
            return f" Convert it to a tensor: {name}=torch.from_numpy(...)."
        if got in ("int", "float", "bool", "complex", "list", "tuple"):
            return f" Convert it to a tensor: {name}=torch.tensor(...)."
    if expected.rstrip("]") == got == "int":
        return " It does not fit in 64 bits."
    plain = value.strip("'")
    if expected.rstrip("]") == "torch.dtype" and plain in _DTYPES:
        return f" Pass a dtype: {name}=torch.{plain}."
    if got == "Tensor" and expected.rstrip("]") in ("int", "float", "bool", "number"):
        return f" Pass a number: {name}=tensor.item()."
    return ""
