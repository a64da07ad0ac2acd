"""However an operator is named, torchop finds the same definition. Uses private names."""

import gc
import itertools
import threading
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from tests._support.devices import BACKEND, TYPE
from tests._support.releases import needs_tags
from torchop._core.registry import find_schema, op_name, own_definitions, resolve
from torchop.extend import Form, OpName

T = torch.zeros(2)


def define(namespace, name="op"):
    @torchop.custom_op(f"{namespace}::{name}", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    return op


def packet(namespace, name="op"):
    return getattr(getattr(torch.ops, namespace), name)


WAYS = {
    "handle": lambda ns: torch._library.custom_ops.OPDEFS[f"{ns}::op"],
    "name": lambda ns: f"{ns}::op",
    "default": lambda ns: f"{ns}::op.default",
    "overload": lambda ns: packet(ns).default,
    "packet": packet,
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@ways
def test_every_way_to_name_an_operator_finds_its_definition(namespace, way):
    handle = define(namespace)
    op = way(namespace)
    assert op_name(op, "caller") == OpName(namespace, "op", "")
    assert resolve(op, "caller") is handle._definition


@ways
def test_every_rule_is_registered_in_every_way(namespace, way):
    handle = define(namespace)
    op = way(namespace)
    torchop.register_kernel(op, TYPE, lambda x: x + 2)
    torchop.register_fake(op, lambda x: x.new_empty(7))
    torchop.register_autograd(op, lambda ctx, grad: grad * 3)
    torchop.register_vmap(op, lambda info, in_dims, x: (x + 4, in_dims[0]))
    torchop.register_autocast(op, TYPE, torch.bfloat16)
    torchop.register_torch_dispatch(op, Mode, lambda *args: torch.full((1,), 5.0))
    torchop.register_effect(op, None)
    assert torchop.opcheck(op, (T,), test_utils="test_schema") == {"test_schema": "SUCCESS"}
    x = torch.zeros(2, requires_grad=True)
    handle(x).sum().backward()
    assert handle(T).tolist() == [2, 2]
    assert handle(T.to("meta")).shape == (7,)
    assert x.grad.tolist() == [3, 3]
    assert torch.vmap(handle)(T).tolist() == [4, 4]
    with torch.autocast(TYPE):
        assert handle(T).dtype is torch.bfloat16
    with Mode():
        assert handle(T).tolist() == [5]


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_packet_of_several_overloads_is_ambiguous(namespace):
    define(namespace)
    define(namespace, "op.two")
    with pytest.raises(ValueError, match="has the overloads") as caught:
        torchop.register_fake(packet(namespace), lambda x: x)
    message = str(caught.value)
    assert message.startswith(f"register_fake({namespace}.op)")
    assert "default, two" in message or "two, default" in message


@pytest.mark.parametrize("op", [None, 3, torch.sin, torch.ops.aten, lambda x: x])
def test_argument_that_is_no_operator_is_rejected_with_its_type(op):
    with pytest.raises(
        ValueError, match=r"register_fake\(.* got unexpected type for op:"
    ) as caught:
        torchop.register_fake(op, lambda x: x)
    assert type(op).__name__ in str(caught.value)


@pytest.mark.parametrize("name", ["op", "::op", "ns::", "ns::op::op", ""])
def test_name_of_another_form_is_refused(name):
    with pytest.raises(torchop.OperatorNameError, match="does not have the form namespace::name"):
        torchop.register_fake(name, lambda x: x)


REGISTRATIONS = {
    "register_kernel": lambda op: torchop.register_kernel(op, TYPE, lambda x: x),
    "register_fake": lambda op: torchop.register_fake(op, lambda x: x),
    "register_autograd": lambda op: torchop.register_autograd(op, lambda ctx, grad: grad),
    "register_vmap": lambda op: torchop.register_vmap(op, lambda info, in_dims, x: x),
    "register_autocast": lambda op: torchop.register_autocast(op, TYPE, torch.float16),
    "register_torch_dispatch": lambda op: torchop.register_torch_dispatch(op, Mode, print),
    "register_effect": lambda op: torchop.register_effect(op, None),
    "opcheck": lambda op: torchop.opcheck(op, (T,)),
    "get_kernel": lambda op: torchop.get_kernel(op, BACKEND),
}


@pytest.mark.parametrize("register", REGISTRATIONS.values(), ids=REGISTRATIONS)
@pytest.mark.parametrize("name", ["op", "op.two"])
def test_an_undefined_operator_is_not_found(namespace, register, name):
    define(namespace, "other")
    with pytest.raises(RuntimeError, match=f"{namespace}::{name}.* does not exist"):
        register(f"{namespace}::{name}")


@pytest.mark.parametrize(
    "register",
    [
        *REGISTRATIONS.values(),
        lambda op: torchop.register_sharding(op, "b -> b"),
        lambda op: torchop.get_rule("inverse").register(op, lambda x: x),
        lambda op: torchop.register_kernel(op, TYPE, lambda x: x, provider="fast"),
        lambda op: torchop.explain(op, torch.ones(2)),
        lambda op: torchop.testing.check(op, (T,)),
    ],
    ids=[*REGISTRATIONS, "register_sharding", "register_inverse", "register_provider", "explain"]
    + ["check"],
)
def test_a_namespace_without_operators_is_named(namespace, register):
    define(f"other{namespace}", "op")
    with pytest.raises(torchop.OperatorNotFoundError) as caught:
        register(f"{namespace}::op")
    message = str(caught.value)
    assert f"nothing is registered in the namespace '{namespace}'" in message
    assert "its library may have failed to load" in message
    assert f"other{namespace}" not in message


@pytest.mark.parametrize("register", REGISTRATIONS.values(), ids=REGISTRATIONS)
def test_redefined_operator_raises_operator_gone_error(namespace, register):
    old = define(namespace)
    define(namespace)
    with pytest.raises(torchop.OperatorGoneError, match="It was replaced by the definition at"):
        register(old)


# --------------------------------------------------------------------------------------------------
# The argument `lib`


def test_library_owns_its_registrations_for_an_operator(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        first = resolve(f"{namespace}::op", "caller", library)
        assert resolve(packet(namespace), "caller", library) is first
        with torchop.Library(namespace, "IMPL") as guest:
            assert resolve(packet(namespace), "caller", guest) is not first


def test_closing_another_library_removes_its_registration(namespace):
    op = define(namespace)
    op.register_fake(lambda x: x.new_empty(7))
    with torchop.Library(namespace, "FRAGMENT") as library:
        torchop.register_fake(op, lambda x: x.new_empty(9), lib=library)
        torchop.register_kernel(op, TYPE, lambda x: x + 5, lib=library)
        assert op(T).tolist() == [5, 5]
        with torch._subclasses.fake_tensor.FakeTensorMode():
            assert op(torch.zeros(2)).shape == (9,)
    assert op(T).tolist() == [1, 1]
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert op(torch.zeros(2)).shape == (7,)


def test_registration_through_the_operators_own_library(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        op = torchop.custom_op(
            f"{namespace}::op",
            lambda x: x,
            mutates_args=(),
            schema="(Tensor x) -> Tensor",
            lib=library,
        )
        assert resolve(op, "caller", library) is op._definition


@pytest.mark.parametrize("module", [torchop, torch.library])
def test_registration_for_a_stock_operator_without_library_is_permanent(namespace, module):
    with module._scoped_library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        torchop.register_kernel(f"{namespace}::op", TYPE, lambda x: x + 5)
        assert packet(namespace)(T).tolist() == [5, 5]
    with module._scoped_library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        assert packet(namespace)(T).tolist() == [5, 5]


def test_definition_follows_an_operator_that_is_defined_with_another_schema(namespace):
    guest = torchop.Library(namespace, "IMPL")
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        before = resolve(f"{namespace}::op", "caller", guest)
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x, Tensor y) -> Tensor")
        after = resolve(f"{namespace}::op", "caller", guest)
        assert after is not before
        assert len(after.schema.arguments) == 2
        torchop.register_kernel(f"{namespace}::op", TYPE, lambda x, y: x + 5, lib=guest)
        assert packet(namespace)(T, T).tolist() == [5, 5]
    guest.close()


FORMS = {
    "out": "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
    "inplace": "(Tensor(a!) x, Tensor y) -> Tensor(a!)",
}


@needs_tags
@pytest.mark.parametrize("make", [torchop.Library, torch.library.Library])
@pytest.mark.parametrize("tag", FORMS)
def test_tags_decide_the_form_of_an_operator_in_a_library(namespace, tag, make):
    library = make(namespace, "FRAGMENT")
    for name, tags in (
        ("plain", ()),
        ("op", (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, tag))),
    ):
        library.define(name + FORMS[tag], tags=tags)
    assert find_schema(OpName.parse(f"{namespace}::plain")).form is Form.PLAIN
    assert find_schema(OpName.parse(f"{namespace}::op")).form.value == f"torch.Tag.{tag}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # registering an unnecessary fake kernel must not warn
        torchop.register_fake(f"{namespace}::op", lambda *args, out=None: out, lib=library)
    library._destroy()


@needs_tags
def test_formula_of_an_out_variant_in_a_library_is_refused(namespace):
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        library.define("op" + FORMS["out"], tags=torch.Tag.out)
        with pytest.raises(
            RuntimeError,
            match=f"operator tagged with torch.Tag.out: {namespace}::op. Out variants do not",
        ):
            torchop.register_autograd(f"{namespace}::op", lambda ctx, grad: grad, lib=library)


@needs_tags
def test_in_place_operator_in_a_library_has_a_formula(namespace):
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        library.define("op" + FORMS["inplace"], tags=torch.Tag.inplace)
        library.impl("op", lambda x, y: x.mul_(y), "CompositeExplicitAutograd")

        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[1])

        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0], None

        torchop.register_autograd(
            f"{namespace}::op", backward, setup_context=setup_context, lib=library
        )

        def function(x):
            y = x * 2
            assert getattr(torch.ops, namespace).op(y, y.new_full((2,), 3.0)) is y
            return y.sum()

        for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
            x = torch.ones(2, requires_grad=True)
            call(x).backward()
            assert x.grad.tolist() == [6, 6]


