"""The digest for compile caches covers all code and constants that a rule uses.

Uses private names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from tests._support.common import assert_clean, run_program
from torchop._inspect import cache_key
from torchop._inspect.code_digest import CodeDigest

# Rules that use a helper function or constant of `mid.py` or `inner.py`, each in a different way.
_WAYS = {
    "module.function": "from . import mid\ndef rule(x): return mid.mid(x)",
    "package.module.function": "import {package}.mid\ndef rule(x): return {package}.mid.mid(x)",
    "module.constant": "from . import inner\ndef rule(x): return x * inner.SCALE",
    "getattr": "from . import mid\ndef rule(x): return getattr(mid, 'mid')(x)",
    "variable": "from . import mid\ndef rule(x):\n    m = mid\n    return m.mid(x)",
    "partial": "import functools\nfrom . import mid\n"
    "part = functools.partial(mid.mid)\ndef rule(x): return part(x)",
    "value of a partial": "import functools\nfrom . import inner\ndef apply(x, s): return x * s\n"
    "part = functools.partial(apply, s=inner.SCALE)\ndef rule(x): return part(x)",
    "lru_cache": "import functools\nfrom . import mid\n@functools.lru_cache\n"
    "def cached(x): return mid.mid(x)\ndef rule(x): return cached(x)",
    "context manager": "import contextlib\nfrom . import mid\n@contextlib.contextmanager\n"
    "def manager(x): yield mid.mid(x)\ndef rule(x):\n    with manager(x) as y: return y",
    "singledispatch": "import functools\nfrom . import mid\n@functools.singledispatch\n"
    "def f(x): raise TypeError\n@f.register\ndef _(x: int): return mid.mid(x)\n"
    "def rule(x): return f(x)",
    "constructor": "from . import mid\nclass C:\n    def __init__(self, x): self.y = mid.mid(x)\n"
    "def rule(x): return C(x).y",
    "static method": "from . import mid\nclass C:\n    @staticmethod\n"
    "    def f(x): return mid.mid(x)\ndef rule(x): return C.f(x)",
    "class method": "from . import mid\nclass C:\n    @classmethod\n"
    "    def f(cls, x): return mid.mid(x)\nf = C.f\ndef rule(x): return f(x)",
    "property": "from . import mid\nclass C:\n    @property\n    def y(self): return mid.mid(1)\n"
    "c = C()\ndef rule(x): return c.y",
    "bound method": "from . import mid\nclass C:\n    def f(self, x): return mid.mid(x)\n"
    "rule = C().f",
    "callable object": "from . import mid\nclass C:\n    def __call__(self, x): return mid.mid(x)\n"
    "rule = C()",
    "attribute of an object": "from . import inner\nclass C:\n"
    "    def __init__(self, s): self.s = s\nc = C(inner.SCALE)\ndef rule(x): return x * c.s",
    "slot of an object": "from . import inner\nclass C:\n    __slots__ = 's',\n"
    "    def __init__(self, s): self.s = s\nc = C(inner.SCALE)\ndef rule(x): return x * c.s",
    "base class": "from . import mid\nclass B:\n    def f(self, x): return mid.mid(x)\n"
    "class C(B): pass\ndef rule(x): return C().f(x)",
    "attribute of a class": "from . import inner\nclass C: S = inner.SCALE\n"
    "def rule(x): return x * C.S",
    "enum": "import enum\nfrom . import inner\nclass E(enum.Enum): S = inner.SCALE\n"
    "def rule(x): return x * E.S.value",
    "class of an argument": "from __future__ import annotations\nfrom . import mid\nclass C:\n"
    "    def f(self, x): return mid.mid(x)\ndef rule(x, c: C | None = None): return c.f(x)",
    "import": "def rule(x):\n    from . import mid\n    return mid.mid(x)",
    "import of a function": "def rule(x):\n    from .mid import mid\n    return mid(x)",
    "absolute import": "def rule(x):\n    import {package}.mid as m\n    return m.mid(x)",
    "import that has happened": "from . import mid as _\ndef rule(x):\n"
    "    from .mid import mid\n    return mid(x)",
    "import in a lambda's function": "def rule(x):\n    def f():\n"
    "        from .inner import inner\n        return inner(x)\n    return f()",
    "nested function": "from . import mid\ndef rule(x):\n"
    "    def f(): return mid.mid(x)\n    return f()",
    "lambda": "from . import mid\ndef rule(x): return (lambda: mid.mid(x))()",
    "comprehension": "from . import mid\ndef rule(x): return [mid.mid(x) for _ in range(1)][0]",
    "default": "from . import mid\ndef rule(x, f=mid.mid): return f(x)",
    "keyword-only default": "from . import inner\ndef rule(x, *, s=inner.SCALE): return x * s",
    "closure": "from . import mid\ndef make():\n    m = mid\n    return lambda x: m.mid(x)\n"
    "rule = make()",
    "list in a closure": "from . import mid\ndef make():\n    fs = [mid.mid]\n"
    "    return lambda x: fs[0](x)\nrule = make()",
    "dict": "from . import mid\nTABLE = {{'mid': mid.mid}}\ndef rule(x): return TABLE['mid'](x)",
    "dict of numbers": "from . import inner\nTABLE = {{'a': {{'b': [inner.SCALE]}}}}\n"
    "def rule(x): return x * TABLE['a']['b'][0]",
    "set": "from . import inner\nSCALES = {{inner.SCALE}}\ndef rule(x): return x * max(SCALES)",
    "named tuple": "import typing\nfrom . import mid\nclass C(typing.NamedTuple):\n    a: int\n"
    "    def f(self, x): return mid.mid(x)\nc = C(1)\ndef rule(x): return c.f(x)",
    "simple namespace": "import types\nfrom . import mid\nn = types.SimpleNamespace(f=mid.mid)\n"
    "def rule(x): return n.f(x)",
    "attribute of a function": "from . import mid\ndef g(x): return g.f(x)\ng.f = mid.mid\n"
    "def rule(x): return g(x)",
    "recursion": "from . import mid\ndef a(x): return b(x)\ndef b(x): return a(x) + mid.mid(x)\n"
    "def rule(x): return a(x)",
    "recursive dict": "from . import mid\nT = {{}}\nT['self'] = T\nT['f'] = mid.mid\n"
    "def rule(x): return T['self']['f'](x)",
}


class _Package:
    """A package on disk, which a test can edit and import again, as if in a later process."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder / name, name
        self.folder.mkdir()
        self.write("__init__", "")
        self.write("mid", "from . import inner\ndef mid(x): return inner.inner(x) + 1")

    def write(self, module: str, text: str) -> None:
        (self.folder / f"{module}.py").write_text(text)

    def digest(self, text: str, scale: int) -> bytes:
        self.write("ops", text.format(package=self.name))
        self.write("inner", f"SCALE = {scale}\ndef inner(x): return x * {scale}")
        for name in [each for each in sys.modules if each.partition(".")[0] == self.name]:
            del sys.modules[name]
        importlib.invalidate_caches()
        digest = CodeDigest("")
        digest.add(importlib.import_module(f"{self.name}.ops").rule)
        return digest.digest()


