"""Definitions: lifetime, closing, and registrations from several threads.

Uses private names: _rules.fake.rule, _rules.kernels.rule.
"""

import threading

import torch
from torch import Tensor

import torchop
from tests._support.devices import BACKEND, TYPE
from torchop._rules.fake.rule import FakeRule
from torchop._rules.kernels.rule import KernelRule

T = torch.zeros(2)


def define(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    return op


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
