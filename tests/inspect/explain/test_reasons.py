"""For each reason that `explain` can give, the call really takes this path. Uses private names."""

from __future__ import annotations

import re
from typing import Annotated

import pytest
import torch
import torch.autograd.forward_ad
import torch.fx.experimental.proxy_tensor
import torch.profiler
from torch import Tensor

import torchop
from tests._support.common import counting, needs_native
from tests._support.devices import AUTOGRAD, BACKEND, TYPE
from tests.inspect.explain.checking import T, check, needing_grad
from torchop._native.extension.recipe import CSRC
from torchop._native.reasons import Reason
from torchop._rules.autograd.derived import replay

pytestmark = needs_native


def test_native(op):
    explanation = check(op, Reason.NATIVE, T)
    assert explanation.keys == (AUTOGRAD, "ADInplaceOrView", "BackendSelect", BACKEND)
    autograd, kernel = explanation.kernels
    assert autograd == "autograd: records nothing"
    code = op.__wrapped__.__code__
    assert kernel == f"kernel: op.<locals>.op ({code.co_filename}:{code.co_firstlineno})"


def test_native_below_autograd(op):
    with torch.inference_mode():
        explanation = check(op, Reason.NATIVE, torch.zeros(2))
    assert explanation.keys == ("BackendSelect", BACKEND)
    assert len(explanation.kernels) == 1


def test_switched_off(op):
    with torchop.native.disabled():
        check(op, Reason.SWITCHED_OFF, T)
    check(op, Reason.NATIVE, T)


@pytest.mark.parametrize(
    "schema", ["(Tensor x, Stream? stream=None) -> Tensor", "(Tensor x) -> Scalar"]
)
def test_operator(namespace, schema):
    kernel = (lambda x, stream=None: x + 1) if "stream" in schema else (lambda x: 3)
    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), schema=schema)
    part = "argument 'Stream? stream=None'" if "stream" in schema else "a result 'Scalar'"
    expected = f"{part} has a type that only the dispatcher can convert"
    assert check(op, Reason.OPERATOR, T).reason == expected


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((T, 1, 2), {}), ((T,), {"m": 1}), ((T,), {"x": T})]
)
def test_binding(op, args, kwargs):
    check(op, Reason.BINDING, *args, **kwargs)


def test_an_operator_without_its_arguments(op):
    reason = torchop.explain(op).reason
    assert "do not fit the parameters (missing a required argument: 'x')" in reason


@pytest.mark.parametrize(
    ("value", "spelled"), [("a", "of type str"), ([1, 2.0], "a list of int, ")]
)
def test_the_type_that_was_passed_and_the_one_wanted(op, value, spelled):
    reason = torchop.explain(op, value).reason
    assert f"the schema's type 'Tensor x', but is {spelled}" in reason


@pytest.mark.parametrize(
    "args", [(3,), ("text",), (None,), (T, 1.5), (T, None), (T, torch.tensor(3)), ([T],)]
)
def test_argument_type(op, args):
    name = ["x", "n"][len(args) - 1]
    assert check(op, Reason.ARGUMENT_TYPE, *args).reason.startswith(
        f"argument '{name}' does not have"
    )


class Computing(int):
    def __float__(self) -> float:
        return 0.5


class Overriding(int):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return T


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *(("int", Overriding(3)), ("float", Computing(3)), ("bool", 1), ("str", 3)),
        *(("int", 2**63), ("Scalar", -(2**63) - 1), ("int[]", [1, 2**64]), ("str", "\ud800")),
        *(("float", -0.0), ("Scalar", -0.0), ("float", 10**400), ("float[]", [10**400])),
        *(("int[]", [Overriding(3)]), ("float[]", [0.5, Computing(3)])),
    ],
)
def test_a_value_that_the_dispatcher_replaces(namespace, kind, value):
    schema = f"(Tensor x, {kind} value) -> Tensor"
    op = torchop.custom_op(
        f"{namespace}::op", lambda x, value: x + 1, mutates_args=(), schema=schema
    )
    check(op, Reason.ARGUMENT_TYPE, T, value)


class Subclass(Tensor):
    pass


def test_tensor_subclass(op):
    # There are two calls, because the `__torch_function__` of the subclass calls the operator
    # again.
    check(op, Reason.TENSOR_SUBCLASS, T.as_subclass(Subclass), times=2)
    check(op, Reason.NATIVE, torch.nn.Parameter(T, requires_grad=False))


def test_tangent(op):
    with torch.autograd.forward_ad.dual_level():
        check(op, Reason.TANGENT, torch.autograd.forward_ad.make_dual(T, T))
        check(op, Reason.NATIVE, T)


def test_tangent_of_a_view_whose_base_was_written_later(op):
    base = torch.zeros(2)
    view = base[:1]
    with torch.autograd.forward_ad.dual_level():
        check(op, Reason.NATIVE, view)
        base.copy_(torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2)))
        check(op, Reason.TANGENT, view)


