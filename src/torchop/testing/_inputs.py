"""inputs: a strategy of Hypothesis for the calls that the preconditions of an operator allow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchop._errors import MissingRuleError
from torchop._rules.user.examples import make_examples
from torchop._rules.user.preconditions import PRECONDITIONS
from torchop._rules.user.preconditions.base import Precondition, Unfit, bounds
from torchop._rules.user.preconditions.declared import Preconditions
from torchop._rules.user.preconditions.relations import is_of_integers
from torchop.extend import Operator, OpLike
from torchop.preconditions import Dtype, OneOf
from torchop.testing import probes
from torchop.testing._extras import installing
from torchop.testing._samples import Sample, with_values

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

_SPREAD = 6  # of sizes, above the smallest
_FAR = 10  # how far from 0, or from the one bound, numbers go where nothing is declared
# That are drawn for one tensor, which repeats them, because Hypothesis draws few at once.
_MOST_NUMBERS = 24


def inputs(op: OpLike) -> SearchStrategy[Sample]:
    """Returns a strategy of Hypothesis for calls that the preconditions of an operator allow.

    A call is drawn from an example of the operator: it gets other sizes where a `Shape` names them,
    and arguments with preconditions get other values, which include the limits of what is allowed.
    Numbers without bounds are small. A failing call shrinks to small sizes and simple numbers. An
    argument without preconditions stays as it is in the example, and so do all arguments of an
    operator that has no preconditions, or that takes structures.

    The name is a plural because those of Hypothesis's own strategies are.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload. It needs examples (`register_examples`), or preconditions
            from which some can be made.

    Returns:
        A strategy whose values are pairs `(args, kwargs)`: a tuple of positional arguments, and a
        dict of those by keyword. Each call gets tensors of its own.

    Raises:
        MissingRuleError: there are no examples, and none can be made from the preconditions.
        ValueError: an example breaks the preconditions.
        ModuleNotFoundError: Hypothesis is missing, which the extra `test` of torchop installs.

    Example:
        >>> import torch, torchop
        >>> from hypothesis import given, settings
        >>> from torchop.testing import inputs
        >>> @torchop.custom_op("docs_inputs::double", mutates_args=())
        ... def double(x: torch.Tensor) -> torch.Tensor:
        ...     return x + x
        >>> double.register_preconditions({"x": torchop.preconditions.Shape("rows", 3)})
        {'x': Shape(dims=('rows', 3), least=0)}
        >>> @settings(deadline=None)  # a first call may compile something
        ... @given(inputs(double))
        ... def test_double(call):
        ...     args, kwargs = call
        ...     x = kwargs["x"]
        ...     assert torch.equal(double(*args, **kwargs), 2 * x)
        >>> test_double()
    """
    try:
        from hypothesis import strategies as st  # it may be missing
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"torchop.testing.inputs needs hypothesis: {installing('test')}", name="hypothesis"
        ) from None
    operator = Operator(op, "inputs")
    examples = make_examples(op)
    if not examples:
        raise MissingRuleError(
            f"{operator} has no examples, because the function of register_examples yields none. "
            "inputs(op) starts from at least one."
        )
    as_they_are = st.sampled_from(examples).map(probes.copies)
    if operator.takes_structures or not PRECONDITIONS.has(op):
        return as_they_are
    declared = PRECONDITIONS.lookup(op)

    @st.composite
    def changed(draw: DrawFn) -> Sample:
        with torch.no_grad():
            return _changed(draw, operator, declared, draw(as_they_are))

    return changed()


def _changed(draw: DrawFn, operator: Operator, declared: Preconditions, call: Sample) -> Sample:
    """A call that the preconditions allow, of the form of an example."""
    from hypothesis import strategies as st  # it may be missing

    args, kwargs = operator.flat_arguments(*call)
    values = declared.arguments(args, kwargs)
    least = declared.least_sizes(values)
    sizes = {dim: draw(st.integers(size, size + _SPREAD)) for dim, size in least.items()}
    # All at once first, because one may need another, as no rows need that there are no indices.
    for group in (sizes, *({dim: size} for dim, size in sizes.items())):
        with contextlib.suppress(Unfit):
            resized = values
            for dim, size in group.items():
                resized = declared.resized(resized, dim, size)
            values = declared.fitted(resized)
    for name, words in declared.by_argument.items():
        with contextlib.suppress(Unfit):  # then the argument stays as it is
            values = declared.fitted({**values, name: _drawn(draw, values[name], words, values)})
    return with_values(operator.schema, args, kwargs, values)


def _drawn(draw: DrawFn, value: Any, words: list[Precondition], values: dict[str, Any]) -> Any:
    """Another value of the same type and sizes, within the bounds of the words."""
    from hypothesis import strategies as st  # it may be missing

    for word in words:
        if isinstance(word, OneOf):
            return draw(st.sampled_from(word.values))
    if isinstance(value, (list, tuple)):
        return type(value)(_drawn(draw, item, words, values) for item in value)
    if isinstance(value, (bool, int, float)):
        dtype = torch.double if isinstance(value, float) else torch.tensor(value).dtype
        numbers = _numbers(dtype, words, values)
        return value if numbers is None else draw(numbers)
    if not isinstance(value, Tensor) or not probes.is_plain(value):
        return value
    dtypes = next((word.dtypes for word in words if isinstance(word, Dtype)), (value.dtype,))
    dtype = draw(st.sampled_from(dtypes))
    numbers = _numbers(dtype, words, values)
    if numbers is None or not value.numel():
        return value.to(dtype)
    few = draw(st.lists(numbers, min_size=1, max_size=_MOST_NUMBERS))
    made = torch.tensor(few, dtype=dtype, device=value.device)
    return made.repeat(-(-value.numel() // len(few)))[: value.numel()].view(value.shape)


def _numbers(
    dtype: torch.dtype, words: Iterable[Precondition], values: dict[str, Any]
) -> SearchStrategy[Any] | None:
    """The numbers of a dtype within the bounds of the words; None if there are none."""
    from hypothesis import strategies as st  # it may be missing

    if dtype is torch.bool:
        return st.booleans()
    if dtype.is_complex:
        return st.complex_numbers(max_magnitude=_FAR)
    low, high = bounds(words, torch.zeros((), dtype=dtype), values)
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if low is None:
        low = max(limits.min, -_FAR if high is None else min(-_FAR, high - _FAR))
    if high is None:
        high = min(limits.max, max(_FAR, low + _FAR))
    if low > high:
        return None
    if dtype.is_floating_point and not any(map(is_of_integers, words)):
        return st.floats(low, high)
    return st.integers(int(low), int(high))
