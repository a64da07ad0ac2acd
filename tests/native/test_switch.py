"""Operators go native, and go on being what they are, whatever is registered when."""

from __future__ import annotations

import contextlib
import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchop
from tests.support import adding, assert_clean, counting, needs_native, run_program
from torchop._native import switch
from torchop._native.extension.worker import digest_file

pytestmark = needs_native

T = torch.zeros(2)


@pytest.fixture
def op(namespace):
    return adding(namespace)


# --------------------------------------------------------------------------------------------------
# Before the extension is there

# Each program starts without the extension. The compiler is a script that waits until the program
# asks for the file, and hands out the one that the tests run with.
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

    assert torchop.native.status().state == "building", torchop.native.status()
"""


@pytest.fixture
def switching(tmp_path: Path):
    """Runs a program that begins without the extension, and decides itself when it is there."""
    signal, compiler = tmp_path / "signal", tmp_path / "fake-c++"
    compiler.write_text(
        '#!/bin/sh\nwhile [ "$1" != "-o" ]; do shift; done\n'
        f'while [ ! -e "{signal}" ]; do sleep 0.02; done\n'
        f'cp "{torchop.native.status().path}" "$2"\n'
    )
    compiler.chmod(0o755)

    def run(body: str) -> str:
        done = run_program(
            PREAMBLE + body,
            str(signal),
            TORCHOP_NATIVE="auto",
            TORCHOP_CACHE_DIR=str(tmp_path / "cache"),
            TORCHOP_NATIVE_DIR="",
            CXX=str(compiler),
        )
        notice, _, rest = done.stderr.partition("\n")
        assert notice.startswith("torchop: compiling"), done.stderr
        done.stderr = rest
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
    assert call(T).tolist() == [1, 1]  # a bound method of the Python class: right, if not native
    """)


def test_torch_ops_that_was_called_before_is_native_without_a_call_of_the_handle(switching):
    switching("""
    assert torch.ops.switched.op(T).tolist() == [1, 1]
    finish_build()
    assert torch.ops.switched.op(T).tolist() == [1, 1]
    assert torchop.native.counters(op) == {"native": 1}
    """)


def test_operator_that_was_never_called_is_native(switching):
    switching("""
    overload = op.overload
    finish_build()
    assert op(T).tolist() == [1, 1]
    assert overload(T).tolist() == [1, 1]
    assert torchop.native.counters(op) == {"native": 2}
    """)


def test_rules_of_before_are_followed(switching):
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
    """The call began in the dispatcher, and ends there."""
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


def test_operators_of_closed_libraries_are_left_alone(switching):
    switching("""
    with torchop.Library("switched_closed", "FRAGMENT") as library:
        closed = torchop.custom_op("switched_closed::op", op.__wrapped__, mutates_args=(),
                                   lib=library)
        closed(T)
    finish_build()
    try:
        closed(T)
    except torchop.OperatorGoneError:
        pass
    else:
        raise AssertionError
    assert op(T).tolist() == [1, 1]
    """)


