"""Operators without tensor arguments, or whose tensors are all in optional lists.

The dispatcher finds no device in the arguments of such a call. So torchop registers a kernel for
the dispatch key BackendSelect, which finds the device.
"""

import contextlib
from typing import List, Optional

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torchop
from tests._support.common import on_both
from tests._support.devices import AUTOGRAD, OTHER, TYPE

# --------------------------------------------------------------------------------------------------
# Operators without tensor arguments


def positional(n: int, device: torch.device) -> Tensor:
    return torch.ones(n, device=device)


def keyword_only(n: int, *, device: torch.device) -> Tensor:
    return torch.ones(n, device=device)


def defaulted(n: int, device: torch.device = "cpu") -> Tensor:
    return torch.ones(n, device=device)


def keyword_only_defaulted(n: int, *, device: torch.device = "cpu") -> Tensor:
    return torch.ones(n, device=device)


def optional(n: int, device: Optional[torch.device] = None) -> Tensor:
    return torch.ones(n, device=device)


def optional_keyword_only(n: int, *, device: Optional[torch.device] = None) -> Tensor:
    return torch.ones(n, device=device)


FACTORIES = (
    positional,
    keyword_only,
    defaulted,
    keyword_only_defaulted,
    optional,
    optional_keyword_only,
)
WITHOUT_DEVICE = (defaulted, keyword_only_defaulted, optional, optional_keyword_only)


def define(namespace, function, library=torchop):
    """Define an operator with kernels for the CPU and for CUDA. The second one must not run."""
    op = library.custom_op(f"{namespace}::op", function, mutates_args=(), device_types="cpu")
    op.register_kernel("cuda")(lambda n, device=None: torch.full((n,), 2.0))
    op.register_fake(lambda n, device=None: torch.empty(n, device=device))
    return op


@pytest.mark.parametrize("function", FACTORIES)
def test_factory_runs_on_the_device_it_is_asked_for(namespace, function):
    op = define(namespace, function)
    assert op(2, device="cpu").tolist() == [1, 1]
    assert op(2, device=torch.device("cpu")).tolist() == [1, 1]
    assert op(2, device="cuda:0").tolist() == [2, 2]


@pytest.mark.parametrize("function", WITHOUT_DEVICE)
def test_factory_runs_on_its_default_device(namespace, function):
    def scenario(library, namespace):
        return define(namespace, function, library)(2).tolist()

    both = on_both(scenario, namespace)
    assert both.ours == [1, 1]
    # Up to 2.12, PyTorch raises a RuntimeError.
    assert isinstance(both.stock, (IndexError, ValueError, RuntimeError))


def test_factory_takes_the_device_by_keyword_only(namespace):
    def scenario(library, namespace):
        return define(namespace, keyword_only, library)(2, device="cpu").tolist()

    both = on_both(scenario, namespace)
    assert both.ours == [1, 1]
    assert isinstance(both.stock, (IndexError, RuntimeError))


@pytest.mark.parametrize("function", [optional, optional_keyword_only])
def test_factory_without_a_device_behaves_like_torch_ops(namespace, function):
    op = define(namespace, function)
    with torch.device("meta"):
        assert op(2).device == torch.ops.aten.ones.default([2]).device


@pytest.mark.parametrize("function", FACTORIES)
def test_factory_on_the_meta_device_runs_the_fake_kernel(namespace, function):
    op = define(namespace, function)
    result = op(2, device="meta")
    assert result.is_meta
    assert result.shape == (2,)


@pytest.mark.parametrize("function", FACTORIES)
def test_factory_makes_fake_tensors_of_any_device(namespace, function):
    op = define(namespace, function)
    with FakeTensorMode():
        assert op(2, device="cpu").device == torch.device("cpu")
        assert op(2, device="cuda:0").device == torch.device("cuda:0")


def test_kernel_for_every_device_serves_the_devices_without_one(namespace):
    op = define(namespace, positional)
    op.register_kernel(None)(lambda n, device: torch.full((n,), 3.0))
    assert op(2, "xpu").tolist() == [3, 3]
    assert op(2, "cpu").tolist() == [1, 1]


