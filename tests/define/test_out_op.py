from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torchgen.model import FunctionSchema, SchemaKind

import torchop
from tests._support.devices import DEVICE
from tests._support.releases import INPLACE
from tests.define.families import SAMPLES, bounds, forms_of, sine, write_sine


def test_all_forms_compute_the_same(family: torchop.OperatorFamily) -> None:
    x = torch.randn(3)
    expected, buffer, own = x.sin(), torch.empty(3), x.clone()
    assert torch.allclose(family.functional(x), expected)
    assert family.out(x, out=buffer) is buffer
    assert torch.allclose(buffer, expected)
    assert family.inplace is not None
    assert family.inplace(own) is own
    assert torch.allclose(own, expected)


def test_schemas_match_pytorchs_own_forms(family: torchop.OperatorFamily, namespace: str) -> None:
    assert family.inplace is not None
    assert str(family.functional.schema) == f"{namespace}::sin(Tensor x) -> Tensor"
    assert str(family.out.schema) == (
        f"{namespace}::sin.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"
    )
    assert str(family.inplace.schema) == f"{namespace}::sin_(Tensor(a!) x) -> Tensor(a!)"
    assert (INPLACE in family.inplace.tags) is hasattr(torch.Tag, "inplace")
    assert all(op.tags.count(torch.Tag.pt2_compliant_tag) == 1 for op in forms_of(family))


def test_several_outputs(namespace: str) -> None:
    family = bounds(namespace)
    x = torch.randn(3, 4)
    low, high = family(x, scale=2)
    assert torch.allclose(low, x * 2 - 1)
    assert torch.allclose(high, (x * 2).sum(-1) + 1)
    buffers = torch.empty(3, 4), torch.empty(3)
    results = family(x, 0.5, low=buffers[0], high=buffers[1])
    assert results[0] is buffers[0]
    assert results[1] is buffers[1]
    assert torch.allclose(buffers[0], x - 0.5)
    assert str(family.out.schema) == (
        f"{namespace}::bounds.out(Tensor x, float margin=1., *, int scale=1, Tensor(a!) low, "
        "Tensor(b!) high) -> (Tensor(a!), Tensor(b!))"
    ).replace("int scale", "SymInt scale")
    assert family.inplace is None


def test_family_looks_like_its_kernel(family: torchop.OperatorFamily, namespace: str) -> None:
    assert repr(family) == (
        f"<torchop.OperatorFamily {namespace}::sin, {namespace}::sin.out, {namespace}::sin_>"
    )
    assert family.__doc__ is not None
    assert family.__doc__.startswith("Compute the sine with NumPy.")
    assert str(inspect.signature(family.functional)) == "(x: torch.Tensor) -> torch.Tensor"
    assert list(inspect.signature(family).parameters) == ["x", "out"]
    assert list(inspect.signature(family.out).parameters) == ["x", "out"]
    assert inspect.signature(family).parameters["out"].default is None
    assert family.functional.__name__ == "write_sine"
    assert family.out.__name__ == "sin_out"
    assert family.out.__doc__ is not None
    assert family.out.__doc__.startswith("Writes the result of write_sine into out")
    assert family.inplace is not None
    assert family.inplace.__doc__ is not None
    assert family.inplace.__doc__.startswith("Overwrites x with the result of write_sine")


def test_non_elementwise_kernel_in_place_uses_a_temporary(
    namespace: str,
) -> None:
    @torchop.out_op(f"{namespace}::reverse", like="x", inplace=True)
    def reverse(x: Tensor, *, out: Tensor) -> None:
        for index in range(len(x)):
            out[index] = x[len(x) - 1 - index]

    x = torch.arange(4.0)
    assert reverse.inplace(x) is x
    assert x.tolist() == [3, 2, 1, 0]
    with pytest.raises(torchop.MutationError, match="refer to a single memory location"):
        reverse(x, out=x)
    assert x.tolist() == [3, 2, 1, 0]


def test_elementwise_kernel_needs_no_memory_in_place(namespace: str) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def kernel(x: Tensor, *, out: Tensor) -> None:
        seen.append((x, out))
        torch.neg(x, out=out)

    family = torchop.out_op(f"{namespace}::neg", kernel, like="x", inplace=True, elementwise=True)
    x = torch.ones(2)
    assert family.inplace is not None
    family.inplace(x)
    family(x, out=x)
    assert all(given is x and out is x for given, out in seen)
    assert x.tolist() == [1, 1]


