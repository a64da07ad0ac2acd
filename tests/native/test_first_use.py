from __future__ import annotations

import json

import pytest

from tests._support.common import assert_clean, needs_native
from tests._support.forking import run_forked

pytestmark = needs_native

# Runs each program of USES in a forked process, where it is the first use of torchop, and prints
# the traceback of each program that fails.
PROGRAM = """
import json, os, sys, traceback
import torch, torchop

T = torch.zeros(2)

def state():
    return torchop.native.status().state

outcomes = {}
for name, body in json.loads(sys.argv[1]).items():
    output, input = os.pipe()
    if os.fork() == 0:
        os.close(output)
        try:
            exec(body, globals())
        except BaseException:
            os.write(input, traceback.format_exc().encode())
        os._exit(0)
    os.close(input)
    with open(output) as file:
        outcomes[name] = file.read()
print(json.dumps(outcomes))
"""

DEFINITION = """
@torchop.custom_op("unused::op", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    return x + 1

op.register_fake(torch.empty_like)
op.register_autograd(lambda ctx, grad: grad * 5)
bound = op.__call__
assert repr(op).startswith("<torchop.CustomOp unused::op")
assert list(op.tags) == op.overload.tags and torchop.native.counters(op) == {}
assert state() == "idle" and "torch._dynamo" not in sys.modules
"""

CALL = """
assert {call}.tolist() == [1, 1]
assert state() == "ready"
assert torchop.native.counters(op).get("native", 0) == {count}
assert {call}.tolist() == [1, 1]
assert torchop.native.counters(op) == {{"native": {count} + 1}}
"""

IN_MODE = """
from torch._subclasses import FakeTensorMode
with {mode}:
    assert op(torch.zeros(2)).shape == (2,)
assert state() == "ready"
x = T.clone().requires_grad_()
op(x).sum().backward()
assert x.grad.tolist() == [5, 5]
"""

IN_RECURSION = """
call = {call}

def descend(depth):
    return call(T) if depth == 0 else descend(depth - 1)

failed = 0
for depth in range(sys.getrecursionlimit(), 0, -1):
    try:
        descend(depth)
        break
    # `torch.ops` turns a RecursionError into an AttributeError.
    except (RecursionError, AttributeError):
        failed += 1
assert failed
op(T)
before = torchop.native.counters(op).get("native", 0)
call(T)
assert state() == "ready", torchop.native.status()
assert torchop.native.counters(op)["native"] == before + 1
"""

