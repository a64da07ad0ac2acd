"""Recordings can be saved and loaded, and invalid files are rejected. Uses private names."""

from __future__ import annotations

import json
import math

import pytest
import torch

import torchop
from torchop import Recorded
from torchop._inspect.record import MAX_KINDS
from torchop.testing import CallRecord, TensorRecord, TypeRecord

TENSOR = TensorRecord(torch.float32, (2, 3), "cuda:1", True, (1, 2))
VALUES = [
    None, True, 0, -7, 2**70, 1.5, -0.0, 1e-300, math.inf, -math.inf, "", 'quo"te\n\u00fc\ud800',
    1 + 2j, complex(-math.inf, 0.0), [], [1, [2.0, [None]]], [TENSOR, None],
    *(torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint4),
    *(torch.device("cpu"), torch.device("cuda:7"), torch.device("meta")),
    *(torch.strided, torch.sparse_coo, torch.channels_last_3d, torch.preserve_format),
    TENSOR, TensorRecord(torch.int8, (), "cpu", False),
    TensorRecord(torch.bool, (0,), "mps", False),
    TypeRecord("torch._C.Generator"), TypeRecord("sparse_coo tensor"),
]  # fmt: skip


def recording(*calls):
    recorded = torchop.record("*")
    for call in calls:
        recorded._add(*call)
    return recorded


@pytest.fixture
def path(tmp_path):
    return tmp_path / "calls.json"


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_value_survives_saving(path, value):
    recording(("a::b", CallRecord((value,), {"k": value}), 3)).save(path)
    loaded = Recorded.load(path)
    [(call, count)] = loaded["a::b"]
    # Compare the `repr` of the calls, because it differs for 1, 1.0 and True, which are equal.
    assert repr(call) == repr(CallRecord((value,), {"k": value}))
    assert count == loaded.calls("a::b") == 3


def test_nan_survives_saving(path):
    recording(("a::b", CallRecord((math.nan,), {}), 1)).save(path)
    [(call, _)] = Recorded.load(path)["a::b"]
    assert math.isnan(call.args[0])


def test_recording_survives_saving(path, namespace):
    op = torch.library.custom_op(
        f"{namespace}::op",
        lambda x, k: x * k,
        mutates_args=(),
        schema="(Tensor x, float k) -> Tensor",
    )
    with torchop.record(f"{namespace}::*") as recorded:
        for k in (*range(MAX_KINDS + 7), 3, 3, 2):
            op(torch.ones(2, 3).t(), float(k))
    recorded.save(path)
    loaded = Recorded.load(str(path))
    assert loaded == recorded
    assert loaded.calls(f"{namespace}::op") == recorded.calls(f"{namespace}::op") == MAX_KINDS + 10
    text = path.read_text()
    loaded.save(path)
    assert path.read_text() == text


def test_contents_of_tensors_are_not_in_the_file(path, namespace):
    op = torch.library.custom_op(
        f"{namespace}::op", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    with torchop.record(f"{namespace}::*") as recorded:
        op(torch.full((2, 3), 42.125))
    recorded.save(path)
    assert "42.125" not in path.read_text()


def test_loaded_recording_cannot_record(path):
    recording().save(path)
    with pytest.raises(
        RuntimeError, match=r"loaded from a file is complete; record again, with torc"
    ):
        Recorded.load(path).__enter__()


def test_a_failure_leaves_the_old_file(path, monkeypatch):
    recording(("a::b", CallRecord((), {}), 1)).save(path)
    before = path.read_text()
    bad = recording(("a::b", CallRecord((object(),), {}), 1))
    with pytest.raises(TypeError, match="not JSON serializable"):
        bad.save(path)
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


# --------------------------------------------------------------------------------------------------
# Rejected files


def refusal(path, text):
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        Recorded.load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "Record again" in message
    return message.removeprefix(str(path))


GOOD = json.dumps(
    {"torchop recording": 1, "calls": {"a::b": [{"count": 1, "args": [1], "kwargs": {}}]}}
)


@pytest.mark.parametrize("length", range(0, len(GOOD) - 1, 7))
def test_a_truncated_file_is_refused(path, length):
    assert "contains no recording of calls: it is not complete JSON" in refusal(path, GOOD[:length])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("not json", "Expecting value"),
        ("[" * 100_000, "recursion"),
        (GOOD.replace("[1]", "[NaN]"), "NaN is not valid JSON"),
        (GOOD.replace("[1]", '[{"a": 1, "a": 1}]'), "the key 'a' occurs twice"),
        (GOOD.replace("[1]", "[" + "1" * 5000 + "]"), "limit"),
    ],
    ids=["text", "depth", "NaN", "twice", "digits"],
)
def test_invalid_json_is_rejected(path, text, reason):
    assert reason in refusal(path, text)


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("a::b", "a" * 10**6),
        GOOD.replace("[1]", '[{"KEY": 1, "KEY": 1}]').replace("KEY", "a" * 10**6),
        GOOD.replace('"kwargs": {}', '"kwargs": {"KEY": {}}').replace("KEY", "a" * 10**6),
        GOOD.replace('"torchop recording": 1', '"torchop recording": ' + "1" * 4000),
    ],
    ids=["operator", "key", "keyword", "version"],
)
def test_message_quotes_only_part_of_the_file(path, text):
    assert len(refusal(path, text)) < 400


def test_missing_file_raises_os_error(path):
    with pytest.raises(FileNotFoundError):
        Recorded.load(path)


