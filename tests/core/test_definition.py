"""Definitions: lifetime, closing, and registrations from several threads."""

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.devices import BACKEND, OTHER, TYPE
from torchop._core.declaration import Site
from torchop._core.definition import Definition
from torchop._rules import RULES
from torchop._rules.fake.rule import FakeRule
from torchop._rules.kernels.rule import KernelRule
from torchop._schema.naming import OpName

T = torch.zeros(2)


def define(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    return op


def test_definition_has_one_rule_of_each_kind(namespace):
    definition = define(namespace)._definition
    assert set(definition.rules) == set(RULES)
    assert all(definition.rule(kind).definition is definition for kind in RULES)


def test_definition_knows_its_operator(namespace):
    op = define(namespace)
    definition = op._definition
    assert definition.name == OpName(namespace, "op", "")
    assert str(definition) == f"{namespace}::op"
    assert definition.is_ours
    assert definition.handle is op
    assert definition.overload is op.overload
    assert definition.deregistration_reason is None
    assert definition.callers_library is None
    assert definition.declaration.site.file == __file__
    assert definition.declaration.site.module == __name__
    assert definition.declaration.site.qualname.endswith("define.<locals>.op")


def test_sites_of_the_same_code_have_the_same_origin():
    before = Site("module", "function", "/old/file.py", 3)
    after = Site("module", "function", "/new/file.py", 30)
    assert before.origin == after.origin
    assert before.origin != Site("other", "function", "/old/file.py", 3).origin
    assert str(before) == "/old/file.py:3"


def test_operator_of_ours_has_its_kernels_from_birth(namespace):
    define(namespace)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for key in ("CompositeExplicitAutograd", "Meta", "Autograd"):
        assert has(f"{namespace}::op", key)
    for key in ("CPU", "FuncTorchBatched", "AutocastCPU", "ADInplaceOrView", "BackendSelect"):
        assert not has(f"{namespace}::op", key)


def test_operator_of_others_gets_a_kernel_when_a_rule_needs_it(namespace):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        registrations = {
            BACKEND: lambda: torchop.register_kernel(f"{namespace}::op", TYPE, abs, lib=library),
            "Meta": lambda: torchop.register_fake(f"{namespace}::op", abs, lib=library),
            "Autograd": lambda: torchop.register_autograd(
                f"{namespace}::op", lambda ctx, grad: grad, lib=library
            ),
            "FuncTorchBatched": lambda: torchop.register_vmap(
                f"{namespace}::op", lambda info, in_dims, x: (x, 0), lib=library
            ),
            f"Autocast{BACKEND}": lambda: torchop.register_autocast(
                f"{namespace}::op", TYPE, torch.bfloat16, lib=library
            ),
        }
        for key, register in registrations.items():
            assert not has(f"{namespace}::op", key)
            register()
            assert has(f"{namespace}::op", key)


def test_closing_ends_the_operator_once_and_keeps_the_first_reason(namespace):
    op = define(namespace)
    op._definition.deregister("the first reason")
    op._definition.deregister("another reason")
    assert op._definition.deregistration_reason == "the first reason"
    with pytest.raises(torchop.OperatorGoneError, match="the first reason"):
        op(T)
    assert torch._C._get_operation_overload(f"{namespace}::op", "") is None
    assert f"{namespace}::op" not in torch._library.custom_ops.OPDEFS
    define(namespace)
    assert getattr(torch.ops, namespace).op(T).tolist() == [1, 1]


def test_definition_of_a_closed_library_refuses(namespace):
    library = torchop.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    rule = KernelRule
    torchop.register_kernel(f"{namespace}::op", TYPE, lambda x: x + 5, lib=library)
    (definition,) = library._torchop_definitions.values()
    assert isinstance(definition, Definition)
    library.close()
    with pytest.raises(torchop.OperatorGoneError, match=f"{namespace}::op"):
        definition.rule(rule).register(OTHER, lambda x: x)


def test_definition_does_not_keep_the_library_of_others_alive(namespace):
    library = torchop.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    torchop.register_fake(f"{namespace}::op", lambda x: x, lib=library)
    reference = weakref.ref(library)
    del library
    gc.collect()
    assert reference() is None


def test_registrations_from_several_threads_all_count(namespace):
    op = define(namespace)
    devices = {TYPE, "cpu", "cuda", "xpu", "hpu", "mps", "xla", "lazy", "mtia"}
    barrier = threading.Barrier(len(devices))
    errors = []

    def register(device):
        try:
            barrier.wait()
            for amount in range(20):
                op.register_kernel(device)(lambda x, amount=amount: x + amount)
                op.register_fake(lambda x: torch.empty_like(x))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=register, args=(device,)) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert set(op._definition.rule(KernelRule).functions) == {None, *devices}
    assert op(T).tolist() == [19, 19]


def test_calls_run_while_another_thread_registers(namespace):
    op = define(namespace)
    done = threading.Event()

    def register():
        for _ in range(200):
            op.register_kernel(TYPE)(lambda x: x + 1)
            with op.set_kernel_enabled(TYPE, enabled=False):
                op.register_fake(lambda x: torch.empty_like(x))
        done.set()

    thread = threading.Thread(target=register)
    thread.start()
    results = set()
    while not done.is_set():
        results.add(op(T).sum().item())
    thread.join()
    assert results <= {2.0}
    assert op._definition.rule(FakeRule).function is not None


def test_what_is_refused_is_tried_once(namespace):
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    tried = []

    def install() -> None:
        tried.append(op)
        raise ValueError("not this")

    with pytest.raises(ValueError, match="not this") as caught:
        op._definition.rule(FakeRule).update(install)
    assert len(tried) == 1
    assert caught.value.__context__ is None
