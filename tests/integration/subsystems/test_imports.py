"""Programs without a compiler do not import Dynamo, and torchop imports no package except torch."""

from __future__ import annotations

import sys

import pytest

from tests._support.common import assert_clean
from tests._support.forking import run_forked

_USE = """
import sys, torch
from torch import Tensor
import {library} as library

@library.custom_op("imports::double", mutates_args=())
def double(x: Tensor, ys: list[Tensor]) -> Tensor:
    return x * 2

@library.custom_op("imports::write", mutates_args=("x",))
def write(x: Tensor) -> None:
    x.add_(1)

double.register_fake(lambda x, ys: torch.empty_like(x))
double.register_autograd(lambda ctx, grad: (grad * 2, [None]))
double.register_autocast("cpu", torch.bfloat16)
double.register_kernel("cpu", lambda x, ys: x + x)
x = torch.ones(2, requires_grad=True)
double(x, [x]).sum().backward()
write(torch.ones(2))
with torch.autocast("cpu"):
    double(x, [x])
print("\\n".join(sys.modules))
"""


def _modules_after(program: str) -> set[str]:
    return set(assert_clean(run_forked(program)).split())


def test_eager_use_never_imports_dynamo() -> None:
    used = _modules_after(_USE.format(library="torchop"))
    assert "torchop" in used
    assert not {name for name in used if name.startswith(("torch._dynamo", "torch._inductor"))}


@pytest.mark.exhaustive
def test_eager_use_of_pytorchs_own_imports_dynamo() -> None:
    # Shows that the test above can fail, because the same program with torch.library imports
    # Dynamo.
    assert "torch._dynamo" in _modules_after(_USE.format(library="torch.library"))


_IMPORTED = """
import sys, torch
before = set(sys.modules)
import torchop
print("\\n".join(set(sys.modules) - before))
"""


def test_importing_torchop_imports_nothing_but_torch_and_the_standard_library() -> None:
    added = set(assert_clean(run_forked(_IMPORTED)).split())
    packages = {name.partition(".")[0] for name in added}
    assert packages - set(sys.stdlib_module_names) <= {"torchop", "torch", "torchgen"}
    assert not {name for name in added if name.startswith("torch._dynamo")}


_RECORDED = """
import sys, torch, torchop

library = torch.library.Library("imports", "FRAGMENT")
library.define("low(Tensor x) -> Tensor")
library.impl("low", lambda x: x * 2, "CPU")

@torchop.custom_op("imports::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

double.register_autograd(lambda ctx, grad: grad * 2)
x = torch.ones(2, requires_grad=True)
double(x)
before = set(sys.modules)
with {mode}:
    double(x).sum().backward()
    torch.ops.imports.low(x)
    torch.ones(2).sin()
print("\\n".join(set(sys.modules) - before))
"""

_MODE_OF_PYTORCH = """
class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
"""


def test_recording_imports_nothing_but_torchop_and_the_standard_library() -> None:
    used = _modules_after(_RECORDED.format(mode='torchop.record("*", sys.modules["__main__"])'))
    # Since PyTorch 2.15, the first backward imports more PyTorch modules, so subtract the modules
    # that the same program imports without recording.
    used -= _modules_after(
        "import contextlib\n" + _RECORDED.format(mode="contextlib.nullcontext()")
    )
    packages = {name.partition(".")[0] for name in used}
    assert packages <= {"torchop", *sys.stdlib_module_names}


@pytest.mark.exhaustive
def test_torch_dispatch_mode_imports_dynamo() -> None:
    program = _RECORDED.format(mode="Mode()")
    used = _modules_after(program.replace("before =", f"{_MODE_OF_PYTORCH}before ="))
    assert {"torch._dynamo", "sympy"} <= used
