"""Kernels must return results with the number and types that the schema declares."""

import contextlib
import enum
from typing import Any, List, Optional

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from tests._support.common import on_both
from tests._support.devices import AUTOGRAD, BACKEND, TYPE

T = torch.ones(2)


class PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def under_mode(op):
    def call(*args):
        with PassThrough():
            return op(*args)

    return call


# Maps each way to call an operator to a function that returns the callable, given the handle.
PATHS = {
    "handle": lambda op: op,
    "overload": lambda op: op.overload,
    "packet": lambda op: getattr(getattr(torch.ops, op._namespace), op._name),
    "mode": under_mode,
    "gradient": lambda op: lambda x: op(x.requires_grad_()),
    "no_grad": lambda op: torch.no_grad()(op.overload),
    "inference": lambda op: torch.inference_mode()(op.overload),
}
paths = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


def one(x: Tensor) -> Tensor:
    raise NotImplementedError


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


def nothing(x: Tensor) -> None:
    raise NotImplementedError


def listed(x: Tensor) -> List[Tensor]:
    raise NotImplementedError


def integer(x: Tensor) -> int:
    raise NotImplementedError


def mixed(x: Tensor) -> tuple[Tensor, int, float, bool]:
    raise NotImplementedError


class Odd:
    def __index__(self):
        raise ValueError("is not known yet")

    __float__ = __index__


WRONG = {
    "an int for a tensor": (
        one,
        3,
        "must return a Tensor, as its schema says, but returned an int",
    ),
    "None for a tensor": (one, None, "must return a Tensor, .* returned None"),
    "a tuple for a tensor": (one, (T,), r"must return a Tensor, .* a tuple of 1 \(torch.Tensor\)"),
    "a list for a tensor": (one, [T, T], "must return a Tensor, .* a list of 2"),
    "a string for a tensor": (one, "x", "must return a Tensor, .* a str"),
    "one for two": (two, T, r"must return 2 values \(Tensor, Tensor\), .* a torch.Tensor"),
    "1-tuple for two": (two, (T,), "must return 2 values .* a tuple of 1"),
    "three for two": (two, (T, T, T), "must return 2 values .* a tuple of 3"),
    "none for two": (two, None, "must return 2 values .* returned None"),
    "a generator for two": (two, (t for t in ()), "must return 2 values .* a generator"),
    "ints for two": (two, (1, 2), r"must return 2 values .* a tuple of 2 \(int, int\)"),
    "a tensor for none": (nothing, T, "must return None, .* a torch.Tensor"),
    "a tensor for a list": (listed, T, r"must return a List\[Tensor\], .* a torch.Tensor"),
    "a gap in a list": (listed, [T, None], r"must return a List\[Tensor\], .* \(torch.Tensor, Non"),
    "a string for an int": (integer, "3", "must return an int, .* a str"),
    "a string for a float": (mixed, (T, 1, "x", True), "must return 4 values .* str, bool"),
    "too large an object for an int": (
        integer,
        np.uint64(2**63),
        r"must return an int, .* numpy.uint64\.$",
    ),
    "an object that is no int": (integer, Odd(), "must return an int, .*Odd"),
    "too large an int for a float": (
        mixed,
        (T, 1, 10**400, True),
        "must return 4 values .* int, bo",
    ),
    "an object that is no float": (mixed, (T, 1, Odd(), True), "must return 4 values .*Odd, bool"),
    "a string for a bool": (mixed, (T, 1, 2.0, np.str_("x")), "must return 4 values .*numpy.str_"),
    "a class for a bool": (mixed, (T, 1, 2.0, int), r"must return 4 values .* float, type\)"),
    "too many to show": (two, (1,) * 20, r"must return 2 values .* of 20 \((int, ){8}\.\.\.\)"),
}


@paths
@pytest.mark.parametrize(("function", "result", "words"), WRONG.values(), ids=WRONG)
def test_wrong_result_is_one_error_on_every_path(namespace, path, function, result, words):
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=(), effects="none")
    op.register_kernel(TYPE)(lambda x: result)
    call = path(op)
    with pytest.raises(TypeError, match=f"{namespace}::op: the kernel {words}") as caught:
        call(torch.ones(2))
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, torchop.ResultError)


class Word(str, enum.Enum):
    HELLO = "hello"


class Four(int):
    def __int__(self):
        return 99


