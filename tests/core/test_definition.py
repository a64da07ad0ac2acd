import torch
from torch import Tensor

import torchop
from tests._support.devices import BACKEND, TYPE


def define(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    return op


def test_operator_has_its_kernels_from_the_definition(namespace):
    define(namespace)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for key in ("CompositeExplicitAutograd", "Meta", "Autograd"):
        assert has(f"{namespace}::op", key)
    for key in ("CPU", "FuncTorchBatched", "AutocastCPU", "ADInplaceOrView", "BackendSelect"):
        assert not has(f"{namespace}::op", key)


def test_library_operator_gets_a_kernel_when_a_rule_needs_it(namespace):
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
