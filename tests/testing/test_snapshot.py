"""A snapshot of a call's arguments detects every change, and has no false alarms.

Uses private names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchop
from torchop.extend import Schema
from torchop.testing import _snapshot as snapshot_module
from torchop.testing._snapshot import Snapshot

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks",
    "ignore:.*beta state",
    "ignore:torch.quantize_per_tensor",
    "ignore:The PyTorch API of nested tensors",
)


class Wrapper(Tensor):
    """A wrapper subclass, which has a size but no memory."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, (3,))  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("nothing is to be computed with it")


def schema(text: str) -> Schema:
    return Schema(torch._C.parse_schema(f"ns::op{text}"))


ONE = schema("(Tensor x) -> ()")
ONE_MUTABLE = schema("(Tensor(a!) x) -> ()")
TWO = schema("(Tensor x, Tensor(a!) out) -> ()")


def change(write: Callable[..., Any], *args: Any, of: Schema = ONE, **kwargs: Any) -> str | None:
    """Return the change that a snapshot reports after `write(*args, **kwargs)`, or None if none."""
    snapshot = Snapshot(of, args, kwargs)
    with torch.no_grad():
        write(*args, **kwargs)
    try:
        snapshot.check("ns::op")
    except torchop.UndeclaredMutationError as error:
        return str(error)
    return None


def flip_a_bit(x: Tensor) -> None:
    bytes_ = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
    bytes_[x.storage_offset() * x.element_size()] ^= 1


# Constructors for every kind of tensor that has its own memory.
KINDS: dict[str, Callable[[], Tensor]] = {
    "float": lambda: torch.arange(6.0).view(2, 3),
    "scalar": lambda: torch.tensor(3.0),
    "nan": lambda: torch.tensor([float("nan"), 1.0]),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "half": lambda: torch.ones(3, dtype=torch.half),
    "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "bits": lambda: torch.ones(4, dtype=torch.uint8).view(torch.uint16),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "sliced": lambda: torch.arange(10.0)[2:8:2],
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "overlapping": lambda: torch.arange(5.0).unfold(0, 3, 1),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8
    ),
    "leaf": lambda: torch.ones(3, requires_grad=True),
    "not a leaf": lambda: torch.ones(3, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "inference": lambda: torch.inference_mode()(torch.ones)(3),
    "NumPy's": lambda: torch.from_numpy(np.ones(3)),
}
SPARSE: dict[str, Callable[[], Tensor]] = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "coo, not coalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,)),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
}
EMPTY: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(0),
    "no rows": lambda: torch.empty(0, 3),
    "empty slice": lambda: torch.arange(5.0)[5:],
    "empty sparse": lambda: torch.sparse_coo_tensor(size=(3, 3)),
}
LEFT_OUT: dict[str, Callable[[], Tensor]] = {
    "meta": lambda: torch.ones(3, device="meta"),
    "fake": lambda: torch._subclasses.FakeTensorMode().from_tensor(torch.ones(3)),
    "mkldnn": lambda: torch.ones(3, 3, device="cpu").to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "zero": lambda: torch._efficientzerotensor(3),
    "wrapper": Wrapper,
}

EVERY = KINDS | SPARSE | EMPTY | LEFT_OUT


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_unwritten_tensor_has_no_change(make: Callable[[], Tensor]) -> None:
    assert change(lambda x: None, make()) is None


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_one_changed_bit_is_detected_for_every_kind_of_tensor(make: Callable[[], Tensor]) -> None:
    said = change(flip_a_bit, make())
    assert said is not None
    assert "Argument x is not defined as mutable but was mutated, input 'x'" in said
    assert "Name it in mutates_args" in said


