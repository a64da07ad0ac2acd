"""No user code runs under the registration lock, and forked children can register operators.

Uses private names.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import textwrap
import threading
import warnings

import pytest
import torch
from torch import Tensor

import torchop
import torchop.extend
from torchop._core.lock import registration_lock


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_of_a_fork_during_a_registration_is_not_locked_out(namespace: str) -> None:
    locked, done = threading.Event(), threading.Event()

    def register_slowly() -> None:
        with registration_lock:
            locked.set()
            done.wait(30)

    thread = threading.Thread(target=register_slowly)
    thread.start()
    locked.wait(30)
    child = os.fork()
    if child == 0:
        is_right = False
        try:
            signal.alarm(20)

            @torchop.custom_op(f"{namespace}::double", mutates_args=())
            def double(x: Tensor) -> Tensor:
                return x * 2

            # Use the CPU, because a forked process cannot use a GPU.
            is_right = double(torch.ones(1, device="cpu")).item() == 2
        finally:
            os._exit(0 if is_right else 1)  # else the child would run the other tests
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_forked_by_the_registering_thread_releases_the_lock(namespace: str) -> None:
    parent = os.getpid()
    is_free = []
    try:
        with registration_lock:
            child = os.fork()
            torchop.custom_op(
                f"{namespace}::more", lambda x: x + 1, mutates_args=(), schema="(int x) -> int"
            )
        if os.getpid() != parent:
            signal.alarm(20)
            thread = threading.Thread(
                target=lambda: is_free.append(registration_lock.acquire(timeout=5))
            )
            thread.start()
            thread.join()
    finally:
        if os.getpid() != parent:
            os._exit(0 if is_free == [True] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Watched(torchop.Rule):
    """A rule that records whether its methods run under the lock."""

    calls: list[tuple[str, bool]]

    def note(self, name: str) -> None:
        self.calls.append((name, registration_lock._is_owned()))

    def validate(self, op, value):
        self.note("validate")
        return value

    def attach(self, op):
        self.note("attach")

    def replaced(self, op):
        self.note("replaced")

    def detach(self, op):
        self.note("detach")

    def of_derived(self, op, kind, origin, value):
        self.note("of_derived")
        return value


@pytest.fixture
def rule(namespace):
    watched = Watched(f"watched_{namespace}")
    watched.calls = []
    return watched


def double(x: Tensor) -> Tensor:
    return x * 2


def ends(namespace, rule):
    """Yield functions that end the registration of a value, each in another way."""

    def close():
        with torchop.Library(namespace, "FRAGMENT") as library:
            torchop.define(f"{namespace}::closed", "(Tensor x) -> Tensor", lib=library)
            rule.register(f"{namespace}::closed", 1, lib=library)

    def collect():
        library = torchop.Library(namespace, "FRAGMENT")
        torchop.define(f"{namespace}::collected", "(Tensor x) -> Tensor", lib=library)
        rule.register(f"{namespace}::collected", 1, lib=library)
        library.cycle = library
        del library
        with registration_lock:  # as if a registration allocated the object that starts it
            gc.collect()
        assert "detach" not in dict(rule.calls)
        torchop.define(f"{namespace}::next", "() -> ()")

    def redefine():
        for _ in range(2):
            op = torchop.custom_op(f"{namespace}::redefined", double, mutates_args=())
            rule.register(op, 1)

    def fail():
        def build():
            rule.register(torchop.custom_op(f"{namespace}::failed", double, mutates_args=()), 1)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            torchop.extend.all_or_nothing("an operator", build)

    return {"close": close, "collect": collect, "redefine": redefine, "fail": fail}


@pytest.mark.parametrize("end", ["close", "collect", "redefine", "fail"])
def test_methods_of_rules_run_without_the_lock(namespace, rule, end):
    ends(namespace, rule)[end]()
    assert {name for name, _ in rule.calls} >= {"validate", "attach", "detach"}
    assert [name for name, is_locked in rule.calls if is_locked] == []


def test_rules_of_derived_operators_run_without_the_lock(namespace, rule):
    op = torchop.custom_op(f"{namespace}::double", double, mutates_args=())
    rule.register(op, 1)
    op.derive_inplace()
    op.derive_out()
    rule.register(op, 2)
    torchop.custom_op(f"{namespace}::double", double, mutates_args=())
    expected = {"validate", "attach", "replaced", "detach", "of_derived"}
    assert {name for name, _ in rule.calls} == expected
    assert [name for name, is_locked in rule.calls if is_locked] == []


def test_functions_of_providers_run_without_the_lock(namespace):
    locked = {}

    def note(name, *args):
        locked[name] = registration_lock._is_owned()
        return True

    op = torchop.custom_op(f"{namespace}::double", double, mutates_args=())
    op.register_kernel(
        None,
        lambda x: x + x,
        provider="sum",
        supported=lambda: note("supported"),
        supports=lambda x: note("supports"),
    )
    op.set_priority(["sum"])
    assert op(torch.ones(1)).item() == 2
    assert locked == {"supported": False, "supports": False}


def test_hooks_for_warnings_run_without_the_lock(namespace, monkeypatch):
    locked = []

    def show(message, *args, **kwargs):
        locked.append((str(message), registration_lock._is_owned()))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        for module in ("package_a", "package_b"):
            scope = {"__name__": module, "torch": torch, "torchop": torchop}
            program = f"""
                @torchop.custom_op("{namespace}::op", mutates_args=())
                def op_of_{module}(x: torch.Tensor) -> torch.Tensor:
                    return x * 2
                op_of_{module}.register_kernel("cpu", lambda x: x, provider="p")
                torchop.register_fake("{namespace}::op", lambda x: x)
            """
            exec(compile(textwrap.dedent(program), f"{module}.py", "exec"), scope)
    assert locked
    assert [message for message, is_locked in locked if is_locked] == []


def test_operators_that_a_failing_definition_imports_stay(namespace, tmp_path, monkeypatch):
    (tmp_path / f"{namespace}_imported.py").write_text(
        "import torch, torchop\n"
        f"@torchop.custom_op('{namespace}::imported', mutates_args=())\n"
        "def op(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x * 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def build():
        torchop.custom_op(f"{namespace}::removed", double, mutates_args=())
        __import__(f"{namespace}_imported")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        torchop.extend.all_or_nothing("an operator", build)
    assert sys.modules[f"{namespace}_imported"].op(torch.ones(1)).item() == 2
    assert not hasattr(getattr(torch.ops, namespace), "removed")


def test_operators_that_a_rule_of_a_failing_definition_defines_stay(namespace, rule):
    @functools.cache
    def helper():
        return torchop.custom_op(f"{namespace}::helper", double, mutates_args=())

    def validate(op, value):
        helper()
        raise TypeError("invalid")

    rule.validate = validate
    attributes = {"forward": staticmethod(double), rule.name: 1}
    with pytest.raises(TypeError, match="invalid"):
        torchop.operator(f"{namespace}::failed")(type("failed", (), attributes))
    assert helper()(torch.ones(1)).item() == 2
