import contextlib
import gc
import warnings
import weakref

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import assert_clean, needs_native, on_both, run_program
from tests._support.devices import BACKEND, TYPE

T = torch.zeros(2)
SCHEMA = "(Tensor x) -> Tensor"


def first(x: Tensor) -> Tensor:
    return x + 1


def second(x: Tensor) -> Tensor:
    return x + 2


def line_of(function) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno}"


def packet(namespace):
    return getattr(torch.ops, namespace).op


def test_redefinition_elsewhere_warns_and_names_both_locations(namespace):
    def scenario(library, namespace):
        library.custom_op(f"{namespace}::op", first, mutates_args=())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            library.custom_op(f"{namespace}::op", second, mutates_args=())
        return caught

    both = on_both(scenario, namespace)
    (warning,) = both.ours
    assert warning.category is torchop.RedefinitionWarning
    assert issubclass(warning.category, UserWarning)
    assert warning.filename == __file__
    message = str(warning.message)
    assert message.startswith(f"{namespace}::op was defined at {line_of(first)}")
    assert f"is defined again at {line_of(second)}" in message
    assert both.stock == []


def source(amount: int) -> str:
    return f"""
def op(x):
    return x + {amount}
"""


def from_source(namespace, amount, filename, module):
    """Define the operator like a notebook cell that runs again, or a module that is reloaded."""
    variables = {"__name__": module}
    exec(compile(source(amount), filename, "exec"), variables)
    return torchop.custom_op(f"{namespace}::op", variables["op"], mutates_args=(), schema=SCHEMA)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("<cell 1>", "__main__"), ("<cell 2>", "__main__")),
        (("/lib/module.py", "module"), ("/lib/module.py", "module")),
        (("/old/module.py", "module"), ("/new/module.py", "module")),
    ],
    ids=["notebook", "reload", "moved"],
)
def test_redefinition_by_the_same_function_is_quiet(namespace, before, after):
    from_source(namespace, 1, *before)
    op = from_source(namespace, 2, *after)
    assert op(T).tolist() == [2, 2]


def test_a_file_that_is_imported_under_two_names_is_named_with_both(namespace):
    old = from_source(namespace, 1, "/lib/kernels.py", "package.kernels")
    expected = (
        r"op was defined at /lib/kernels.py:2 in the module package.kernels and is defined again "
        r"at /lib/kernels.py:2 in the module kernels, which replaces it. Import the file under one "
    )
    with pytest.warns(torchop.RedefinitionWarning, match=expected):
        from_source(namespace, 2, "/lib/kernels.py", "kernels")
    with pytest.raises(torchop.OperatorGoneError, match=r"2 in the module kernels; use that one"):
        old(T)


def test_replaced_overload_raises_and_the_packet_finds_the_new_one(namespace):
    torchop.custom_op(f"{namespace}::op", first, mutates_args=())
    held, overload = packet(namespace), packet(namespace).default
    with pytest.warns(torchop.RedefinitionWarning):
        new = torchop.custom_op(f"{namespace}::op", second, mutates_args=())
    assert held(T).tolist() == [2, 2]
    with pytest.raises(torchop.OperatorGoneError, match="It was replaced"):
        overload(T)
    assert packet(namespace).default is new.overload
    assert new(T).tolist() == [2, 2]


def test_a_redefined_operator_has_none_of_the_old_rules(namespace):
    old = torchop.custom_op(f"{namespace}::op", first, mutates_args=())
    old.register_fake(lambda x: x.new_empty(7))
    old.register_kernel(TYPE)(lambda x: x + 5)
    old.register_effect(torchop.EffectType.ORDERED)
    with pytest.warns(torchop.RedefinitionWarning):
        new = torchop.custom_op(f"{namespace}::op", second, mutates_args=())
    assert new(T).tolist() == [2, 2]
    assert "effect" not in repr(new)
    with pytest.raises(torchop.MissingFakeError):
        new(T.to("meta"))
    with torch._subclasses.fake_tensor.FakeTensorMode(), pytest.raises(torchop.MissingFakeError):
        new(torch.zeros(2))
    with pytest.raises(torchop.OperatorGoneError):
        old.register_fake(lambda x: x)


class Amount:
    amount = 1


@pytest.mark.needs_gil("classes are freed, of which an operator that records a gradient has two")
def test_replaced_function_is_freed(namespace):
    def define():
        def op(x: Tensor) -> Tensor:
            return x + token.amount

        token = Amount()
        handle = torchop.custom_op(f"{namespace}::op", op, mutates_args=())
        handle.register_autograd(lambda ctx, grad: grad * token.amount)
        handle(torch.zeros(2, requires_grad=True)).sum().backward()
        return weakref.ref(token)

    token = define()
    gc.collect()
    assert token() is not None
    again = define()
    gc.collect()
    assert token() is None
    assert again() is not None


