"""Functions of probes and of the programs that `check` prints: arguments and comparisons.

A printed program calls a *probe* with the call that failed. A probe is a function that raises if
the operator is wrong. The probes are in `_check`, and several of them use these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchop.extend import Schema, named_inputs
from torchop.testing.process_state import seed_torch


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The arguments, with each tensor replaced by `change(tensor)`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)([mapped(item, change) for item in value])
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    # A call advances its generator, so equal calls need one each.
    return value.clone_state() if isinstance(value, torch.Generator) else value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results, in their order."""
    collected: list[torch.Tensor] = []
    mapped(value, collected.append)
    return collected


def with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The arguments, with these tensors in place of theirs."""
    iterator = iter(tensors)
    return mapped(value, lambda tensor: next(iterator))


def requiring_grad(value: Any) -> Any:
    """The arguments, with leaves of a graph for tensors whose dtypes can have a gradient."""
    return mapped(
        value, lambda t: t.detach().requires_grad_(t.is_floating_point() or t.is_complex())
    )


def is_sorted(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor of one dimension never get smaller."""
    return tensor.dim() == 1 and bool((tensor[1:] >= tensor[:-1]).all())


def rolled_elements(tensor: torch.Tensor, steps: int) -> torch.Tensor:
    """A tensor with its elements in another order; sorted integers, such as offsets, stay."""
    if not tensor.is_floating_point() and not tensor.is_complex() and is_sorted(tensor):
        return tensor.clone()
    return tensor.flatten().roll(steps).view(tensor.shape)