@pytest.mark.parametrize("make", LEFT_OUT.values(), ids=LEFT_OUT)
def test_tensors_that_cannot_be_compared_are_skipped(make: Callable[[], Tensor]) -> None:
    x = make()
    assert not Snapshot(ONE, (x,), {})._inputs
    said = change(lambda x, y: y.add_(1), x, torch.ones(2), of=schema("(Tensor x, Tensor y) -> ()"))
    assert said is not None
    assert "Argument y" in said


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "too small for a tolerance": lambda x: x.add_(1e-7),
    "the other zero": lambda x: x.view(-1)[:1].neg_(),
    "a permutation": lambda x: x.copy_(x.flip(0)),
    "through detach": lambda x: x.detach().add_(1),
    "through data": lambda x: x.data.add_(1),
    "through NumPy": lambda x: np.add(x.numpy(), 1, out=x.numpy()),
    "through DLPack": lambda x: torch.from_dlpack(x).add_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_kind_of_write_is_detected(write: Callable[[Tensor], Any]) -> None:
    said = change(write, torch.arange(6.0).view(3, 2))
    assert said is not None
    assert "the kernel changed its values, first at index [0, 0]" in said


def test_message_names_the_first_changed_element() -> None:
    said = change(lambda x: x[2, 1].add_(1), torch.zeros(4, 3).t().contiguous().t())
    assert said is not None
    assert "first at index [2, 1]" in said


def test_nan_with_another_payload_is_a_change() -> None:
    def write(x: Tensor) -> None:
        x.view(torch.int32).add_(1)

    assert change(write, torch.tensor([float("nan")])) is not None


def test_restored_values_are_detected_by_the_version_counter() -> None:
    said = change(lambda x: x.add_(1).sub_(1), torch.zeros(2))
    assert said is not None
    assert "although its values are the same (its version went from 0 to 2)" in said
    with torch.inference_mode():
        # An inference tensor has no version counter, so restored values are not detected.
        assert change(lambda x: x.add_(1).sub_(1), torch.zeros(2)) is None


LAYOUT: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "resize": (lambda x: x.resize_(5), "changed", "shape{}, from [2, 3] to [5]"),
    "grow": (lambda x: x.resize_(9), "resized", "storage{}, from 24 to 36 bytes, as resize_ does"),
    "transpose": (lambda x: x.t_(), "changed", "shape{}, from [2, 3] to [3, 2]"),
    "strides": (lambda x: x.as_strided_((2, 3), (1, 2)), "changed", "strides{}, from"),
    "offset": (
        lambda x: x.set_(x.untyped_storage(), 1, (2, 2), (2, 1)),
        "changed",
        "shape{}, from",
    ),
    "set": (lambda x: x.set_(torch.ones(2, 3)), "swapped", "storage{}, as set_ and assignments"),
    "data": (lambda x: setattr(x, "data", torch.ones(2, 3)), "swapped", "storage{}, as set_"),
    "dtype": (lambda x: setattr(x, "data", torch.ones(2, 3).double()), "swapped", "storage{}, as"),
    "freed": (lambda x: x.untyped_storage().resize_(0), "resized", "storage{}, from 24 to 0 bytes"),
}


@pytest.mark.parametrize(("write", "verb", "words"), LAYOUT.values(), ids=LAYOUT)
def test_layout_changes_are_detected(write: Callable[[Tensor], Any], verb: str, words: str) -> None:
    said = change(write, torch.zeros(2, 3))
    assert said is not None
    assert f"the kernel {verb} its {words.format('')}" in said
    assert "An operator must not change its arguments in this way." in said


@pytest.mark.parametrize(("write", "verb", "words"), LAYOUT.values(), ids=LAYOUT)
@pytest.mark.parametrize(
    ("text", "args", "place"),
    [
        ("(Tensor(a!) x) -> ()", lambda x: (x,), "x"),
        ("(Tensor(a!) x) -> Tensor(a!)", lambda x: (x,), "x"),
        ("(Tensor(a!)? x) -> ()", lambda x: (x,), "x"),
        (
            "(Tensor y, Tensor(a!)[] xs) -> ()",
            lambda x: (torch.ones(1), [torch.ones(2), x]),
            "xs[1]",
        ),
    ],
)
def test_a_declared_write_may_not_change_the_layout(
    text: str, args: Any, place: str, write: Any, verb: str, words: str
) -> None:
    x = torch.zeros(2, 3)
    said = change(lambda *args: write(x), *args(x), of=schema(text))
    assert said is not None
    assert said.startswith(f"ns::op: the kernel {verb} the ")
    assert words.format(f" of argument {place!r}") in said
    assert said.endswith("Write into the tensor with copy_, or return a new tensor.")