@pytest.fixture
def package(tmp_path: Path, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Package]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield _Package(tmp_path, f"package_{namespace}")
    for name in [each for each in sys.modules if each.startswith(f"package_{namespace}")]:
        del sys.modules[name]


@pytest.mark.parametrize("way", _WAYS)
def test_edited_helper_changes_the_digest(package: _Package, way: str) -> None:
    before = package.digest(_WAYS[way], scale=2)
    assert package.digest(_WAYS[way], scale=2) == before
    assert package.digest(_WAYS[way], scale=5) != before


def test_installed_package_is_followed_only_from_its_own_code(
    package: _Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    (tmp_path / "site-packages").mkdir()
    name = f"{package.name}_installed"
    installed = _Package(tmp_path / "site-packages", name)
    own = _WAYS["module.function"]
    assert installed.digest(own, scale=2) != installed.digest(own, scale=5)

    from_outside = f"from {name}.ops import rule as f\ndef rule(x): return f(x)"
    before = package.digest(from_outside, scale=2)
    del sys.modules[f"{name}.inner"], sys.modules[f"{name}.mid"], sys.modules[f"{name}.ops"]
    installed.write("inner", "def inner(x): return x * 9")
    assert package.digest(from_outside, scale=2) == before
    sys.modules[name].__version__ = "2.0"  # type: ignore[attr-defined]
    assert package.digest(from_outside, scale=2) != before


def test_code_that_is_not_reached_does_not_change_the_digest(package: _Package) -> None:
    text = "from . import mid\ndef rule(x): return mid.mid(x)\ndef other(x): return x * {0}"
    digests = {package.digest(text.replace("{0}", str(n)), scale=2) for n in (2, 3)}
    assert len(digests) == 1


helper: Any = None  # set by the tests


def _two(*args: Any) -> Any:
    return 2


def _three(*args: Any) -> Any:
    return 3


class _Mode(TorchDispatchMode):
    pass


_REGISTRATIONS: dict[str, Callable[[Any], object]] = {
    "fake kernel": lambda op: op.register_fake(lambda x: _by_module(x)),
    "backward": lambda op: op.register_autograd(lambda ctx, grad: _by_module(grad)),
    "setup_context": lambda op: op.register_autograd(
        lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: _by_module(ctx)
    ),
    "jvp": lambda op: op.register_jvp(
        lambda ctx, x: _by_module(x), setup_context=lambda ctx, inputs, output: None
    ),
    "vmap": lambda op: op.register_vmap(lambda info, in_dims, x: (_by_module(x), 0)),
    "torch_dispatch": lambda op: op.register_torch_dispatch(
        _Mode, lambda mode, func, types, args, kwargs: _by_module(args)
    ),
    "checkpoint policy": lambda op: op.register_checkpoint_policy(
        lambda ctx, op, *args, **kwargs: _by_module(op)
    ),
    "sharding": lambda op: op.register_sharding(lambda x: _by_module(x)),
}


def _by_module(x: Any) -> Any:
    return sys.modules[__name__] and this.helper(x)


this = sys.modules[__name__]


def _define(qualname: str, **options: Any) -> Any:
    def run(x: Tensor) -> Tensor:
        result: Tensor = _by_module(x)
        return result

    return torchop.custom_op(qualname, run, mutates_args=(), **options)


@pytest.mark.parametrize("kind", [*_REGISTRATIONS, "inline", "class form", "torch.library"])
def test_the_helpers_of_every_rule_are_part_of_the_key(
    namespace: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    qualname = f"{namespace}::f"
    if kind == "inline":
        _define(qualname, compile="inline")
    elif kind == "class form":

        @torchop.operator(qualname)
        class f:
            @staticmethod
            def forward(x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def fake(x: Tensor) -> Tensor:
                result: Tensor = _by_module(x)
                return result
    elif kind == "torch.library":
        torch.library.custom_op(
            qualname, lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        torch.library.register_fake(qualname, lambda x: _by_module(x))
    else:
        _REGISTRATIONS[kind](_define(qualname))
    identities = []
    for function in (_two, _three, _two):
        monkeypatch.setattr(this, "helper", function)
        identities.append(cache_key.identify([qualname])[0])
    assert identities[0] == identities[2] != identities[1]


@pytest.mark.parametrize("way", ["packet", "namespace", "name of a namespace"])
def test_an_operator_is_found_in_variables_of_the_module(namespace: str, way: str) -> None:
    inner = _define(f"{namespace}::inner")
    value = {
        "packet": lambda: getattr(torch.ops, namespace).inner,
        "namespace": lambda: getattr(torch.ops, namespace),
        "name of a namespace": lambda: namespace,
    }[way]()
    text = {
        "packet": "lambda x: v(x)",
        "namespace": "lambda x: v.inner(x)",
        "name of a namespace": "lambda x: getattr(torch.ops, v).inner(x)",
    }[way]
    outer = _define(f"{namespace}::outer")
    outer.register_fake(eval(text, {"v": value, "torch": torch, "__name__": __name__}))
    before = cache_key.identify([f"{namespace}::outer"])[0]
    inner.register_fake(lambda x: torch.empty_like(x))
    assert cache_key.identify([f"{namespace}::outer"])[0] != before


_PROGRAM = """
import functools, torch, torchop
SCALES, TABLE = {"a", "b", "c", "d"}, {str: 1, int: functools.lru_cache(lambda x: x), "e": {1.5}}
class C:
    tensor, lock = torch.ones(2), object()
c = C()
@torchop.custom_op("seeds::f", mutates_args=())
def f(x: torch.Tensor) -> torch.Tensor:
    return x.clone()
@f.register_fake
def _(x):
    return torch.empty_like(x) if c.tensor is not TABLE and x.dim() in {1, "two"} else SCALES
print(torchop.cache_key_tag())
"""


def test_the_digest_is_the_same_in_every_process() -> None:
    tags = {assert_clean(run_program(_PROGRAM, PYTHONHASHSEED=seed)) for seed in ("1", "2")}
    assert len(tags) == 1
