"""Variants, which generate calls by modifying the examples of the operator's author."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._rules.layout import layouts_of
from torchop.testing import probes
from torchop.testing._check.calls import CannotCheck, Example
from torchop.testing._check.cases import Arrangement, Case, Variant
from torchop.testing._check.enlarged import counts, larger, longer, odd, unequal, uneven
from torchop.testing._check.layouts import LAYOUTS, WRITABLE, in_layout
from torchop.testing._check.outputs import other_out
from torchop.testing._check.relations import has_fixed_values, referred
from torchop.testing._check.sharing import one_tensor, one_view, overlapping, shared
from torchop.testing._check.sizes import (
    BLOCKS,
    TILES,
    each_resized,
    sizes,
    sizes_changed,
)
from torchop.testing._check.subject import Subject

Cases = Iterator[Case]


def all_and_each(items: Iterable[int]) -> list[list[int]]:
    every = list(items)
    singles = [[item] for item in every]
    return [every, *singles] if len(every) > 1 else singles


def each_and_all(items: Iterable[int]) -> list[list[int]]:
    """Return a one-item list for each item, followed by a list of all items.

    Single items come first, because a failure for a single tensor pinpoints the argument that the
    kernel handles incorrectly.
    """
    return sorted(all_and_each(items), key=len)


def _which(subject: Subject, example: Example, chosen: list[int], count: int) -> str:
    if count == 1:
        return "the tensor"
    return "all tensors" if len(chosen) == count else subject.names(example)[chosen[0]]


def plain(subject: Subject, example: Example) -> Cases:
    yield Case("the example", example)


def original(subject: Subject, example: Example) -> Cases:
    passed = subject.originals[subject.place(example)]
    yield Case("the example as it was passed", passed.map(Tensor.detach))


# --------------------------------------------------------------------------------------------------
# Layouts

_WORDS = {
    "gaps": "with gaps",
    "offset": "at an offset",
    "negative": "as a negative view",
    "conjugate": "as a conjugate view",
    "expanded_last": "expanded in the last dimension",
}


def laid_out(layout: str, subject: Subject, example: Example) -> Cases:
    """Yield cases that change one tensor at a time to `layout`, then a case that changes them all.

    If the operator writes to arguments, each case is repeated with finite numbers instead of NaN in
    the memory around the tensors (see `layouts.filler`).
    """
    places = set(range(len(example.tensors)))
    if not places:
        raise CannotCheck("no argument is a tensor")
    if layout not in WRITABLE:
        places -= subject.written_places(example)
        if not places:
            raise CannotCheck("every tensor is written, and cannot be expanded")
    places -= subject.excluded_places(layout, example)
    if not places:
        raise CannotCheck("the operator declares other layouts")
    in_layout(layout, places)(example)  # raises if no tensor can have the layout
    for chosen in each_and_all(places):
        try:
            in_layout(layout, chosen)(example)
        except CannotCheck:  # e.g. a tensor with one dimension cannot be transposed
            continue
        label = f"{_which(subject, example, chosen, len(places))} {_WORDS.get(layout, layout)}"
        yield Case(label, example, in_layout(layout, chosen))
        if subject.schema.is_mutable:
            arrange = in_layout(layout, chosen, finite=True)
            yield Case(f"{label}, surrounded by 3", example, arrange)


def undeclared(subject: Subject, example: Example) -> Cases:
    """Change each tensor with a declared layout to a layout that the kernel does not accept."""
    if not layouts_of(subject.op):
        raise CannotCheck("the operator declares no layouts")
    written = subject.written_places(example)
    for layout in ("contiguous", "channels_last", "transposed", "gaps"):
        for place in sorted(subject.excluded_places(layout, example) - written):
            arrange = in_layout(layout, [place])
            try:
                arrange(example)
            except CannotCheck:
                continue
            label = f"{subject.names(example)[place]} {_WORDS.get(layout, layout)}"
            yield Case(label, example, arrange)


def conjugate(subject: Subject, example: Example) -> Cases:
    """Replace tensors with conjugate views, converting real tensors if none is complex."""
    if not any(t.dtype.is_complex for t in example.tensors):
        # PyTorch cannot convert float8 tensors to a complex dtype, so skip them.
        example = example.map(
            lambda t: t * (1 + 0.5j) if t.dtype.is_floating_point and t.itemsize > 1 else t
        )
        if not any(t.dtype.is_complex for t in example.tensors):
            raise CannotCheck("no argument is complex or can be made complex")
    places = [place for place, t in enumerate(example.tensors) if t.dtype.is_complex]
    for chosen in each_and_all(places):
        label = f"{_which(subject, example, chosen, len(places))} {_WORDS['conjugate']}"
        yield Case(label, example, in_layout("conjugate", chosen))


def written_expanded(subject: Subject, example: Example) -> Cases:
    """Expand the tensors that the operator writes to, so that several elements share memory."""
    if not subject.schema.is_mutable:
        raise CannotCheck("nothing is written")
    arrange = in_layout("expanded", subject.written_places(example))
    yield Case("written tensors expanded", example, arrange)


# --------------------------------------------------------------------------------------------------
# Sizes


def sized(size: int, subject: Subject, example: Example) -> Cases:
    """Resize all dimensions to `size`, and then each group of equal dimensions separately."""
    chosen = all_and_each([n for n in sizes(example) if n != size])
    if not chosen:
        raise CannotCheck("no tensor has a dimension")
    for change, other in each_resized(example, *(dict.fromkeys(n, size) for n in chosen)):
        yield Case(sizes_changed(change), other, in_layout("contiguous"))


def odd_strides(subject: Subject, example: Example) -> Cases:
    """Give dimensions of size 1 arbitrary strides, which a correct kernel never uses."""
    for _, smaller in each_resized(example, {}, *({size: 1} for size in sizes(example))):
        yield Case("dimensions of size 1 with odd strides", smaller, in_layout("odd_strides"))


def zero_dim(subject: Subject, example: Example) -> Cases:
    """Replace each tensor with a 0-dim tensor that holds its first element."""
    tensors = example.tensors
    places = [p for p, t in enumerate(tensors) if probes.is_plain(t) and t.dim() and t.numel()]
    places = [place for place in places if not has_fixed_values(tensors[place], example)]
    places = sorted({*places} - referred(example))
    if not places:
        raise CannotCheck("no tensor has a dimension")
    for chosen in each_and_all(places):
        changed = [t.flatten()[0].clone() if p in chosen else t for p, t in enumerate(tensors)]
        label = f"{_which(subject, example, chosen, len(places))} without a dimension"
        yield Case(label, example.with_tensors(changed), in_layout("offset", chosen))


# --------------------------------------------------------------------------------------------------
# Dtypes

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
EVERY = (*FLOATS, torch.complex64, torch.complex128, *INTEGERS)


def is_float(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def in_dtype(dtype: torch.dtype, example: Example) -> Example:
    """Convert the floating-point and complex tensors of an example to a dtype."""

    def change(tensor: Tensor) -> Tensor:
        if not is_float(tensor):
            return tensor
        is_integer = not dtype.is_floating_point and not dtype.is_complex
        if is_integer and tensor.layout is torch.strided:  # sparse tensors support fewer functions
            tensor = tensor.real if tensor.dtype.is_complex else tensor
            return (probes.widened(tensor).nan_to_num(0) * 3).round().clamp(0, 100).to(dtype)
        if tensor.dtype.is_complex and not dtype.is_complex:
            return tensor.real.to(dtype)
        return tensor.to(dtype)

    return example.map(change)


def dtypes(subject: Subject, example: Example) -> Cases:
    _needs_float(example)
    for dtype in EVERY:
        name = str(dtype).removeprefix("torch.")
        changed = in_dtype(dtype, example)
        yield Case(f"in {name}", changed)
        none = dict.fromkeys(sizes(changed), 0) if dtype is torch.double else {}
        for _, empty in each_resized(changed, none) if none else ():
            yield Case(f"in {name}, with 0 elements", empty)


def integers(subject: Subject, example: Example) -> Cases:
    """Convert the integer tensors to every other integer dtype that can hold their values."""
    places = [p for p, t in enumerate(example.tensors) if probes.has_integers(t)]
    if not places:
        raise CannotCheck("no argument holds integers")
    for dtype in INTEGERS[:-1]:
        limits = torch.iinfo(dtype)
        tensors = example.tensors
        chosen = [place for place in places if tensors[place].dtype is not dtype]
        fits = all(
            limits.min <= int(tensors[p].min()) and int(tensors[p].max()) <= limits.max
            for p in chosen
        )
        if chosen and fits:
            changed = [t.to(dtype) if p in chosen else t for p, t in enumerate(tensors)]
            name = str(dtype).removeprefix("torch.")
            yield Case(f"integers in {name}", example.with_tensors(changed))


def promotion(subject: Subject, example: Example) -> Cases:
    places = [p for p, t in enumerate(example.tensors) if t.dtype.is_floating_point]
    if len(places) < 2:
        raise CannotCheck("no call has two floating-point tensors")
    for place, dtype in itertools.product(places, (torch.float64, torch.bfloat16)):
        tensor = example.tensors[place]
        name = subject.names(example)[place]
        yield Case(f"{name} in {dtype}", example.replace(place, tensor.to(dtype)))
        if not probes.is_plain(tensor) or not tensor.dim():
            continue
        # PyTorch's type promotion treats 0-dim tensors differently, so try a 0-dim tensor too.
        scalar = probes.widened(tensor).flatten()[:1].sum().to(dtype)
        changed = example.replace(place, scalar)
        if subject.refusal(changed) is None and subject.has_fake_sizes(changed):
            yield Case(f"{name} in {dtype}, without a dimension", changed)


def precisions(subject: Subject, example: Example) -> Cases:
    """Convert floating-point tensors to each floating-point dtype except double."""
    _needs_float(example)
    if any(t.dtype.is_complex for t in example.tensors):
        raise CannotCheck("an argument is complex")
    for dtype in FLOATS:
        if dtype is not torch.double:
            yield Case(f"in {dtype} and in double", in_dtype(dtype, example))


def digits(dtype: torch.dtype, share: float, subject: Subject, example: Example) -> Cases:
    """Perturb each element slightly, so that a less precise dtype cannot represent it exactly."""
    _needs_float(example)
    if any(t.dtype.is_complex for t in example.tensors):
        raise CannotCheck("an argument is complex")
    generator = torch.Generator().manual_seed(subject.seed)

    def change(tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.double)
        return (tensor.double() * (1 + share * noise.to(tensor.device))).to(dtype)

    yield Case(f"digits in {dtype}", example.map(change), shrink=False)


def _needs_float(example: Example) -> None:
    if not any(map(is_float, example.tensors)):
        raise CannotCheck("no argument is floating-point or complex")


# --------------------------------------------------------------------------------------------------
# Values

# For each kind of special values, a description and a function. The function takes the
# `torch.finfo` of a dtype and returns lists of values. Each list is used to fill one tensor.
NUMBERS: dict[str, tuple[str, Callable[[torch.finfo], list[list[float]]]]] = {
    "nan": ("NaN", lambda limits: [[float("nan")]]),
    "inf": ("infinities", lambda limits: [[float("inf"), float("-inf")], [float("-inf")]]),
    "zeros": ("zeros of both signs", lambda limits: [[0.0, -0.0]]),
    "denormals": (
        "subnormal numbers",
        lambda limits: [[limits.tiny / 2, -limits.tiny / 4, limits.tiny / 8]],
    ),
    "extremes": (
        "the largest and smallest numbers of the dtype",
        # Keep the maximum and the minimum in separate lists, because the sum of a tensor that
        # contains both would depend on the order of additions.
        lambda limits: [[limits.max, limits.tiny], [limits.min, limits.tiny]],
    ),
}


def with_numbers(numbers: Sequence[float], steps: Sequence[int], tensor: Tensor) -> Tensor:
    """Replace some elements of a tensor with `numbers`.

    The distances between the replaced elements cycle through `steps`.
    """
    flat = tensor.flatten().clone()
    every = itertools.accumulate(itertools.cycle(steps), initial=0)
    places = itertools.takewhile(lambda place: place < flat.numel(), every)
    for index, place in enumerate(places):
        flat[place] = numbers[index % len(numbers)]
    return flat.view(tensor.shape)


def numbers(name: str, subject: Subject, example: Example) -> Cases:
    """Put special values, such as NaN, into one floating-point tensor at a time."""
    words, choice = NUMBERS[name]
    for place, tensor in enumerate(example.tensors):
        if tensor.dtype.is_floating_point and probes.is_plain(tensor):
            if not 0 < tensor.numel() <= 4096:
                continue
            layout = _other_layout(subject, example, tensor)
            for each in choice(torch.finfo(tensor.dtype)):
                # Unequal steps reach each column of a matrix.
                for steps, amount in (((2, 3, 2), "with"), ((1,), "full of")):
                    changed = example.replace(place, with_numbers(each, steps, tensor))
                    label = f"{subject.names(example)[place]} {amount} {words}"
                    yield Case(label, changed, layout)


def _other_layout(subject: Subject, example: Example, tensor: Tensor) -> Arrangement:
    """Return a non-contiguous layout for a call with special values.

    If the call fails in the non-contiguous layout even with the original values, special values are
    not the cause of the failure, so return the contiguous layout instead.
    """
    layout = in_layout("sliced" if tensor.dim() else "offset")
    with contextlib.suppress(Exception):
        call = subject.call(Case("", example, layout))
        options = subject.expectation(example, "")
        expected = options.pop("expected", None) or call.contiguous
        if call.record.error is None:
            probes.assert_same(call.record.outcome, expected, **options)
            return layout
    return in_layout("contiguous")


def int8(subject: Subject, example: Example) -> Cases:
    for place, tensor in enumerate(example.tensors):
        is_byte = tensor.dtype in (torch.int8, torch.uint8)
        # If the integers are indices, the limits of the dtype are out of bounds. Python kernels
        # reject such indices, but C++ kernels may crash.
        is_safe = subject.operator.function is not None or not may_be_places(tensor, example)
        if is_byte and is_safe:
            limits = torch.iinfo(tensor.dtype)
            changed = with_numbers([limits.min, limits.max, 0], (1,), tensor)
            label = f"{subject.names(example)[place]} full of limits"
            yield Case(label, example.replace(place, changed))


def may_be_places(integers: Tensor, example: Example) -> bool:
    """Return whether all integers are small enough to be indices, or lengths of segments."""
    most = max((tensor.numel() for tensor in example.tensors), default=0)
    return bool(((integers >= 0) & (integers <= most)).all())


def scalars(subject: Subject, example: Example) -> Cases:
    """Replace numbers with values such as 0 that kernels may special-case, and invert bools."""
    named = subject.by_name(example)
    for name, value in subject.scalars(example).items():
        others: set[Any] = set()
        if type(value) is bool:
            others = {not value}
        elif type(value) is float:
            others = {0.0, 1.0, value + 0.5} - {value}
        elif type(value) is int and subject.operator.function is not None:
            # C++ operators may require particular integers, so change integers only for operators
            # written in Python. If all elements of an integer tensor are smaller than this
            # argument, they may be indices with the argument as their upper bound. Lowering the
            # bound would make the indices invalid, so only increase it.
            indices = filter(probes.has_integers, named.tensors)
            is_bound = any(int(t.min()) >= 0 and int(t.max()) < value for t in indices)
            others = {value + 1} if is_bound else {0, -1, value + 1} - {value}
        for other in sorted(others):
            yield Case(f"{name}={other}", named.with_argument(name, other))


def other_scalars(subject: Subject, example: Example) -> Cases:
    """Increase floats and invert bools, because most kernels accept the resulting values."""
    named = subject.by_name(example)
    for name, value in subject.scalars(example).items():
        if type(value) in (bool, float):
            other = value + 0.5 if type(value) is float else not value
            yield Case(f"{name}={other}", named.with_argument(name, other))


def absent(subject: Subject, example: Example) -> Cases:
    named = subject.by_name(example)
    for argument in subject.schema.arguments:
        is_given = named.kwargs.get(argument.name) is not None
        if is_given and argument.kind.startswith("Optional["):
            yield Case(f"{argument.name}=None", named.with_argument(argument.name, None))


# --------------------------------------------------------------------------------------------------
# The table


def _group(group: str, **makes: Any) -> dict[str, Variant]:
    return {name: Variant(name, group, make) for name, make in makes.items()}


_LAID_OUT = [name for name in LAYOUTS if name not in ("odd_strides", "conjugate")]
VARIANTS: dict[str, Variant] = {
    **_group("plain", plain=plain, given=original),
    **_group("layout", **{name: functools.partial(laid_out, name) for name in _LAID_OUT}),
    **_group("layout", undeclared=undeclared),
    **_group("layout", conjugate=conjugate),
    **_group("size", empty=functools.partial(sized, 0), single=functools.partial(sized, 1)),
    **_group("size", longer=longer, uneven=uneven, counts=counts, unequal=unequal),
    **_group("layout", odd_strides=odd_strides, zero_dim=zero_dim),
    "blocks": Variant("blocks", "size", functools.partial(larger, BLOCKS), most=1),
    "tiles": Variant("tiles", "size", functools.partial(larger, TILES), most=1),
    "odd": Variant("odd", "size", odd, most=1),
    **_group("size", other_out=other_out),
    # The same as "blocks", but only with the smallest size. Checks of fake kernels use it, because
    # a fake kernel in Python may be slow for large sizes.
    "block": Variant("block", "size", functools.partial(larger, BLOCKS[:1]), most=1),
    **_group("dtype", precisions=precisions, integers=integers),
    "dtypes": Variant("dtypes", "dtype", dtypes, most=1),
    "promotion": Variant("promotion", "dtype", promotion, most=1),
    "digits": Variant("digits", "dtype", functools.partial(digits, torch.double, 1e-9)),
    "half_digits": Variant("half_digits", "dtype", functools.partial(digits, torch.half, 2**-8)),
    **_group("value", **{name: functools.partial(numbers, name) for name in NUMBERS}),
    **_group("value", int8=int8),
    **_group("scalar", scalars=scalars, absent=absent),
    **_group("sharing", one=functools.partial(shared, [one_tensor], False)),
    **_group("sharing", overlap=functools.partial(shared, [overlapping], False)),
    **_group("sharing", written=functools.partial(shared, [one_view, overlapping], True)),
    **_group("sharing", written_expanded=written_expanded),
}
