import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import on_both
from tests._support.devices import AUTOGRAD, BACKEND, OTHER, OTHER_BACKEND, TYPE

T = torch.zeros(2)


def packet(namespace, name="op"):
    return getattr(getattr(torch.ops, namespace), name)


@pytest.fixture
def library(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        yield library


def plus(amount):
    return lambda x: x + amount


# --------------------------------------------------------------------------------------------------
# impl


def test_operator_may_be_given_in_every_way(library, namespace):
    ways = ("op", f"{namespace}::op", f"{namespace}::op.default", packet(namespace).default)
    for way in ways:
        with torchop.Library(namespace, "IMPL") as guest:
            guest.impl(way, plus(5), BACKEND)
            assert packet(namespace)(T).tolist() == [5, 5]
        with torchop.Library(namespace, "IMPL") as guest:
            torchop.impl(guest, way, BACKEND)(plus(6))
            assert packet(namespace)(T).tolist() == [6, 6]
    for way in (*ways[1:], packet(namespace)):
        with torchop.Library(namespace, "IMPL") as guest:
            torchop.impl(way, TYPE, plus(7), lib=guest)
            assert packet(namespace)(T).tolist() == [7, 7]


def test_overloads_are_implemented_separately(library, namespace):
    library.define("op.two(Tensor x, Tensor y) -> Tensor")
    library.impl("op.two", lambda x, y: x + 2, BACKEND)
    assert packet(namespace)(T, T).tolist() == [2, 2]
    with pytest.raises(NotImplementedError):
        packet(namespace)(T)


@pytest.mark.parametrize("types", [TYPE, BACKEND, "default", [TYPE, OTHER], (BACKEND, TYPE)])
def test_types_are_device_types_or_keys(library, namespace, types):
    torchop.impl(f"{namespace}::op", types, plus(1), lib=library)
    assert packet(namespace)(T).tolist() == [1, 1]


def test_decorators_return_the_function(library, namespace):
    def scenario(module, namespace):
        home = module.Library(namespace, "FRAGMENT")
        home.define("op(Tensor x) -> Tensor")
        kernel = plus(1)
        result = module.impl(f"{namespace}::op", TYPE, lib=home)(kernel) is kernel
        home._destroy()
        return result

    both = on_both(scenario, f"{namespace}_decorated")
    assert both.ours is True
    assert both.stock is False
    kernel = plus(1)
    assert torchop.impl(f"{namespace}::op", TYPE, kernel, lib=library) is kernel
    assert torchop.impl(library, "op", OTHER_BACKEND)(kernel) is kernel


@pytest.mark.parametrize("form", ["method", "function"])
def test_kernel_may_be_registered_before_the_operator(namespace, form):
    with torchop.Library(namespace, "FRAGMENT") as library:
        if form == "method":
            library.impl("op", lambda x: (x, x), BACKEND)
        else:
            torchop.impl(f"{namespace}::op", TYPE, lambda x: (x, x), lib=library)
        library.define("op(Tensor x) -> (Tensor, Tensor)")
        assert len(packet(namespace)(T)) == 2


class Endless:
    def __repr__(self):
        return "endless" * 1000


@pytest.mark.parametrize("key", [None, 3, ["CPU"], torch._C.DispatchKey.CPU, Endless()])
def test_a_dispatch_key_that_is_no_string_is_refused(library, namespace, key):
    calls = [
        lambda: library.impl("op", plus(1), key),
        lambda: torchop.impl(f"{namespace}::op", [key], plus(1)),
    ]
    # `impl(library, "op", None)` is valid: None stands for the library's own dispatch key.
    if key is not None:
        calls.append(lambda: torchop.impl(library, "op", key)(plus(1)))
    for call in calls:
        with pytest.raises(TypeError, match=r"impl\((.*::)?op\): .*'CPU'|'cpu'.*got") as refusal:
            call()
        assert len(str(refusal.value)) < 400
    by_default = "CompositeImplicitAutograd"
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::op", by_default)
    if not isinstance(key, torch._C.DispatchKey):
        with pytest.raises(ValueError, match=rf"get_kernel\({namespace}::op\): .*got") as refusal:
            torchop.get_kernel(f"{namespace}::op", key)
        assert len(str(refusal.value)) < 400


def test_letters_that_pytorch_cannot_show_are_in_the_message(library, namespace):
    calls = [
        lambda: library.define("größe(Tensor x) -> Tensor"),
        lambda: library.impl(f"{namespace}::größe", plus(1), BACKEND),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"gr.* <--- HERE"):
            call()
    with pytest.raises(torchop.OperatorNotFoundError, match=f"{namespace}::größe does not exist"):
        torchop.get_kernel(f"{namespace}::größe", BACKEND)


def test_operator_of_another_namespace_is_refused(library, namespace):
    with pytest.raises(RuntimeError, match=rf"\(aten::sin\): .* not match namespace '{namespace}'"):
        library.impl("aten::sin", plus(1), BACKEND)


@pytest.mark.parametrize("key", ["cpu", "Toaster"])
def test_unknown_key_is_refused(library, key):
    with pytest.raises(RuntimeError, match=f"{key}"):
        library.impl("op", plus(1), key)


def test_unknown_device_type_is_refused_and_nothing_is_registered(library, namespace):
    with pytest.raises(RuntimeError, match="toaster"):
        torchop.impl(f"{namespace}::op", ["cpu", "toaster"], plus(1), lib=library)
    with pytest.raises(NotImplementedError):
        packet(namespace)(T)


def test_kernel_replacement_can_be_forbidden(library, namespace):
    library.impl("op", plus(1), BACKEND)
    with pytest.raises(RuntimeError, match="already a kernel registered"):
        library.impl("op", plus(2), BACKEND, allow_override=False)
    assert packet(namespace)(T).tolist() == [1, 1]
    with torchop.Library(namespace, "IMPL") as guest:
        guest.impl("op", plus(2), "Meta", allow_override=False)
        assert packet(namespace)(T.to("meta")).is_meta


def test_kernel_with_a_keyset_can_redispatch(library, namespace):
    def kernel(keyset, x):
        assert keyset.has(getattr(torch._C.DispatchKey, AUTOGRAD))
        return packet(namespace).default.redispatch(keyset & torch._C._after_autograd_keyset, x) * 2

    library.impl("op", plus(1), BACKEND)
    library.impl("op", kernel, AUTOGRAD, with_keyset=True)
    assert packet(namespace)(T).tolist() == [2, 2]


# --------------------------------------------------------------------------------------------------
# Kernels for PyTorch's own operators


@pytest.mark.parametrize("way", ["sin", "aten::sin", torch.ops.aten.sin.default])
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_operator_of_pytorch_has_another_kernel_inside_the_block_only(way):
    with torchop.Library("aten", "IMPL") as library:
        library.impl(way, lambda x: torch.full_like(x, 5), BACKEND)
        assert torch.sin(T).tolist() == [5, 5]
    assert torch.sin(T).tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_meta_kernel_of_pytorch_is_replaced_inside_the_block_only():
    with torchop.Library("aten", "IMPL") as library:
        library.impl("cholesky_inverse", lambda x, upper=False: x.new_empty(7), "Meta")
        assert torch.cholesky_inverse(torch.empty(2, 2, device="meta")).shape == (7,)
    assert torch.cholesky_inverse(torch.empty(2, 2, device="meta")).shape == (2, 2)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_result_of_a_kernel_for_pytorch_is_checked():
    with torchop.Library("aten", "IMPL") as library:
        library.impl("frexp.Tensor", lambda x: (x, x, x), BACKEND)
        with pytest.raises(torchop.ResultError, match=r"aten::frexp\.Tensor: .* a tuple of 3"):
            torch.frexp(T)
    assert len(torch.frexp(T)) == 2


def test_kernel_of_pytorch_that_decomposes_takes_no_meta_kernel():
    with (
        torchop.Library("aten", "IMPL") as library,
        pytest.raises(RuntimeError, match="CompositeImplicitAutograd"),
    ):
        library.impl("kron", lambda x, y: x, "Meta")


# --------------------------------------------------------------------------------------------------
# get_kernel

KEYS = torch._C.DispatchKeySet(BACKEND)


@pytest.mark.parametrize("key", [BACKEND, getattr(torch._C.DispatchKey, BACKEND)])
def test_kernel_is_found_in_every_way_of_naming_an_operator(namespace, key):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    for way in (op, f"{namespace}::op", f"{namespace}::op.default", op.overload, packet(namespace)):
        assert torchop.get_kernel(way, key).call_boxed(KEYS, T).tolist() == [1, 1]


def test_handle_is_refused_by_get_kernel_of_pytorch(namespace):
    def scenario(library, namespace):
        op = library.custom_op(
            f"{namespace}::op", plus(1), mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        return library.get_kernel(op, BACKEND).call_boxed(KEYS, T).tolist()

    both = on_both(scenario, namespace)
    assert both.ours == [1, 1]
    assert isinstance(both.stock, ValueError)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_get_kernel_returns_the_kernel_of_that_time():
    kernel = torchop.get_kernel("aten::sin", BACKEND)
    with torchop.Library("aten", "IMPL") as library:
        library.impl("sin", lambda x: kernel.call_boxed(KEYS, x) + 5, BACKEND)
        assert torch.sin(T).tolist() == [5, 5]
        assert kernel.op_handle is not None


@pytest.mark.parametrize(
    ("op", "key", "error"),
    [
        ("aten::absent", "CPU", RuntimeError),
        ("aten::sin", "Toaster", ValueError),
        ("sin", "CPU", ValueError),
        (3, "CPU", ValueError),
        (torch.ops.aten.add, "CPU", ValueError),
    ],
)
def test_kernel_that_cannot_be_found_is_refused(op, key, error):
    with pytest.raises(error):
        torchop.get_kernel(op, key)


@pytest.mark.parametrize("key", ["Meta", "CompositeExplicitAutograd"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_meta_kernels_that_create_a_meta_tensor_compile(namespace, key, dynamic):
    with torchop.Library(namespace, "DEF") as library:
        library.define("one(Tensor x) -> Tensor")
        library.define("many(Tensor x) -> (Tensor, Tensor[])")
        library.impl("one", lambda x: x * 2, "CPU")
        library.impl("many", lambda x: (x * 2, [x * 3]), "CPU")

        def empty(x):
            return torch.empty(x.shape, device=x.device if key != "Meta" else "meta")

        library.impl("one", empty, key)
        library.impl("many", lambda x: (empty(x), [torch.empty_like(x)]), key)
        ops = getattr(torch.ops, namespace)

        def call(x):
            first, (second,) = ops.many(ops.one(x))
            return first + second

        compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 10.0))
