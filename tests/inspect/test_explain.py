"""explain says which way a call takes; the call then takes it."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.autograd.forward_ad
import torch.fx.experimental.proxy_tensor
import torch.profiler
from torch import Tensor

import torchop
from tests.support import adding, assert_clean, counting, needs_native, run_program
from torchop._compat import aliasing
from torchop._inspect.reasons import REASONS
from torchop._native.switch import Reason

pytestmark = needs_native

T = torch.zeros(2)


@pytest.fixture
def op(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, n: int = 1) -> Tensor:
        return x + n

    op.register_fake(lambda x, n=1: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: (grad, None))
    return op


def needing_grad():
    return T.clone().requires_grad_()


def check(op, reason, *args, times=1, **kwargs):
    """That a call is explained by `reason`, and is then counted so; returns the explanation."""
    with counting(op) as explained:
        explanation = torchop.explain(op, *args, **kwargs)
    assert explained == {}  # it is asked about, and not made
    for words in REASONS[reason].replace("{why}", "{argument}").split("{argument}"):
        assert words in explanation.reason
    assert explanation.native is (reason is Reason.NATIVE)
    assert explanation.op == op.name
    assert explanation.kernels or "CPU" not in explanation.keys  # without a tensor, no kernel
    with counting(op) as calls, contextlib.suppress(Exception):
        op(*args, **kwargs)
    assert calls.get(reason.name.lower()) == times, calls
    return explanation


# --------------------------------------------------------------------------------------------------
# One test for each reason


def test_native(op):
    explanation = check(op, Reason.NATIVE, T)
    assert explanation.keys == ("AutogradCPU", "ADInplaceOrView", "BackendSelect", "CPU")
    autograd, kernel = explanation.kernels
    assert autograd == "autograd: records nothing"
    assert kernel == f"kernel: op.<locals>.op ({__file__}:{op.__wrapped__.__code__.co_firstlineno})"


def test_native_with_a_gradient(op):
    op(needing_grad())
    explanation = check(op, Reason.NATIVE, needing_grad())
    assert explanation.kernels[0] == "autograd: records the gradient"


def test_native_mutation(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args={"x", "ys"})
    def op(x: Tensor, ys: list[Tensor]) -> None:
        x.add_(1)

    x = torch.zeros(2)
    explanation = check(op, Reason.NATIVE, x, [torch.zeros(2)])
    assert explanation.kernels[1] == "versions: counts those of x, ys"
    assert x.tolist() == [1, 1]


def test_native_below_autograd(op):
    with torch.inference_mode():
        explanation = check(op, Reason.NATIVE, torch.zeros(2))
    assert explanation.keys == ("BackendSelect", "CPU")
    assert len(explanation.kernels) == 1


def test_kernel_of_a_device(op):
    @op.register_kernel("cpu")
    def special(x, n=1):
        return x + n

    assert "special" in check(op, Reason.NATIVE, T).kernels[-1]
    with op.set_kernel_enabled("cpu", enabled=False):
        assert "special" not in check(op, Reason.NATIVE, T).kernels[-1]


def test_kernel_that_is_an_object(namespace):
    class Kernel:
        def __call__(self, x):
            return x + 1

    op = torchop.custom_op(
        f"{namespace}::op", Kernel(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    assert check(op, Reason.NATIVE, T).kernels[-1] == "kernel: Kernel"


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
    part = "an argument" if "stream" in schema else "a result"
    expected = f"{part} has a type that only the dispatcher can convert"
    assert check(op, Reason.OPERATOR, T).reason == expected


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((T, 1, 2), {}), ((T,), {"m": 1}), ((T,), {"x": T})]
)
def test_binding(op, args, kwargs):
    check(op, Reason.BINDING, *args, **kwargs)


@pytest.mark.parametrize(
    "args", [(3,), ("text",), (None,), (T, 1.5), (T, None), (T, torch.tensor(3)), ([T],)]
)
def test_argument_type(op, args):
    name = ["x", "n"][len(args) - 1]
    assert check(op, Reason.ARGUMENT_TYPE, *args).reason.startswith(
        f"argument '{name}' does not have"
    )


class Count(int):
    pass


class Ratio(float):
    pass


class Word(str):
    pass


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *(("int", True), ("int", Count(3)), ("float", Ratio(0.5)), ("bool", 1)),
        *(("str", Word("a")), ("Scalar", Count(3)), ("Scalar", Ratio(0.5))),
        *(("int", 2**63), ("Scalar", -(2**63) - 1), ("int[]", [1, 2**64]), ("str", "\ud800")),
        *(("float", -0.0), ("Scalar", -0.0), ("float", True), ("float", Count(3))),
        *(("float", 10**400), ("float[]", [0.5, True]), ("float[]", [10**400])),
        *(("int[]", [Count(3)]), ("float[]", [Ratio(0.5)]), ("int[]", [True])),
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
    # PyTorch asks the class, which makes the call once more.
    check(op, Reason.TENSOR_SUBCLASS, T.as_subclass(Subclass), times=2)
    check(op, Reason.NATIVE, torch.nn.Parameter(T, requires_grad=False))


def test_tangent(op):
    with torch.autograd.forward_ad.dual_level():
        check(op, Reason.TANGENT, torch.autograd.forward_ad.make_dual(T, T))
        check(op, Reason.NATIVE, T)


KEYS = {
    "sparse": (lambda: T.to_sparse(), "SparseCPU"),
    "meta": (lambda: T.to("meta"), "Meta"),
    "conjugated": (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "Conjugate"),
    "negated": (lambda: torch.zeros(2, dtype=torch.complex64).conj().imag, "Negative"),
    "quantized": (lambda: torch.quantize_per_tensor(T, 1.0, 0, torch.qint8), "QuantizedCPU"),
    "nested": (lambda: torch.nested.nested_tensor([T, T]), "NestedTensorCPU"),
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_keys(op, kind):
    make, key = KEYS[kind]
    assert key in check(op, Reason.KEYS, make()).keys


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
def test_thread(op, mode):
    entered = mode()
    if isinstance(entered, torch._C._ExcludeDispatchKeyGuard):
        with entered:  # what is excluded is looked up, and does not matter
            check(op, Reason.NATIVE, T)
        return
    with entered:
        check(op, Reason.THREAD, T)
    check(op, Reason.NATIVE, T)


def test_thread_without_kernels_for_data(op):
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)):
        check(op, Reason.THREAD, T)
    check(op, Reason.NATIVE, T)


def test_thread_in_a_transform(op):
    seen = []

    def function(x):
        seen.append(torchop.explain(op, T))
        return op(x)

    with counting(op) as calls:
        torch.func.grad(lambda x: function(x).sum())(T)
    assert "native" not in calls
    assert [explanation.reason for explanation in seen] == [REASONS[Reason.THREAD]]


def test_thread_in_a_trace(op):
    with counting(op) as calls:
        graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: op(x))(T)
    assert calls["thread"] > 0  # below the trace, the values are computed natively
    assert op.overload in [node.target for node in graph.graph.nodes]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of 2.11
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
    with torch.autocast("cpu", torch.bfloat16):
        check(op, Reason.NATIVE, T)  # without a rule there is nothing to do
        op.register_autocast("cpu", torch.bfloat16)
        check(op, Reason.AUTOCAST, T)
    check(op, Reason.NATIVE, T)


@pytest.mark.parametrize("key", ["CPU", "Autograd", "BackendSelect"])
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_kernel(op, key):
    with torchop.Library(op.name.split("::")[0], "IMPL") as guest:
        guest.impl("op", lambda x, n=1: x + 7, key)
        explanation = check(op, Reason.KERNEL, T)
        at = "AutogradCPU" if key == "Autograd" else key
        assert explanation.reason == (
            f"the dispatcher would run the kernel at {at}, which was registered by other means"
        )
        assert any(line.startswith(f"{at}: ") for line in explanation.kernels)
        assert __file__ in str(explanation)
    check(op, Reason.NATIVE, T)


def test_kernel_that_is_missing(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x: x + 1,
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
        device_types="cuda",
    )
    assert check(op, Reason.KERNEL, T).reason == "it has no kernel for CPU"


def test_kernel_that_takes_dispatch_keys(op):
    with torchop.Library(op.name.split("::")[0], "IMPL") as guest:
        guest.impl("op", lambda keys, x, n=1: x + 7, "CUDA", with_keyset=True)
        check(op, Reason.NATIVE, T)
        guest.impl("op", lambda keys, x, n=1: x + 7, "BackendSelect", with_keyset=True)
        reason = check(op, Reason.KERNEL, T).reason
    assert (
        reason == "the dispatcher would run the kernel at BackendSelect, which takes dispatch keys"
    )


def test_kernel_that_is_in_cpp(op):
    guest = torch.library.Library(op.name.split("::")[0], "FRAGMENT")
    guest.m.register_ad_inplace_or_view_fallback("op")
    reason = check(op, Reason.KERNEL, T).reason
    guest._destroy()
    assert reason == (
        "the dispatcher would run the kernel at ADInplaceOrView, which is not a Python function"
    )


def test_kernel_for_views(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x: x.view(-1),
        mutates_args=(),
        schema="(Tensor(a) x) -> Tensor(a)",
    )
    assert check(op, Reason.KERNEL, T).reason == "PyTorch's kernel for views has to run"
    with torch.inference_mode():
        check(op, Reason.NATIVE, torch.zeros(2))


# By the keys of the kernels, and whether these take the keys of a call: what is counted and said of
# a call with a tensor on the CPU.
LOW_LEVEL = {
    "with keys": ({"CPU": True}, "operator", "its kernel for CPU takes dispatch keys"),
    "with keys, for every device": (
        {"CompositeExplicitAutograd": True},
        "operator",
        "its kernel for CPU takes dispatch keys",
    ),
    "none for a device": (
        {"Meta": False},
        "operator",
        "it has no kernel for CPU, CUDA, XPU or MPS",
    ),
    "for another device": ({"CUDA": False, "Meta": False}, "kernel", "it has no kernel for CPU"),
    "at Autograd": (
        {"CPU": False, "Autograd": False},
        "kernel",
        "the dispatcher would first run the kernel at AutogradCPU",
    ),
    "at BackendSelect, with keys": (
        {"CPU": False, "BackendSelect": True},
        "kernel",
        "the dispatcher would first run the kernel at BackendSelect",
    ),
}


def kernel_of(takes_keys):
    return (lambda keys, x: x + 1) if takes_keys else (lambda x: x + 1)


@pytest.mark.parametrize("kernels", LOW_LEVEL)
def test_kernel_of_the_low_level(namespace, kernels):
    kernels, counted, reason = LOW_LEVEL[kernels]
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        for key, takes_keys in kernels.items():
            library.impl("op", kernel_of(takes_keys), key, with_keyset=takes_keys)
        op = getattr(torch.ops, namespace).op
        op(T.to("meta") if "Meta" in kernels else T)  # by now there is a plan
        explanation = torchop.explain(op, T)
        with counting(op) as calls, contextlib.suppress(NotImplementedError):
            op(T)
    assert not explanation.native
    assert explanation.reason == reason
    assert calls == {counted: 1}


@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_kernel_of_somebody_else(namespace, device):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", kernel_of(device == "CPU"), device, with_keyset=device == "CPU")
    with torchop.accelerate(f"{namespace}::*"):
        reason = torchop.explain(f"{namespace}::op", T).reason
    library._destroy()
    expected = {"CPU": "its kernel for CPU takes dispatch keys", "CUDA": "it has no kernel for CPU"}
    assert reason == expected[device]


@pytest.fixture
def write(namespace):
    return torchop.custom_op(
        f"{namespace}::op", lambda x: None, mutates_args={"x"}, schema="(Tensor(a!) x) -> ()"
    )


def test_mutation(write):
    explanation = check(write, Reason.MUTATION, needing_grad())
    assert explanation.reason == "it mutates argument 'x', which requires grad"
    with torch.no_grad():
        check(write, Reason.NATIVE, needing_grad())


def test_mutation_in_inference_mode(write):
    x = torch.zeros(2)
    with torch.inference_mode():
        inference = torch.zeros(2)
        check(write, Reason.NATIVE, x)
        check(write, Reason.NATIVE, inference)
    assert x._version == 1
    explanation = check(write, Reason.MUTATION, inference)
    assert explanation.reason.endswith("'x', an inference tensor, outside of inference mode")


def test_mutation_where_elements_share_memory(write):
    check(write, Reason.NATIVE, torch.zeros(2, 4)[:, :2])
    check(write, Reason.NATIVE, torch.zeros(1, 4).expand(1, 4))
    check(write, Reason.NATIVE, torch.zeros(0).as_strided((0, 3), (0, 1)))
    explanation = check(write, Reason.MUTATION, torch.zeros(1).expand(2))
    assert explanation.reason.endswith("'x', of which several elements lie in the same place")


OVERLAPPING = {
    "plain": (lambda: torch.zeros(6), False),
    "part": (lambda: torch.zeros(2, 4)[:, :2], False),
    "expanded": (lambda: torch.zeros(1).expand(3), True),
    "expanded, of one element": (lambda: torch.zeros(1, 2).expand(1, 2), False),
    "expanded, without elements": (lambda: torch.zeros(1, 0).expand(3, 0), False),
    # PyTorch does not find out.
    "overlapping rows": (lambda: torch.zeros(6).as_strided((2, 3), (1, 1)), False),
}


@pytest.mark.parametrize("memory", OVERLAPPING)
def test_mutation_is_refused_by_all_that_look_at_the_memory(write, memory):
    make, is_refused = OVERLAPPING[memory]
    assert aliasing.overlaps_itself(make()) is is_refused
    explanation = check(write, Reason.MUTATION if is_refused else Reason.NATIVE, make())
    assert ("several elements lie in the same place" in explanation.reason) is is_refused
    for way in (contextlib.nullcontext, torchop.native.disabled):
        refused = pytest.raises(RuntimeError, match="more than one element of the written-to")
        with refused if is_refused else contextlib.nullcontext(), way():
            write(make())


def test_mutation_beside_an_input_in_the_same_memory(namespace):
    x, y = torch.zeros(6), torch.zeros(6)
    plain = torchop.custom_op(
        f"{namespace}::plain",
        lambda x, y: None,
        mutates_args={"x"},
        schema="(Tensor(a!) x, Tensor y) -> ()",
    )
    check(plain, Reason.NATIVE, x[2:], x[:4])
    inplace = torchop.custom_op(
        f"{namespace}::inplace_",
        lambda x, y: x,
        mutates_args={"x"},
        schema="(Tensor(a!) x, Tensor y) -> Tensor(a!)",
    )
    check(inplace, Reason.NATIVE, x, y)
    check(inplace, Reason.NATIVE, x, x)
    explanation = check(inplace, Reason.MUTATION, x[2:], x[:4])
    assert explanation.reason.endswith("argument 'x', in whose memory another argument lies")
    check(inplace, Reason.MUTATION, x[3:], x[:3])  # the rule finds that they do not meet
    out = torchop.custom_op(
        f"{namespace}::out",
        lambda x, *, y, z: (y, z),
        mutates_args={"y", "z"},
        schema="(Tensor x, *, Tensor(a!) y, Tensor(b!) z) -> (Tensor(a!), Tensor(b!))",
    )
    check(out, Reason.NATIVE, x, y=x, z=y)
    check(out, Reason.MUTATION, T, y=x, z=x)


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


def test_gradient_on_a_pytorch_that_is_too_new(op, monkeypatch):
    op(needing_grad())
    check(op, Reason.NATIVE, needing_grad())
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    op.register_autograd(lambda ctx, grad: (grad, None))
    explanation = check(op, Reason.GRADIENT, needing_grad())
    assert "PyTorch 2.99.0 is newer than 2.15, the newest release whose" in explanation.reason
    check(op, Reason.NATIVE, T)


def test_gradient_of_a_derived_formula(namespace):
    op = adding(namespace)
    op.derive_autograd()
    op(needing_grad())
    check(op, Reason.NATIVE, needing_grad())
    op.derive_autograd("save")
    for _ in range(2):
        explanation = check(op, Reason.GRADIENT, needing_grad())
        assert "its formula is derived, and keeps the graph of the body" in explanation.reason


def test_gradient_of_nothing_that_is_registered(namespace):
    torchop.define(f"{namespace}::op", "(Tensor x) -> Tensor")
    torchop.impl(f"{namespace}::op", "CPU", lambda x: x + 1)
    op = f"{namespace}::op"
    getattr(torch.ops, namespace).op(T)
    explanation = torchop.explain(op, needing_grad())
    assert explanation.native
    autograd, kernel = explanation.kernels
    assert autograd == "autograd: PyTorch's fallback, which notes that there is no formula"
    assert "<lambda>" in kernel
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert torchop.explain(op, needing_grad()).reason == REASONS[Reason.ANOMALY]
    with torch.no_grad():
        assert len(torchop.explain(op, needing_grad()).kernels) == 1


def test_gradient_through_a_list(namespace):
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: [x + 1], mutates_args=(), schema="(Tensor x) -> Tensor[]"
    )
    op.register_autograd(lambda ctx, grads: grads[0])
    check(op, Reason.GRADIENT, needing_grad())
    check(op, Reason.NATIVE, needing_grad())


def test_gradient_through_what_is_mutated(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x, y: x + y,
        mutates_args=(),
        schema="(Tensor x, Tensor y) -> Tensor",
    )
    op.register_autograd(lambda ctx, grad: (grad, grad))
    inplace = op.derive_inplace()
    explanation = check(inplace, Reason.GRADIENT, T.clone(), needing_grad())
    assert explanation.reason.endswith(
        "it rebases the history of the tensors that the operator mutates"
    )


def test_every_reason_has_words_and_a_test():
    assert set(REASONS) == set(Reason)
    tests = {name for name in globals() if name.startswith("test_")}
    assert {f"test_{reason.name.lower()}" for reason in Reason} <= tests


# --------------------------------------------------------------------------------------------------
# Operators


def test_operator_may_be_given_in_every_way(op):
    overload = op.overload
    for way in (op, op.name, f"{op.name}.default", overload, overload.overloadpacket):
        explanation = torchop.explain(way, T)
        assert explanation.native
        assert explanation.op == op.name


def test_of_a_packet_it_explains_the_overload_that_pytorch_chooses(namespace):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.define("op.two(Tensor x, Tensor y) -> Tensor")
    packet = getattr(torch.ops, namespace).op
    assert torchop.explain(packet, T).op == f"{namespace}::op"
    assert torchop.explain(packet, T, y=T).op == f"{namespace}::op.two"
    with pytest.raises(RuntimeError, match="failed to match any schema"):
        torchop.explain(packet, "text")
    library._destroy()


def test_arguments_are_passed_on_by_keyword_as_well(op):
    assert torchop.explain(op, x=T, n=3).native
    assert torchop.explain(op, T, n=1.5).reason.startswith("argument 'n' does not have")


def test_nothing_is_run(namespace):
    def kernel(x: Tensor) -> Tensor:
        raise AssertionError("it was run")

    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=())
    with counting(op) as calls:
        assert torchop.explain(op, T).native
        assert not torchop.explain(op, T.to_sparse()).native
    assert calls == {}


def test_explanation_says_it_in_words(op):
    lines = str(torchop.explain(op, T)).splitlines()
    assert lines[0].startswith(f"{op.name}: native, because the dispatcher would run only")
    assert lines[1] == "keys: AutogradCPU, ADInplaceOrView, BackendSelect, CPU"
    assert lines[2] == "1. autograd: records nothing"
    lines = str(torchop.explain(op, T.to_sparse())).splitlines()
    assert lines[0].startswith(f"{op.name}: through the dispatcher, because a tensor is not plain")
    assert lines[1].endswith("SparseCPU")


def test_operator_of_pytorch(namespace):
    explanation = torchop.explain("aten::sin", T)
    assert explanation.op == "aten::sin"
    assert not explanation.native
    assert explanation.reason == "torchop has called none of its kernels yet"
    assert any(line.startswith("CPU: registered at ") for line in explanation.kernels)


def test_operator_of_a_library(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x + 1, "CPU")
        before = torchop.explain(f"{namespace}::op", T)
        packet = getattr(torch.ops, namespace).op
        packet(T)  # by now there is a plan
        after = torchop.explain(f"{namespace}::op", T)
        assert packet(T).tolist() == [1, 1]
        assert torchop.native.counters(packet) == {"native": 1}
    assert not before.native
    assert before.reason == "torchop has called none of its kernels yet"
    assert any(__file__ in line for line in before.kernels)
    assert after.native
    assert __file__ in after.kernels[-1]


def test_operator_that_nobody_defined(namespace):
    with pytest.raises(torchop.OperatorNotFoundError, match=f"{namespace}::absent"):
        torchop.explain(f"{namespace}::absent", T)


def test_what_is_no_operator():
    with pytest.raises((TypeError, ValueError)):
        torchop.explain(3, T)


def test_operator_that_is_gone(namespace):
    old = adding(namespace)
    new = adding(namespace)
    with pytest.raises(torchop.OperatorGoneError, match=f"{namespace}::op"):
        torchop.explain(old, T)
    assert torchop.explain(new, T).native


def test_operator_of_a_closed_library(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        op = adding(namespace, lib=library)
    with pytest.raises(torchop.OperatorGoneError, match="closed"):
        torchop.explain(op, T)


def test_notebooks_show_a_list(namespace):
    op = adding(namespace)
    op(T)
    shown = torchop.explain(op, T)._repr_html_()
    assert shown.startswith(f"<p><b>{namespace}::op: native, because ")
    assert shown.endswith("</li></ol>")
    assert "&lt;lambda&gt;" in shown
    assert "<lambda>" not in shown


def test_without_the_extension():
    done = run_program(
        """
        import torch, torchop

        @torchop.custom_op("without::op", mutates_args=())
        def op(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        explanation = torchop.explain(op, torch.ones(1))
        assert not explanation.native and len(explanation.kernels) > 0
        print(explanation.reason)
        """,
        TORCHOP_NATIVE="0",
    )
    assert assert_clean(done) == (
        "the native call path is not there (TORCHOP_NATIVE=0 turns it off)\n"
    )