USES = {
    "call of a handle": CALL.format(call="op(T)", count=1),
    "call with a keyword": CALL.format(call="op(x=T)", count=1),
    "method of before": CALL.format(call="bound(T)", count=1),
    # The first call replaces the function of a torch.ops object, but is not native itself.
    "call of torch.ops": CALL.format(call="torch.ops.unused.op(T)", count=0),
    "call of an overload": CALL.format(call="op.overload(T)", count=0),
    "call of another operator": """
torchop.custom_op("unused::other", op.__wrapped__, mutates_args=())(T)
assert state() == "ready" and torchop.native.counters(op) == {}
assert op(T).tolist() == torch.ops.unused.op(T).tolist() == [1, 1]
assert torchop.native.counters(op) == {"native": 2}
""",
    "call of an operator of the low level": """
with torchop.Library("unused_low_level", "DEF") as library:
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x + 1, "CPU")
    assert torchop.explain("unused_low_level::op", T).reason == (
        "torchop has called none of its kernels yet"
    )
    assert state() == "idle"
    for count in range(3):
        assert torch.ops.unused_low_level.op(T).tolist() == [1, 1]
        assert state() == "ready"
        assert torchop.native.counters("unused_low_level::op").get("native", 0) == count
""",
    "call that fails": """
try:
    op("text")
except torchop.ArgumentError:
    assert state() == "ready"
assert op(T).tolist() == [1, 1]
""",
    "question about a call": """
assert torchop.explain(op, T).native
assert torchop.native.counters(op) == {}
""",
    "block without native calls": """
with torchop.native.disabled():
    op(T)
assert torchop.native.counters(op) == {"switched_off": 1}
""",
    "accelerate": """
torch.library.custom_op("unused_of_others::op", op.__wrapped__, mutates_args=())
with torchop.accelerate("unused_of_others::*"):
    assert state() == "ready"
""",
    "call in inference mode": IN_MODE.format(mode="torch.inference_mode()"),
    "call with fake tensors": IN_MODE.format(mode="FakeTensorMode()"),
    "call deep in a recursion": IN_RECURSION.format(call="op"),
    "call of torch.ops deep in a recursion": IN_RECURSION.format(call="torch.ops.unused.op"),
    "interrupted call": """
from torchop._native.extension import files

def interrupt(*args, **kwargs):
    raise KeyboardInterrupt

load, files.load = files.load, interrupt
for call in (op, torch.ops.unused.op, op):
    try:
        call(T)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError
files.load = load
assert op(T).tolist() == torch.ops.unused.op(T).tolist() == [1, 1]
assert torchop.native.counters(op) == {"native": 2}
""",
    "interrupted call of an operator of the low level": """
from torchop._native.extension import files

def interrupt(*args, **kwargs):
    raise KeyboardInterrupt

load, files.load = files.load, interrupt
library = torchop.Library("unused_low_level", "DEF")
library.define("op(Tensor x) -> Tensor")
library.impl("op", lambda x: x + 1, "CPU")
try:
    torch.ops.unused_low_level.op(T)
except KeyboardInterrupt:
    files.load = load
for count in range(3):
    assert torch.ops.unused_low_level.op(T).tolist() == [1, 1]
    assert torchop.native.counters("unused_low_level::op").get("native", 0) == count
""",
    "calls of many threads": """
import threading

barrier, results = threading.Barrier(8), []

def work():
    barrier.wait()
    results.append(op(T).tolist())

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(30)
assert results == [[1, 1]] * 8
op(T)
assert torchop.native.counters(op)["native"] >= 1
""",
    # Dynamo guards on the type of the handle. If the type changed while Dynamo traces, the next
    # call would fail the guard and recompile.
    "compiled call": """
graphs = []

def compiler(graph, inputs):
    graphs.append(graph)
    return graph.forward

program = torch.compile(lambda x: op(op(x)), backend=compiler)
assert [program(T).tolist() for _ in range(3)] == [[2, 2]] * 3
assert len(graphs) == 1, graphs
assert state() == "ready"
""",
    # `torch.jit.trace` runs the function twice and compares the operators' positions in the source.
    # If the operator became native in between, the positions would differ.
    "trace of TorchScript": """
import warnings
warnings.simplefilter("ignore")  # PyTorch warns that TorchScript is deprecated
for call in (op, torch.ops.unused.op, bound):
    assert torch.jit.trace(lambda x: call(x), T)(T).tolist() == [1, 1]
assert state() == "idle"
for count in (1, 2):
    assert op(T).tolist() == [1, 1]
    assert torchop.native.counters(op) == {"native": count}
""",
    "call through what a program puts around those of handles": """
before, calls = torchop.CustomOp.__call__, []

def observed(handle, *args):
    calls.append(handle.name)
    return before(handle, *args)

torchop.CustomOp.__call__ = observed
assert op(T).tolist() == [1, 1]
assert torchop.CustomOp.__call__ is observed and calls == ["unused::op"]
torchop.CustomOp.__call__ = before
assert op(T).tolist() == before(op, T).tolist() == [1, 1]
""",
    "call through an observer, without native calls": """
from unittest.mock import patch
os.environ["TORCHOP_NATIVE"] = "0"
with patch.object(torchop.CustomOp, "__call__", lambda handle, *args: "observed"):
    assert op(T) == "observed"
    assert torch.ops.unused.op(T).tolist() == [1, 1]
assert op(T).tolist() == torchop.CustomOp.__call__(op, T).tolist() == [1, 1]
""",
    # Importing Dynamo must succeed even if the extension cannot be loaded and warnings are errors,
    # because Python could not import Dynamo again after a failed import.
    "import of Dynamo where warnings are errors": """
import warnings
os.environ.update(CXX="/absent", TORCHOP_CACHE_DIR="/absent/cache", TORCHOP_NATIVE_DIR="")
warnings.simplefilter("error", torchop.native.NativeBuildWarning)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide the warning, which is also logged to stderr
import torch._dynamo
assert state() == "failed"
assert torch.compile(op, backend="eager")(T).tolist() == op(T).tolist() == [1, 1]
""",
    "accelerate where warnings are errors": """
import warnings
from torchop._accelerate import accelerate
os.environ.update(CXX="/absent", TORCHOP_CACHE_DIR="/absent/cache", TORCHOP_NATIVE_DIR="")
warnings.simplefilter("error")
try:
    torchop.accelerate("unused_of_others::*")  # a missing compiler is no warning
except torchop.NothingToAccelerateWarning:
    assert not accelerate._active
else:
    raise AssertionError
""",
    "definition after Dynamo was imported": """
import torch._dynamo
assert state() == "ready"
op_of_later = torchop.custom_op("unused::later", op.__wrapped__, mutates_args=())
assert op_of_later(T).tolist() == [1, 1]
assert torchop.native.counters(op_of_later) == {"native": 1}
""",
}
PROGRAMS = {use: DEFINITION + body for use, body in USES.items()} | {
    "first definition after Dynamo was imported": """
import torch._dynamo
schema = "(Tensor x) -> Tensor"
op = torchop.custom_op("unused::op", lambda x: x + 1, mutates_args=(), schema=schema)
assert op(T).tolist() == [1, 1]
assert torchop.native.counters(op) == {"native": 1}
"""
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    done = run_forked(PROGRAM, json.dumps(PROGRAMS), TORCHOP_NATIVE="auto")
    outcomes: dict[str, str] = json.loads(assert_clean(done))
    return outcomes


@pytest.mark.parametrize("use", PROGRAMS)
def test_first_use(outcomes, use):
    assert not outcomes[use], outcomes[use]


@pytest.mark.parametrize(
    "use",
    [
        "op.derive_inplace()",
        "[op(T) for _ in range(999)]",
        "torch.library.custom_op('unused2::f', op.__wrapped__, mutates_args=())\n"
        "torchop.accelerate('unused2::*')",
    ],
)
def test_short_programs_start_no_compiler(tmp_path, child_environment, use):
    environment = child_environment(f'touch "{tmp_path}/started"\nexit 1')
    body = f"{use}\nassert state() == 'idle'"
    done = run_forked(
        PROGRAM,
        json.dumps({"definition": DEFINITION + body}),
        **environment,
    )
    assert json.loads(assert_clean(done)) == {"definition": ""}
    assert not (tmp_path / "started").exists()
    assert not (tmp_path / "cache").exists()
