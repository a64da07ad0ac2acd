"""In-place and out= operators, which are recognized by their tags or schemas.

Uses private names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Optional, Tuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torchop
from tests._support.devices import TYPE
from tests._support.releases import INPLACE, OUT, needs_tags, of_form
from tests.define.families import sine
from torchop._schema import forms
from torchop._schema.forms import form_of
from torchop.extend import Form


def add_(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return x


def sin_out(x: Tensor, *, out: Tensor) -> Tensor:
    out.copy_(x.sin())
    return out


def both_out(x: Tensor, *, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    low.copy_(x - 1)
    high.copy_(x + 1)
    return low, high


@pytest.fixture
def inplace_op(namespace: str) -> Any:
    return torchop.custom_op(
        f"{namespace}::add_",
        add_,
        mutates_args=("x",),
        **of_form("inplace", "(Tensor(a!) x, Tensor y) -> Tensor(a!)"),
    )


@pytest.fixture
def out_op(namespace: str) -> Any:
    return torchop.custom_op(
        f"{namespace}::sin_out",
        sin_out,
        mutates_args=("out",),
        **of_form("out", "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"),
    )


@needs_tags
def test_form_of_tags() -> None:
    assert form_of([]) is Form.PLAIN
    assert form_of([torch.Tag.pointwise, INPLACE]) is Form.INPLACE
    assert form_of([OUT]) is Form.OUT
    with pytest.raises(AssertionError, match="mutually exclusive"):
        form_of([INPLACE, OUT])


@needs_tags
def test_inferred_returns_alias_the_mutated_arguments() -> None:
    schemas = [
        torchop.infer_schema(add_, mutates_args=("x",), tags=INPLACE),
        torchop.infer_schema(sin_out, mutates_args=("out",), tags=OUT),
        torchop.infer_schema(both_out, mutates_args=("low", "high"), tags=OUT),
    ]
    assert schemas == [
        "(Tensor(a0!) x, Tensor y) -> Tensor(a0!)",
        "(Tensor x, *, Tensor(a1!) out) -> Tensor(a1!)",
        "(Tensor x, *, Tensor(a1!) low, Tensor(a2!) high) -> (Tensor(a1!), Tensor(a2!))",
    ]


def test_results_are_the_tensors_that_were_given(
    namespace: str, inplace_op: Any, out_op: Any
) -> None:
    x, out = torch.zeros(3), torch.empty(3)
    assert inplace_op(x, torch.ones(3)) is x
    assert x.tolist() == [1, 1, 1]
    assert out_op(x, out=out) is out
    assert torch.equal(out, x.sin())
    both = torchop.custom_op(
        f"{namespace}::both",
        both_out,
        mutates_args=("low", "high"),
        **of_form(
            "out", "(Tensor x, *, Tensor(a!) low, Tensor(b!) high) -> (Tensor(a!), Tensor(b!))"
        ),
    )
    low, high = torch.empty(3), torch.empty(3)
    results = both(x, low=low, high=high)
    assert results[0] is low
    assert results[1] is high


def test_registered_fake_kernel_warns_and_is_used(inplace_op: Any) -> None:
    with pytest.warns(UserWarning, match=r"torch\.Tag\.inplace.*needs no fake kernel"):
        inplace_op.register_fake(lambda x, y: x.clone())
    with FakeTensorMode():
        x = torch.randn(3)
        assert inplace_op(x, x) is not x


@needs_tags
def test_fake_tensors_keep_their_devices(namespace: str, out_op: Any, inplace_op: Any) -> None:
    stock = torch.library.custom_op(f"{namespace}::stock", sin_out, mutates_args=("out",), tags=OUT)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for op in (stock, out_op):
            out = torch.zeros(2)
            assert op(torch.zeros(2, device="meta"), out=out) is out
            assert op(torch.zeros(2), out=torch.zeros(2, device="meta")).device.type == "meta"
        assert inplace_op(torch.zeros(2), torch.zeros(2, device="meta")).device.type == TYPE


def test_registered_fake_kernel_replaces_the_tags(inplace_op: Any) -> None:
    with pytest.warns(UserWarning, match="needs no fake kernel"):
        torchop.register_fake(inplace_op, lambda x, y: x.clone(), allow_override=False)
    with pytest.raises(RuntimeError, match=r"has a fake impl registered at .*test_forms"):
        torchop.register_fake(inplace_op, lambda x, y: x, allow_override=False)


def test_inplace_backward_names_the_missing_formula(inplace_op: Any) -> None:
    x = torch.randn(3, requires_grad=True)
    y = x.clone()
    result = inplace_op(y, torch.ones(3))
    assert result is y
    with pytest.raises(RuntimeError, match="no autograd formula"):
        result.sum().backward()


@pytest.mark.parametrize("which", ["input", "out"])
def test_out_refuses_gradients(out_op: Any, which: str) -> None:
    x = torch.randn(3, requires_grad=which == "input")
    out = torch.empty(3, requires_grad=which == "out")
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        out_op(x, out=out)
    with torch.no_grad():
        assert out_op(x, out=out) is out


def test_out_takes_no_formula(out_op: Any) -> None:
    with pytest.raises(RuntimeError, match="Out variants do not support autograd"):
        out_op.register_autograd(lambda ctx, grad: grad)


@needs_tags
def test_kernel_with_another_result_is_rejected(namespace: str) -> None:
    def wrong_inplace(x: Tensor, y: Tensor) -> Tensor:
        return y

    def wrong_out(x: Tensor, *, out: Tensor) -> Tensor:
        return x

    inplace = torchop.custom_op(
        f"{namespace}::inplace", wrong_inplace, mutates_args=("x",), tags=INPLACE
    )
    out = torchop.custom_op(f"{namespace}::out", wrong_out, mutates_args=("out",), tags=OUT)
    with pytest.raises(RuntimeError, match="must return its first argument"):
        inplace(torch.ones(1), torch.ones(1))
    with pytest.raises(RuntimeError, match=r"mutable keyword-only arguments \(out\)"):
        out(torch.ones(1), out=torch.ones(1))


def _keyword_only(*, x: Tensor) -> Tensor:
    return x


def _returns_nothing(x: Tensor) -> None: ...


def _number_first(n: int, x: Tensor) -> Tensor:
    return x


def _optional_out(x: Tensor, *, out: Optional[Tensor]) -> Tensor:
    return x


def _positional_out(x: Tensor, out: Tensor) -> Tensor:
    return out


def _tuple_of_one(x: Tensor, *, out: Tensor) -> tuple[Tensor]:
    return (out,)


@needs_tags
@pytest.mark.parametrize(
    ("function", "mutated", "tag", "message"),
    [
        (_keyword_only, ("x",), INPLACE, r"the first one must be a Tensor\(a!\)"),
        (_number_first, ("x",), INPLACE, "first positional argument .n. is not a Tensor"),
        (add_, ("y",), INPLACE, r"argument .x.: write mutates_args=\(.x.,\)"),
        (add_, (), INPLACE, r"write mutates_args=\(.x.,\)"),
        (add_, "unknown", INPLACE, r"argument .x.: write mutates_args=\(.x.,\)"),
        (
            _returns_nothing,
            ("x",),
            INPLACE,
            "requires the return annotation torch.Tensor, .*got None",
        ),
        (sin_out, (), OUT, "at least one keyword-only Tensor in mutates_args"),
        (_optional_out, ("out",), OUT, "only supports Tensor"),
        (_positional_out, ("out",), OUT, r"keyword-only, but out is not; move it after"),
        (_tuple_of_one, ("out",), OUT, "requires the return annotation torch.Tensor"),
    ],
)
def test_signature_of_another_form_is_refused(
    namespace: str,
    function: Callable[..., Any],
    mutated: Any,
    tag: torch.Tag,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        torchop.custom_op(f"{namespace}::op", function, mutates_args=mutated, tags=tag)
    assert not hasattr(getattr(torch.ops, namespace), "op")


# --------------------------------------------------------------------------------------------------
# Tagged schemas that torch.library rejects as well


INVALID: dict[str, tuple[torch.Tag, str]] = {
    "(*, Tensor(a!) x) -> Tensor(a!)": (INPLACE, "has no positional argument"),
    "() -> Tensor": (INPLACE, "has no positional argument"),
    "(Tensor x) -> Tensor": (INPLACE, "must mutate only its first positional"),
    "(Tensor(a) x) -> Tensor(a)": (INPLACE, "must mutate only its first positional"),
    "(Tensor x, Tensor(a!) y) -> Tensor(a!)": (INPLACE, "mutate only its first positional"),
    "(Tensor(a!)[] x) -> Tensor(a!)[]": (INPLACE, "'x' is not a Tensor"),
    "(Tensor(a!)? x) -> Tensor(a!)?": (INPLACE, "'x' is not a Tensor"),
    "(Tensor(a!) x) -> ()": (INPLACE, "returns 0 values instead of Tensor(a!) for x"),
    "(Tensor(a!) x) -> (Tensor(a!), Tensor)": (INPLACE, "returns 2 values"),
    "(Tensor(a!) x) -> Tensor(a!)[]": (INPLACE, "return 0 is a List[Tensor] instead of a Tensor"),
    "(Tensor(a!) x) -> int": (INPLACE, "return 0 is a int instead of a Tensor"),
    "(Tensor(a!) x) -> Tensor": (INPLACE, "return 0 is no alias"),
    "(Tensor(a!) x) -> Tensor(a)": (INPLACE, "return 0 is Tensor(a)"),
    "(Tensor(a!) x) -> Tensor(b!)": (INPLACE, "return 0 is Tensor(b!)"),
    "(Tensor(a!) x, *, Tensor(b!) y) -> Tensor(a!)": (INPLACE, "only its first"),
    "(Tensor x, *, Tensor o) -> Tensor": (OUT, "mutates no argument"),
    "(Tensor(a!) x, *, Tensor(b!) o) -> (Tensor(a!), Tensor(b!))": (OUT, "but x is not"),
    "(Tensor x, *, Tensor(a!)[] o) -> Tensor(a!)[]": (OUT, "and o has type"),
    "(Tensor x, *, Tensor(a!)? o=None) -> Tensor(a!)": (OUT, "and o has type"),
    "(Tensor x, *, Tensor(a!) o) -> ()": (OUT, "returns 0 values instead of Tensor(a!) for o"),
    "(Tensor x, *, Tensor(a!) o) -> Tensor": (OUT, "return 0 is no alias"),
    "(Tensor x, *, Tensor(a!) o) -> Tensor(a)": (OUT, "return 0 is Tensor(a)"),
    "(Tensor x, *, Tensor(a!) o) -> Tensor(b!)": (OUT, "return 0 is Tensor(b!)"),
    "(*, Tensor(a!) o, Tensor(b!) p) -> (Tensor(b!), Tensor(a!))": (OUT, "return 0 is Tensor(b!)"),
    "(*, Tensor(a!) o, Tensor(b!) p) -> Tensor(a!)": (OUT, "Tensor(a!) for o, Tensor(b!) for p"),
}


@needs_tags
@pytest.mark.parametrize("schema", list(INVALID))
def test_schema_that_torch_library_refuses_is_refused(namespace: str, schema: str) -> None:
    tag, message = INVALID[schema]
    mutated = [a.name for a in torch._C.parse_schema(f"f{schema}").arguments if a.is_write]
    with pytest.raises(ValueError, match=f"tagged {tag}".replace("Tag.", r"torch\.Tag\.")):
        torchop.custom_op(
            f"{namespace}::op", lambda *a, **k: None, mutates_args=mutated, schema=schema, tags=tag
        )
    with pytest.raises(ValueError, match=re.escape(message)):
        torchop.custom_op(
            f"{namespace}::op", lambda *a, **k: None, mutates_args=mutated, schema=schema, tags=tag
        )
    stock = torch.library._scoped_library(f"{namespace}_stock", "FRAGMENT")
    with stock as library, pytest.raises(ValueError, match=f"tagged with torch.{tag}"):
        library.define(f"op{schema}", tags=tag)


VALID: dict[str, torch.Tag] = {
    "(Tensor(a!) x) -> Tensor(a!)": INPLACE,
    "(Tensor(a!) x, Tensor y, *, float z=1.0) -> Tensor(a!)": INPLACE,
    "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)": OUT,
    "(int n, *, Tensor mask, Tensor(a!) o, Tensor(b!) p) -> (Tensor(a!), Tensor(b!))": OUT,
}


@needs_tags
@pytest.mark.parametrize("schema", list(VALID))
def test_schema_that_torch_library_accepts_is_accepted(namespace: str, schema: str) -> None:
    for kind in (torchop.Library, torch.library._scoped_library):
        with kind(f"{namespace}_{kind.__name__}", "FRAGMENT") as library:
            library.define(f"op{schema}", tags=VALID[schema])
    torchop.custom_op(
        f"{namespace}::op",
        lambda *a, **k: None,
        mutates_args=[a.name for a in torch._C.parse_schema(f"f{schema}").arguments if a.is_write],
        schema=schema,
        tags=VALID[schema],
    )


@needs_tags
def test_both_spellings_of_a_tuple_are_returns() -> None:
    def old_style(x: Tensor, *, low: Tensor, high: Tensor) -> Tuple[Tensor, Tensor]:
        return low, high

    schema = torchop.infer_schema(old_style, mutates_args=("low", "high"), tags=OUT)
    assert schema == torch.library.infer_schema(old_style, mutates_args=("low", "high"), tags=OUT)


@needs_tags
@pytest.mark.parametrize("tag", [INPLACE, OUT])
def test_tensor_that_defaults_to_none_is_optional(namespace: str, tag: torch.Tag) -> None:
    def first(x: Tensor = None) -> Tensor:  # type: ignore[assignment]
        return x

    def out(x: Tensor, *, out: Tensor = None) -> Tensor:  # type: ignore[assignment]
        return out

    function, mutated = (first, "x") if tag is INPLACE else (out, "out")
    message = "'x' is not a Tensor but Opt" if tag is INPLACE else "out has type Opt"
    with pytest.raises(ValueError, match=rf"{message}ional\[Tensor\]"):
        torchop.custom_op(f"{namespace}::op", function, mutates_args=(mutated,), tags=tag)


# --------------------------------------------------------------------------------------------------
# The operator's form (functional, in-place or out=) is inferred from the schema, even without a tag


@pytest.fixture
def without_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_FORMS", {})


@pytest.mark.parametrize("schema", [*VALID, *INVALID])
def test_form_is_read_from_the_schema(schema: str) -> None:
    parsed = torch._C.parse_schema(f"f{schema}")
    # With the in-place tag, this schema is invalid. Without a tag, it is a valid out= operator.
    valid = {**VALID, "(*, Tensor(a!) x) -> Tensor(a!)": OUT}
    expected = (
        {INPLACE: Form.INPLACE, OUT: Form.OUT}[valid[schema]] if schema in valid else Form.PLAIN
    )
    assert forms.form_of_schema(parsed) is expected


@needs_tags
def test_form_in_the_schema_gets_its_tag(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x: x.add_(1),
        mutates_args=("x",),
        schema="(Tensor(a!) x) -> Tensor(a!)",
    )
    assert INPLACE in op.tags
    x = torch.zeros(2)
    assert op(x) is x
    compiled = torch.compile(lambda x: op(x) * 2, backend="aot_eager", fullgraph=True)
    assert compiled(x).tolist() == [4, 4]


@pytest.mark.usefixtures("without_tags")
def test_inplace_by_schema_without_tags(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x, wrong: x.clone() if wrong else x.add_(1),
        mutates_args=("x",),
        schema="(Tensor(a!) x, bool wrong=False) -> Tensor(a!)",
    )
    assert INPLACE not in op.tags
    x = torch.zeros(2)
    version = x._version
    assert op(x) is x
    assert x.tolist() == [1, 1]
    assert x._version > version
    with pytest.raises(torchop.AliasError, match="must return its first argument"):
        op(x, True)
    with FakeTensorMode():
        fake = torch.randn(3)
        assert op(fake) is fake


@pytest.mark.usefixtures("without_tags")
def test_out_by_schema_without_tags(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::op.out",
        lambda x, *, out: out.copy_(x),
        mutates_args=("out",),
        schema="(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
    )
    assert OUT not in op.tags
    x, out = torch.zeros(2), torch.ones(2)
    assert op(x, out=out) is out
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        op(x, out=torch.ones(2, requires_grad=True))
    with FakeTensorMode():
        fake = torch.randn(3)
        assert op(torch.randn(3), out=fake) is fake


@pytest.mark.usefixtures("without_tags")
def test_form_tags_are_ignored_if_pytorch_has_none(namespace: str) -> None:
    assert form_of([INPLACE]) is Form.PLAIN
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: None, mutates_args=("x",), schema="(Tensor(a!) x) -> ()"
    )
    assert op.schema is not None


@pytest.mark.usefixtures("without_tags")
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "inductor"])
def test_families_work_without_tags(namespace: str, backend: str | None) -> None:
    family = sine(namespace)
    inplace = family.functional.derive_inplace(f"{namespace}::derived_")
    out = family.functional.derive_out(f"{namespace}::derived.out")
    assert family.inplace is not None
    for op in (family.inplace, family.out, inplace, out):
        assert op.tags == (torch.Tag.pt2_compliant_tag,)

    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        family(x, out=a)
        inplace(a)
        out(a, out=b)
        assert family.inplace is not None
        return family.inplace(b) + family(x)

    x, buffers = torch.randn(3), [torch.empty(3), torch.empty(3)]
    run = function if backend is None else torch.compile(function, backend=backend, fullgraph=True)
    expected = x.sin().sin().sin().sin()
    torch.testing.assert_close(run(x, *buffers), expected + x.sin())
    torch.testing.assert_close(buffers, [x.sin().sin(), expected])
    with pytest.raises(torchop.MutationError, match="shape"):
        family(x, out=torch.empty(4))
    for op in (family.inplace, inplace):
        torchop.opcheck(op, (torch.randn(3),))
    for op in (family.out, out):
        torchop.opcheck(op, (torch.randn(3),), {"out": torch.empty(3)})
