"""Providers of operators that others registered: beside the package's own kernels, and undone."""

import contextlib
import functools
import gc
import threading
import warnings

import pytest
import torch
from torch import Tensor

import torchop
from tests.devices import BACKEND, TYPE
from tests.support import needs_native
from torchop._rules.providers import foreign
from torchop.extend import OpName

WAYS = ["custom_op", "library", "default"]


def define(namespace, way="custom_op"):
    """`ns::op`, as a package registers it: `x * factor`, with a gradient and a fake kernel."""
    name = f"{namespace}::op"

    def kernel(x, factor=2.0):
        return x * factor

    if way == "custom_op":

        @torch.library.custom_op(name, mutates_args=())
        def op(x: Tensor, factor: float = 2.0) -> Tensor:
            return x * factor

    else:
        torch.library.define(name, "(Tensor x, float factor=2.0) -> Tensor")
        torch.library.impl(name, TYPE if way == "library" else "default", kernel)
    torch.library.register_fake(name, lambda x, factor=2.0: torch.empty_like(x))
    torch.library.register_autograd(
        name,
        lambda ctx, grad: (grad * ctx.factor, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
    )
    return functools.partial(getattr(torch.ops, namespace).op)


def added(amount):
    return lambda x, factor=2.0: x * factor + amount


@pytest.fixture
def library(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        yield library


def value(op, *args, **kwargs) -> float:
    return op(torch.ones(1), *args, **kwargs).item()


@pytest.mark.parametrize("way", WAYS)
def test_a_provider_beside_the_packages_kernel(namespace, library, way):
    op, name = define(namespace, way), f"{namespace}::op"
    fast = added(10)
    assert torchop.register_kernel(name, TYPE, fast, provider="fast", lib=library) is fast
    assert value(op) == 2  # nobody asks for it
    with torchop.priority({name: ["fast"]}):
        assert value(op) == 12
        assert value(op, 3.0) == value(op, factor=3.0) == 13
        explanation = torchop.explain(name, torch.ones(1))
        with torchop.priority({name: ["reference"]}):
            assert value(op) == 2
    assert explanation.provider == "fast"
    torchop.set_priority({f"{namespace}::*": ["fast"]})
    assert value(op) == 12
    library.close()
    assert value(op) == 2
    assert torchop.explain(name, torch.ones(1)).provider is None
    assert torchop.providers(name) == []
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect")


@pytest.mark.parametrize("way", WAYS)
def test_the_rest_of_the_operator_stays(namespace, library, way):
    op, name = define(namespace, way), f"{namespace}::op"
    torch.library.register_autocast(name, TYPE, torch.bfloat16)
    torch.library.register_vmap(name, lambda info, dims, x, factor=2.0: (op(x, factor), dims[0]))
    torchop.register_kernel(name, TYPE, added(10), provider="fast", lib=library)
    with torchop.priority({name: ["fast"]}, strict=True):
        x = torch.ones(2, requires_grad=True)
        op(x, 3.0).sum().backward()
        assert x.grad.tolist() == [3.0, 3.0]
        with torch.autocast(TYPE):
            assert op(torch.ones(1)).dtype is torch.bfloat16
        assert torch.vmap(op)(torch.ones(2, 3)).tolist() == [[12.0] * 3] * 2
        assert op(torch.ones(2, device="meta")).device.type == "meta"
        with torch._subclasses.FakeTensorMode():
            assert op(torch.ones(2)).shape == (2,)
        with torch.inference_mode():
            assert value(op) == 12
        compiled = torch.compile(lambda x: op(x) + 1, fullgraph=True, backend="aot_eager")
        assert compiled(torch.ones(1)).item() == 13
    assert compiled(torch.ones(1)).item() == 3  # the graph calls the operator, which chooses


def test_supports_and_strict(namespace, library):
    op, name = define(namespace), f"{namespace}::op"
    torchop.register_kernel(
        name,
        TYPE,
        added(10),
        provider="rows",
        supports=lambda x, factor: x.ndim == 1 and factor == 2.0,
        lib=library,
    )
    with torchop.priority({name: ["rows"]}):
        assert value(op) == 12
        with pytest.warns(torchop.ProviderWarning, match="its `supports` says no"):
            assert value(op, 3.0) == 3
        with (
            torchop.priority(strict=True),
            pytest.raises(torchop.ProviderError, match=f"{name}: no provider of the order"),
        ):
            op(torch.ones(1, 1))
        rows, _ = torchop.explain(name, torch.ones(1, 1)).providers
    assert "its `supports` says no to the arguments" in rows


def test_a_provider_for_every_device(namespace, library):
    op, name = define(namespace, "default"), f"{namespace}::op"
    torchop.register_kernel(name, None, added(10), provider="any", lib=library)
    with torchop.priority({name: ["any"]}):
        assert value(op) == 12
        assert op(torch.ones(1, device="meta")).device.type == "meta"
    assert value(op) == 2


def test_tensors_that_are_not_dense_are_the_packages(namespace, library):
    op, name = define(namespace, "default"), f"{namespace}::op"
    torchop.register_kernel(name, None, added(10), provider="any", lib=library)
    with torchop.priority({name: ["any"]}):
        sparse = torch.eye(2).to_sparse()
        assert op(sparse).to_dense().tolist() == [[2, 0], [0, 2]]


def test_the_package_brings_its_kernel_later_and_replaces_it(namespace, library):
    name = f"{namespace}::op"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torchop.register_kernel(name, TYPE, lambda x: x + 10, provider="fast", lib=library)
    op = getattr(torch.ops, namespace).op
    with pytest.raises(NotImplementedError, match="Could not run"):
        value(op)
    first = torch.library.Library(namespace, "IMPL")
    first.impl("op", lambda x: x + 1, BACKEND)
    assert value(op) == 2
    second = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, that a kernel is replaced
        second.impl("op", lambda x: x + 2, BACKEND, allow_override=True)
    assert value(op) == 3
    with torchop.priority({name: ["fast"]}):
        assert value(op) == 11
    second._destroy()
    assert value(op) == 2


@pytest.mark.parametrize("first", [0, 1])
def test_two_libraries_are_undone_in_either_order(namespace, first):
    op, name = define(namespace), f"{namespace}::op"
    libraries = [torchop.Library(namespace, "FRAGMENT") for _ in range(2)]
    for number, library in enumerate(libraries):
        torchop.register_kernel(
            name, TYPE, added(10 * number + 10), provider=f"p{number}", lib=library
        )
    torchop.set_priority({f"{namespace}::*": ["p0", "p1"]})
    assert value(op) == 12
    libraries.pop(first).close()
    with contextlib.nullcontext() if first else pytest.warns(torchop.ProviderWarning, match="'p0'"):
        assert value(op) == (22 if first == 0 else 12)
    libraries.pop().close()
    assert value(op) == 2
    assert foreign.definition_of(OpName.parse(name)) is None


def test_a_library_that_is_collected_takes_its_providers_along(namespace):
    op, name = define(namespace), f"{namespace}::op"
    library = torchop.Library(namespace, "FRAGMENT")
    torchop.register_kernel(name, TYPE, added(10), provider="fast", lib=library)
    del library
    gc.collect()
    assert torchop.providers(name) == []
    assert value(op) == 2


def test_a_redefined_operator_begins_without_providers(namespace, library):
    name = f"{namespace}::op"
    handle = torch.library.custom_op(
        name, lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    torchop.register_kernel(name, TYPE, lambda x: x + 10, provider="fast", lib=library)
    torchop.set_priority({f"{namespace}::*": ["fast"]})
    assert value(handle) == 11
    handle = torch.library.custom_op(
        name, lambda x: x + 3, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    assert value(handle) == 4
    assert torchop.providers(name) == []
    torchop.register_kernel(name, TYPE, lambda x: x + 20, provider="fast", lib=library)
    assert value(handle) == 21
    library.close()
    assert value(handle) == 4


def test_a_result_that_is_wrong_is_refused(namespace, library):
    op, name = define(namespace), f"{namespace}::op"
    torchop.register_kernel(name, TYPE, lambda x, factor=2.0: x, provider="alias", lib=library)
    torchop.register_kernel(name, TYPE, lambda x, factor=2.0: None, provider="none", lib=library)
    with torchop.priority({name: ["alias"]}), pytest.raises(torchop.AliasError, match=name):
        value(op)
    with torchop.priority({name: ["none"]}), pytest.raises(torchop.ResultError, match=name):
        value(op)


def test_what_cannot_have_providers(namespace, library):
    composite = f"{namespace}::composite"
    torch.library.define(composite, "(Tensor x) -> Tensor")
    torch.library.impl(composite, "CompositeImplicitAutograd", lambda x: x + 1)
    with pytest.raises(NotImplementedError, match="a composition of others"):
        torchop.register_kernel(composite, TYPE, lambda x: x + 1, provider="fast")
    with pytest.raises(NotImplementedError, match=r"PyTorch's own, and compilers replace"):
        torchop.register_kernel("aten::sin", TYPE, lambda self: self, provider="fast")
    with pytest.raises(torchop.OperatorNotFoundError, match="Import the module"):
        torchop.register_kernel(f"{namespace}::later", TYPE, lambda x: x, provider="fast")
    name = f"{namespace}::op"
    op = define(namespace)
    with pytest.raises(RuntimeError, match="'CPU' is not a device type"):
        torchop.register_kernel(name, "CPU", added(1), provider="fast")
    with pytest.raises(torchop.RuleSignatureError, match=r"has the default 3\.0 for 'factor'"):
        torchop.register_kernel(name, TYPE, lambda x, factor=3.0: x, provider="fast")
    assert value(op) == 2
    assert torchop.providers(name) == []


def test_two_packages_with_the_same_provider_name(namespace, library):
    op, name = define(namespace), f"{namespace}::op"
    torchop.register_kernel(name, TYPE, added(10), provider="fast", lib=library)
    other: dict = {}
    exec("def kernel(x, factor=2.0): return x + 99", {"__name__": "another"}, other)
    with pytest.warns(torchop.RedefinitionWarning, match="provider 'fast' was registered at"):
        torchop.register_kernel(name, TYPE, other["kernel"], provider="fast", lib=library)
    with torchop.priority({name: ["fast"]}):
        assert value(op) == 100


def test_an_operator_of_torchops_low_level(namespace, library):
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x + 1, BACKEND)
    op, name = getattr(torch.ops, namespace).op, f"{namespace}::op"
    torchop.register_kernel(name, TYPE, lambda x: x + 10, provider="fast", lib=library)
    assert value(op) == 2
    with torchop.priority({name: ["fast"]}):
        assert value(op) == 11
    assert value(op) == 2


@needs_native
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_accelerated_first", [True, False])
def test_accelerated_operators_choose_natively(namespace, library, way, is_accelerated_first):
    op, name = define(namespace, way), f"{namespace}::op"
    register = functools.partial(torchop.register_kernel, name, TYPE, added(10), lib=library)
    if not is_accelerated_first:
        register(provider="fast", supports=lambda x, factor: factor != 5)
    acceleration = torchop.accelerate(name)
    assert value(op) == 2
    if is_accelerated_first:
        register(provider="fast", supports=lambda x, factor: factor != 5)
    assert value(op) == 2
    torchop.set_priority({f"{namespace}::*": ["fast"]})
    assert value(op) == 12
    assert torchop.explain(name, torch.ones(1)).native
    with pytest.warns(torchop.ProviderWarning):
        assert value(op, 5.0) == 5
    x = torch.ones(2, requires_grad=True)
    op(x, 3.0).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]
    with torchop.priority({name: ["reference"]}):
        assert value(op) == 2
    acceleration.undo()
    assert value(op) == 12
    acceleration = torchop.accelerate(name)
    assert value(op) == 12
    library.close()
    assert value(op) == 2
    assert torchop.explain(name, torch.ones(1)).native
    acceleration.undo()
    assert value(op) == 2


@needs_native
def test_the_packages_kernel_gets_what_it_got_before(namespace, library):
    name = f"{namespace}::op"
    torch.library.define(name, "(Tensor x, float factor=2.0, *, int n=1) -> Tensor")
    seen = []

    def kernel(*args, **kwargs):
        seen.append((args[1:], kwargs))
        return args[0] + 1

    torch.library.impl(name, BACKEND, kernel)
    op = getattr(torch.ops, namespace).op
    torchop.register_kernel(
        name,
        TYPE,
        lambda x, factor=2.0, *, n=1: x,
        provider="none",
        supports=lambda x, factor, *, n: False,
        lib=library,
    )
    with torchop.accelerate(name):
        torchop.set_priority({f"{namespace}::*": ["none", "reference"]})
        value(op)
        value(op, 2.0)
        value(op, 3.0, n=2)
        assert torchop.explain(name, torch.ones(1)).native
    assert seen == [((), {}), ((), {}), ((3.0,), {"n": 2})]


@pytest.mark.filterwarnings("ignore:.*it was removed:torchop.ProviderWarning")
def test_threads_call_while_providers_come_and_go(namespace, library):
    op, name = define(namespace, "library"), f"{namespace}::op"
    torchop.set_priority({f"{namespace}::*": ["fast"]})  # which comes later
    torchop.register_kernel(name, TYPE, added(20), provider="other", lib=library)
    stop, wrong = threading.Event(), []

    def call():
        while not stop.is_set():
            result = value(op)
            if result not in (2, 12):
                wrong.append(result)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        with torchop.Library(namespace, "FRAGMENT") as passing:
            torchop.register_kernel(name, TYPE, added(10), provider="fast", lib=passing)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