@pytest.mark.parametrize("version", [2, "1", True])
def test_another_version_is_refused(path, version):
    message = refusal(path, json.dumps({"torchop recording": version, "calls": {}}))
    assert message.startswith(f" is a recording of version {version!r}, and this torchop reads ver")


CALL = {"count": 1, "args": [], "kwargs": {}}
DENSE = {"tensor": "float32", "shape": [2], "device": "cpu"}


@pytest.mark.parametrize(
    ("calls", "place", "problem"),
    [
        ([], "calls", "expected an object, got []"),
        ({"b": []}, "calls['b']", "expected the name of an operator, namespace::name, got 'b'"),
        ({"a::\x1b[2J": []}, r"calls['a::\x1b[2J']", "a name without control characters, got"),
        ({"a::b": {}}, "calls['a::b']", "expected a list"),
        ({"a::b": [3]}, "calls['a::b'][0]", "expected an object, got 3"),
        (
            {"a::b": [CALL | {"count": -1}]},
            "calls['a::b'][0].count",
            "a number of 0 or more, got -1",
        ),
        ({"a::b": [CALL | {"count": True}]}, "calls['a::b'][0].count", "got True"),
        (
            {"a::b": [CALL, {"count": 1}]},
            "calls['a::b'][1]",
            "the keys args, count, kwargs, got ['c",
        ),
        ({"a::b": [CALL | {"x": 1}]}, "calls['a::b'][0]", "expected the keys args, count, kwargs"),
        ({"a::b": [CALL | {"args": {}}]}, "calls['a::b'][0].args", "expected a list, got {}"),
        ({"a::b": [CALL | {"kwargs": []}]}, "calls['a::b'][0].kwargs", "expected an object"),
    ],
)
def test_a_wrong_call_is_refused(path, calls, place, problem):
    message = refusal(path, json.dumps({"torchop recording": 1, "calls": calls}))
    assert message.startswith(f": {place}: expected ")
    assert problem in message


@pytest.mark.parametrize(
    ("value", "place", "problem"),
    [
        (
            {},
            "",
            "expected a value, or an object with one of complex, device, dtype, float, layout",
        ),
        ({"pickle": "x"}, "", "got {'pickle': 'x'}"),
        ({"type": "a", "dtype": "b"}, "", "expected a value, or an object with one of"),
        ({"type": 3}, ".type", "expected a string, got 3"),
        ({"type": "a\x1b[2J"}, ".type", "a name without control characters, got"),
        ({"dtype": "float31"}, ".dtype", "this PyTorch, such as 'float32', got 'float31'"),
        ({"dtype": "nn"}, ".dtype", "got 'nn'"),
        (
            {"layout": "dense"},
            ".layout",
            "a layout of this PyTorch, such as 'strided', got 'dense'",
        ),
        ({"memory_format": ""}, ".memory_format", "such as 'channels_last', got ''"),
        ({"device": "gpu:0"}, ".device", "a device that this PyTorch knows, such as 'cuda:0', got"),
        # torchop must reject "cuda:128", because PyTorch would parse it as cuda:-128.
        ({"device": "cuda:128"}, ".device", "got 'cuda:128'"),
        ({"device": "cuda:0; x"}, ".device", "got 'cuda:0; x'"),
        ({"float": "1e5"}, ".float", "expected 'inf', '-inf' or 'nan', got '1e5'"),
        ({"complex": "i"}, ".complex", "a complex number such as '(1+2j)', got 'i'"),
        ([1, {"float": 3}], "[1].float", "expected a string, got 3"),
        (DENSE | {"tensor": "float31"}, ".tensor", "such as 'float32', got 'float31'"),
        (DENSE | {"tensor": ["float32"]}, ".tensor", "got ['float32']"),
        (DENSE | {"shape": 3}, ".shape", "expected a list of numbers, got 3"),
        (DENSE | {"shape": [2, -1]}, ".shape[1]", "expected a number of 0 or more, got -1"),
        (DENSE | {"shape": [2**63]}, ".shape[0]", "expected a number of 0 or more"),
        (DENSE | {"stride": [1, 1]}, ".stride", "expected 1 numbers, as in shape, got (1, 1)"),
        (DENSE | {"device": 0}, ".device", "such as 'cuda:0', got 0"),
        (DENSE | {"requires_grad": 1}, ".requires_grad", "expected true or false, got 1"),
        (
            DENSE | {"tensor": "int8", "requires_grad": True},
            ".requires_grad",
            "false, for torch.int8",
        ),
        (
            DENSE | {"data": [1, 2]},
            "",
            "expected the keys device, shape, tensor, got ['data', 'dev",
        ),
        ({"tensor": "float32"}, "", "expected the keys device, shape, tensor, got ['tensor']"),
        ({"float": "x" * 100}, ".float", "got '" + "x" * 56 + "..."),
    ],
)
@pytest.mark.parametrize("where", ["args", "kwargs"])
def test_a_wrong_value_is_refused(path, where, value, place, problem):
    call = CALL | ({"args": [0, value]} if where == "args" else {"kwargs": {"k": value}})
    start = "args[1]" if where == "args" else "kwargs['k']"
    message = refusal(path, json.dumps({"torchop recording": 1, "calls": {"a::b": [call]}}))
    assert message.startswith(f": calls['a::b'][0].{start}{place}: expected ")
    assert problem in message
    assert message.endswith("Record again, or correct it.")
