"""Add a suggested fix to the dispatcher's errors about invalid arguments."""

from __future__ import annotations

import re

from torchop._compat import dtensor
from torchop._errors import ArgumentError, nearest, short_text
from torchop._schema.naming import OpName


def argument_error(name: OpName, error: RuntimeError) -> ArgumentError | None:
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
        return _count_error(**counted.groupdict())
    if (unknown := _UNKNOWN.match(text)) and unknown["name"] == str(name):
        close = nearest(unknown["keyword"], _PARAMETER.findall(unknown["schema"]))
        return ArgumentError(f"{unknown['sentence']}{close}. Schema: {unknown['schema']}.")
    start = f"{name.packet}() Expected a value of type "
    if not text.startswith(start) or "\nValue: " not in text:
        return None
    sentence, _, rest = text.partition("\nPosition: ")
    value, _, declaration = rest.partition("\nValue: ")[2].rpartition("\nDeclaration: ")
    schema = declaration.partition("\n")[0]
    return ArgumentError(
        f"{sentence} Value: {short_text(value)}. Schema: {schema}."
        f"{_fix_of_argument(sentence, value)}"
    )


# Patterns for the error messages of createStackForSchema (torch/csrc/jit/python/pybind_utils.h) and
# of FunctionSchema::findErrorInKwargs.
_COUNT = re.compile(
    r"(?P<sentence>(?P<name>\S+)\(\) (?P<problem>takes|expected at most|is missing).*?)\.? +"
    r"Declaration: (?P<schema>.*)"
)
_UNKNOWN = re.compile(
    r"(?P<sentence>Unknown keyword argument '(?P<keyword>\w+)' for operator '(?P<name>\S+)')\. "
    r"Schema: (?P<schema>.*)"
)
_PARAMETER = re.compile(r" (\w+)(?==|,|\))")


def _count_error(sentence: str, name: str, problem: str, schema: str) -> ArgumentError:
    keywords = _PARAMETER.findall(schema.partition("*,")[2].partition(" -> ")[0])
    fix = f" Pass {', '.join(keywords)} by keyword: {keywords[0]}=..." if keywords else ""
    return ArgumentError(f"{sentence}. Schema: {schema}.{fix * (problem != 'is missing')}")


_VALUE = re.compile(
    r".* of type '(?P<expected>.*)' for argument '(?P<name>.*)' but instead "
    r"found type '(?P<got>.*)'"
)


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
    if got == "Tensor" and expected.rstrip("]") in ("int", "float", "bool", "number"):
        return f" Pass a number: {name}=tensor.item()."
    return ""
