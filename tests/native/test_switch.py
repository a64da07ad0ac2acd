"""Calls bypass the dispatcher once the C++ extension is loaded. Uses private names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import torchop
from tests._support.common import assert_clean, needs_native
from tests._support.forking import run_compiling, run_forked
from tests.native.conftest import Environment
from torchop._native import switch
from torchop._native.extension import recipe

pytestmark = needs_native

T = torch.zeros(2)


# --------------------------------------------------------------------------------------------------
# Before the extension is loaded


# The start of each program. The program has no extension at first, because its compiler is a script
# that waits until `finish_build` creates a file, and only then copies the extension of this
# process.
PREAMBLE = """
    import pathlib, sys, threading, time
    import torch, torchop
    from torch import Tensor

    T = torch.zeros(2)

    def finish_build():
        pathlib.Path(sys.argv[1]).touch()
        until = time.monotonic() + 60
        while torchop.native.status().state != "ready":
            assert torchop.native.status().state in ("building", "found"), torchop.native.status()
            assert time.monotonic() < until
            time.sleep(0.001)

    @torchop.custom_op("switched::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    first = torchop.custom_op("switched::first", op.__wrapped__, mutates_args=())
    for _ in range(1000):
        assert torchop.native.status().state == "idle", torchop.native.status()
        first(T)
    assert torchop.native.status().state == "building", torchop.native.status()
"""


@pytest.fixture
def switching(tmp_path: Path, child_environment: Environment):
    """A function that runs a program, which can call `finish_build` to get the extension."""
    signal = tmp_path / "signal"
    environment = child_environment(
        'while [ "$1" != "-o" ]; do shift; done\n'
        f'while [ ! -e "{signal}" ]; do sleep 0.02; done\n'
        f'cp "{torchop.native.status().path}" "$2"'
    )

    def run(body: str) -> str:
        done = run_forked(PREAMBLE + body, str(signal), **environment)
        notice, _, rest = done.stderr.partition("\n")
        assert notice.startswith("torchop: compiling"), done.stderr
        done.stderr = re.sub(r"^torchop: native calls are ready, after \d+ s\.\n", "", rest)
        return assert_clean(done)

    return run


def test_operator_that_was_called_before_is_native_afterwards(switching):
    switching("""
    held, call, ours = op, op.__call__, torch.ops.switched.op
    overload = op.overload
    python_type = type(op)
    op.note = "mine"
    for call_now in (held, call, ours, overload):
        assert call_now(T).tolist() == [1, 1]
    assert torchop.native.counters(op) == {}
    finish_build()
    assert op is held and type(op) is not python_type and op.note == "mine"
    assert torch.ops.switched.op is ours and op.overload is overload
    for n, call_now in enumerate((held, ours, overload), 1):
        assert call_now(T).tolist() == [1, 1]
        assert torchop.native.counters(op) == {"native": n}, (n, torchop.native.counters(op))
    # This method was bound before the extension was loaded, so its calls need not be native.
    assert call(T).tolist() == [1, 1]
    """)


def test_torch_ops_that_was_called_before_is_native_without_a_call_of_the_handle(switching):
    switching("""
    assert torch.ops.switched.op(T).tolist() == [1, 1]
    finish_build()
    assert torch.ops.switched.op(T).tolist() == [1, 1]
    assert torchop.native.counters(op) == {"native": 1}
    """)


def test_operator_of_the_low_level_is_native_afterwards(switching):
    switching("""
    library = torchop.Library("switched_low", "DEF")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x + 1, "CPU")
    with torchop.Library("switched_closed", "DEF") as closed:
        closed.define("op(Tensor x) -> Tensor")
        closed.impl("op", lambda x: x + 1, "CPU")
        torch.ops.switched_closed.op(T)
    # While the kernel of `guest` is registered, PyTorch keeps the overload object, so the next
    # operator of this name reuses the object.
    guest = torchop.Library("switched_next", "IMPL")
    with torchop.Library("switched_next", "FRAGMENT") as first:
        first.define("op(Tensor x) -> Tensor")
        first.impl("op", lambda x: x + 1, "CPU")
        guest.impl("op", torch.empty_like, "Meta")
        overload = torch.ops.switched_next.op.default
        overload(T)
    following = torchop.Library("switched_next", "FRAGMENT")
    following.define("op(Tensor x) -> Tensor[]")
    following.impl("op", lambda x: [x], "CPU")
    assert torch.ops.switched_next.op.default is overload
    for calls in (0, 1, 2):
        assert torch.ops.switched_low.op(T).tolist() == [1, 1]
        if not calls:
            reason = torchop.explain("switched_low::op", T).reason
            assert reason == "the native call path is not loaded (building)"
            finish_build()
        assert torchop.native.counters("switched_low::op").get("native", 0) == calls
    assert [x.tolist() for x in overload(T)] == [[0, 0]]
    """)


def test_operator_that_was_never_called_is_native(switching):
    switching("""
    overload = op.overload
    finish_build()
    assert op(T).tolist() == [1, 1]
    assert overload(T).tolist() == [1, 1]
    assert torchop.native.counters(op) == {"native": 2}
    """)


def test_rules_registered_before_the_switch_apply(switching):
    switching("""
    op.register_kernel("cpu", lambda x: x + 2)
    assert op(T).tolist() == [2, 2]
    op.register_kernel("cpu", lambda x: x + 3)
    op.register_autograd(lambda ctx, grad: grad * 5)
    finish_build()
    assert op(T).tolist() == [3, 3]
    x = T.clone().requires_grad_()
    for _ in range(2):
        x.grad = None
        op(x).sum().backward()
        assert x.grad.tolist() == [5, 5]
    assert torchop.native.counters(op) == {"native": 2, "gradient": 1}
    """)


def test_threads_that_call_during_the_switch_get_right_results(switching):
    switching("""
    stop, wrong, counts = threading.Event(), [], []

    def work(number):
        x = torch.full((2,), float(number))
        y = x.clone().requires_grad_()
        calls = 0
        while not stop.is_set():
            through = (op, torch.ops.switched.op, op.overload)[calls % 3]
            result = through(x if calls % 2 else y).tolist()
            if result != [number + 1, number + 1]:
                wrong.append(result)
            calls += 1
        counts.append(calls)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    finish_build()
    time.sleep(0.3)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert wrong == [] and len(counts) == 4
    native = torchop.native.counters(op)
    assert native["native"] > 0 and sum(native.values()) < sum(counts)
    """)


def test_switch_inside_a_call_of_the_operator(switching):
    """A call to `outer` that runs when the extension is loaded keeps using the dispatcher."""
    switching("""
    @torchop.custom_op("switched::outer", mutates_args=())
    def outer(x: Tensor) -> Tensor:
        before = op(x)
        if torchop.native.status().state == "building":
            finish_build()
        return before + op(x)

    assert outer(T).tolist() == [2, 2]
    assert torchop.native.counters(op) == {"native": 1}
    assert torchop.native.counters(outer) == {}
    assert outer(T).tolist() == [2, 2]
    assert torchop.native.counters(outer) == {"native": 1}
    """)


def test_gradient_recorded_before_the_switch_flows_after_it(switching):
    switching("""
    op.register_autograd(lambda ctx, grad: grad * 5)
    x = T.clone().requires_grad_()
    y = op(x).sum()
    finish_build()
    (op(x).sum() + y).backward()
    assert x.grad.tolist() == [10, 10]
    assert torchop.native.counters(op) == {"native": 1}
    """)


@pytest.mark.parametrize("key", ["CPU", "Autograd", "CompositeExplicitAutograd"])
def test_override_registered_before_the_switch_runs(switching, key):
    switching(f"""
    import warnings
    warnings.simplefilter("ignore")  # PyTorch warns about the override
    op(T)
    guest = torch.library.Library("switched", "IMPL")
    guest.impl("op", lambda x: torch.full_like(x, 7), {key!r}, allow_override=True)
    assert op(T).tolist() == [7, 7]
    finish_build()
    for call in (op, op.overload, torch.ops.switched.op):
        assert call(T).tolist() == [7, 7]
    assert set(torchop.native.counters(op)) == {{"kernel"}}
    guest._destroy()
    for call in (op, op.overload, torch.ops.switched.op):
        assert call(T).tolist() == [1, 1]
    assert torchop.native.counters(op) == {{"kernel": 3, "native": 3}}
    """)


# --------------------------------------------------------------------------------------------------
# Unsupported releases of PyTorch, and errors


def test_gradients_of_a_pytorch_with_other_nodes_are_logged(monkeypatch, caplog):
    fields = recipe.node_fields()
    switch._prepare(switch.native_module())
    assert not caplog.records
    monkeypatch.setattr(recipe, "node_fields", lambda: fields | {"more"})
    switch._prepare(switch.native_module())
    (message,) = caplog.messages
    assert message == (
        "Calls that record a gradient go through the dispatcher: the autograd nodes of PyTorch "
        f"{torch.__version__} have the new field more, which this version of torchop does not "
        "support."
    )


# --------------------------------------------------------------------------------------------------
# The build starts after many calls

COUNTED = """
    import os, sys
    import torch, torchop
    from torch import Tensor

    T = torch.zeros(2)

    def f(x: Tensor) -> Tensor:
        return x + 1

    def state():
        return torchop.native.status().state

    def of_others(define):
        acceleration = torchop.accelerate("counted::*")
        call = define()
        call(T)
        assert "not compiled yet" in acceleration.operators[0].reason
        return call

    def low_level(library):
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", f, "CPU")
        return library