def test_out_argument_may_be_resized_but_not_swapped() -> None:
    of = schema("(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")

    def said(write: Callable[[Tensor], Any]) -> str | None:
        def kernel(x: Tensor, out: Tensor) -> None:
            write(out)

        return change(kernel, torch.ones(9), out=torch.empty(2), of=of)

    assert said(lambda out: torch.add(torch.ones(9), 1, out=out.resize_(0))) is None
    assert "swapped the storage of argument 'out'" in str(said(lambda out: out.set_(torch.ones(9))))


def test_an_operator_tagged_inplace_view_may_change_the_layout() -> None:
    x = torch.zeros(2, 3)
    of = Schema(torch.ops.aten.t_.default._schema)
    snapshot = Snapshot(of, (x,), {})
    x.t_()
    snapshot.check("aten::t_")
    torchop.opcheck("aten::t_", (torch.zeros(2, 3),), test_utils="test_schema")
    with pytest.raises(torchop.UndeclaredMutationError, match="the shape of argument 'self'"):
        snapshot.check("aten::add_.Tensor")


def test_metadata_changes_are_detected() -> None:
    said = str(change(lambda x: x.requires_grad_(), torch.zeros(2, 3)))
    assert "the kernel changed its requires_grad, from False to True" in said


def test_sparse_metadata_changes_are_detected() -> None:
    x = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (2,))
    assert "coalesced flag" in str(change(lambda x: x._coalesced_(True), x))
    x = torch.eye(2).to_sparse()._coalesced_(False)
    assert "strides" in str(change(lambda x: x.add_(x), x))


# --------------------------------------------------------------------------------------------------
# Shared memory


def test_write_around_a_view_is_detected() -> None:
    said = change(lambda x: x._base.view(-1)[0].add_(1), torch.zeros(4, 4)[1:3, 1:3])
    assert said is not None
    assert "the kernel wrote into its storage, outside the elements of this view" in said
    assert "first at" not in said


def test_memory_outside_a_mutable_view_is_compared() -> None:
    said = change(lambda x: x._base.zero_(), torch.ones(4)[:2], of=ONE_MUTABLE)
    assert said is not None
    assert "memory outside the elements of input 'x' was mutated" in said
    assert change(lambda x: x.zero_(), torch.ones(4)[:2], of=ONE_MUTABLE) is None


def test_declared_mutation_may_change_values_or_nothing() -> None:
    for write in (
        lambda x: None,
        lambda x: x.add_(1),
        lambda x: x.detach().t_().add_(1),
        lambda x: setattr(x, "data", x.detach()),
    ):
        assert change(write, torch.ones(2, 3), of=ONE_MUTABLE) is None
    x = torch.eye(2).to_sparse()
    assert change(lambda x: x.add_(x), x, of=ONE_MUTABLE) is None


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (slice(0, 4), slice(4, 8)),
        (slice(0, 4), slice(0, 4)),
        (slice(0, 4), slice(2, 6)),
        (slice(0, 8), slice(2, 3)),
        (slice(0, 8, 2), slice(1, 8, 2)),
    ],
)
def test_input_may_change_where_it_overlaps_a_mutable_argument(x: slice, out: slice) -> None:
    base = torch.zeros(8)
    assert change(lambda x, out: out.add_(1), base[x], base[out], of=TWO) is None
    said = change(lambda x, out: base[7].add_(1), base[0:4], base[4:7], of=TWO)
    assert said is not None
    assert "outside the elements of this view" in said


# --------------------------------------------------------------------------------------------------
# Arguments


def test_contents_are_not_compared_without_memory_for_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(storage: Any) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(snapshot_module, "bytes_of", full)
    assert "resized its storage" in str(change(lambda x: x.resize_(7), torch.zeros(2)))
    assert change(lambda x: x.numpy().fill(1), torch.zeros(2)) is None


def test_user_modes_do_not_intercept_the_comparison() -> None:
    from torch.overrides import TorchFunctionMode

    class Counting(TorchFunctionMode):
        calls = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    x = torch.zeros(3)
    with Counting() as mode:
        Snapshot(ONE, (x,), {}).check("ns::op")
    assert mode.calls == 0