@pytest.mark.parametrize("key", ["CPU", "Autograd", "CompositeExplicitAutograd"])
def test_override_of_before_the_switch_is_honoured(switching, key):
    switching(f"""
    import warnings
    warnings.simplefilter("ignore")  # PyTorch tells of the override
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
# Overrides

# CompositeExplicitAutograd is where an operator without kernels of its own has the function.
KEYS = pytest.mark.parametrize(
    "key", ["CPU", "Autograd", "AutogradCPU", "CompositeExplicitAutograd"]
)


def override(op, key):
    guest = torch.library.Library(op.name.split("::")[0], "IMPL")
    guest.impl("op", lambda x: torch.full_like(x, 7), key, allow_override=True)
    return guest


@KEYS
@pytest.mark.parametrize("calls_before", [0, 1])
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_override_is_honoured_and_ours_comes_back(op, key, calls_before):
    for _ in range(calls_before):
        op(T)
    guest = override(op, key)
    with counting(op) as calls:
        assert op(T).tolist() == [7, 7]
        assert op.overload(T).tolist() == [7, 7]
    assert "native" not in calls
    guest._destroy()
    assert op(T).tolist() == [1, 1]
    with counting(op) as calls:
        assert op(T).tolist() == [1, 1]
    assert calls == {"native": 1}


@KEYS
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_override_of_an_override_is_honoured(op, key):
    op(T)
    first = override(op, key)
    second = torch.library.Library(op.name.split("::")[0], "IMPL")
    second.impl("op", lambda x: torch.full_like(x, 8), key, allow_override=True)
    assert op(T).tolist() == [8, 8]
    first._destroy()
    assert op(T).tolist() == [8, 8]
    second._destroy()
    with counting(op) as calls:
        assert op(T).tolist() == [1, 1]
    assert calls == {"native": 1}


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_override_at_autograd_meets_gradients_only_where_they_are_asked_for(op):
    """It stands at Autograd, where calls without gradients come by as well."""
    op(T)
    guest = override(op, "Autograd")
    with torch.inference_mode(), counting(op) as calls:
        assert op(torch.zeros(2)).tolist() == [1, 1]  # inference tensors have no autograd keys
    assert calls == {"native": 1}
    with torch.no_grad():
        assert op(T).tolist() == [7, 7]
    guest._destroy()


def test_override_of_another_device_is_none(op):
    op(T)
    guest = override(op, "CUDA")
    with counting(op) as calls:
        assert op(T).tolist() == [1, 1]
    assert calls == {"native": 1}
    guest._destroy()


def test_same_function_registered_by_somebody_else_is_not_taken_for_ours(op):
    """It would be right to call it natively, but the dispatcher has its own wrapper around it."""
    op(T)
    guest = torch.library.Library(op.name.split("::")[0], "IMPL")
    guest.impl("op", op.__wrapped__, "CPU")
    with counting(op) as calls:
        assert op(T).tolist() == [1, 1]
    assert calls == {"kernel": 1}
    guest._destroy()


def test_fallthrough_at_a_backend_is_honoured(op):
    op.register_kernel("cpu", lambda x: x + 3)
    assert op(T).tolist() == [3, 3]
    guest = torch.library.Library(op.name.split("::")[0], "IMPL")
    guest.impl("op", torch.library.fallthrough_kernel, "AutogradCPU")
    assert op(T).tolist() == [3, 3]
    guest._destroy()
    assert op(T).tolist() == [3, 3]


# --------------------------------------------------------------------------------------------------
# Registrations after calls


def test_kernel_is_honoured_after_calls(op):
    for amount in (5.0, 6.0):
        op(T)
        op.register_kernel("cpu", lambda x, amount=amount: x + amount)
        with counting(op) as calls:
            assert op(T).tolist() == [amount, amount]
            assert op.overload(T).tolist() == [amount, amount]
        assert calls == {"native": 2}


def test_switched_off_kernel_is_not_run_and_calls_stay_native(op):
    op.register_kernel("cpu", lambda x: x + 5)
    assert op(T).tolist() == [5, 5]
    with counting(op) as calls:
        with op.set_kernel_enabled("cpu", enabled=False):
            assert op(T).tolist() == [1, 1]
            with op.set_kernel_enabled("cpu", enabled=True):
                assert op(T).tolist() == [5, 5]
            assert op(T).tolist() == [1, 1]
        assert op(T).tolist() == [5, 5]
    assert calls == {"native": 4}


def test_formula_is_honoured_after_calls(op):
    x = T.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no autograd formula"):
        op(x).sum().backward()
    for factor in (5.0, 6.0, 7.0):
        op.register_autograd(lambda ctx, grad, factor=factor: grad * factor)
        for _ in range(2):
            x.grad = None
            op(x).sum().backward()
            assert x.grad.tolist() == [factor, factor]
    with counting(op) as calls:
        op(x)
    assert calls == {"native": 1}


def test_autocast_rule_is_honoured_after_calls(op):
    with torch.autocast("cpu", torch.bfloat16):
        with counting(op) as calls:
            assert op(T).dtype == torch.float32
        assert calls == {"native": 1}
        op.register_autocast("cpu", torch.bfloat16)
        with counting(op) as calls:
            assert op(T).dtype == torch.bfloat16
            assert op.overload(T).dtype == torch.bfloat16
        assert calls == {"autocast": 2, "native": 2}  # the rule calls the operator again
    with counting(op) as calls:
        assert op(T).dtype == torch.float32
    assert calls == {"native": 1}


def test_vmap_rule_is_honoured_after_calls(op):
    op(T)
    op.register_vmap(lambda info, dims, x: (torch.full_like(x, 9), dims[0]))
    assert torch.vmap(op)(torch.zeros(3, 2)).tolist() == [[9, 9]] * 3
    with counting(op) as calls:
        assert op(T).tolist() == [1, 1]
    assert calls == {"native": 1}


def test_fake_kernel_is_honoured_after_calls(op):
    op(T)
    op.register_fake(lambda x: x.new_empty(3))
    assert op(T.to("meta")).shape == (3,)
    op.register_fake(lambda x: x.new_empty(4))
    assert op(T.to("meta")).shape == (4,)
    assert op(T).tolist() == [1, 1]


def test_torch_dispatch_rule_is_honoured_after_calls(op):
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    op(T)
    op.register_torch_dispatch(Mode, lambda mode, func, types, args, kwargs: args[0] + 40)
    with Mode(), counting(op) as calls:
        assert op(T).tolist() == [40, 40]
    assert calls == {"thread": 1}
    assert op(T).tolist() == [1, 1]


def test_refused_registration_leaves_calls_native(op):
    op(T)
    with pytest.raises(RuntimeError):
        op.register_kernel("toaster", lambda x: x)
    with pytest.raises(TypeError):
        op.register_autograd("non-differentiable")
    with counting(op) as calls:
        assert op(T).tolist() == [1, 1]
    assert calls == {"native": 1}


# --------------------------------------------------------------------------------------------------
# The end of an operator


@pytest.mark.parametrize("called", [False, True])
def test_replaced_handle_says_so_and_the_new_one_is_native(namespace, called):
    old = adding(namespace, 1)
    old_overload = old.overload
    if called:
        old(T)
    new = adding(namespace, 2)
    for call in (old, old_overload):
        with pytest.raises(torchop.OperatorGoneError):
            call(T)
    with counting(new) as calls:
        assert new(T).tolist() == [2, 2]
        assert new.overload(T).tolist() == [2, 2]
        assert getattr(torch.ops, namespace).op(T).tolist() == [2, 2]
    assert calls == {"native": 3}
    with pytest.raises(torchop.OperatorGoneError):
        old(T)


@pytest.mark.parametrize("made_by", [torchop.Library, torch.library.Library])
@pytest.mark.parametrize("called", [False, True])
def test_handle_of_a_closed_library_says_so(namespace, made_by, called):
    library = made_by(namespace, "FRAGMENT")
    op = adding(namespace, lib=library)
    held = [op, op.overload, op.overload.overloadpacket]
    if called:
        assert [call(T).tolist() for call in held] == [[1, 1]] * 3
    library._destroy()
    for call in held:
        with pytest.raises(torchop.OperatorGoneError, match="is gone"):
            call(T)
    assert "gone" in repr(op)


# A library tries to close once: each test gets one try.


def assert_closing_is_refused(op, call):
    """That a native call which closes the library of its operator raises."""
    with counting(op) as calls, pytest.raises(RuntimeError, match="from inside a call of it"):
        call()
    assert calls == {"native": 1}


def assert_is_closed_later(op, library, x):
    """That the operator works, and was not forgotten when its library could not be closed."""
    assert op(x).tolist() == [1, 1]
    library._destroy()
    with pytest.raises(torchop.OperatorGoneError, match="was closed"):
        op(x)


@pytest.mark.parametrize(
    "way", [lambda op: op, lambda op: op.overload, lambda op: op.overload.overloadpacket]
)
def test_library_is_not_closed_from_inside_a_native_call(namespace, way):
    library = torchop.Library(namespace, "FRAGMENT")
    closing = False

    def kernel(x: Tensor) -> Tensor:
        if closing:
            library._destroy()
        return x + 1

    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), lib=library)
    way(op)(T)
    closing = True
    assert_closing_is_refused(op, lambda: way(op)(T))
    closing = False
    assert_is_closed_later(op, library, T)


def test_library_is_not_closed_from_inside_a_setup_context(namespace):
    library = torchop.Library(namespace, "FRAGMENT")
    closing = False

    def kernel(x: Tensor) -> Tensor:
        return x + 1

    def setup_context(ctx, inputs, output):
        if closing:
            library._destroy()

    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), lib=library)
    op.register_autograd(lambda ctx, grad: grad, setup_context=setup_context)
    x = T.clone().requires_grad_()
    op(x)
    closing = True
    assert_closing_is_refused(op, lambda: op(x))
    closing = False
    assert_is_closed_later(op, library, x)


def test_operators_are_closed_while_other_threads_call_them(namespace):
    """They get results or the error, and nothing else."""
    unexpected = []

    def work(op):
        while True:
            try:
                if op(T).tolist() != [1, 1]:
                    unexpected.append("result")
            except torchop.OperatorGoneError:
                return
            except BaseException as error:
                unexpected.append(error)
                return

    for number in range(30):
        library = torchop.Library(f"{namespace}_{number}", "FRAGMENT")
        op = adding(f"{namespace}_{number}", lib=library)
        threads = [threading.Thread(target=work, args=(op,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            op(T)
        with contextlib.suppress(RuntimeError):
            library._destroy()
        for thread in threads:
            thread.join(30)
    assert unexpected == []


# --------------------------------------------------------------------------------------------------
# The extension, wherever it is


def test_programs_share_the_cached_extension(tmp_path):
    """Loaded before the operator is defined: the very first call is native."""
    built = torchop.native.status().path
    assert built is not None
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    for file in (built, digest_file(built)):
        shutil.copy(file, folder)
        (folder / file.name).chmod(0o700)
    done = run_program(
        """
        import torch, torchop

        @torchop.custom_op("cached::op", mutates_args=())
        def op(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        op(torch.ones(1))
        assert torchop.native.counters(op) == {"native": 1}
        """,
        TORCHOP_NATIVE="auto",
        TORCHOP_CACHE_DIR=str(folder),
        CXX="/absent",
    )
    assert_clean(done)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_operator_of_pytorch_with_a_kernel_of_ours_stays_as_it_is():
    op = torch.ops.aten.erfinv.default
    before = op._op
    with torchop.Library("aten", "IMPL") as library:
        library.impl("erfinv", lambda x: x + 1, "CPU")
        assert op(T).tolist() == (T + 1).tolist()
    assert op._op is before


def test_gradients_of_a_pytorch_that_is_too_new_are_logged(monkeypatch, caplog):
    switch._log_unknown_nodes()
    assert not caplog.records
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    switch._log_unknown_nodes()
    (message,) = caplog.messages
    assert message == (
        "Calls that record a gradient go through the dispatcher: PyTorch 2.99.0 is newer than "
        "2.15, the newest release whose gradients this version of torchop records natively."
    )
