"""torchop's versions of the functions with which inference engines register operators."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
import torch.library
from torch import Tensor

import torchop
from tests._support.common import counting, needs_native
from tests._support.opaque_types import Constant
from torchop.compat import direct_register_custom_op, register_custom_op


def add_into(x: Tensor, out: Tensor, scale: Optional[float] = None) -> None:
    out.add_(x * (scale or 1.0))


def double(x: Tensor) -> Tensor:
    return x * 2


def like_x(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def engine(source: str, module: str) -> dict[str, Any]:
    """Run the source code as if it were a module of an engine, and return its variables."""
    scope: dict[str, Any] = {"__name__": module}
    exec(source, scope)
    return scope


# --------------------------------------------------------------------------------------------------
# direct_register_custom_op of vLLM and of SGLang


def test_signature_equals_vllms() -> None:
    parameters = inspect.signature(direct_register_custom_op).parameters.values()
    assert [(p.name, p.default) for p in parameters] == [
        ("op_name", inspect.Parameter.empty),
        ("op_func", inspect.Parameter.empty),
        ("mutates_args", None),
        ("fake_impl", None),
        ("target_lib", None),
        ("dispatch_key", None),
        ("tags", ()),
    ]
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_vllm_operator_runs_compiles_and_mutates(namespace: str) -> None:
    library = torch.library.Library(namespace, "FRAGMENT")
    op = direct_register_custom_op(
        op_name="add_into",
        op_func=add_into,
        mutates_args=["out"],
        fake_impl=lambda x, out, scale=None: None,
        target_lib=library,
        dispatch_key="CPU",
        tags=(torch.Tag.needs_fixed_stride_order,),
    )
    assert torch.Tag.needs_fixed_stride_order in op.overload.tags
    packet = getattr(torch.ops, namespace).add_into

    def step(x: Tensor, out: Tensor) -> Tensor:
        packet(x, out, 3.0)
        return out * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for call in (step, compiled):
        out = torch.ones(2)
        assert call(torch.ones(2), out).tolist() == [8, 8]
        assert out.tolist() == [4, 4]
    torchop.opcheck(op, (torch.ones(2), torch.ones(2)))


def attention(
    query: Tensor,
    output: Tensor,
    layer_name: Constant,
    output_scale: Tensor | None = None,
    kv_cache_dummy_dep: Tensor | None = None,
) -> None:
    output.copy_(query * layer_name.number)


def vllms_own(*, op_name: str, op_func: Any, target_lib: Any, **options: Any) -> None:
    """Register an operator like `direct_register_custom_op` of vLLM 0.32."""
    schema = torch.library.infer_schema(op_func, mutates_args=options["mutates_args"])
    target_lib.define(op_name + schema)
    target_lib.impl(op_name, op_func, dispatch_key=options["dispatch_key"])


@needs_native
@pytest.mark.parametrize("register", [direct_register_custom_op, vllms_own])
def test_vllm_calls_for_each_layer_are_native(namespace: str, register: Callable[..., Any]) -> None:
    library = torch.library.Library(namespace, "FRAGMENT")
    register(
        op_name="attention",
        op_func=attention,
        mutates_args=["output"],
        target_lib=library,
        dispatch_key="CPU",
    )
    packet = getattr(torch.ops, namespace).attention
    query, output = torch.ones(2), torch.zeros(2)
    with torchop.accelerate(f"{namespace}::*"), torch.inference_mode():
        packet(query, output, Constant(1))  # the first call is not native, the next ones are
        with counting(f"{namespace}::attention") as calls:
            for layer in range(4):
                packet(query, output, Constant(layer), kv_cache_dummy_dep=torch.empty(0))
                assert output.tolist() == [layer, layer]
    assert calls == {"native": 4}
    library._destroy()


def test_dispatch_key_selects_the_device_of_the_kernel(namespace: str) -> None:
    op = direct_register_custom_op(f"{namespace}::double", double, dispatch_key="CUDA")
    with pytest.raises(NotImplementedError, match="does not have a kernel registered for cpu"):
        op(torch.ones(1))
    everywhere = direct_register_custom_op(f"{namespace}::double2", double)
    assert everywhere(torch.ones(1)).tolist() == [2]
    explicit = direct_register_custom_op(
        f"{namespace}::double3", double, dispatch_key="CompositeExplicitAutograd"
    )
    assert explicit(torch.ones(1)).tolist() == [2]
    backend = torch._C._get_privateuse1_backend_name()
    other = direct_register_custom_op(f"{namespace}::double4", double, dispatch_key="PrivateUse1")
    assert f"kernels for {backend}" in repr(other)


def test_closing_the_target_library_deregisters_the_operator(namespace: str) -> None:
    library = torchop.Library(namespace, "FRAGMENT")
    op = direct_register_custom_op("double", double, target_lib=library)
    assert op(torch.ones(1)).tolist() == [2]
    library.close()
    with pytest.raises(torchop.OperatorGoneError):
        op(torch.ones(1))


def test_deleting_the_target_library_deregisters_the_operator(namespace: str) -> None:
    library = torchop.Library(namespace, "FRAGMENT")
    op = direct_register_custom_op("double", double, target_lib=library)
    reference = weakref.ref(library)
    del library
    gc.collect()
    assert reference() is None
    with pytest.raises(torchop.OperatorGoneError):
        op(torch.ones(1))
    with pytest.raises(TypeError, match="lib expects a Library, got str"):
        direct_register_custom_op(f"{namespace}::double", double, target_lib="lib")  # type: ignore[arg-type]


def test_default_namespace_is_the_calling_package(namespace: str) -> None:
    source = """
