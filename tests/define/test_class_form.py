"""operator: a class becomes the handle that custom_op would make of its members."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from tests.support import needs_native
from torchop import CustomOp, OperatorClassError


class Tracing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def define_crop(namespace: str) -> CustomOp[..., Tensor]:
    @torchop.operator(f"{namespace}::crop")
    class crop:
        """Crop a signal to a range."""

        tags = torch.Tag.needs_fixed_stride_order
        autocast = {"cpu": torch.bfloat16}  # noqa: RUF012  (read, never changed)
        out = True

        @staticmethod
        def forward(x: Tensor, box: Sequence[int], factor: float = 2.0) -> Tensor:
            return torch.from_numpy(x.detach().numpy()[box[0] : box[1]] * np.float32(factor))

        @staticmethod
        def fake(x: Tensor, box: Sequence[int], factor: float = 2.0) -> Tensor:
            return x.new_empty(box[1] - box[0])

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            x, ctx.box, ctx.factor = inputs
            ctx.size = x.shape[0]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            start, end = ctx.box
            return (
                torch.nn.functional.pad(grad * ctx.factor, (start, ctx.size - end)),
                None,
                None,
            )

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor, box: Any, factor: float) -> Any:
            rows = x.movedim(in_dims[0], 0)
            return torch.stack([crop(row, box, factor) for row in rows]), 0

        @staticmethod
        def right_inverse(output: Tensor, box: Sequence[int], factor: float) -> Tensor:
            return torch.cat([output.new_zeros(box[0]), output / factor])

        @staticmethod
        def examples() -> Any:
            yield torch.randn(5, requires_grad=True), [1, 3]
            yield {"x": torch.randn(5), "box": [0, 5], "factor": 3.0}

    return crop


# --------------------------------------------------------------------------------------------------
# The handle


def test_the_result_is_an_ordinary_handle_with_the_identity_of_the_class(namespace: str) -> None:
    crop = define_crop(namespace)
    assert isinstance(crop, CustomOp)
    assert crop.__name__ == "crop"
    assert crop.__qualname__ == "define_crop.<locals>.crop"
    assert crop.__module__ == __name__
    assert crop.__doc__ == "Crop a signal to a range."
    assert list(inspect.signature(crop).parameters) == ["x", "box", "factor"]
    assert str(crop.schema) == (
        f"{namespace}::crop(Tensor x, SymInt[] box, float factor=2.) -> Tensor"
    )
    assert torch.Tag.needs_fixed_stride_order in crop.tags
    assert "right inverse" in repr(crop)
    assert copy.deepcopy(crop) is crop
    assert pickle.loads(pickle.dumps(crop)) is crop


def test_every_member_is_registered(namespace: str) -> None:
    crop = define_crop(namespace)
    x = torch.arange(5.0, requires_grad=True)
    expected = torch.tensor([2.0, 4.0])
    assert torch.equal(crop(x, [1, 3]), expected)
    assert torch.equal(getattr(torch.ops, namespace).crop(x, [1, 3]), expected)
    crop(x, [1, 3]).sum().backward()
    assert torch.equal(x.grad, torch.tensor([0.0, 2.0, 2.0, 0.0, 0.0]))
    assert torch.equal(torch.vmap(lambda x: crop(x, [1, 3]))(x.detach()[None]), expected[None])
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="BFloat16"):
        crop(x, [1, 3])  # the cast happened: NumPy has no such dtype
    buffer = torch.empty(2)
    assert crop.out is not None
    assert crop.out(x.detach(), [1, 3], out=buffer) is buffer
    assert torch.equal(buffer, expected)
    assert crop.inplace is None
    assert torch.equal(
        torchop.right_inverse(crop)(expected, box=[1, 3]), torch.tensor([0.0, 1.0, 2.0])
    )


def test_opcheck_uses_the_examples(namespace: str) -> None:
    crop = define_crop(namespace)
    assert set(torchop.opcheck(crop).values()) == {"SUCCESS"}
    (first, nothing), (none, second) = crop.examples()
    assert (first[1], nothing, none, second["factor"]) == ([1, 3], {}, (), 3.0)


@needs_native
def test_a_call_is_native(namespace: str) -> None:
    explained = torchop.explain(define_crop(namespace), torch.ones(5), [1, 3])
    assert explained.native, explained


def test_compile_and_export(namespace: str) -> None:
    crop = define_crop(namespace)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return crop(x + 1, [1, 3], 3.0) * 2

    x = torch.arange(5.0, requires_grad=True)
    expected = torch.tensor([12.0, 18.0])
    compiled = torch.compile(Model(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    compiled(x).sum().backward()
    assert torch.equal(x.grad, torch.tensor([0.0, 6.0, 6.0, 0.0, 0.0]))
    program = torch.export.export(Model(), (x.detach(),))
    assert any(node.target is crop.overload for node in program.graph.nodes)
    assert torch.equal(program.module()(x.detach()), expected)


def test_a_handle_is_loaded_from_a_pickle_by_importing_its_module(
    namespace: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ops_of_a_class.py").write_text(
        "import torch, torchop\n"
        f"@torchop.operator('{namespace}::double')\n"
        "class double:\n"
        "    @staticmethod\n"
        "    def forward(x: torch.Tensor) -> torch.Tensor:\n"
        "        return x * 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import ops_of_a_class  # type: ignore[import-not-found]

    pickled = pickle.dumps(ops_of_a_class.double)
    ops_of_a_class.double._definition.end("gone")
    del sys.modules["ops_of_a_class"]
    assert torch.equal(pickle.loads(pickled)(torch.ones(1)), torch.tensor([2.0]))


# --------------------------------------------------------------------------------------------------
# Kernels


@needs_native
def test_kernels_of_devices_with_a_signature(namespace: str) -> None:
    @torchop.operator(f"{namespace}::negate")
    class negate:
        @staticmethod
        def signature(x: Tensor, *, twice: bool = False) -> Tensor:
            """Negate."""
            raise AssertionError("a signature is not run")

        @staticmethod
        def cpu(x: Tensor, *, twice: bool) -> Tensor:
            return x.clone() if twice else -x

        @staticmethod
        def meta(x: Tensor, *, twice: bool) -> Tensor:
            return torch.empty_like(x)

    assert str(negate.schema) == f"{namespace}::negate(Tensor x, *, bool twice=False) -> Tensor"
    assert negate.__doc__ == "Negate."
    assert torch.equal(negate(torch.ones(1)), -torch.ones(1))
    assert torch.equal(negate(torch.ones(1), twice=True), torch.ones(1))
    assert negate(torch.ones(1, device="meta")).is_meta
    assert torchop.explain(negate, torch.ones(1)).native
    with (
        negate.set_kernel_enabled("cpu", False),
        pytest.raises(torchop.MissingKernelError, match=r"kernels for cpu, meta only"),
    ):
        negate(torch.ones(1))


def test_kernels_of_devices_with_a_schema(namespace: str) -> None:
    @torchop.operator(f"{namespace}::negate")
    class negate:
        schema = "(Tensor x, int n=2) -> Tensor"
        cpu = staticmethod(lambda x, n=2: -x * n)

    assert torch.equal(negate(torch.ones(1)), torch.tensor([-2.0]))
    assert negate._definition.declaration.site is not None
    assert negate._definition.declaration.site.file == __file__
    assert repr(negate).endswith("; kernels for cpu>"), "and for nothing else"


def test_a_kernel_of_a_device_beside_the_default_one(namespace: str) -> None:
    @torchop.operator(f"{namespace}::which")
    class which:
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x + 1

        @staticmethod
        def cpu(x: Tensor) -> Tensor:
            return x + 2

    assert torch.equal(which(torch.zeros(1)), torch.tensor([2.0]))
    with which.set_kernel_enabled("cpu", False):
        assert torch.equal(which(torch.zeros(1)), torch.tensor([1.0]))


def test_forward_may_be_any_callable(namespace: str) -> None:
    def scaled(factor: float, x: Tensor) -> Tensor:
        return x * factor

    @torchop.operator(f"{namespace}::double")
    class double:
        schema = "(Tensor x) -> Tensor"
        forward = functools.partial(scaled, 2.0)
        fake = torch.empty_like

    assert double.__name__ == "double"
    assert torch.equal(double(torch.ones(1)), torch.tensor([2.0]))


# --------------------------------------------------------------------------------------------------
# Attributes


def test_attributes_of_custom_op(namespace: str) -> None:
    written: list[float] = []

    @torchop.operator(f"{namespace}::fill")
    class fill:
        mutates_args = ("x",)

        @staticmethod
        def forward(x: Tensor) -> None:
            x.fill_(1)

    @torchop.operator(f"{namespace}::log")
    class log:
        effects = "ordered"

        @staticmethod
        def forward(x: Tensor) -> None:
            written.append(x.sum().item())

    x = torch.zeros(2)
    fill(x)
    log(x)
    assert (fill.schema.is_mutable, written) == (True, [2.0])
    assert "effect ORDERED" in repr(log)


def test_other_forms_and_torch_dispatch(namespace: str) -> None:
    @torchop.operator(f"{namespace}::negate")
    class negate:
        inplace = True
        out = f"{namespace}::negate_into"
        autocast = torch.bfloat16

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return -x

        @staticmethod
        def _in_trace(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
            return torch.full_like(args[0], 7)

        torch_dispatch = {Tracing: _in_trace}  # noqa: RUF012  (read, never changed)

    x = torch.ones(1)
    assert negate.inplace is not None
    assert negate.out is not None
    assert (negate.inplace.name, negate.out.name) == (
        f"{namespace}::negate_",
        f"{namespace}::negate_into",
    )
    assert negate.inplace(x) is x
    assert torch.equal(x, torch.tensor([-1.0]))
    with Tracing():
        assert torch.equal(negate(x), torch.tensor([7.0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert negate(x).dtype is torch.bfloat16


def test_rules_without_writing_them(namespace: str) -> None:
    @torchop.operator(f"{namespace}::curve")
    class curve:
        fake = {"like": "x"}  # noqa: RUF012  (read, never changed)
        vmap = "sequential"
        backward = torchop.derived("save")
        compile = "inline"

        @staticmethod
        def forward(x: Tensor, factor: float = 2.0) -> Tensor:
            return x.sin() * factor

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            x, ctx.factor = inputs
            ctx.save_for_forward(x)

        @staticmethod
        def jvp(ctx: Any, x: Tensor, factor: None) -> Tensor:
            return ctx.saved_tensors[0].cos() * x * ctx.factor

    x = torch.randn(3, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(curve(x).sum(), x)[0], x.cos() * 2.0)
    torch.testing.assert_close(torch.vmap(curve)(torch.ones(2, 3)), curve(torch.ones(2, 3)))
    _, tangent = torch.func.jvp(curve, (x.detach(),), (torch.ones(3),))
    torch.testing.assert_close(tangent, x.detach().cos() * 2.0)
    assert curve(torch.empty(4, device="meta")).shape == (4,)
    described = repr(curve)
    assert "autograd derived (save), jvp" in described
    assert "vmap (sequential)" in described


def test_an_opaque_backward(namespace: str) -> None:
    @torchop.operator(f"{namespace}::cube")
    class cube:
        fake = torch.empty_like
        opaque = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x**3

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * torch.from_numpy(3 * x.detach().numpy() ** 2)

    torch._dynamo.reset()
    x = torch.tensor([2.0], requires_grad=True)
    torch.compile(cube, fullgraph=True, backend="aot_eager")(x).backward()
    assert x.grad is not None
    assert x.grad.item() == 12
    assert "autograd (opaque)" in repr(cube)


def test_an_operator_of_a_library_goes_with_it(namespace: str) -> None:
    with torchop.Library(namespace, "DEF") as library:

        @torchop.operator(f"{namespace}::negate", lib=library)
        class negate:
            inplace = True

            @staticmethod
            def forward(x: Tensor) -> Tensor:
                return -x

        in_place = negate.inplace
        assert in_place is not None
    for op in (negate, in_place):
        with pytest.raises(torchop.OperatorGoneError, match="library"):
            op(torch.ones(1))


# --------------------------------------------------------------------------------------------------
# Base classes, and names


class Elementwise:
    """Rules that many operators share."""

    @staticmethod
    def fake(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def examples() -> Any:
        yield (torch.randn(3),)


def test_base_classes_share_rules(namespace: str) -> None:
    @torchop.operator(f"{namespace}::negate")
    class negate(Elementwise):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return -x

    @torchop.operator(f"{namespace}::double")
    class double(Elementwise):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def examples() -> Any:
            yield (torch.ones(2),)

    for op in (negate, double):
        assert op(torch.ones(1, device="meta")).is_meta
        torchop.opcheck(op)
    assert torch.equal(double.examples()[0][0][0], torch.ones(2)), "the nearest member counts"
    assert double.__doc__ is None, "a base class describes itself"


def test_none_takes_back_what_a_base_class_has(namespace: str) -> None:
    class Invertible(Elementwise):
        inplace = True

        @staticmethod
        def inverse(output: Tensor) -> Tensor:
            return -output

    @torchop.operator(f"{namespace}::relu")
    class relu(Invertible):
        inverse = None
        inplace = False
        tags = None

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.relu()

    assert not torchop.get_rule("inverse").has(relu)
    assert relu.inplace is None
    assert torchop.get_rule("examples").has(relu)


def test_operators_that_share_forward_are_told_apart(namespace: str) -> None:
    class Base:
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return -x

    @torchop.operator(f"{namespace}::first")
    class first(Base):
        pass

    with pytest.warns(torchop.RedefinitionWarning, match="defined again"):

        @torchop.operator(f"{namespace}::first")
        class second(Base):
            pass

    assert (first.__name__, second.__name__) == ("first", "second")
    with pytest.raises(torchop.OperatorGoneError, match="replaced"):
        first(torch.ones(1))


def test_the_same_class_again_replaces_its_own_quietly(namespace: str) -> None:
    before = define_crop(namespace)
    after = define_crop(namespace)
    assert after is not before
    assert torchop.get_rule("right_inverse").has(after)


def test_private_names_are_the_authors_own(namespace: str) -> None:
    @torchop.operator(f"{namespace}::double")
    class double:
        _factor = 2

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

        def _helper(self) -> None: ...

        def __len__(self) -> int:
            return 0

    assert torch.equal(double(torch.ones(1)), torch.tensor([2.0]))


def test_an_operator_is_no_base_class(namespace: str) -> None:
    crop = define_crop(namespace)
    with pytest.raises(TypeError, match=r"::crop is an operator, not a class.*plain class"):

        class larger(crop):  # type: ignore[misc,valid-type]
            pass


# --------------------------------------------------------------------------------------------------
# Mistakes: each is found before anything is defined, or takes it back


def forward(x: Tensor) -> Tensor:
    return x.clone()


def make(**members: Any) -> type:
    return types.new_class("sample", (), exec_body=lambda body: body.update(members))


KERNEL = {"forward": staticmethod(forward)}

MISTAKES = {
    "unknown": (
        {**KERNEL, "fakes": staticmethod(forward)},
        r"class sample has the member 'fakes', which is neither a rule nor a device type "
        r"\(did you mean 'fake'\?\)\. The name of a helper starts with an underscore",
    ),
    "unknown, near an attribute": ({**KERNEL, "mutate_args": ()}, "did you mean 'mutates_args'"),
    "unknown, near a rule": ({**KERNEL, "inverted": 3}, "did you mean 'inverse'"),
    "unknown, near nothing": ({**KERNEL, "zzz": 1}, r"nor a device type\. The name"),
    "a method": (
        {"forward": forward},
        r"has a method 'forward', but an operator has no instances: write @staticmethod",
    ),
    "a class method": ({"forward": classmethod(forward)}, "has a classmethod 'forward'"),
    "a property": ({**KERNEL, "fake": property(forward)}, "has a property 'fake'"),
    "not a function": (
        {**KERNEL, "fake": 3},
        "member 'fake', which must be a static function, or a dict with a declaration: .*; got 3",
    ),
    "not a kernel": ({**KERNEL, "cpu": "c"}, "'cpu', which must be a static function; got 'c'"),
    "not a dtype": (
        {**KERNEL, "autocast": "half"},
        "'autocast', which must be a dtype, or a dict",
    ),
    "not a dict": ({**KERNEL, "torch_dispatch": forward.__name__}, "a dict of functions by mode"),
    "not a form": ({**KERNEL, "out": 3}, "'out', which must be True, or the name"),
    "no kernel": (
        {"fake": staticmethod(forward)},
        r"has no kernel: it needs the member 'forward', for every device, or one named",
    ),
    "no signature": (
        {"cpu": staticmethod(forward)},
        r"has kernels for cpu, but no signature.*'signature'.*'schema'",
    ),
    "two signatures": (
        {**KERNEL, "signature": staticmethod(forward)},
        "has both 'forward' and 'signature'",
    ),
    "half a formula": (
        {**KERNEL, "setup_context": staticmethod(forward)},
        "'setup_context' without 'backward'",
    ),
    "opaque alone": ({**KERNEL, "opaque": True}, "'opaque' without 'backward'"),
    "not opaque": (
        {**KERNEL, "backward": staticmethod(forward), "opaque": "yes"},
        "'opaque', which must be True, for a backward that cannot be traced",
    ),
    "opaque, derived": (
        {**KERNEL, "backward": torchop.derived, "opaque": True},
        "'opaque' beside a derived 'backward'",
    ),
    "devices": ({**KERNEL, "device_types": "cpu"}, "'device_types'.*such as 'cpu'"),
}


@pytest.mark.parametrize(("members", "message"), MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_in_a_class_names_the_member(
    namespace: str, members: dict[str, Any], message: str
) -> None:
    with pytest.raises(OperatorClassError, match=message):
        torchop.operator(f"{namespace}::sample")(make(**members))
    assert not hasattr(getattr(torch.ops, namespace), "sample")


LATE_MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a fake kernel": (
        {"fake": staticmethod(lambda: None)},
        torchop.RuleSignatureError,
        "fake kernel is called with",
    ),
    "an own rule": (
        {"inverse": staticmethod(lambda: None)},
        torchop.RuleSignatureError,
        r"inverse is called with \(output\)",
    ),
    "a checkpoint policy": (
        {"checkpoint_policy": "keep"},
        torchop.RuleSignatureError,
        "'save', 'recompute'",
    ),
    "a name": ({"inplace": True, "out": "nowhere"}, torchop.OperatorNameError, "namespace::name"),
    "autocast": ({"autocast": {"cpu": torch.int8}}, ValueError, "floating-point"),
    "an effect": ({"effects": "all"}, ValueError, "EffectType"),
}


@pytest.mark.parametrize(
    ("members", "error", "message"), LATE_MISTAKES.values(), ids=list(LATE_MISTAKES)
)
def test_a_registration_that_fails_frees_the_name(
    namespace: str, members: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        torchop.operator(f"{namespace}::sample")(make(**KERNEL, **members))
    for name in ("sample", "sample_"):
        assert not hasattr(getattr(torch.ops, namespace), name)
    again = torchop.operator(f"{namespace}::sample")(make(**KERNEL, inplace=True))
    assert torch.equal(again(torch.ones(1)), torch.ones(1))


def test_what_is_decorated_is_a_class(namespace: str) -> None:
    with pytest.raises(OperatorClassError, match=r"decorates a class.*use torchop\.custom_op"):
        torchop.operator(f"{namespace}::sample")(forward)  # type: ignore[call-overload]
    with pytest.raises(torchop.OperatorNameError, match="is a string, got type"):
        torchop.operator(make(**KERNEL))  # type: ignore[arg-type]
