import logging
import threading
import traceback

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import BaseTorchDispatchMode

import torchop
from tests._support.common import on_both
from tests._support.devices import BACKEND, OTHER, TYPE
from tests.rules.support import adding_one as define
from tests.rules.support import assert_only_torchop_rejects


def adding(amount):
    return lambda x: x + amount


def value(op) -> float:
    return op(torch.zeros(1)).item()


def test_kernel_registered_again_for_one_device_replaces_it(namespace):
    def scenario(library, namespace):
        op = define(namespace, library, device_types=[TYPE, OTHER])
        op.register_kernel(TYPE)(adding(10))
        return value(op)

    both = on_both(scenario, namespace)
    assert both.ours == 10
    assert both.stock == 1


def test_switching_off_one_of_several_devices_runs_the_original_function(namespace):
    def scenario(library, namespace):
        op = define(namespace, library)
        op.register_kernel([TYPE, OTHER])(adding(10))
        with op.set_kernel_enabled(TYPE, enabled=False):
            inside = value(op)
        return inside, value(op)

    both = on_both(scenario, namespace)
    assert both.ours == (1, 10)
    assert both.stock == (10, 10)


def test_disabling_another_devices_kernel_has_no_effect(namespace):
    def scenario(library, namespace):
        op = define(namespace, library)
        op.register_kernel([TYPE, OTHER])(adding(10))
        with op.set_kernel_enabled(OTHER, enabled=False):
            return value(op)

    both = on_both(scenario, namespace)
    assert both.ours == 10
    assert both.stock == 1


def test_nested_switches_restore_the_state_they_found(namespace):
    op = define(namespace)
    op.register_kernel(TYPE)(adding(10))
    with op.set_kernel_enabled(TYPE, enabled=False):
        with op.set_kernel_enabled(TYPE, enabled=True):
            assert value(op) == 10
        assert value(op) == 1
        with pytest.raises(ZeroDivisionError), op.set_kernel_enabled(TYPE, enabled=True):
            raise ZeroDivisionError
        assert value(op) == 1
    assert value(op) == 10


def test_kernel_registered_while_switched_off_stays_off(namespace):
    op = define(namespace)
    op.register_kernel(TYPE)(adding(10))
    with op.set_kernel_enabled(TYPE, enabled=False):
        op.register_kernel(TYPE)(adding(20))
        assert value(op) == 1
    assert value(op) == 20


def test_disabling_a_kernel_affects_the_whole_process(namespace):
    op = define(namespace)
    op.register_kernel(TYPE)(adding(10))
    seen = []
    with op.set_kernel_enabled(TYPE, enabled=False):
        thread = threading.Thread(target=lambda: seen.append(value(op)))
        thread.start()
        thread.join()
    assert seen == [1]


@pytest.mark.parametrize(
    ("device", "enabled", "words"),
    [
        (OTHER, False, "no kernel was registered for this device type"),
        (TYPE, True, "already enabled"),
    ],
)
def test_switch_without_effect_is_logged(namespace, caplog, device, enabled, words):
    op = define(namespace)
    op.register_kernel(TYPE)(adding(10))
    logger = logging.getLogger("torch._library.custom_ops")
    logger.addHandler(caplog.handler)
    try:
        with op.set_kernel_enabled(device, enabled=enabled):
            assert value(op) == 10
    finally:
        logger.removeHandler(caplog.handler)
    assert words in caplog.text
    assert f"{namespace}::op" in caplog.text


def test_kernel_of_a_device_precedes_the_default_kernel(namespace):
    op = define(namespace)
    op.register_kernel(TYPE)(adding(10))
    assert value(op) == 10
    op.register_kernel(None)(adding(20))
    assert value(op) == 10


def test_none_among_device_types_means_every_other_device(namespace):
    op = define(namespace, device_types=OTHER)
    op.register_kernel([OTHER, None])(adding(10))
    assert value(op) == 10


def test_default_means_every_device(namespace):
    op = define(namespace, device_types=OTHER)
    op.register_kernel("default")(adding(10))
    assert value(op) == 10
    op.register_kernel(None)(adding(20))
    assert value(op) == 20


@pytest.mark.parametrize("device_types", ["CPU", "cuda:0", "toaster", ["cpu", "toaster"]])
def test_unknown_device_type_is_refused_and_changes_nothing(namespace, device_types):
    op = define(namespace)
    message = rf"{namespace}::op: '(CPU|cuda:0|toaster)' is not a device type; .*'cpu'.*Expected "
    with pytest.raises(RuntimeError, match=message):
        op.register_kernel(device_types)(adding(10))
    assert value(op) == 1
    with pytest.raises(RuntimeError, match=message.replace("op:", "other:")):
        torchop.custom_op(
            f"{namespace}::other", lambda x: x, mutates_args=(), device_types="toaster"
        )


