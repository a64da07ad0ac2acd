"""torchop finds out which package has registered an operator. Uses private names."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch

import torchop
from tests._support.common import needs_native
from tests._support.devices import BACKEND
from torchop._native import switch

X = torch.ones(2)

# Programs that register the operator NAME, each in a different way.
WAYS = {
    "custom_op": """
@torch.library.custom_op("NAME", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    return x * 2
""",
    "torchop": """
@torchop.custom_op("NAME", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    return x * 2
""",
    "library": """
library = torch.library.Library("NAME".partition("::")[0], "FRAGMENT")
library.define("op(Tensor x) -> Tensor")
library.impl("op", torch.sin, "BACKEND")
""",
    "fake kernel": """
torch.library.define("NAME", "(Tensor x) -> Tensor")
torch.library.impl("NAME", "BACKEND", torch.sin)
torch.library.register_fake("NAME", torch.empty_like)
""",
}
# For these programs, only the dispatcher records where the kernel was registered, and only the
# native extension can read the record.
NATIVE_WAYS = {
    "kernel": """
torch.library.define("NAME", "(Tensor x) -> Tensor")
@torch.library.impl("NAME", "BACKEND")
def kernel(x):
    return x * 2
""",
    "partial": """
import functools
def kernel(k, x):
    return x * k
torch.library.define("NAME", "(Tensor x) -> Tensor")
torch.library.impl("NAME", "BACKEND", functools.partial(kernel, 2))
""",
    "low level of torchop": """
torchop.define("NAME", "(Tensor x) -> Tensor")
@torchop.impl("NAME", "BACKEND")
def kernel(x):
    return x * 2
""",
}


@pytest.fixture
def make_module(tmp_path, monkeypatch, namespace):
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(name, source):
        top = name.partition(".")[0]
        if "." in name:
            (tmp_path / top).mkdir(exist_ok=True)
            (tmp_path / top / "__init__.py").touch()
        path = tmp_path / f"{name.replace('.', '/')}.py"
        text = source.replace("NAME", f"{namespace}::op").replace("BACKEND", BACKEND)
        path.write_text(f"import torch, torchop\n{text}")
        importlib.invalidate_caches()
        made.extend((top, name))
        return importlib.import_module(name)

    yield make
    for name in made:
        sys.modules.pop(name, None)


def recorded_names(namespace, *modules):
    with torchop.record(*modules) as recorded:
        getattr(torch.ops, namespace).op(X)
    return [*recorded]


@pytest.mark.parametrize("way", WAYS)
def test_operator_belongs_to_its_module(make_module, namespace, way, monkeypatch):
    module = make_module(f"module_{namespace}", WAYS[way])
    other = make_module(f"module_{namespace}_other", WAYS["custom_op"].replace("NAME", "NAME_too"))
    assert recorded_names(namespace, module) == [f"{namespace}::op"]
    monkeypatch.setattr(switch, "native_module", lambda: None)
    assert recorded_names(namespace, module) == [f"{namespace}::op"]
    assert recorded_names(namespace, other) == []


@needs_native
@pytest.mark.parametrize("way", NATIVE_WAYS)
def test_a_kernel_reports_its_module(make_module, namespace, way):
    module = make_module(f"module_{namespace}", NATIVE_WAYS[way])
    assert recorded_names(namespace, module) == [f"{namespace}::op"]


@pytest.mark.parametrize("way", WAYS)
def test_package_includes_operators_of_its_modules(make_module, namespace, way):
    inside = make_module(f"package_{namespace}.inside", WAYS[way])
    package = sys.modules[f"package_{namespace}"]
    other = make_module(f"package_{namespace}x", "")
    assert recorded_names(namespace, package) == [f"{namespace}::op"]
    assert recorded_names(namespace, inside) == [f"{namespace}::op"]
    with pytest.warns(torchop.NothingToAccelerateWarning):
        assert recorded_names(namespace, other) == []


def test_modules_and_patterns_can_be_combined(make_module, namespace):
    module = make_module(f"module_{namespace}", WAYS["custom_op"])
    with torchop.record(module, "aten::sin") as recorded:
        module.op(X).sin().cos()
    assert sorted(recorded) == ["aten::sin", f"{namespace}::op"]


def test_operators_registered_later_are_recorded(make_module, namespace):
    make_module(f"package_{namespace}.empty", "")
    package = sys.modules[f"package_{namespace}"]
    with torchop.record(package) as recorded:
        make_module(f"package_{namespace}.late", WAYS["custom_op"]).op(X)
    assert [*recorded] == [f"{namespace}::op"]


def test_a_module_without_operators_is_reported(make_module, namespace):
    recorded = torchop.record(make_module(f"module_{namespace}", ""))
    message = (
        rf"record\(module_{namespace}\): no registered operator has a function in "
        r"this module or was defined by it; for operators defined in C\+\+ or by another module, "
        r"pass their names, such as '\w+::\*'"
    )
    with pytest.warns(torchop.NothingToAccelerateWarning, match=message), recorded:
        pass


def test_the_package_of_a_module_without_operators_is_proposed(make_module, namespace):
    package = f"package_{namespace}"
    make_module(f"{package}.inside", WAYS["custom_op"])
    recorded = torchop.record(make_module(f"{package}.empty", ""))
    message = rf"record\({package}.empty\): .*; the package {package} has some: pass that package\."
    with pytest.warns(torchop.NothingToAccelerateWarning, match=message), recorded:
        pass


def test_module_without_a_file_is_supported():
    with pytest.warns(torchop.NothingToAccelerateWarning), torchop.record(types.ModuleType("m")):
        torch.ones(2)