def test_call_with_and_without_a_rule_that_needs_the_defaults(namespace: str) -> None:
    @torchop.out_op(f"{namespace}::repeat", allocate=lambda x, times: x.new_empty(times * len(x)))
    def repeat(x: Tensor, times: int = 2, *, out: Tensor) -> None:
        out.copy_(x.repeat(times))

    assert repeat(torch.ones(2)).shape == (4,)
    assert repeat(torch.ones(2), 3).shape == (6,)
    assert repeat(torch.ones(2), out=torch.empty(4)).shape == (4,)
    with pytest.raises(torchop.MutationError, match=r"shape \[6\], but got \[4\]"):
        repeat(torch.ones(2), 3, out=torch.empty(4))


def test_factory_without_tensors(namespace: str) -> None:
    @torchop.out_op(f"{namespace}::ramp", allocate=lambda n, device: torch.empty(n, device=device))
    def ramp(n: int, device: torch.device, *, out: Tensor) -> None:
        out.copy_(torch.arange(n))

    assert ramp(3, DEVICE).tolist() == [0, 1, 2]
    assert ramp(2, DEVICE, out=torch.empty(2)).tolist() == [0, 1]
    with pytest.raises(torchop.MutationError, match=f"device meta, but got {DEVICE}"):
        ramp(2, torch.device("meta"), out=torch.empty(2))


def test_the_code_generator_of_pytorch_reads_the_schemas_and_ties_the_forms(namespace: str) -> None:
    # ExecuTorch uses this parser to find the out= form of a functional operator by its schema.
    for family in (sine(namespace), bounds(namespace)):
        functional, out = (
            FunctionSchema.parse(str(op.schema).partition("::")[2])
            for op in (family.functional, family.out)
        )
        assert (functional.kind(), out.kind()) == (SchemaKind.functional, SchemaKind.out)
        assert out.signature() == functional.signature()
        assert str(out) == str(family.out.schema).partition("::")[2]


def test_more_outputs_than_letters_have_numbers(namespace: str) -> None:
    names = [f"out{index}" for index in range(27)]
    parameters = ", ".join(f"{name}: torch.Tensor" for name in names)
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def write(x: torch.Tensor, *, {parameters}) -> None: ...", scope)
    family = torchop.out_op(
        f"{namespace}::op", scope["write"], allocate=lambda x: (torch.empty_like(x),) * 27
    )
    assert "Tensor(z!) out25, Tensor(a26!) out26) ->" in str(family.out.schema)


@pytest.mark.parametrize("sample", list(SAMPLES))
def test_opcheck_passes_on_all_forms(family: torchop.OperatorFamily, sample: str) -> None:
    x = SAMPLES[sample]()
    torchop.opcheck(family.functional, (x,))
    torchop.opcheck(family.out, (x,), {"out": torch.empty_like(x)})
    torchop.opcheck(family.out, (x,), {"out": x.new_empty((*x.shape, 2))[..., 1]})
    assert family.inplace is not None
    torchop.opcheck(family.inplace, (x,))


def test_opcheck_passes_with_gradients(namespace: str, family: torchop.OperatorFamily) -> None:
    torchop.opcheck(family.functional, (torch.randn(3, requires_grad=True),))
    with torch.no_grad():
        x = torch.randn(3, requires_grad=True)
        torchop.opcheck(family.out, (x,), {"out": torch.empty(3)}, test_utils="test_schema")

    @torchop.out_op(f"{namespace}::mul", like="x", inplace=True, elementwise=True)
    def mul(x: Tensor, y: Tensor, *, out: Tensor) -> None:
        torch.mul(x, y, out=out)

    mul.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    # Only the second argument requires grad, because the in-place form cannot mutate a leaf that
    # requires grad.
    assert mul.inplace is not None
    torchop.opcheck(mul.inplace, (torch.randn(3), torch.randn(3, requires_grad=True)))


def test_a_family_is_copied_and_pickled_as_its_operators_are(
    namespace: str, family: torchop.OperatorFamily
) -> None:
    named_otherwise = torchop.out_op(f"{namespace}::other", write_sine, like="x")
    for each in (family, named_otherwise):
        assert copy.copy(each) is each
        assert copy.deepcopy([each]) == [each]
        assert pickle.loads(pickle.dumps(each)) is each