def test_device_object_is_refused_with_the_spelling_that_works(namespace):
    op = define(namespace)
    with pytest.raises(TypeError, match="device types as strings, such as 'cpu'"):
        op.register_kernel(torch.device("cpu"))(adding(10))


def test_function_without_the_parameters_of_the_operator_is_refused(namespace):
    def scenario(library, namespace):
        op = define(namespace, library)
        op.register_kernel(TYPE)(lambda x, y: x + y)

    assert_only_torchop_rejects(
        namespace,
        scenario,
        torchop.RuleSignatureError,
        "a kernel is called with (x)",
        "takes (x, y)",
    )
    assert issubclass(torchop.RuleSignatureError, TypeError)


def test_kernel_that_is_no_function_is_refused(namespace):
    assert_only_torchop_rejects(
        namespace,
        lambda library, namespace: define(namespace, library).register_kernel(TYPE)(
            "not a function"
        ),
        TypeError,
        "must be a function, got 'not a function' of type str",
    )


# --------------------------------------------------------------------------------------------------
# A kernel that raises


def test_exception_of_a_kernel_passes_through_and_the_operator_stays_usable(namespace):
    class TroubleError(Exception):
        pass

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return inner(x)

    def inner(x):
        if x.sum() < 0:
            raise TroubleError("a negative sum")
        return x + 1

    for requires_grad in (False, True):
        with pytest.raises(TroubleError, match="a negative sum") as caught:
            op(torch.full((1,), -1.0, requires_grad=requires_grad))
        assert "inner" in [frame.name for frame in traceback.extract_tb(caught.tb)]
        assert value(op) == 1


# --------------------------------------------------------------------------------------------------
# Operators of other libraries


def test_kernel_for_an_operator_of_a_library(namespace):
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x, int n=3) -> Tensor")
        torchop.register_kernel(f"{namespace}::op", [TYPE, OTHER], lambda x, n=5: x + n)
        assert getattr(torch.ops, namespace).op(torch.zeros(1)).item() == 3
        torchop.register_kernel(f"{namespace}::op", TYPE, lambda x, n: x + 2 * n)
        assert getattr(torch.ops, namespace).op(torch.zeros(1)).item() == 6


@pytest.mark.parametrize(("first", "second"), [(TYPE, BACKEND), (BACKEND, TYPE)])
def test_device_type_and_its_dispatch_key_are_equivalent(namespace, first, second):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        op = getattr(torch.ops, namespace).op
        for device_type, amount in ((first, 10), (second, 20), (first, 30)):
            torchop.register_kernel(op, device_type, adding(amount), lib=library)
            assert value(op) == amount


def test_dispatch_key_without_a_device_type_has_a_kernel_of_its_own(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        op = getattr(torch.ops, namespace).op
        torchop.register_kernel(op, f"Sparse{BACKEND}", lambda x: x * 2, lib=library)
        assert op(torch.ones(1).to_sparse()).to_dense().item() == 2


def test_kernel_for_an_operator_of_pytorch_lives_as_long_as_its_library():
    class ReachedError(Exception):
        pass

    def kernel(x):
        raise ReachedError

    with torchop.Library("aten", "IMPL") as library:
        torchop.register_kernel("aten::special_i0e", TYPE, kernel, lib=library)
        with pytest.raises(ReachedError):
            torch.special.i0e(torch.zeros(1))
    assert torch.special.i0e(torch.zeros(1)).item() == pytest.approx(1)


def test_argument_may_be_named_keyset(namespace):
    @torchop.custom_op(f"{namespace}::add_", mutates_args=("x",), tags=())
    def add_(x: Tensor, *, keyset: int) -> None:
        x.add_(keyset)

    @torchop.custom_op(f"{namespace}::filled", mutates_args=(), device_types="cpu")
    def filled(*, keyset: int, device: torch.device) -> Tensor:
        return torch.full((1,), keyset, device=device)

    x = torch.zeros(1, dtype=torch.complex64)
    for tensor in (x, x.conj()):
        add_(tensor, keyset=2)
        with BaseTorchDispatchMode():  # under a mode, calls use the dispatcher
            add_(tensor, keyset=3)
    assert x.item() == 10
    assert filled(keyset=2, device=torch.device("cpu")).item() == 2
