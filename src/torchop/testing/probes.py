"""Helpers for probes: change arguments, call operators, and compare outcomes.

A *probe* is a function that raises an exception if it finds a bug in an operator. The programs that
`check` prints to reproduce a failure call a probe, and also import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchop.extend import Schema, named_inputs
from torchop.testing.process_state import seed_torch


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return the arguments with `change` applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)([mapped(item, change) for item in value])
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    # A call advances any generator that is passed to it, so each call needs its own copy.
    return value.clone_state() if isinstance(value, torch.Generator) else value


def tensors_of(value: Any) -> list[torch.Tensor]:
    collected: list[torch.Tensor] = []
    mapped(value, collected.append)
    return collected


def with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    iterator = iter(tensors)
    return mapped(value, lambda tensor: next(iterator))


def requiring_grad(value: Any) -> Any:
    return mapped(
        value, lambda t: t.detach().requires_grad_(t.is_floating_point() or t.is_complex())
    )


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Convert float8 to float32, because PyTorch has no arithmetic for float8."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def is_sorted(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one-dimensional and sorted in ascending order."""
    return tensor.dim() == 1 and bool((tensor[1:] >= tensor[:-1]).all())


def rolled_elements(tensor: torch.Tensor, steps: int) -> torch.Tensor:
    """Rotate the elements of a tensor by `steps`, except for sorted integers such as offsets."""
    if not tensor.is_floating_point() and not tensor.is_complex() and is_sorted(tensor):
        return tensor.clone()
    return tensor.flatten().roll(steps).view(tensor.shape)


def has_integers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds integers, which may be indices into other arguments."""
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return is_integer and tensor.dtype is not torch.bool and is_plain(tensor) and tensor.numel() > 0


def other_values(value: Any, steps: int = 1) -> Any:
    """Return the arguments with the elements of each tensor rotated.

    Several integer tensors are left unchanged, because their values may depend on each other, like
    the starts and lengths of segments. They are rotated anyway if rotating the floating-point
    tensors has no effect.
    """
    plain = [t for t in tensors_of(value) if is_plain(t)]
    integers = [t for t in plain if has_integers(t)]
    changes = any(
        not torch.equal(rolled_elements(t, steps).double(), t.double())
        for t in plain
        if t.is_floating_point()
    )
    kept = integers if len(integers) > 1 and changes else []

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        moves = is_plain(tensor) and all(tensor is not other for other in kept)
        return rolled_elements(tensor, steps) if moves else tensor

    return mapped(value, changed)


def signs_like(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape with elements 1 or -1, drawn with a fixed seed."""
    generator = torch.Generator().manual_seed(3)
    return (torch.randint(0, 2, values.shape, generator=generator) * 2.0 - 1).to(values.device)


def negative_view(values: torch.Tensor) -> torch.Tensor:
    """Return a view with these values and the negative bit set: its memory holds `-values`."""
    return torch.complex(torch.zeros_like(values), -values).conj().imag


def copies(value: Any) -> Any:
    """Copy the arguments into new memory with the same layout.

    If arguments share memory, their copies share memory in the same way.
    """
    memories: dict[int, torch.UntypedStorage] = {}
    made: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        if not is_plain(tensor):
            copied = plain.clone()
            return copied.requires_grad_() if tensor.requires_grad else copied
        if plain.is_neg():
            return negative_view(plain.resolve_neg()).requires_grad_(tensor.requires_grad)
        if plain.is_conj():
            return copy(plain.conj()).conj().requires_grad_(tensor.requires_grad)
        memory = plain.untyped_storage()
        if memory.data_ptr() not in memories or not memory.nbytes():
            memories[memory.data_ptr()] = memory.clone()
        again = torch.empty(0, dtype=plain.dtype, device=plain.device)
        again.set_(memories[memory.data_ptr()], plain.storage_offset(), plain.shape, plain.stride())
        return again.requires_grad_(tensor.requires_grad)

    def copy_once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = copy(tensor)
        return made[id(tensor)]

    return mapped(value, copy_once)