"""
FORMS = {
    "handle": """
    call = torchop.custom_op("counted::op", f, mutates_args=())
    call(T)
    """,
    "torch.ops": """
    torchop.custom_op("counted::op", f, mutates_args=())(T)
    call = torch.ops.counted.op
    """,
    "class form": """
    @torchop.operator("counted::op")
    class call:
        forward = staticmethod(f)
    call(T)
    """,
    "structured arguments": """
    def pair(x: tuple[Tensor, Tensor]) -> Tensor:
        return x[0] + x[1]
    op = torchop.custom_op("counted::op", pair, mutates_args=())
    call = lambda x: op((x, x))
    call(T)
    """,
    "in-place form": """
    def increment(x: Tensor) -> None:
        x.add_(1)
    call = torchop.custom_op("counted::op", increment, mutates_args=("x",))
    call(T)
    """,
    "low level": """
    library = low_level(torchop.Library("counted", "DEF"))
    call = torch.ops.counted.op
    call(T)
    """,
    "compiled": """
    op = torchop.custom_op("counted::op", f, mutates_args=())
    op.register_fake(torch.empty_like)
    call = torch.compile(op, backend="aot_eager", fullgraph=True)
    call(T)
    """,
    "stock custom_op": """
    call = of_others(lambda: torch.library.custom_op("counted::op", f, mutates_args=()))
    """,
    "torch.ops of stock custom_op": """
    torch.library.custom_op("counted::op", f, mutates_args=())
    call = of_others(lambda: torch.ops.counted.op)
    """,
    "overload of the stock low level": """
    library = low_level(torch.library.Library("counted", "DEF"))
    call = of_others(lambda: torch.ops.counted.op.default)
    """,
}


@pytest.fixture
def unusable(tmp_path: Path, child_environment: Environment) -> dict[str, str]:
    """Return environment variables that select a compiler that fails."""
    return child_environment(f'echo run >> "{tmp_path}/runs"\nexit 1')


@pytest.mark.parametrize("form", FORMS)
def test_the_build_starts_at_call_1000(form: str, unusable: dict[str, str], tmp_path: Path) -> None:
    body = """
    for _ in range(998):
        call(T)
    assert state() == "idle", torchop.native.status()
    call(T)
    assert state() in ("building", "failed"), torchop.native.status()
    try:
        torchop.native.wait()
    except torchop.native.NativeUnavailableError:
        print("done")
    """
    done = run_compiling(COUNTED + FORMS[form] + body, **unusable)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert (tmp_path / "runs").read_text() == "run\n"


def test_undo_stops_counting(unusable: dict[str, str], tmp_path: Path) -> None:
    done = run_compiling(
        COUNTED
        + """
    op = torch.library.custom_op("counted::op", f, mutates_args=())
    overload, packet = op._opoverload, torch.ops.counted.op
    before = overload._op, packet._op, hash(overload), hash(packet)
    with torchop.accelerate("counted::*"):
        assert overload._op is not before[0] and packet._op is not before[1]
        assert (hash(overload), hash(packet)) == before[2:]
        [op(T) for _ in range(500)]
    assert (overload._op, packet._op, hash(overload), hash(packet)) == before
    [op(T) for _ in range(1000)]
    assert state() == "idle"
    """,
        **unusable,
    )
    assert_clean(done)


def test_calls_under_a_mode_do_not_count(unusable: dict[str, str]) -> None:
    done = run_compiling(
        COUNTED
        + """
    from torch._subclasses import FakeTensorMode

    ours = torchop.custom_op("counted::ours", f, mutates_args=())
    ours.register_fake(torch.empty_like)
    op = torch.library.custom_op("counted::op", f, mutates_args=())
    op.register_fake(torch.empty_like)
    torchop.accelerate("counted::*")
    with FakeTensorMode() as mode:
        fake = torch.empty(2)
        for _ in range(1000):
            op(fake), ours(fake)
    assert state() == "idle"
    """,
        **unusable,
    )
    assert_clean(done)


def test_forked_child_counts_again(unusable: dict[str, str], tmp_path: Path) -> None:
    Path(unusable["CXX"]).write_text(f'#!/bin/sh\necho run >> "{tmp_path}/runs"\nexec sleep 60\n')
    done = run_forked(
        COUNTED
        + """
    import signal, time
    op = torchop.custom_op("counted::op", f, mutates_args=())
    [op(T) for _ in range(1000)]
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        [op(T) for _ in range(999)]
        assert state() == "idle"
        op(T)
        assert state() == "building"
        while torchop.native.status().reason is None:
            time.sleep(0.01)
        assert torchop.native.status().reason == "another process is compiling it"
        assert torchop.explain(op, T).reason == (
            "the native call path is not loaded (another process is compiling it)"
        )
        print("counted", flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """,
        str(tmp_path / "runs"),
        **unusable,
    )
    assert (done.returncode, done.stdout) == (0, "counted\n"), done.stderr
    assert "another process is compiling the native call path" in done.stderr
    assert (tmp_path / "runs").read_text() == "run\n"


def test_forked_child_does_not_hold_the_lock_of_its_parent(
    unusable: dict[str, str], tmp_path: Path
) -> None:
    """The parent exits during the build, and its child lives longer."""
    slow = tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\ntouch "{tmp_path}/started"\nexec sleep 60\n')
    slow.chmod(0o755)
    done = run_forked(
        COUNTED
        + """
    import time
    broken, (reader, writer) = os.environ["CXX"], os.pipe()
    if os.fork() == 0:  # the parent
        os.environ["CXX"] = sys.argv[1]
        torchop.native.wait(0)
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.01)
        if os.fork():
            os._exit(0)  # without stopping the compiler
        os.environ["CXX"] = broken
        outcome = "no error"
        try:
            torchop.native.wait(30)
        except torchop.native.NativeUnavailableError as error:
            outcome = str(error)
        os.write(writer, outcome.encode())
        os._exit(0)
    os.close(writer)
    print(os.read(reader, 10000).decode())
    """,
        str(slow),
        str(tmp_path / "started"),
        **unusable,
    )
    assert done.returncode == 0, done.stderr
    assert "failed with exit code 1" in done.stdout


def test_without_a_compiler_a_program_prints_nothing(unusable: dict[str, str]) -> None:
    done = run_forked(
        COUNTED
        + """
    op = torchop.custom_op("counted::op", f, mutates_args=())
    [op(T) for _ in range(1001)]
    assert state() == "failed"
    print(torchop.explain(op, T).reason)
    """,
        **{**unusable, "CXX": "/absent/c++"},
    )
    assert assert_clean(done).startswith(
        "the native call path is not loaded (the compiler '/absent/c++' in the environment"
    )
