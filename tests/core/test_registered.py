"""A second registration causes a warning, and a registration that fails leaves nothing behind.

Uses private names.
"""

from __future__ import annotations

import functools
import itertools
import textwrap
import warnings

import pytest
import torch

import torchop
from torchop import RedefinitionWarning
from torchop._compat import libraries, registries

# Maps each kind of rule to the code that registers it for the operator `name`.
RULES = {
    "fake kernel": "torchop.register_fake(name, lambda x: torch.empty_like(x))",
    "kernel at CPU": "torchop.register_kernel(name, 'cpu', lambda x: x + 1)",
    "kernel at CPU of a library": """
        library = torchop.Library(name.partition("::")[0], "IMPL")
        library.impl("f", lambda x: x + 1, "CPU")
    """,
    "kernel at CPU of impl": "torchop.impl(name, 'cpu', lambda x: x + 1)",
    "backward formula": "torchop.register_autograd(name, lambda ctx, grad: grad)",
    "forward-mode formula": "torchop.register_jvp(name, lambda ctx, tangent: tangent)",
    "vmap rule": "torchop.register_vmap(name, 'sequential')",
    "autocast rule for cpu": "torchop.register_autocast(name, 'cpu', torch.bfloat16)",
    "torch_dispatch rule for Mode": """
        torchop.register_torch_dispatch(name, Mode, lambda mode, func, types, args, kwargs: 1)
    """,
    "effect": "torchop.register_effect(name, 'ordered')",
    "rule 'flop_formula'": "torchop.get_rule('flop_formula').register(name, lambda x: 1)",
    "rule 'inverse'": "torchop.get_rule('inverse').register(name, lambda output: output - 1)",
}


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    pass


def register(namespace: str, package: str, code: str) -> list[str]:
    """Run the code as a package would, and return the messages of the warnings."""
    scope = {
        "__name__": f"{package}.rules",
        "torch": torch,
        "torchop": torchop,
        "name": f"{namespace}::f",
        "Mode": Mode,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RedefinitionWarning)
        exec(compile(textwrap.dedent(code), f"/site/{package}.py", "exec"), scope)
    kept.append(scope)
    return [str(each.message) for each in caught]


kept: list[object] = []  # keeps the libraries of packages alive


@pytest.fixture
def library(namespace):
    with torch.library._scoped_library(namespace, "DEF") as library:
        library.define("f(Tensor x) -> Tensor")
        yield library
    kept.clear()


@pytest.mark.parametrize("kind", RULES)
def test_second_package_warns_with_both_places(namespace, library, kind):
    assert register(namespace, "package_a", RULES[kind]) == []
    assert register(namespace, "package_a", RULES[kind]) == []  # the package is reloaded
    (message,) = register(namespace, "package_b", RULES[kind])
    assert message.startswith(f"{namespace}::f: the {kind.partition(' of ')[0]} was registered at")
    assert "/site/package_a.py:" in message
    assert "/site/package_b.py:" in message


@pytest.mark.parametrize("kind", ["fake kernel", "vmap rule", "kernel at CPU", "rule 'inverse'"])
def test_rules_for_operators_of_custom_op_warn_too(namespace, kind):
    torchop.custom_op(f"{namespace}::f", lambda x: x, mutates_args=(), schema="(Tensor x)->Tensor")
    assert register(namespace, "package_a", RULES[kind]) == []
    assert len(register(namespace, "package_b", RULES[kind])) == 1


def test_closed_library_does_not_count(namespace, library):
    with torchop.Library(namespace, "FRAGMENT") as other:
        torchop.register_fake(f"{namespace}::f", torch.empty_like, lib=other)
    assert register(namespace, "package_b", RULES["fake kernel"]) == []


def test_a_rule_that_is_rejected_does_not_count(namespace, library):
    with pytest.raises(torchop.RuleSignatureError):
        register(namespace, "package_a", "torchop.register_fake(name, lambda: 1)")
    assert register(namespace, "package_b", RULES["fake kernel"]) == []


# The functions that put an object into one of PyTorch's registries
PUBLISHING = [
    (libraries, "implement"),
    (libraries, "implement_temporarily"),
    (registries, "register_fake"),
    (registries, "add_default_torch_dispatch"),
    (registries, "register_torch_dispatch"),
    (registries, "register_effect"),
]


class InjectedError(Exception):
    pass


def published(name: str) -> object:
    rules = registries._rules_registry.find(name).torch_dispatch_rules._data
    return registries.fake_functions(name), dict(rules), registries.effect_of(name)


def inject(monkeypatch, failing: int) -> None:
    """Raise before the call with this number that publishes an object."""
    calls = itertools.count(1)

    def raising(publish, *args, **kwargs):
        if next(calls) == failing:
            raise InjectedError
        return publish(*args, **kwargs)

    for owner, attribute in PUBLISHING:
        publish = getattr(owner, attribute)
        monkeypatch.setattr(owner, attribute, functools.partial(raising, publish))


@pytest.mark.parametrize("is_ours", [True, False], ids=["custom_op", "foreign"])
@pytest.mark.parametrize("kind", ["fake kernel", "vmap rule", "autocast rule for cpu", "effect"])
def test_a_registration_that_fails_leaves_nothing_behind(
    namespace, request, monkeypatch, is_ours, kind
):
    name = f"{namespace}::f"
    if is_ours:
        torchop.custom_op(name, lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor")
    else:
        request.getfixturevalue("library")
    before = published(name)
    for failing in itertools.count(1):
        with monkeypatch.context() as patch:
            inject(patch, failing)
            try:
                register(namespace, "package_a", RULES[kind])
                break
            except InjectedError:
                assert published(name) == before
    assert failing > 1
    assert published(name) != before or kind in ("vmap rule", "autocast rule for cpu")
    assert len(register(namespace, "package_b", RULES[kind])) == 1


def test_closing_a_library_undoes_a_registration_after_an_interrupted_one(
    namespace, library, monkeypatch
):
    name = f"{namespace}::f"
    before = published(name)
    other = torchop.Library(namespace, "FRAGMENT")
    with monkeypatch.context() as patch:
        patch.setattr(libraries, "on_close", raise_error)
        with pytest.raises(InjectedError):
            torchop.register_fake(name, torch.empty_like, lib=other)
    torchop.register_fake(name, torch.empty_like, lib=other)
    assert published(name) != before
    other.close()
    assert published(name) == before


def raise_error(*args: object) -> None:
    raise InjectedError