def has_integers(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds integers that may say something of others."""
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return is_integer and tensor.dtype is not torch.bool and is_plain(tensor) and tensor.numel() > 0


def other_values(value: Any) -> Any:
    """The arguments with other values of the same kind: their elements in another order.

    Integers of several tensors stay where floating-point numbers change. They may fit each other,
    as starts and counts do, and a kernel need not look whether they do.
    """
    plain = [t for t in tensors_of(value) if is_plain(t)]
    integers = [t for t in plain if has_integers(t)]
    changes = any(
        not torch.equal(rolled_elements(t, 1).double(), t.double())
        for t in plain
        if t.is_floating_point()
    )
    kept = integers if len(integers) > 1 and changes else []

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        moves = is_plain(tensor) and all(tensor is not other for other in kept)
        return rolled_elements(tensor, 1) if moves else tensor

    return mapped(value, changed)


def signs_like(values: torch.Tensor) -> torch.Tensor:
    """Ones and minus ones, in the shape of a tensor; the same for each call."""
    generator = torch.Generator().manual_seed(3)
    return (torch.randint(0, 2, values.shape, generator=generator) * 2.0 - 1).to(values.device)


def negative_view(values: torch.Tensor) -> torch.Tensor:
    """A tensor of these values whose memory holds the negative ones."""
    return torch.complex(torch.zeros_like(values), -values).conj().imag


def copies(value: Any) -> Any:
    """The arguments in new memory with the same layout; arguments that shared memory still do."""
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
    """The results of a call, including those inside tuples and lists."""
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return [] if value is None else [value]


def written_places(op: Any) -> list[tuple[int, str]]:
    """The position and name of each argument that the schema says is written."""
    return [
        (index, argument.name)
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def written(places: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors of a call at these places, which are those of `written_places`."""
    collected = []
    for index, name in places:
        value = args[index] if index < len(args) else kwargs.get(name)
        collected.extend(tensors_of(value))
    return collected


def outcome(op: Any, args: Any, kwargs: Any, function: Any = None) -> list[Any]:
    """What a call of the operator returns, and what it has written; always from the same seed."""
    seed_torch(0)
    result = (op if function is None else function)(*args, **kwargs)
    return leaves(result) + written(written_places(op), args, kwargs)


def outcome_of_copies(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """What a call returns and writes, for which the arguments are copied first."""
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
    """Raises AssertionError if the outcomes of two calls differ.

    `tolerance` has `(rtol, atol)` for dtypes that have their own.
    """
    if len(actual) != len(expected):
        raise AssertionError(f"{what}: {len(actual)} results and not {len(expected)}.")
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        place = f"{what}: result {index} of {len(actual)}"
        if one is None or other is None:  # gradients of what is not used
            present = other if one is None else one
            if present is not None and bool(present.any()):
                raise AssertionError(f"{place} is {one} and not {other}.")
            continue
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            if values and one != other and not (one != one and other != other):
                raise AssertionError(f"{place} is {one!r} and not {other!r}.")
            continue
        if one.shape != other.shape:
            raise AssertionError(f"{place} has shape {[*one.shape]} and not {[*other.shape]}.")
        if dtypes and one.dtype != other.dtype:
            raise AssertionError(f"{place} has dtype {one.dtype} and not {other.dtype}.")
        if not values or one.numel() == 0:
            continue
        one, other = one.detach(), other.detach()
        if "float8" in str(one.dtype):  # which PyTorch does not compare
            one = one.float()
        other = other.to(one.dtype)
        if one.layout is torch.strided and one.device == other.device and torch.equal(one, other):
            continue  # without the steps of a comparison that can tell what differs
        relative, absolute = tolerance.get(one.dtype, (rtol, atol))
        torch.testing.assert_close(
            one,
            other,
            rtol=relative,
            atol=absolute,
            equal_nan=True,
            msg=lambda text, place=place, one=one, other=other: (  # type: ignore[misc]
                f"{place} is {shown(one)} and should be {shown(other)}. {text}"
            ),
        )


def rounding(dtype: torch.dtype, results: Sequence[Any]) -> dict[str, float]:
    """Tolerances for results, if a few steps on the way to them are rounded to a dtype."""
    floats = [dense(t.detach()) for t in tensors_of(list(results)) if t.is_floating_point()]
    sizes = [t.double().abs().nan_to_num(posinf=0.0).max() for t in floats if t.numel()]
    largest = max(map(float, sizes), default=0.0)
    eps = torch.finfo(dtype).eps
    return {"rtol": 2 * eps, "atol": 2 * eps * largest}


def has_digits_of_float32(tensor: torch.Tensor) -> bool:
    """Whether each number of a tensor is one of float32, and more than a count of something."""
    tensor = tensor.detach()[tensor.isfinite()]
    if not tensor.numel() or (tensor.bfloat16().double() == tensor).float().mean() > 0.5:
        return False
    return torch.equal(tensor.float().double(), tensor)


def shown(tensor: torch.Tensor) -> str:
    """The first elements of a tensor, in one line."""
    numbers = tensor.flatten()[:6].tolist()
    more = ", ..." if tensor.numel() > 6 else ""
    digits = [f"{n:.6g}" if isinstance(n, float) else str(n) for n in numbers]
    return f"[{', '.join(digits)}{more}]"


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a dense one of its values if it is sparse."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a kind whose place in memory can be chosen."""
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return is_strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def contiguous_copies(value: Any) -> Any:
    """The arguments as contiguous tensors of their own."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        if not is_plain(tensor):
            return plain.clone()
        return plain.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)

    return mapped(value, copy)


def memory_around(tensor: torch.Tensor, writable: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of a tensor's memory that a call has to leave alone.

    They belong to none of the tensors that it writes, nor, if it writes none there, to the tensor.
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
            # Each element once: few devices write twice to one place.
            shape = [1 if step == 0 else n for n, step in zip(other.shape, steps, strict=True)]
            outside.as_strided(shape, steps, other.storage_offset()).fill_(False)
    return rows[outside]


def argument_names(op: Any, args: Any, kwargs: Any) -> list[str]:
    """Return what messages call each tensor of a call, such as "argument 'xs[1]'"."""
    inputs = named_inputs(Schema(op._schema), args, kwargs)
    return [where.replace("input", "argument", 1) for _, where, _ in inputs]


def free_zeros(tensors: Sequence[torch.Tensor]) -> None:
    """Puts zeros where the next tensors of these sizes are likely to be: in memory that was freed.

    What was there may be NaN, and `torch.empty` would hand it on.
    """
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()  # of a sparse tensor, at most
        count = min(256, 2**20 // (size + 1) + 2)
        zeros = [torch.zeros(size, dtype=torch.uint8, device=tensor.device) for _ in range(count)]
        del zeros


def as_function(op: Any, args: Any, kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
    """A call as a function of the tensors that require grad, and these tensors.

    It returns the results that may have a gradient, sparse ones as dense tensors, because finite
    differences need these. What the operator writes into is a copy, as leaves of a graph must not
    be written.
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
    """A call as a function of all its tensors, and these tensors.

    It returns the results, and what the operator has written, which are copies of its arguments.
    """
    places = written_places(op)  # found here, because compilers trace the function

    def function(*tensors: torch.Tensor) -> list[Any]:
        call_args, call_kwargs = with_tensors((args, kwargs), [t.clone() for t in tensors])
        results = leaves(op(*call_args, **call_kwargs))
        return results + written(places, call_args, call_kwargs)

    return function, tensors_of((args, kwargs))


def weighted_sum(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number in which every element of the results counts differently."""
    # On the device of the results: one on the CPU would make the host wait for them.
    device = results[0].device if results else "cpu"
    total = torch.zeros((), dtype=torch.double, device=device)
    for result in results:
        weights = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.double, device=result.device)
        values = torch.view_as_real(result).sum(-1) if result.is_complex() else result
        total = total + (values.double().reshape(-1) * weights).sum().to(total.device)
    return total


def gradients(function: Any, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
    """The gradients of a function of tensors, in which each element of its results counts."""
    return torch.autograd.grad(weighted_sum(function(*inputs)), inputs, allow_unused=True)


def slope_is_right(function: Any, inputs: Any, step: float = 1e-6, tolerance: float = 1e-3) -> None:
    """In a random direction, the gradient of a function agrees with finite differences."""
    seed_torch(2)
    directions = [torch.rand_like(tensor) for tensor in inputs]

    def total(steps: float) -> torch.Tensor:
        moved = [t + steps * step * d for t, d in zip(inputs, directions, strict=True)]
        return weighted_sum(function(*moved))

    pairs = zip(gradients(function, inputs), directions, strict=True)
    slope = sum(float((g.conj() * d).sum().real) for g, d in pairs if g is not None)
    with torch.no_grad():
        expected = float(total(1) - total(-1)) / (2 * step)
    if not abs(slope - expected) <= tolerance * (0.1 + abs(expected)):
        raise RuntimeError(
            f"in a random direction, the gradient is {slope:.6g}, but finite differences give "
            f"{expected:.6g}."
        )
