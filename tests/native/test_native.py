"""`torchop.native` waits for native calls, disables them and counts them.

Native calls go through torchop's C++ extension, without PyTorch's dispatcher.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import adding, assert_clean, counting, in_threads, needs_native
from tests._support.forking import run_forked

T = torch.zeros(2)


@pytest.fixture
def op(namespace):
    return adding(namespace)


def test_an_operator_that_does_not_exist_has_no_counters(namespace):
    with pytest.raises(torchop.OperatorNotFoundError, match="typo::op does not exist"):
        torchop.native.counters("typo::op")
    assert torchop.native.counters("aten::sin") == {}


@needs_native
class TestDisabled:
    def test_calls_in_the_block_go_to_the_dispatcher(self, op):
        with counting(op) as calls:
            with torchop.native.disabled():
                for call in (op, op.overload, op.overload.overloadpacket):
                    assert call(T).tolist() == [1, 1]
            op(T)
        assert calls == {"switched_off": 3, "native": 1}

    def test_blocks_may_be_nested(self, op):
        with counting(op) as calls:
            with torchop.native.disabled():
                with torchop.native.disabled():
                    op(T)
                op(T)
            op(T)
        assert calls == {"switched_off": 2, "native": 1}

    def test_block_that_raises_is_exited(self, op):
        with pytest.raises(ZeroDivisionError), torchop.native.disabled():
            raise ZeroDivisionError
        with counting(op) as calls:
            op(T)
        assert calls == {"native": 1}

    def test_block_does_not_affect_other_threads(self, op):
        op(T)
        with counting(op) as calls, torchop.native.disabled():
            in_threads(lambda _: op(T), count=1)
        assert calls == {"native": 1}

    def test_block_affects_nested_operators(self, op, namespace):
        @torchop.custom_op(f"{namespace}::outer", mutates_args=())
        def outer(x: Tensor) -> Tensor:
            return op(x)

        with counting(op) as calls, torchop.native.disabled():
            outer(T)
        assert calls == {"switched_off": 1}

    def test_block_entered_in_backward_and_exited_after_it(self, op):
        block = torchop.native.disabled()
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda grad: block.__enter__())
        x.sum().backward()
        block.__exit__(None, None, None)
        with counting(op) as calls:
            op(T)
            with torchop.native.disabled():
                op(T)
        assert calls == {"native": 1, "switched_off": 1}

    def test_disabled_is_also_a_decorator(self, op):
        @torchop.native.disabled()
        def function():
            return op(T)

        with counting(op) as calls:
            function()
            function()
            op(T)
        assert calls == {"switched_off": 2, "native": 1}


class TestCounters:
    @needs_native
    def test_calls_are_counted_by_reason(self, op):
        assert torchop.native.counters(op) == {}
        op(T)
        op(T)
        with torchop.native.disabled():
            op(T)
        with pytest.raises(RuntimeError):
            op(3)
        assert torchop.native.counters(op) == {
            "native": 2,
            "switched_off": 1,
            "argument_type": 1,
        }

    @needs_native
    def test_counters_result_is_a_copy(self, op):
        before = torchop.native.counters(op)
        op(T)
        assert before == {}

    @needs_native
    def test_call_that_raises_is_counted(self, namespace):
        def kernel(x: Tensor) -> Tensor:
            raise ZeroDivisionError

        op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=())
        with pytest.raises(ZeroDivisionError):
            op(T)
        assert torchop.native.counters(op) == {"native": 1}

    @needs_native
    def test_calls_of_many_threads_are_all_counted(self, op):
        in_threads(lambda _: [op(T) for _ in range(1000)], count=4)
        assert torchop.native.counters(op) == {"native": 4000}

    @needs_native
    def test_operator_may_be_named_in_any_way(self, op):
        op(T)
        for named in (op, op.name, op.overload, op.overload.overloadpacket):
            assert torchop.native.counters(named) == {"native": 1}

    def test_stock_operator_has_no_counts(self):
        assert torchop.native.counters("aten::sin") == {}

    @pytest.mark.parametrize("thing", [3, torch.sin])
    def test_argument_that_is_no_operator_is_rejected(self, thing):
        with pytest.raises(ValueError, match=r"counters.* got unexpected type for op"):
            torchop.native.counters(thing)


class TestWait:
    @needs_native
    @pytest.mark.parametrize("timeout", [None, 0, 0.0, 10**30, float("inf"), np.float32(1)])
    def test_extension_is_in_use(self, timeout):
        assert torchop.native.wait(timeout) is True
        assert torchop.native.wait(timeout=timeout) is True

    @pytest.mark.parametrize(
        ("timeout", "error"),
        [
            (-1, ValueError),
            (-1e-9, ValueError),
            (float("nan"), ValueError),
            ("30", TypeError),
            (1j, TypeError),
            ([], TypeError),
        ],
    )
    def test_invalid_timeout_is_rejected(self, timeout, error):
        with pytest.raises(error) as caught:
            torchop.native.wait(timeout)
        assert str(caught.value) == (
            "torchop.native.wait: timeout must be a non-negative number of seconds, or None to "
            f"wait for the build; got {timeout!r}."
        )


class TestStatus:
    @needs_native
    def test_extension_is_in_use(self):
        status = torchop.native.status()
        assert isinstance(status, torchop.native.Status)
        assert status.state == "ready"
        assert status.path is not None
        assert status.path.is_file()
        assert status.key is not None
        assert status.key in status.path.name
        assert status.reason is None

    def test_everything_works_without_the_extension(self):
        program = """
        import torch, torchop

        @torchop.custom_op("without::op", mutates_args=())
        def op(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        with torchop.native.disabled():
            op(torch.ones(1))
        op(torch.ones(1))
        assert torchop.native.wait() is False
        assert torchop.native.counters(op) == {}
        assert torchop.native.status().state == "off"
        """
        assert_clean(run_forked(program, TORCHOP_NATIVE="0"))
