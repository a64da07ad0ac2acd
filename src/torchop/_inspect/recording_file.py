"""The file format of recordings: JSON with one call per line.

A tensor is written as a JSON object with its metadata. A value that JSON cannot express, such as a
dtype, is written as an object whose only key is the value's type. The parser rejects unknown input.
It only looks up dtypes, layouts and memory formats by name, so a file from an untrusted source
cannot execute code.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from torchop import OperatorNameError
from torchop._inspect.call_record import CallRecord, TensorRecord, TypeRecord, mapped
from torchop.extend import OpName

# A distinct call, and how often it was made. If the call is None, the number counts all calls
# beyond the limit of stored calls.
Calls: TypeAlias = tuple[CallRecord | None, int]

_FORMAT, _VERSION = "torchop recording", 1


def dumps(recorded: Mapping[str, list[Calls]]) -> str:
    operators = ",\n".join(
        f"    {json.dumps(op)}: [\n{_lines(recorded[op])}\n    ]" for op in sorted(recorded)
    )
    calls = f"{{\n{operators}\n  }}" if operators else "{}"
    return f'{{\n  "{_FORMAT}": {_VERSION},\n  "calls": {calls}\n}}\n'


def _lines(calls: list[Calls]) -> str:
    return ",\n".join(f"      {json.dumps(_call(*each), allow_nan=False)}" for each in calls)


def _call(call: CallRecord | None, count: int) -> dict[str, Any]:
    if call is None:
        return {"count": count, "others": True}
    args, kwargs = mapped(call, _encoded)
    return {"count": count, "args": args, "kwargs": kwargs}


def _encoded(value: Any) -> Any:
    if isinstance(value, TensorRecord):
        tensor: dict[str, Any] = {"tensor": _short(value.dtype), "shape": list(value.shape)}
        if value.stride is not None:
            tensor["stride"] = list(value.stride)
        tensor["device"] = value.device
        if value.requires_grad:
            tensor["requires_grad"] = True
        return tensor
    if isinstance(value, TypeRecord):
        return {"type": value.name}
    is_written = type(value).__name__ in _TEXTS
    if is_written and not (isinstance(value, float) and math.isfinite(value)):
        return {type(value).__name__: _short(value)}
    return value


def _short(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _named(kind: type, example: str) -> tuple[Callable[[str], Any], str]:
    values = {_short(v): v for v in vars(torch).values() if isinstance(v, kind)}
    return values.__getitem__, f"a {kind.__name__} of this PyTorch, such as {example!r}"


def _printable(text: str) -> TypeRecord:
    # The text will be printed, so reject control characters, which a terminal would interpret.
    if not text.isprintable():
        raise ValueError(text)
    return TypeRecord(text)


# A value of one of these types is written as a JSON object that maps the type to a string. For each
# type, this table holds a parser for the string, and a description of valid strings. A string is
# valid only if it round-trips, i.e. if encoding the parsed value gives the same string.
_TEXTS: dict[str, tuple[Callable[[str], Any], str]] = {
    "complex": (complex, "a complex number such as '(1+2j)'"),
    "device": (torch.device, "a device that this PyTorch knows, such as 'cuda:0'"),
    "dtype": _named(torch.dtype, "float32"),
    "float": (float, "'inf', '-inf' or 'nan'"),
    "layout": _named(torch.layout, "strided"),
    "memory_format": _named(torch.memory_format, "channels_last"),
    "type": (_printable, "a name without control characters"),
}
_KINDS = ", ".join(sorted([*_TEXTS, "tensor"]))


def read(path: Path) -> list[tuple[str, Calls]]:
    try:
        content = json.loads(
            path.read_bytes().decode(), object_pairs_hook=_with_unique_keys, parse_constant=_refused
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} contains no recording of calls: it is not complete JSON ({error}). Record "
            "again, with torchop.record or `python -m torchop record`."
        ) from None
    try:
        return list(_calls_in(content))
    except ValueError as error:
        raise ValueError(f"{path}{error}") from None
    except RecursionError:  # nested too deeply for the JSON parser
        raise ValueError(
            f"{path}: a value is nested too deeply for an argument of an operator. Record again, "
            "or correct it."
        ) from None


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {_shown(key)} occurs twice")
    return unique


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")


def _calls_in(content: Any) -> Iterator[tuple[str, Calls]]:
    if not isinstance(content, dict) or _FORMAT not in content:
        raise _wrong("the file", f'an object with "{_FORMAT}": {_VERSION}', content)
    version = content[_FORMAT]
    if version != _VERSION or type(version) is not int:
        raise ValueError(
            f" is a recording of version {_shown(version)}, and this torchop "
            f"reads version {_VERSION}. Record again, or use the torchop that wrote it."
        )
    _check_keys(content, "the file", {_FORMAT, "calls"})
    calls = _of_type(content["calls"], dict, "calls", "an object")
    for op, kinds in calls.items():
        place = f"calls[{_shown(op)}]"
        if not op.isprintable():  # see `_printable`
            raise _wrong(place, "a name without control characters", op)
        try:
            name = OpName.parse(op)
        except OperatorNameError:
            raise _wrong(place, "the name of an operator, namespace::name", op) from None
        for index, kind in enumerate(_of_type(kinds, list, place, "a list")):
            yield str(name), _calls(kind, f"{place}[{index}]")


def _calls(kind: Any, place: str) -> Calls:
    _of_type(kind, dict, place, "an object")
    count = _size(kind.get("count"), f"{place}.count")
    if kind.get("others") is True:
        _check_keys(kind, place, {"count", "others"})
        return None, count
    _check_keys(kind, place, {"count", "args", "kwargs"})
    args = _of_type(kind["args"], list, f"{place}.args", "a list")
    kwargs = _of_type(kind["kwargs"], dict, f"{place}.kwargs", "an object")
    values = {name: _value(v, f"{place}.kwargs[{_shown(name)}]") for name, v in kwargs.items()}
    return CallRecord(tuple(_value(args, f"{place}.args")), values), count


def _value(value: Any, place: str) -> Any:
    if isinstance(value, list):
        return [_value(item, f"{place}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return _tensor(value, place)
    kind = next(iter(value), "")
    if len(value) != 1 or kind not in _TEXTS:
        raise _wrong(place, f"a value, or an object with one of {_KINDS}", value)
    text = _of_type(value[kind], str, f"{place}.{kind}", "a string")
    return _text(kind, text, f"{place}.{kind}")


def _tensor(value: dict[str, Any], place: str) -> TensorRecord:
    optional = {"stride", "requires_grad"} & set(value)
    _check_keys(value, place, {"tensor", "shape", "device"} | optional)
    shape = _sizes(value["shape"], f"{place}.shape")
    stride = None
    if "stride" in value:
        stride = _sizes(value["stride"], f"{place}.stride")
        if len(stride) != len(shape):
            raise _wrong(f"{place}.stride", f"{len(shape)} numbers, as in shape", stride)
    dtype = _text("dtype", value["tensor"], f"{place}.tensor")
    needs = value.get("requires_grad", False)
    _of_type(needs, bool, f"{place}.requires_grad", "true or false")
    if needs and not (dtype.is_floating_point or dtype.is_complex):
        raise _wrong(f"{place}.requires_grad", f"false, for {dtype}", needs)
    device = _text("device", value["device"], f"{place}.device")
    return TensorRecord(dtype, shape, str(device), needs, stride)


def _text(kind: str, text: Any, place: str) -> Any:
    read, expected = _TEXTS[kind]
    with contextlib.suppress(RuntimeError, TypeError, ValueError, LookupError):
        value = read(text)
        # Reject text that does not round-trip. For instance, PyTorch would parse a large device
        # index as a negative number.
        if _encoded(value) == {kind: text}:
            return value
    raise _wrong(place, expected, text)


def _sizes(value: Any, place: str) -> tuple[int, ...]:
    sizes = _of_type(value, list, place, "a list of numbers")
    return tuple(_size(size, f"{place}[{i}]") for i, size in enumerate(sizes))


def _size(value: Any, place: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise _wrong(place, "a number of 0 or more", value)
    return value


def _of_type(value: Any, kind: type, place: str, expected: str) -> Any:
    if not isinstance(value, kind):
        raise _wrong(place, expected, value)
    return value


def _check_keys(value: dict[str, Any], place: str, expected: set[str]) -> None:
    if set(value) != expected:
        raise _wrong(place, f"the keys {', '.join(sorted(expected))}", sorted(value))


def _wrong(place: str, expected: str, value: Any) -> ValueError:
    return ValueError(
        f": {place}: expected {expected}, got {_shown(value)}. Record again, or correct it."
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