class Half(float):
    def __float__(self):
        return 99.0


@paths
def test_numbers_and_strings_have_python_types(namespace, path):
    schema = "(Tensor x) -> (Tensor, int, float, bool, str)"
    op = torchop.custom_op(f"{namespace}::op", lambda x: x, mutates_args=(), schema=schema)
    op.derive_autograd()
    for values, expected in {
        (Four(4), Half(0.5), 3, Word.HELLO): (4, 0.5, True, "hello"),
        (np.int64(4), np.float32(0.5), np.bool_(False), np.str_("x")): (4, 0.5, False, "x"),
        (True, 2, 0.0, "x"): (1, 2.0, False, "x"),
        tuple(map(torch.tensor, (4, 0.5, True))) + ("x",): (4, 0.5, True, "x"),
    }.items():
        op.register_kernel(TYPE)(lambda x, values=values: (x + 1, *values))
        for _ in range(2):
            _, *got = path(op)(torch.zeros(2))
            assert got == list(expected)
            assert list(map(type, got)) == [int, float, bool, str]
    # A string with a lone surrogate cannot be converted to a C++ string.
    op.register_kernel(TYPE)(lambda x: (x + 1, 4, 0.5, True, "\ud800"))
    with pytest.raises(torchop.ResultError, match=r"must return 5 values .* str\)"):
        path(op)(torch.zeros(2))


@paths
@pytest.mark.parametrize("make", [iter, lambda items: dict(enumerate(items)).values()])
def test_an_iterator_becomes_the_list_of_a_result(namespace, path, make):
    op = torchop.custom_op(f"{namespace}::op", listed, mutates_args=())
    op.register_kernel(TYPE)(lambda x: make([x + 1, x + 2]))
    for _ in range(3):
        assert [y.tolist() for y in path(op)(torch.zeros(2))] == [[1, 1], [2, 2]]
    op.register_kernel(TYPE)(lambda x: make([x, x]))
    # Unlike torchop, torch.library only detects results that share memory in lists and tuples.
    with pytest.raises(torchop.AliasError):
        path(op)(torch.zeros(2))
    op.register_kernel(TYPE)(lambda x: make([x + 1, None]))
    with pytest.raises(torchop.ResultError, match="a list of 2"):
        path(op)(torch.zeros(2))