def test_factory_for_every_device_needs_no_device_argument(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(n: int) -> Tensor:
        return torch.ones(n)

    assert op(2).tolist() == [1, 1]


def without_device(n: int) -> Tensor:
    return torch.ones(n)


def misnamed(n: int, where: torch.device) -> Tensor:
    return torch.ones(n, device=where)


def mistyped(n: int, device: str) -> Tensor:
    return torch.ones(n, device=device)


@pytest.mark.parametrize("function", [without_device, misnamed, mistyped])
def test_factory_for_some_devices_needs_a_device_argument(namespace, function):
    expected = "Functions without tensor inputs are required to have a `device: torch.device` arg"
    with pytest.raises(ValueError, match=expected):
        torchop.custom_op(f"{namespace}::op", function, mutates_args=(), device_types="cpu")
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    with pytest.raises(ValueError, match=expected):
        op.register_kernel(TYPE)(function)


# --------------------------------------------------------------------------------------------------
# Tensors in an optional list, which the dispatcher ignores when it computes dispatch keys


def total(xs: Optional[List[Tensor]] = None) -> Tensor:
    return torch.stack(xs).sum(0) if xs else torch.zeros(1)


def total_with_gaps(xs: Optional[List[Optional[Tensor]]] = None) -> Tensor:
    present = [x for x in xs or () if x is not None]
    return torch.stack(present).sum(0) if present else torch.zeros(1)


SCHEMAS = {
    total: "(Tensor[]? xs=None) -> Tensor",
    total_with_gaps: "(Tensor?[]? xs=None) -> Tensor",
}
LISTS = pytest.mark.parametrize("function", [total, total_with_gaps])


def define_lists(namespace, function, library=torchop, **options):
    # PyTorch 2.13 cannot infer a schema with optional lists of tensors, so pass the schema.
    return library.custom_op(
        f"{namespace}::op", function, mutates_args=(), schema=SCHEMAS[function], **options
    )


@LISTS
def test_optional_list_reaches_the_kernel_of_its_device(namespace, function):
    def scenario(library, namespace):
        op = define_lists(namespace, function, library)
        op.register_kernel(TYPE)(lambda xs: xs[0] * 10)
        return op([torch.ones(1)]).item()

    both = on_both(scenario, namespace)
    assert both.ours == 10
    assert both.stock == 1


def test_none_in_an_optional_list_is_passed_to_the_kernel(namespace):
    op = define_lists(namespace, total_with_gaps)
    assert op([None, torch.ones(1), None]).item() == 1


ALONE_OR_NOT = pytest.mark.parametrize("schema", ["(Tensor[]? xs)", "(Tensor x, Tensor[]? xs)"])


def doubling(namespace, schema):
    """Return an operator that doubles the first tensor of a list, and arguments for a call."""
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda *args: args[-1][0] * 2,
        mutates_args=(),
        schema=f"{schema} -> Tensor",
    )
    xs = [torch.ones(1)]
    return op, (torch.ones(1), xs) if "Tensor x" in schema else (xs,)


@ALONE_OR_NOT
@pytest.mark.parametrize("has_rule", [True, False])
def test_optional_list_under_autocast(namespace, schema, has_rule):
    op, args = doubling(namespace, schema)
    if has_rule:
        op.register_autocast(TYPE, torch.bfloat16)
    with torch.autocast(TYPE):
        assert op(*args).dtype is (torch.bfloat16 if has_rule else torch.float32)
        with torchop.native.disabled():
            assert op(*args).dtype is (torch.bfloat16 if has_rule else torch.float32)


def test_optional_list_of_a_device_whose_keys_have_no_names_in_python(namespace):
    op, _ = doubling(namespace, "(Tensor[]? xs)")
    op.register_fake(lambda xs: torch.empty_like(xs[0]))
    with FakeTensorMode():
        x = torch.empty(2, device="mtia")
    key = torch._C._parse_dispatch_key("AutocastMTIA")
    assert not hasattr(torch._C.DispatchKey, "AutocastMTIA")
    # Set the dispatch keys that torch.autocast("mtia") would set. torch.autocast itself cannot be
    # used, because it needs the device.
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        assert op([x]).device.type == "mtia"


