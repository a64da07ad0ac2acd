import pytest
import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from tests._support.common import on_both
from tests.rules.support import assert_only_torchop_rejects


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class DerivedMode(Mode):
    pass


class Wrapper(Tensor):
    """A wrapper subclass whose `__torch_dispatch__` supports no operator."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("the rule was not asked")


def define(namespace, library=torchop):
    @library.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, n: int = 1, *, flag: bool = False) -> Tensor:
        return x + n

    return op


def constant(value):
    return lambda mode_or_cls, func, types, args, kwargs: torch.full((1,), float(value))


def under_mode(op) -> float:
    with Mode():
        return op(torch.zeros(1)).item()


def test_rule_of_a_mode_runs_under_the_mode_only(namespace):
    op = define(namespace)
    assert under_mode(op) == 1
    op.register_torch_dispatch(Mode, constant(7))
    assert under_mode(op) == 7
    assert op(torch.zeros(1)).item() == 1
    with DerivedMode():
        assert op(torch.zeros(1)).item() == 1  # a rule does not apply to subclasses of its class


def test_rule_of_a_subclass_runs_on_its_tensors(namespace):
    op = define(namespace)

    @op.register_torch_dispatch(Wrapper)
    def _(cls, func, types, args, kwargs):
        assert cls is Wrapper
        assert types == (Wrapper,)
        return Wrapper(func(args[0].inner, *args[1:], **kwargs))

    result = op(Wrapper(torch.zeros(1)), 5)
    assert type(result) is Wrapper
    assert result.inner.item() == 5
    assert op(torch.zeros(1)).item() == 1


def test_rule_sees_the_call_as_torch_dispatch_does(namespace):
    seen = []
    op = define(namespace)

    @op.register_torch_dispatch(Mode)
    def _(mode, func, types, args, kwargs):
        seen.append((type(mode), func, args[1:], kwargs))
        return func(*args, **kwargs)

    with Mode():
        assert op(torch.zeros(1), 5, flag=True).item() == 5
    assert seen == [(Mode, op.overload, (5,), {"flag": True})]


def test_rule_of_a_library_may_be_replaced_too(namespace):
    def scenario(library, namespace):
        with torch.library._scoped_library(namespace, "FRAGMENT") as home:
            home.define("op(Tensor x) -> Tensor")
            home.impl("op", lambda x: x + 1, "CompositeExplicitAutograd")
            name = f"{namespace}::op"
            library.register_torch_dispatch(name, Mode, constant(7), lib=home)
            library.register_torch_dispatch(name, Mode, constant(8), lib=home)
            return under_mode(getattr(torch.ops, namespace).op)

    both = on_both(scenario, namespace)
    assert both.ours == 8
    assert isinstance(both.stock, RuntimeError)


def test_rule_ends_with_the_library_that_holds_it(namespace):
    op = define(namespace)
    with torchop.Library(namespace, "FRAGMENT") as library:
        torchop.register_torch_dispatch(op, Mode, constant(7), lib=library)
        assert under_mode(op) == 7
    assert under_mode(op) == 1


@pytest.mark.parametrize("cls", [int, str, "Mode", Mode()])
def test_class_that_is_neither_mode_nor_subclass_is_refused(namespace, cls):
    with pytest.raises(ValueError, match=r"subclass of torch.Tensor .* or of TorchDispatchMode"):
        define(namespace).register_torch_dispatch(cls, constant(7))


def test_function_with_other_parameters_is_refused(namespace):
    assert_only_torchop_rejects(
        namespace,
        lambda library, namespace: define(namespace, library).register_torch_dispatch(
            Mode, lambda func, *, args: None
        ),
        torchop.RuleSignatureError,
        "a torch_dispatch rule is called with (mode_or_cls, func, types, args, kwargs)",
    )


def test_rule_may_decline(namespace):
    op = define(namespace)
    op.register_torch_dispatch(Wrapper, lambda *args: NotImplemented)
    with pytest.raises(TypeError, match="all __torch_dispatch__ handlers returned NotImplemented"):
        op(Wrapper(torch.zeros(1)))


def test_exception_of_a_rule_passes_through(namespace):
    op = define(namespace)

    @op.register_torch_dispatch(Mode)
    def _(mode, func, types, args, kwargs):
        raise ZeroDivisionError("in the rule")

    with pytest.raises(ZeroDivisionError, match="in the rule"):
        under_mode(op)
    op.register_torch_dispatch(Mode, constant(7))
    assert under_mode(op) == 7


# torchop must check how many results a rule returns. If there are more than in the schema, PyTorch
# reads past the end of the schema's results.
@pytest.mark.parametrize("result", [None, 3, torch.ones(1), (torch.ones(1),) * 3])
def test_wrong_result_of_a_rule_is_refused(namespace, result):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), x.clone()

    op.register_torch_dispatch(Mode, lambda *args: result)
    expected = r"the torch_dispatch rule for Mode must return 2 values \(Tensor, Tensor\)"
    with Mode(), pytest.raises(torchop.ResultError, match=f"{namespace}::op: {expected}"):
        op(torch.zeros(1))


@pytest.mark.parametrize("kind", ["defined", "accelerated"])
def test_rules_of_torch_library_replace_our_default_rules(namespace, kind):
    calls = []

    def add_one(x):
        x.add_(1)

    def rule(mode, func, types, args, kwargs):
        calls.append(func)
        return mode.__torch_dispatch__(func, types, args, kwargs)

    library_of = torchop.Library if kind == "defined" else torch.library._scoped_library
    with library_of(namespace, "FRAGMENT") as library:
        library.define("add_one(Tensor(a!) x) -> ()")
        library.impl("add_one", add_one, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::add_one", lambda x: None, lib=library)
        op = getattr(torch.ops, namespace).add_one
        with torchop.accelerate(f"{namespace}::*"):
            torch.library.register_torch_dispatch(
                f"{namespace}::add_one", FunctionalTensorMode, rule, lib=library
            )
            x = torch.zeros(2)
            torch.compile(op, backend="aot_eager", fullgraph=True)(x)
    assert x.tolist() == [1, 1]
    assert set(calls) == {op.default}


@pytest.mark.parametrize("is_accelerated", [False, True])
def test_rules_of_a_definition_outlive_what_is_undone(namespace, is_accelerated):
    # Both `accelerate` and the user's rule find the rule that `define` has installed.
    torchop.define(f"{namespace}::reverse", "(Tensor(a!) y, Tensor x) -> ()")
    torchop.register_fake(f"{namespace}::reverse", lambda y, x: None)

    @torchop.impl(f"{namespace}::reverse", "cpu")
    def _(y, x):
        for i in range(len(x)):
            y[i] = x[len(x) - 1 - i]

    def rule(mode, func, types, args, kwargs):
        return mode.__torch_dispatch__(func, types, args, kwargs)

    if is_accelerated:
        torchop.accelerate(f"{namespace}::reverse").undo()
    else:
        with torchop.Library(namespace, "FRAGMENT") as library:
            torchop.register_torch_dispatch(
                f"{namespace}::reverse", FunctionalTensorMode, rule, lib=library
            )

    def f(x):
        x = x * 2
        y = x.clone()
        getattr(torch.ops, namespace).reverse(y, x)
        return y

    x = torch.arange(4.0)
    torch.testing.assert_close(torch.compile(f, fullgraph=True)(x), f(x))