@pytest.mark.parametrize(("function", "result", "words"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("where", ["impl", "register_kernel", "meta", "autograd", "composite"])
def test_wrong_result_of_a_kernel_of_a_library_is_refused(
    namespace, where, function, result, words
):
    schema = torchop.infer_schema(function, mutates_args=())
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define(f"op{schema}")
        op = getattr(torch.ops, namespace).op
        x = torch.ones(2)
        if where == "impl":
            library.impl("op", lambda x: result, BACKEND)
        elif where == "register_kernel":
            torchop.register_kernel(op, TYPE, lambda x: result, lib=library)
        elif where == "meta":
            library.impl("op", lambda x: result, "Meta")
            x = x.to("meta")
        elif where == "autograd":
            library.impl("op", lambda x: result, AUTOGRAD)
        else:
            library.impl("op", lambda x: result, "CompositeImplicitAutograd")
        with pytest.raises(torchop.ResultError, match=f"{namespace}::op: the kernel {words}"):
            op(x)


@pytest.mark.parametrize(("function", "result", "words"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize(
    ("mode", "device"),
    [(contextlib.nullcontext, "meta"), (FakeTensorMode, "cpu")],
    ids=["meta", "fake"],
)
def test_wrong_result_of_a_fake_kernel_is_refused(namespace, mode, device, function, result, words):
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=(), effects="none")
    op.register_fake(lambda x: result)
    expected = f"{namespace}::op: the fake kernel {words}"
    with mode(), pytest.raises(torchop.ResultError, match=expected):
        op(torch.ones(2, device=device))


def test_operator_stays_usable_after_a_wrong_result(namespace):
    op = torchop.custom_op(f"{namespace}::op", two, mutates_args=())
    op.register_kernel(TYPE)(lambda x: x)
    with pytest.raises(torchop.ResultError):
        op(T)
    op.register_kernel(TYPE)(lambda x: (x + 1, x + 2))
    assert op(T)[1].tolist() == [3, 3]


RIGHT = {
    "a tuple": (two, lambda x: (x + 1, x + 2)),
    "a list": (two, lambda x: [x + 1, x + 2]),
    "a named tuple": (two, lambda x: torch.return_types.max([x + 1, x + 2])),
}


@paths
@pytest.mark.parametrize(("function", "kernel"), RIGHT.values(), ids=RIGHT)
def test_several_results_are_a_tuple_on_every_path(namespace, path, function, kernel):
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=(), effects="none")
    op.register_kernel(TYPE)(kernel)
    results = path(op)(torch.ones(2))
    assert type(results) is tuple
    assert [result.tolist() for result in results] == [[2, 2], [3, 3]]


@paths
def test_list_of_results_is_a_list_on_every_path(namespace, path):
    op = torchop.custom_op(f"{namespace}::op", listed, mutates_args=())
    op.register_kernel(TYPE)(lambda x: (x + 1, x + 2))
    results = path(op)(torch.ones(2))
    assert type(results) is list
    assert len(results) == 2


def test_one_of_several_tensors_may_be_undefined(namespace):
    op = torchop.custom_op(f"{namespace}::op", two, mutates_args=())
    op.register_kernel(TYPE)(lambda x: (x + 1, None))
    assert op(T)[1] is None


def test_none_for_a_tensor_that_is_not_optional_is_refused(namespace: str) -> None:
    def scenario(library: Any, namespace: str) -> Any:
        received: list[Any] = []

        def kernel(x: Tensor, y: Optional[Tensor] = None) -> Tensor:
            received.append(x)
            return torch.ones(1)

        library.custom_op(f"{namespace}::op", kernel, mutates_args=())(None)
        return received

    both = on_both(scenario, namespace)
    assert both.stock == [None]
    assert isinstance(both.ours, TypeError)
    assert isinstance(both.ours, RuntimeError)
    assert "argument 'x' is None" in str(both.ours)
    assert "Optional[Tensor]" in str(both.ours)


# --------------------------------------------------------------------------------------------------
# Kernels that run in inference mode


# In each of them, the first tensor is the sine of `x`.
SINES = {
    "(Tensor x) -> Tensor": lambda x: x.sin(),
    "(Tensor x) -> (Tensor, Tensor?)": lambda x: (x.sin(), None),
    "(Tensor x) -> (Tensor, Tensor)": lambda x: (x.sin(), x.cos()),
    "(Tensor x) -> Tensor[]": lambda x: [x.sin(), x.cos()],
}


def first_of(result):
    return result if isinstance(result, Tensor) else result[0]


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("schema", SINES)
def test_results_made_in_inference_mode_keep_gradients(namespace, schema, backend):
    kernel = torch.inference_mode()(SINES[schema])
    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), schema=schema)
    op.register_fake(SINES[schema])
    op.register_autograd(
        lambda ctx, grad, *others: first_of(grad) * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    def call(x, weight):
        return first_of(op(x)) * weight

    x, weight = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    run = call if backend is None else torch.compile(call, backend=backend, fullgraph=True)
    run(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, (x.cos() * weight).detach())
    torch.testing.assert_close(weight.grad, x.detach().sin())


def sine(namespace, kernel):
    return torchop.custom_op(
        f"{namespace}::op", kernel, mutates_args=(), schema="(Tensor x) -> Tensor"
    )


def test_results_in_the_callers_inference_mode_stay_inference_tensors(namespace):
    op = sine(namespace, torch.sin)
    with torch.inference_mode():
        assert op(torch.ones(1)).is_inference()
    assert not op(torch.ones(1)).is_inference()


def test_the_replacement_of_an_inference_tensor_has_its_memory(namespace):
    made = []

    @torch.inference_mode()
    def kernel(x):
        made.append(x.repeat(2, 2).T)
        return made[0]

    result = sine(namespace, kernel)(torch.ones(3))
    assert result.data_ptr() == made[0].data_ptr()
    assert result.stride() == made[0].stride() == (1, 6)


def test_an_out_argument_may_be_an_inference_tensor(namespace: str) -> None:
    def write(x: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(x)

    op = torchop.custom_op(
        f"{namespace}::f",
        write,
        schema="(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
        mutates_args=("out",),
        tags=torch.Tag.out,
    )
    with torch.inference_mode():
        out = torch.zeros(2)
    with torch._C._AutoDispatchBelowAutograd(), torchop.native.disabled():
        excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            assert op(torch.ones(2), out=out) is out
