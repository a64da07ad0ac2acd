from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torchop._errors import SchemaError, mistake, short_repr, short_text

UNKNOWN = "unknown"


def mutated_names(mutates_args: str | Iterable[str]) -> tuple[str, ...] | None:
    """Return the names in `mutates_args`, or None for `"unknown"`, which stands for all tensors."""
    if isinstance(mutates_args, str):
        if mutates_args == UNKNOWN:
            return None
        fix = (
            f"for one argument write mutates_args=({short_repr(mutates_args)},)"
            if mutates_args.isidentifier()
            else "for a function that mutates nothing write mutates_args=()"
        )
        raise mistake(
            f"mutates_args={short_repr(mutates_args)}: expected a sequence of argument names, or "
            f"the string 'unknown'; {fix}."
        )
    try:
        names = tuple(mutates_args)
    except TypeError:
        raise mistake(
            f"mutates_args={short_repr(mutates_args)}: expected a sequence of argument names, or "
            "the string 'unknown'; for a function that mutates nothing write mutates_args=().",
            TypeError,
        ) from None
    for name in names:
        if not isinstance(name, str):
            raise mistake(
                f"mutates_args holds {short_repr(name)}; expected the names of arguments, as "
                "strings."
            )
    return names


def mutated_arguments(
    where: str,
    names: tuple[str, ...] | None,
    tensors: Mapping[str, str],
    others: Mapping[str, str],
    objects: Collection[str] = (),
) -> tuple[str, ...]:
    """Return the names of the mutated schema arguments.

    `mutates_args` may also name an object that is passed by reference. Such a name is validated but
    not returned, because a schema cannot declare that an object is mutated.

    Args:
        where: the name of the function, for messages.
        names: the result of `mutated_names`. Naming a structure marks all tensors in it as mutated.
        tensors: maps the path of each tensor, such as `x` or `cfg.weight`, to the name of its
            schema argument.
        others: maps the path of every other value, and of every structure, to its type, for error
            messages.
        objects: the paths of objects that are passed by reference.
    """
    if names is None:
        return tuple(tensors.values())
    mutated: list[str] = []
    unknown = []
    choices = f"the tensor arguments are {', '.join(tensors) or 'none'}."
    for name in names:
        inside = [flat for place, flat in tensors.items() if is_inside(place, name)]
        is_found = bool(inside) or any(is_inside(place, name) for place in objects)
        if not is_found and name in others:
            raise SchemaError(
                f"{where}: mutates_args names {short_repr(name)} of type {others[name]}; only "
                f"tensors, lists of tensors and objects that are passed by reference can be "
                f"mutated, and {choices}"
            )
        if not is_found:
            unknown.append(name)
        mutated += inside
    if unknown:
        raise SchemaError(
            f"{where}: {spell_names(unknown)} in mutates_args were not found in the signature; "
            f"{choices}"
        )
    return tuple(dict.fromkeys(mutated))


def is_inside(place: str, name: str) -> bool:
    """Return whether `name` is the path `place`, or a parent of it, as `cfg` is of `cfg.weight`."""
    return f"{place}.".startswith(f"{name}.")


def spell_names(names: Iterable[str]) -> str:
    """Format names as a sorted set, to make messages deterministic."""
    return short_text(f"{{{', '.join(sorted({repr(name) for name in names}))}}}")