def test_operator_of_pytorch_custom_op_is_replaced_with_a_warning(namespace):
    torch.library.custom_op(f"{namespace}::op", first, mutates_args=())
    with pytest.warns(torchop.RedefinitionWarning, match=r"with torch.library.custom_op and is"):
        op = torchop.custom_op(f"{namespace}::op", second, mutates_args=())
    assert op(T).tolist() == [2, 2]
    assert packet(namespace)(T).tolist() == [2, 2]


def test_operator_replaced_by_pytorch_custom_op_raises(namespace):
    old = torchop.custom_op(f"{namespace}::op", first, mutates_args=())
    new = torch.library.custom_op(f"{namespace}::op", second, mutates_args=())
    assert new(T).tolist() == [2, 2]
    with pytest.raises(torchop.OperatorGoneError, match=f"{namespace}::op was deregistered"):
        old(T)


def test_redefinitions_leave_no_hooks_in_the_callers_library(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        for _ in range(20):
            op = torchop.custom_op(f"{namespace}::op", first, mutates_args=(), lib=library)
        assert len(library._registration_handles) < 5
    with pytest.raises(torchop.OperatorGoneError, match="library"):
        op(T)


def test_operator_that_was_not_made_by_custom_op_is_not_replaced(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define(f"op{SCHEMA}")
        library.impl("op", first, BACKEND)
        with pytest.raises(RuntimeError, match="it exists already, registered at") as caught:
            torchop.custom_op(f"{namespace}::op", second, mutates_args=())
        assert f"{namespace}::op cannot be defined at {line_of(second)}" in str(caught.value)
        assert packet(namespace)(T).tolist() == [1, 1]


def test_redefinition_in_another_library_takes_the_name(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        torchop.custom_op(f"{namespace}::op", first, mutates_args=(), lib=library)
        new = torchop.custom_op(f"{namespace}::op", first, mutates_args=())
    # The end of the `with` block closed the library of the old operator. The new operator, which
    # has the same name, must not be deregistered with it.
    assert new(T).tolist() == [1, 1]


@needs_native
@pytest.mark.filterwarnings("ignore::torchop.RedefinitionWarning")
@pytest.mark.parametrize("before", [torchop, torch.library], ids=["torchop", "torch.library"])
def test_a_call_that_redefines_its_operator_finishes_with_the_old_kernel(namespace, before):
    def define_again(x: Tensor) -> Tensor:
        torchop.custom_op(f"{namespace}::op", first, mutates_args=())
        gc.collect()
        return x + 5

    for _ in range(2):
        op = before.custom_op(f"{namespace}::op", define_again, mutates_args=())
        assert op(T).tolist() == [5, 5]
        assert packet(namespace)(T).tolist() == [1, 1]
        with contextlib.suppress(torchop.OperatorGoneError):  # torch.library's handle looks it up
            assert op(T).tolist() == [1, 1]


@pytest.mark.parametrize("way", ["redefine", "close"])
def test_without_the_extension_a_running_operator_is_not_deregistered(way):
    """PyTorch would free the operator's tables, which the running call still reads."""
    source = """
        import sys
        import torch, torchop

        library = torchop.Library("t", "FRAGMENT")

        def kernel(x):
            try:
                if sys.argv[1] == "redefine":
                    torchop.custom_op("t::op", lambda x: x + 2, schema=SCHEMA, mutates_args=())
                else:
                    library.close()
            except RuntimeError as error:
                print(error)
            return x + 1

        SCHEMA = "(Tensor x) -> Tensor"
        op = torchop.custom_op("t::op", kernel, schema=SCHEMA, mutates_args=(), lib=library)
        op.register_autograd(lambda ctx, grad: grad)
        op(torch.ones(2, requires_grad=True)).sum().backward()
        print(op(torch.ones(1)).item())
        """
    lines = assert_clean(run_program(source, way, TORCHOP_NATIVE="0")).splitlines()
    assert lines[0].startswith("t::op cannot be deregistered or replaced from inside a call to it")
    assert lines[-1] == "2.0"


def test_an_operator_is_redefined_after_its_library_was_destroyed(namespace):
    def scenario(library, namespace):
        op = library.custom_op(f"{namespace}::op", first, mutates_args=())
        op._lib._destroy()
        return library.custom_op(f"{namespace}::op", second, mutates_args=())(T).tolist()

    both = on_both(scenario, namespace)
    assert both.ours == both.stock == [2, 2]