def leaves(value: Any) -> list[Any]:
    """Return the results of a call as a flat list without None.

    Objects of opaque types are left out as well, because they cannot be compared.
    """
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value] if isinstance(value, _COMPARED) else []


_COMPARED = (torch.Tensor, int, float, complex, str, torch.SymInt, torch.SymFloat, torch.SymBool)


def written_places(op: Any) -> list[tuple[int, str]]:
    """Return the position and name of each argument that the schema declares as mutable."""
    return [
        (index, argument.name)
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def written(places: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that a call writes to, where `places` comes from `written_places`."""
    collected = []
    for index, name in places:
        value = args[index] if index < len(args) else kwargs.get(name)
        collected.extend(tensors_of(value))
    return collected


def outcome(op: Any, args: Any, kwargs: Any, function: Any = None) -> list[Any]:
    """Call an operator with a fixed seed, and return its results and the arguments it writes to.

    If `function` is given, it is called instead of the operator.
    """
    seed_torch(0)
    result = (op if function is None else function)(*args, **kwargs)
    return leaves(result) + written(written_places(op), args, kwargs)


def outcome_of_copies(op: Any, args: Any, kwargs: Any) -> list[Any]:
    return outcome(op, *copies((args, kwargs)))


def assert_same(
    actual: Sequence[Any],
    expected: Sequence[Any],
    what: str,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    tolerance: Mapping[torch.dtype, tuple[float, float]] = {},
    values: bool = True,
    dtypes: bool = True,
) -> None:
    """Raise AssertionError if the outcomes of two calls differ.

    `what` describes `actual` in the error message. `tolerance` maps dtypes to pairs `(rtol, atol)`,
    which take precedence over the arguments `rtol` and `atol`. The default tolerances are those of
    `torch.testing.assert_close`.
    """
    if len(actual) != len(expected):
        raise AssertionError(f"{what}: {len(actual)} results, not {len(expected)}.")
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        place = f"{what}: result {index} of {len(actual)}"
        # The gradient of an unused input may be either None or zeros, so treat them as equal.
        if one is None or other is None:
            present = other if one is None else one
            if present is not None and bool(present.any()):
                raise AssertionError(f"{place} is {one}, not {other}.")
            continue
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            if values and one != other and not (one != one and other != other):
                raise AssertionError(f"{place} is {one!r}, not {other!r}.")
            continue
        if one.shape != other.shape:
            raise AssertionError(f"{place} has shape {[*one.shape]}, not {[*other.shape]}.")
        if dtypes and one.dtype != other.dtype:
            raise AssertionError(f"{place} has dtype {one.dtype}, not {other.dtype}.")
        if not values or one.numel() == 0:
            continue
        one, other = one.detach(), other.detach()
        if "float8" in str(one.dtype):  # PyTorch cannot compare float8 tensors
            one = one.float()
        other = other.to(one.dtype)
        if one.layout is torch.strided and one.device == other.device and torch.equal(one, other):
            continue  # torch.equal is much faster than assert_close
        relative, absolute = tolerance.get(one.dtype, (rtol, atol))
        torch.testing.assert_close(
            one,
            other,
            rtol=relative,
            atol=absolute,
            equal_nan=True,
            msg=lambda text, place=place, one=one, other=other: (  # type: ignore[misc]
                f"{place} is {_shown_difference(one, other)}. {text}"
            ),
        )


def rounding(dtype: torch.dtype, results: Sequence[Any]) -> dict[str, float]:
    """Return `rtol` and `atol` for results computed from values that were rounded to a dtype."""
    floats = [dense(t.detach()) for t in tensors_of(list(results)) if t.is_floating_point()]
    sizes = [t.double().abs().nan_to_num(posinf=0.0).max() for t in floats if t.numel()]
    largest = max(map(float, sizes), default=0.0)
    eps = torch.finfo(dtype).eps
    return {"rtol": 2 * eps, "atol": 2 * eps * largest}


def narrower_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return float32 or bfloat16 if a double tensor seems to hold values rounded to this dtype.

    The dtype must be able to represent every element. If bfloat16 can represent more than half of
    the elements, they may just be simple numbers, such as small integers or multiples of 0.5, which
    prove nothing. Simple numbers are multiples of a single step, whereas the step between rounded
    numbers doubles at each power of two.
    """
    tensor = tensor.detach()[tensor.isfinite()]
    if not tensor.numel():
        return None
    is_short = tensor.bfloat16().double() == tensor
    if is_short.float().mean() <= 0.5:
        return torch.float32 if torch.equal(tensor.float().double(), tensor) else None
    fractions, exponents = torch.frexp(tensor)
    has_last_digit = (fractions * 2**8).remainder(2) == 1  # bfloat16 has 8 binary digits
    ranges = exponents[has_last_digit].unique()
    is_rounded = bool(is_short.all()) and len(ranges) >= 2 and int(has_last_digit.sum()) >= 4
    return torch.bfloat16 if is_rounded else None


def shown(tensor: torch.Tensor) -> str:
    numbers = dense(tensor).flatten()[:6].tolist()
    more = ", ..." if tensor.numel() > 6 else ""
    digits = [f"{n:.6g}" if isinstance(n, float) else str(n) for n in numbers]
    return f"[{', '.join(digits)}{more}]"


def _shown_difference(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Show the first few elements of both tensors, or else the first elements that differ."""
    one, other = (dense(tensor).flatten() for tensor in (actual, expected))
    differs = ~torch.isclose(one, other, equal_nan=True)
    if bool(differs[:6].any()) or not bool(differs.any()):
        return f"{shown(one)} and should be {shown(other)}"
    index = int(differs.nonzero()[0])
    return f"{shown(one[index:])} from element {index} on, and should be {shown(other[index:])}"


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an ordinary strided tensor.

    Sparse, quantized and nested tensors are not plain, and neither are instances of subclasses.
    """
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return is_strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def has_strides(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def contiguous_copies(value: Any) -> Any:
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        if not is_plain(tensor):
            return plain.clone()
        return plain.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)

    return mapped(value, copy)


def memory_around(tensor: torch.Tensor, writable: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of a tensor's storage that a call must not write to.

    `writable` contains the tensors that the call may write to. If some of these tensors share the
    storage of `tensor`, return the bytes of the storage outside of them. Otherwise, return the
    bytes outside of `tensor` itself.
    """
    if tensor.layout is not torch.strided or tensor.is_neg() or not tensor.untyped_storage():
        return torch.empty(0)
    tensor = tensor.detach().conj() if tensor.is_conj() else tensor.detach()
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    rows = memory[: memory.numel() // tensor.element_size() * tensor.element_size()]
    rows = rows.view(-1, tensor.element_size())
    outside = torch.ones(len(rows), dtype=torch.bool, device=tensor.device)
    here = [
        other
        for other in writable
        if other.layout is torch.strided
        and other.dtype is tensor.dtype
        and other.untyped_storage().data_ptr() == storage.data_ptr()
    ]
    for other in here or [tensor]:
        if other.numel():
            steps = other.stride()
            # Few devices support `fill_` for tensors whose elements share memory, so reduce
            # expanded dimensions to size 1.
            shape = [1 if step == 0 else n for n, step in zip(other.shape, steps, strict=True)]
            outside.as_strided(shape, steps, other.storage_offset()).fill_(False)
    return rows[outside]


def argument_names(op: Any, args: Any, kwargs: Any) -> list[str]:
    """Return a name such as "argument 'xs[1]'" for each tensor of a call, for use in messages."""
    inputs = named_inputs(Schema(op._schema), args, kwargs)
    return [where.replace("input", "argument", 1) for _, where, _ in inputs]


def free_zeros(tensors: Sequence[torch.Tensor]) -> None:
    """Allocate and free zeroed memory, so that `torch.empty` probably returns zeros.

    Without this step, `torch.empty` could return memory that still contains NaN from an earlier
    call. `tensors` must have the sizes that will be passed to `torch.empty`.
    """
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()  # an upper bound for sparse tensors
        count = min(256, 2**20 // (size + 1) + 2)
        zeros = [torch.zeros(size, dtype=torch.uint8, device=tensor.device) for _ in range(count)]
        del zeros


def as_function(op: Any, args: Any, kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return a call as a function of the tensors that require grad, along with these tensors.

    The function returns the floating-point and complex results as dense tensors, because gradcheck
    does not support other layouts. If the operator is mutable, the function clones the arguments
    first, because an operator must not write to leaves that require grad.
    """
    inputs = [tensor for tensor in tensors_of((args, kwargs)) if tensor.requires_grad]

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        iterator = iter(tensors)
        call_args, call_kwargs = mapped(
            (args, kwargs), lambda old: next(iterator) if old.requires_grad else old
        )
        if op._schema.is_mutable:
            call_args, call_kwargs = mapped((call_args, call_kwargs), torch.clone)
        seed_torch(0)
        results = leaves(op(*call_args, **call_kwargs))
        tensors_only = [dense(r) for r in results if isinstance(r, torch.Tensor)]
        return tuple(r for r in tensors_only if r.is_floating_point() or r.is_complex())

    return function, inputs


def on_tensors(op: Any, args: Any, kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return a call as a function of all its tensors, along with these tensors.

    The function returns the results and the arguments that the operator writes to.
    """
    places = written_places(op)  # outside of the function, because compilers trace the function

    def function(*tensors: torch.Tensor) -> list[Any]:
        # Clone the tensors only if the operator declares mutations, so that checks notice
        # undeclared mutations.
        copies = [t.clone() for t in tensors] if places else tensors
        call_args, call_kwargs = with_tensors((args, kwargs), copies)
        results = leaves(op(*call_args, **call_kwargs))
        return results + written(places, call_args, call_kwargs)

    return function, tensors_of((args, kwargs))


def weighted_sum(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a weighted sum of all results, in which each element has a different weight."""
    # Add on the device of the results, because adding on the CPU would synchronize with the device.
    device = results[0].device if results else "cpu"
    total = torch.zeros((), dtype=torch.double, device=device)
    for result in results:
        weights = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.double, device=result.device)
        values = torch.view_as_real(result).sum(-1) if result.is_complex() else result
        total = total + (values.double().reshape(-1) * weights).sum().to(total.device)
    return total


def gradients(function: Any, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
    """Return the gradients of the weighted sum of a function's results."""
    return torch.autograd.grad(weighted_sum(function(*inputs)), inputs, allow_unused=True)


def slope_is_right(function: Any, inputs: Any, step: float = 1e-6, tolerance: float = 1e-3) -> None:
    """Check the gradient against finite differences in a single random direction."""
    seed_torch(2)
    directions = [torch.rand_like(tensor) for tensor in inputs]
    grads = gradients(function, inputs)

    def total(steps: float, places: Sequence[int]) -> torch.Tensor:
        moved = [
            t + steps * step * d if n in places else t
            for n, (t, d) in enumerate(zip(inputs, directions, strict=True))
        ]
        return weighted_sum(function(*moved))

    def problem(places: Sequence[int]) -> str:
        pairs = [(grads[n], directions[n]) for n in places]
        slope = sum(float((g.conj() * d).sum().real) for g, d in pairs if g is not None)
        with torch.no_grad():
            expected = float(total(1, places) - total(-1, places)) / (2 * step)
        if abs(slope - expected) <= tolerance * (0.1 + abs(expected)):
            return ""
        return f"the gradient is {slope:.6g}, but finite differences give {expected:.6g}."

    every = range(len(inputs))
    if found := problem(every):
        # If there are several inputs, check the gradient of each input alone, and name the first
        # input with a wrong gradient.
        alone = ((n, problem([n])) for n in every if len(inputs) > 1)
        number, text = next((pair for pair in alone if pair[1]), (None, found))
        where = "" if number is None else f"with respect to input {number}, "
        raise RuntimeError(f"{where}in a random direction, {text}")