import torch
from torchop.compat import direct_register_custom_op, register_custom_op

def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

direct = direct_register_custom_op("direct", double)

@register_custom_op
def plain(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@register_custom_op(op_name="named", out_shape=0)
def function(x: torch.Tensor) -> torch.Tensor:
    return x * 2
"""
    scope = engine(source, f"{namespace}.layers.linear")
    names = [scope[name].name for name in ("direct", "plain", "function")]
    assert names == [f"{namespace}::direct", f"{namespace}::plain", f"{namespace}::named"]
    with pytest.raises(torchop.OperatorNameError, match=r"'direct' has no namespace.*target_lib"):
        engine(source, "__main__")


# --------------------------------------------------------------------------------------------------
# register_custom_op of SGLang, and fast_custom_op of TensorRT-LLM


def test_out_shape_accepts_a_name_or_a_position(namespace: str) -> None:
    def product(scale: float, x: Tensor) -> Tensor:
        return (x * scale).to(torch.float16)

    for number, place in enumerate(["x", 1, -1]):
        op = register_custom_op(
            product,
            op_name=f"{namespace}::product{number}",
            out_shape=place,
            out_dtype=torch.float16,
        )
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        assert compiled(2.0, torch.ones(2)).dtype == torch.float16
        torchop.opcheck(op, (2.0, torch.ones(3, 2)))


def test_decorator_accepts_the_name_first_like_tensorrt_llm(namespace: str) -> None:
    @register_custom_op(f"{namespace}::op", mutates_args=(), device_types=("CPU", "cuda"))
    def op(x: Tensor) -> Tensor:
        """Doubles."""
        return x * 2

    assert op.register_fake(like_x) is like_x
    assert op(torch.ones(1)).tolist() == [2]
    assert "kernels for cpu, cuda" in repr(op)
    assert op.__doc__ == "Doubles."
    assert torch.compile(op, fullgraph=True, backend="aot_eager")(torch.ones(1)).tolist() == [2]


def test_inplace_operator_needs_no_fake_kernel(namespace: str) -> None:
    @register_custom_op(op_name=f"{namespace}::add_one_", mutates_args=["x"], eager=False)
    def add_one_(x: Tensor) -> None:
        x.add_(1)

    x = torch.zeros(1)
    torch.compile(lambda x: add_one_(x), fullgraph=True, backend="aot_eager")(x)
    assert x.tolist() == [1]


# --------------------------------------------------------------------------------------------------
# Repeated and invalid registrations


def test_repeating_a_registration_returns_the_same_operator(namespace: str) -> None:
    def register(**options: Any) -> Any:
        return direct_register_custom_op(f"{namespace}::double", double, [], like_x, **options)

    first = register()
    held = first.overload
    assert register() is first
    assert held(torch.ones(1)).tolist() == [2]
    # If the options differ, a new operator is defined, which replaces the first.
    second = register(tags=(torch.Tag.needs_fixed_stride_order,))
    assert second is not first
    with pytest.raises(torchop.OperatorGoneError):
        first(torch.ones(1))
    # After the operator has been deregistered, the function must define a new one.
    second._definition.deregister("over")
    assert register()(torch.ones(1)).tolist() == [2]


WRONG: dict[str, tuple[Callable[[str], Any], str]] = {
    "fake kernel": (
        lambda name: direct_register_custom_op(name, double, fake_impl=lambda a, b: a),
        "a fake kernel",
    ),
    "argument of out_shape": (
        lambda name: register_custom_op(double, op_name=name, out_shape="y"),
        "out_shape='y' is neither the name nor the position of an argument of .*, which has x",
    ),
    "position of out_shape": (
        lambda name: register_custom_op(double, op_name=name, out_shape=1),
        "out_shape=1 is neither",
    ),
    "two descriptions": (
        lambda name: register_custom_op(double, op_name=name, out_shape=0, fake_impl=like_x),
        "fake_impl and out_shape both describe the result",
    ),
    "dtype alone": (
        lambda name: register_custom_op(double, op_name=name, out_dtype=torch.half),
        "out_dtype needs out_shape",
    ),
    "key": (
        lambda name: direct_register_custom_op(name, double, dispatch_key="AutogradCPU"),
        "'AutogradCPU' is a dispatch key, but not the key of a device",
    ),
    "device": (
        lambda name: register_custom_op(double, op_name=name, device_types="gpu"),
        "'gpu' is not a device type",
    ),
    "mutated name": (
        lambda name: direct_register_custom_op(name, double, mutates_args=["y"]),
        "mutates_args",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_registration_raises_and_defines_nothing(namespace: str, wrong: str) -> None:
    call, message = WRONG[wrong]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message) as caught:
        call(f"{namespace}::op")
    assert len(str(caught.value)) < 600
    assert not hasattr(getattr(torch.ops, namespace), "op")


def test_names_are_checked(namespace: str) -> None:
    with pytest.raises(
        torchop.OperatorNameError, match="got two names: 'a::b', and op_name='c::d'"
    ):
        register_custom_op("a::b", op_name="c::d")
    with pytest.raises(torchop.OperatorNameError, match="a string, got int"):
        direct_register_custom_op(3, double)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="register_custom_op"):
        register_custom_op(3)  # type: ignore[call-overload]
    library = torch.library.Library(namespace, "FRAGMENT")
    with pytest.raises(ValueError, match=f"lib is the library of the namespace '{namespace}'"):
        direct_register_custom_op("other::op", double, target_lib=library)
