"""Calls bypass the dispatcher once the C++ extension is loaded. Uses private names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import torchop
from tests._support.common import assert_clean, needs_native
from tests._support.forking import run_forked
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

    torchop.custom_op("switched::first", op.__wrapped__, mutates_args=())(T)
    assert torchop.native.status().state == "building", torchop.native.status()
"""


@pytest.fixture
def switching(tmp_path: Path):
    """A function that runs a program, which can call `finish_build` to get the extension."""
    signal, compiler = tmp_path / "signal", tmp_path / "fake-c++"
    compiler.write_text(
        '#!/bin/sh\nwhile [ "$1" != "-o" ]; do shift; done\n'
        f'while [ ! -e "{signal}" ]; do sleep 0.02; done\n'
        f'cp "{torchop.native.status().path}" "$2"\n'
    )
    compiler.chmod(0o755)

    def run(body: str) -> str:
        done = run_forked(
            PREAMBLE + body,
            str(signal),
            TORCHOP_NATIVE="auto",
            TORCHOP_CACHE_DIR=str(tmp_path / "cache"),
            TORCHOP_NATIVE_DIR="",
            CXX=str(compiler),
        )
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
