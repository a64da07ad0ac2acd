"""Error messages are short whatever the argument is, and contain no control characters."""

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import torchop

LONGEST = 400
TEXT = "x\x1b[31m" + "long " * 100_000
LONG_NAME = "a" * 100_000


class Huge:
    """An object with a long `repr` that contains control characters."""

    def __repr__(self) -> str:
        return TEXT


HUGE = Huge()


def sample(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::sample", mutates_args=())
    def sample(x: Tensor, n: int = 1, *, mode: str = "a") -> Tensor:
        return x.clone()

    return sample


def define(namespace: str, **options: Any) -> Any:
    def function(x: Tensor) -> Tensor:
        return x.clone()

    return torchop.custom_op(f"{namespace}::f", function, **{"mutates_args": (), **options})


def defining(default: Any, annotation: Any) -> Callable[[str], Any]:
    def define(namespace: str) -> Any:
        def function(x: Tensor, value=default) -> Tensor:
            return x.clone()

        function.__annotations__["value"] = annotation
        return torchop.custom_op(f"{namespace}::f", function, mutates_args=())

    return define


def structured(namespace: str, value: Any, annotation: Any) -> Any:
    def function(x: Tensor, value: Any) -> Tensor:
        return x.clone()

    function.__annotations__["value"] = annotation
    return torchop.custom_op(f"{namespace}::f", function, mutates_args=())(torch.ones(1), value)


@dataclasses.dataclass
class Config:
    scale: float


def rule(method: str, *args: Any, **options: Any) -> Callable[[str], Any]:
    return lambda namespace: getattr(sample(namespace), method)(*args, **options)


def function(name: str, *args: Any, **options: Any) -> Callable[[str], Any]:
    return lambda namespace: getattr(torchop, name)(*args, **options)


def on_sample(name: str, *args: Any, **options: Any) -> Callable[[str], Any]:
    return lambda namespace: getattr(torchop, name)(sample(namespace), *args, **options)


# Maps each argument of a function to a call that passes an invalid, very long value for it.
MISTAKES: dict[str, Callable[[str], Any]] = {
    "name": lambda _: torchop.custom_op(TEXT, mutates_args=()),
    "name of letters": lambda _: torchop.custom_op(LONG_NAME, mutates_args=()),
    "name, of an object": lambda _: torchop.custom_op(HUGE, mutates_args=()),
    "name, keyword": lambda _: torchop.custom_op(f"{LONG_NAME}::{TEXT}", mutates_args=()),
    "no name": lambda _: torchop.custom_op(TEXT),
    "function": lambda n: torchop.custom_op(f"{n}::f", HUGE, mutates_args=()),
    "mutates_args": lambda n: define(n, mutates_args=HUGE),
    "mutates_args, a string": lambda n: define(n, mutates_args=TEXT),
    "mutates_args, an item": lambda n: define(n, mutates_args=(HUGE,)),
    "mutates_args, a name": lambda n: define(n, mutates_args=(TEXT,)),
    "mutates_args, names": lambda n: define(n, mutates_args=[f"a{i}" for i in range(9999)]),
    "mutates_args and schema": lambda n: define(
        n, mutates_args=(TEXT,), schema="(Tensor(a!) x) -> Tensor"
    ),
    "schema": lambda n: define(n, schema=TEXT),
    "schema, an object": lambda n: define(n, schema=HUGE),
    "schema that does not parse": lambda n: define(n, schema=f"(Tensor x, {LONG_NAME}) -> Tensor"),
    "schema of other parameters": lambda n: define(
        n, schema=f'(Tensor x, str y="{LONG_NAME}") -> Tensor'
    ),
    "device_types": lambda n: define(n, device_types=TEXT),
    "device_types, an object": lambda n: define(n, device_types=HUGE),
    "device_types, an item": lambda n: define(n, device_types=[HUGE]),
    "tags": lambda n: define(n, tags=HUGE),
    "tags, an item": lambda n: define(n, tags=[HUGE]),
    "effects": lambda n: define(n, effects=TEXT),
    "effects, an object": lambda n: define(n, effects=HUGE),
    "compile": lambda n: define(n, compile=TEXT),
    "compile, an object": lambda n: define(n, compile=HUGE),
    "compile, by backend": lambda n: define(n, compile={TEXT: TEXT}),
    "lib": lambda n: define(n, lib=HUGE),
    "default": defining(HUGE, int),
    "default, a string": defining(TEXT, int),
    "default of a structure": defining(HUGE, Config),
    "annotation": defining(1, HUGE),
    "annotation, a string": defining(1, TEXT),
    "annotation, a Literal": defining("a", Literal[TEXT, 1.5]),  # type: ignore[valid-type]
    "signature of a rule": rule("register_fake", lambda *, value=HUGE: value),
    "fake": rule("register_fake", HUGE),
    "fake, like": rule("register_fake", like=TEXT),
    "fake, like an object": rule("register_fake", like=HUGE),
    "fake, shape": rule("register_fake", shape=HUGE),
    "fake, dtype": rule("register_fake", dtype=TEXT),
    "fake, dtype of an object": rule("register_fake", dtype=HUGE),
    "kernel": rule("register_kernel", "cpu", HUGE),
    "kernel, device": rule("register_kernel", TEXT, lambda x, n, *, mode: x),
    "kernel, device of an object": rule("register_kernel", HUGE, lambda x, n, *, mode: x),
    "autograd": rule("register_autograd", HUGE),
    "autograd, setup_context": rule("register_autograd", lambda ctx, g: g, setup_context=HUGE),
    "jvp": rule("register_jvp", HUGE),
    "derive_autograd": rule("derive_autograd", TEXT),
    "derived": lambda _: torchop.derived(HUGE),
    "derive_inplace": rule("derive_inplace", TEXT),
    "derive_out": rule("derive_out", outputs=[TEXT]),
    "vmap": rule("register_vmap", TEXT),
    "vmap, an object": rule("register_vmap", HUGE),
    "autocast": rule("register_autocast", TEXT, torch.half),
    "autocast, an object": rule("register_autocast", HUGE, torch.half),
    "autocast, dtype": rule("register_autocast", "cpu", HUGE),
    "torch_dispatch": rule("register_torch_dispatch", HUGE, lambda *a: None),
    "torch_dispatch, function": rule("register_torch_dispatch", torch.nn.Parameter, HUGE),
    "effect": rule("register_effect", HUGE),
    "inverse": rule("register_inverse", HUGE),
    "flop_formula": rule("register_flop_formula", HUGE),
    "checkpoint_policy": rule("register_checkpoint_policy", HUGE),
    "examples": rule("register_examples", HUGE),
    "rule": rule("register", TEXT, HUGE),
    "rule, an object": rule("register", HUGE, HUGE),
    "attribute": lambda n: getattr(sample(n), LONG_NAME),
    "Rule": function("Rule", TEXT),
    "Rule, an object": function("Rule", HUGE),
    "Rule, an underscore": function("Rule", f"_{LONG_NAME}"),
    "get_rule": function("get_rule", TEXT),
    "inverse of": function("inverse", HUGE),
    "register_fake of": function("register_fake", HUGE, lambda x: x),
    "register_fake of a name": function("register_fake", TEXT, lambda x: x),
    "register_fake of an operator": function("register_fake", f"aten::{LONG_NAME}", lambda x: x),
    "register_kernel of": function("register_kernel", HUGE, "cpu", lambda x: x),
    "get_kernel": function("get_kernel", HUGE, "CPU"),
    "get_kernel, key": function("get_kernel", "aten::add.Tensor", TEXT),
    "explain": function("explain", HUGE),
    "define": function("define", HUGE, "(Tensor x) -> Tensor"),
    "define, schema": function("define", "mylib::f", TEXT),
    "define, schema of an object": function("define", "mylib::f", HUGE),
    "impl": function("impl", HUGE, "cpu", lambda x: x),
    "impl, key": function("impl", "mylib::f", TEXT, lambda x: x),
    "Library": function("Library", TEXT, "DEF"),
    "Library, an object": function("Library", HUGE, "DEF"),
    "Library, kind": function("Library", "mylib", TEXT),
    "Library, kind of an object": function("Library", "mylib", HUGE),
    "Library, key": function("Library", "mylib", "IMPL", TEXT),
    "Library, key of another kind": function("Library", "mylib", "DEF", TEXT),
    "Library.define": lambda n: torchop.Library(n, "DEF").define(TEXT),
    "Library.define, an object": lambda n: torchop.Library(n, "DEF").define(HUGE),
    "Library.impl": lambda n: torchop.Library(n, "IMPL").impl("f", HUGE, "CPU"),
    "Library.impl of": lambda n: torchop.Library(n, "IMPL").impl(TEXT, lambda x: x, "CPU"),
    "Library.impl, key": lambda n: torchop.Library(n, "IMPL").impl("f", lambda x: x, TEXT),
    "Library.fallback": lambda n: torchop.Library(n, "IMPL", "CPU").fallback(HUGE),
    "operator": lambda n: torchop.operator(f"{n}::f")(HUGE),
    "operator, a member": lambda n: torchop.operator(f"{n}::f")(
        type("f", (), {"forward": staticmethod(torch.clone), "schema": HUGE})
    ),
    "operator, a member of a long name": lambda n: torchop.operator(f"{n}::f")(
        type("f", (), {"forward": staticmethod(torch.clone), LONG_NAME: HUGE})
    ),
    "out_op": lambda n: torchop.out_op(f"{n}::f", HUGE),
    "out_op, like": lambda n: torchop.out_op(f"{n}::f", lambda x, *, out: None, like=HUGE),
    "out_op, like a name": lambda n: torchop.out_op(f"{n}::f", like=TEXT)(fill),
    "triton_op": lambda n: torchop.triton_op(f"{n}::f", HUGE, mutates_args=()),
    "maybe_out": function("maybe_out", HUGE, HUGE),
    "infer_schema": function("infer_schema", HUGE, mutates_args=()),
    "accelerate": function("accelerate", TEXT),
    "accelerate, an object": function("accelerate", HUGE),
    "record": lambda _: torchop.record(TEXT).__enter__(),
    "record, an object": lambda _: torchop.record(HUGE).__enter__(),
    "opcheck": on_sample("opcheck", (torch.ones(1),), test_utils=TEXT),
    "opcheck, an object": on_sample("opcheck", HUGE),
    "call": lambda n: sample(n)(TEXT),
    "call, of an object": lambda n: sample(n)(torch.ones(1), HUGE),
    "call, by keyword": lambda n: sample(n)(torch.ones(1), mode=HUGE),
    "call, a Literal": lambda n: structured(n, TEXT, Literal["a", "b"]),
    "call, a dataclass": lambda n: structured(n, HUGE, Config),
    "call, a field": lambda n: structured(n, Config(HUGE), Config),  # type: ignore[arg-type]
    "call, a dict": lambda n: structured(n, {HUGE: 1}, dict[str, int]),
    "call, a value of a dict": lambda n: structured(n, {TEXT: HUGE}, dict[str, int]),
}


def fill(x: Tensor, *, out: Tensor) -> None:
    out.copy_(x)


def clone(x: Tensor) -> Tensor:
    return x.clone()


class Clone:
    forward = staticmethod(clone)


def message_of(mistake: Callable[[str], Any], namespace: str) -> str:
    """Return the message of the exception, or of the warnings if there is no exception."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            mistake(namespace)
        except Exception as error:
            return str(error)
    assert warned, "accepted in silence"
    return "; ".join(str(warning.message) for warning in warned)


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_message_is_short_for_any_argument(namespace: str, mistake: Callable[[str], Any]) -> None:
    message = message_of(mistake, namespace)
    assert "long long" * 20 not in message.replace(" ", "").replace("longlong", "long long")
    assert "\x1b" not in message
    assert message.count("long") < LONGEST / 4
    assert message.count("a" * 50) * 50 < LONGEST
    assert len(message) < 2000


WITH_LIBRARY = [
    name
    for name in torchop.__all__
    if callable(getattr(torchop, name))
    and not inspect.isclass(getattr(torchop, name))
    and "lib" in inspect.signature(getattr(torchop, name)).parameters
]


@pytest.mark.filterwarnings("ignore:impl_abstract")
@pytest.mark.parametrize("name", WITH_LIBRARY)
def test_value_that_is_not_a_library_is_rejected(namespace: str, name: str) -> None:
    op = sample(namespace)
    calls: dict[str, Callable[..., Any]] = {
        "custom_op": lambda f: f(f"{namespace}::f", clone, mutates_args=(), lib="x"),
        "define": lambda f: f(f"{namespace}::f", "(Tensor x) -> Tensor", lib="x"),
        "impl": lambda f: f(op, "cpu", torch.clone, lib="x"),
        "operator": lambda f: f(f"{namespace}::f", lib="x")(Clone),
        "out_op": lambda f: f(f"{namespace}::f", like="x", lib="x")(fill),
        "register_autocast": lambda f: f(op, "cpu", torch.half, lib="x"),
        "register_kernel": lambda f: f(op, "cpu", torch.clone, lib="x"),
        "register_torch_dispatch": lambda f: f(op, torch.nn.Parameter, torch.clone, lib="x"),
        "register_effect": lambda f: f(op, None, lib="x"),
        "register_layout": lambda f: f(op, x=torchop.contiguous, lib="x"),
        "fallthrough_kernel": lambda f: f(),
    }
    call = calls.get(name, lambda f: f(op, torch.clone, lib="x"))
    with pytest.raises(TypeError, match="lib expects a Library, got str"):
        call(getattr(torchop, name))


@pytest.mark.parametrize("method", ["derive_inplace", "derive_out"])
def test_derived_form_checks_its_library(namespace: str, method: str) -> None:
    with pytest.raises(TypeError, match="lib expects a Library, got str"):
        getattr(define(namespace), method)(lib="x")


def test_user_rule_checks_its_library(namespace: str) -> None:
    with pytest.raises(TypeError, match="lib expects a Library, got str"):
        torchop.get_rule("inverse").register(define(namespace), torch.clone, lib="x")


def test_repr_that_raises_is_replaced() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    with pytest.raises(
        torchop.RuleSignatureError, match=r"<Broken, whose repr\(\) raised ZeroDivisionError>"
    ):
        torchop.custom_op("messages::f", Broken(), mutates_args=())  # type: ignore[arg-type]