@pytest.mark.filterwarnings("ignore::torchop.RedefinitionWarning")
@pytest.mark.parametrize("as_method", [True, False])
def test_replaced_handle_cannot_register_through_a_library(namespace, as_method):
    def define():
        return torchop.custom_op(
            f"{namespace}::op", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
        )

    def rule(info, dims, x):
        return x * 100, dims[0]

    older, newer = define(), define()
    with torchop.Library(namespace, "FRAGMENT") as library:
        register = older.register_vmap if as_method else partial(torchop.register_vmap, older)
        with pytest.raises(torchop.OperatorGoneError, match="replaced"):
            register(rule, lib=library)
        assert torch.vmap(newer)(torch.ones(2)).tolist() == [2, 2]


def triple(grad: Tensor) -> Tensor:
    return grad * 3


def leave_behind(namespace, way, name="op"):
    """Deregister an operator with rules that outlive it, including a helper operator."""
    library = (torchop if way == "close" else torch.library).Library(namespace, "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x.clone(), "CompositeExplicitAutograd")
    torchop.register_autograd(f"{namespace}::{name}", backward_kernel=triple)
    torchop.get_rule("inverse").register(f"{namespace}::{name}", torch.neg)
    handle = torch.library.custom_op(
        f"{namespace}::{name}_stock", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    torchop.register_autograd(handle, backward_kernel=triple)
    own = define(namespace, f"{name}_own")
    own.register_autograd(lambda ctx, grad: grad)
    own._lib._destroy()
    handle._lib._destroy()
    if way == "close":
        library.close()
    elif way == "destroy":
        library._destroy()
    else:
        del library
        gc.collect()
    return own  # PyTorch lists the handle as long as it is referenced


def look_at_all_operators():
    torchop.cache_key_tag()
    torchop.providers()
    with torchop.accelerate("*") as acceleration:
        str(acceleration)
    with torchop.record("*") as recorded:
        repr(recorded)


@pytest.mark.parametrize("way", ["close", "destroy", "collect"])
def test_tools_skip_operators_that_were_deregistered(namespace, way):
    _handle = leave_behind(namespace, way)
    look_at_all_operators()
    name = f"{namespace}::op__backward_kernel"
    assert name in torchop.explain(name, torch.ones(2)).op
    assert f"{namespace}::op_own" not in own_definitions()


def test_tools_skip_operators_that_another_thread_deregisters(namespace):
    errors, stop = [], threading.Event()

    def define_and_deregister():
        try:
            for number in itertools.count():
                leave_behind(namespace, "close" if number % 2 else "destroy", f"op{number}")
                if stop.is_set():
                    break
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=define_and_deregister)
    thread.start()
    try:
        for _ in range(8):
            look_at_all_operators()
    finally:
        stop.set()
        thread.join()
    assert errors == []