KEYS = {
    "sparse": (lambda: T.to_sparse(), "Sparse"),
    "meta": (lambda: T.to("meta"), "Meta"),
    "conjugated": (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "Conjugate"),
    "negated": (lambda: torch.zeros(2, dtype=torch.complex64).conj().imag, "Negative"),
    "quantized": (lambda: torch.quantize_per_tensor(T, 1.0, 0, torch.qint8), "Quantized"),
    "nested": (lambda: torch.nested.nested_tensor([T, T]), "NestedTensor"),
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_keys(op, kind):
    make, key = KEYS[kind]
    assert any(each.startswith(key) for each in check(op, Reason.KEYS, make()).keys)


@pytest.mark.parametrize("made_of", ["nothing", "two devices"])
def test_backends(namespace, made_of):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda xs: torch.ones(2),
        mutates_args=(),
        schema="(Tensor[] xs) -> Tensor",
    )
    check(op, Reason.BACKENDS, [] if made_of == "nothing" else [T, T.to("meta")])


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [
        Mode,
        torch._subclasses.FakeTensorMode,
        lambda: torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
        ),
    ],
)
def test_mode(op, mode):
    entered = mode()
    if isinstance(entered, torch._C._ExcludeDispatchKeyGuard):
        with entered:  # excluding this key does not change the call
            check(op, Reason.NATIVE, T)
        return
    with entered:
        # `Mode` calls the operator again, so there are two calls.
        check(op, Reason.MODE, T, times=2 if mode is Mode else 1)
    check(op, Reason.NATIVE, T)


def test_mode_without_kernels_for_data(op):
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)):
        check(op, Reason.MODE, T)
    check(op, Reason.NATIVE, T)


def test_mode_in_a_transform(op):
    seen = []

    def function(x):
        seen.append(torchop.explain(op, T))
        return op(x)

    with counting(op) as calls:
        torch.func.grad(lambda x: function(x).sum())(T)
    assert "native" not in calls
    assert [explanation.reason for explanation in seen] == [Reason.MODE.text]


def test_mode_in_a_trace(op):
    with counting(op) as calls:
        graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: op(x))(T)
    assert calls["mode"] > 0
    assert op.overload in [node.target for node in graph.graph.nodes]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # from PyTorch 2.11
def test_profiler(op):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        check(op, Reason.PROFILER, T)
    assert op.name in [event.name for event in profile.events()]
    check(op, Reason.NATIVE, T)


class FunctionMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [FunctionMode, lambda: torch.device("cpu")])
def test_function_mode(op, mode):
    with mode():
        check(op, Reason.FUNCTION_MODE, T)
    check(op, Reason.NATIVE, T)


def test_autocast(op):
    with torch.autocast(TYPE, torch.bfloat16):
        check(op, Reason.NATIVE, T)  # without an autocast rule, autocast has no effect
        op.register_autocast(TYPE, torch.bfloat16)
        check(op, Reason.AUTOCAST, T)
    check(op, Reason.NATIVE, T)


@pytest.mark.parametrize("key", [BACKEND, "Autograd", "BackendSelect"])
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_kernel(op, key):
    with torchop.Library(op.name.split("::")[0], "IMPL") as guest:
        guest.impl("op", lambda x, n=1: x + 7, key)
        explanation = check(op, Reason.KERNEL, T)
        at = AUTOGRAD if key == "Autograd" else key
        assert explanation.reason == (
            f"the dispatcher would run the kernel at {at}, which was registered by other means"
        )
        assert any(line.startswith(f"{at}: ") for line in explanation.kernels)
        assert __file__ in str(explanation)
    check(op, Reason.NATIVE, T)


def test_mutation(write):
    explanation = check(write, Reason.MUTATION, needing_grad())
    assert explanation.reason == "it mutates argument 'x', which requires grad"
    with torch.no_grad():
        check(write, Reason.NATIVE, needing_grad())


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly(op):
    op(needing_grad())
    with torch.autograd.detect_anomaly():
        check(op, Reason.ANOMALY, needing_grad())
        check(op, Reason.NATIVE, T)
    check(op, Reason.NATIVE, needing_grad())


def test_gradient(op):
    explanation = check(op, Reason.GRADIENT, needing_grad())
    assert explanation.reason.endswith(
        "the first call that records one is never native, but later ones are"
    )
    check(op, Reason.NATIVE, needing_grad())


def test_layout(namespace):
    @torchop.custom_op(f"{namespace}::arranged", mutates_args=())
    def op(x: Annotated[torch.Tensor, torchop.contiguous]) -> torch.Tensor:
        return x * 2

    check(op, Reason.LAYOUT, torch.ones(2, 3).T)
    check(op, Reason.NATIVE, torch.ones(2, 3))


def test_capture(namespace, monkeypatch):
    @torchop.custom_op(f"{namespace}::derived", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    op.derive_autograd()
    op(needing_grad())
    check(op, Reason.NATIVE, needing_grad())
    current = replay.ambient_state
    monkeypatch.setattr(
        replay, "ambient_state", lambda *args: current(*args)._replace(is_captured=True)
    )
    check(op, Reason.CAPTURE, needing_grad())
    check(op, Reason.NATIVE, T)


def test_every_reason_has_words_and_a_test():
    assert all(reason.text for reason in Reason)
    tests = {name for name in globals() if name.startswith("test_")}
    assert {f"test_{reason.name.lower()}" for reason in Reason} <= tests


def test_reasons_match_the_extension():
    members = re.findall(r"^  (\w+),", (CSRC / "reasons.h").read_text(), re.MULTILINE)
    names = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", member).upper() for member in members]
    assert [*(reason.name for reason in Reason), "COUNT"] == names