@ALONE_OR_NOT
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("key", ["Autograd", AUTOGRAD])
def test_optional_list_where_autograd_falls_through(namespace, schema, key):
    op, args = doubling(namespace, schema)
    library = torchop.Library(namespace, "IMPL")
    library.impl("op", torchop.fallthrough_kernel, key, allow_override=True)
    for is_native in (False, True):
        with contextlib.nullcontext() if is_native else torchop.native.disabled():
            assert op(*args).tolist() == [2]
    library.close()


@LISTS
def test_optional_list_names_the_device_that_has_no_kernel(namespace, function):
    op = define_lists(namespace, function, device_types=OTHER)
    with pytest.raises(
        NotImplementedError, match=rf"kernel registered for {TYPE}; it has .*: {OTHER}"
    ):
        op([torch.ones(1)])


@LISTS
def test_optional_list_of_meta_tensors_runs_the_fake_kernel(namespace, function):
    def scenario(library, namespace):
        op = define_lists(namespace, function, library)
        op.register_fake(lambda xs=None: torch.empty(7, device="meta"))
        return tuple(op([torch.ones(1, device="meta")]).shape)

    both = on_both(scenario, namespace)
    assert both.ours == (7,)
    assert both.stock == (1,)


@LISTS
def test_optional_list_of_fake_tensors_runs_the_fake_kernel(namespace, function):
    op = define_lists(namespace, function)
    op.register_fake(lambda xs=None: xs[0].new_empty(7))
    with FakeTensorMode():
        assert op([torch.ones(1)]).shape == (7,)


@LISTS
def test_tensors_of_an_optional_list_get_gradients(namespace, function):
    def scenario(library, namespace):
        op = define_lists(namespace, function, library)

        def backward(ctx, grad):
            return [grad * 3 for _ in range(ctx.length)]

        def setup_context(ctx, inputs, output):
            ctx.length = len(inputs[0])

        op.register_autograd(backward, setup_context=setup_context)
        x = torch.ones(1, requires_grad=True)
        op([x, torch.ones(1)]).sum().backward()
        return x.grad.item()

    both = on_both(scenario, namespace)
    assert both.ours == 3
    assert both.stock != 3


@LISTS
def test_optional_list_of_a_subclass_reaches_its_dispatch(namespace, function):
    seen = []

    class Logged(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return torch.full((1,), 5.0)

    op = define_lists(namespace, function)
    tensor = Tensor._make_wrapper_subclass(Logged, (1,))
    assert op([tensor]).item() == 5
    assert seen == [op.overload]


@LISTS
@pytest.mark.parametrize("arguments", [(), (None,), ([],)])
def test_optional_list_that_is_absent_or_empty_runs_the_kernel_for_every_device(
    namespace, function, arguments
):
    op = define_lists(namespace, function)
    op.register_kernel(TYPE)(lambda xs: xs[0] * 10)
    assert op(*arguments).item() == 0


@LISTS
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_transform_that_would_skip_an_optional_list_is_refused(namespace, function, transform):
    op = define_lists(namespace, function)
    with pytest.raises(NotImplementedError, match=rf"{namespace}::op.*Make the list required"):
        transform(lambda x: op([x]).sum())(torch.ones(1))


def test_transforms_follow_an_optional_list_with_a_wrapped_tensor(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, ys: Optional[List[Tensor]] = None) -> Tensor:
        return x * ys[0] if ys else x.clone()

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], *inputs[1])

    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, [grad * x]

    op.register_autograd(backward, setup_context=setup_context)
    op.register_vmap(lambda info, in_dims, x, ys: (x * ys[0], 0))
    x = torch.tensor([2.0, 3.0])
    assert torch.vmap(lambda x: op(x, [x]))(x).tolist() == [4, 9]
    assert torch.func.grad(lambda y: op(x, [y]).sum())(x).tolist() == [2, 3]
    assert torch.func.grad(lambda y: op(y, [y]).sum())(x).tolist() == [4, 6]
