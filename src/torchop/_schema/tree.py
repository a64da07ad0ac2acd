"""Parse a function's annotations into trees whose leaves are arguments of the schema.

The annotation of a structure, such as a dataclass, becomes a tree with several leaves, and a
`Structure` then converts between the author's objects and the values of these leaves. Most
operators need no conversion, because each annotation is a single leaf with a type that
`infer_schema` supports.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torchop._compat import schemas
from torchop._compat.classes import Tag
from torchop._errors import SchemaError, mistake
from torchop._schema import advice, defaults, signatures, types
from torchop._schema.forms import Form, form_of, returned_alias
from torchop._schema.kinds import (
    CONVERTED_ITEMS,
    KINDS,
    Kind,
    is_by_reference,
    is_object,
    leaf_kind,
    list_of,
    read_container,
    return_type,
    unchanged,
    without_annotated,
)
from torchop._schema.mutates_args import is_inside, mutated_arguments, mutated_names
from torchop._schema.structure import pairs
from torchop._schema.structure.gradients import GradientsOf
from torchop._schema.structure.nodes import (
    Fields,
    Leaf,
    Maybe,
    Node,
    Pair,
    Parameter,
)
from torchop._schema.structure.results import (
    RESULT,
    UnsupportedTypeError,
    build_result,
    check_end,
)
from torchop._schema.structure.rows import Rows
from torchop._schema.structure.shapes import MISSING, argument_shape
from torchop._schema.structure.source import is_plain
from torchop._schema.text import numbered_alias, with_write, write, write_results


class FunctionTree:
    """The annotation trees for the parameters and the result of a function.

    If `structures` is False, accept only annotations that `torch.library.infer_schema` supports.

    Attributes:
        result: the tree of the result, or None if the result needs no conversion.
        positional: the leaves that are positional arguments of the schema.
        keyword_only: the leaves that are keyword-only arguments of the schema.
        mutated: the names of the mutated leaves.
        mutates_objects: whether `mutates_args` names an object. The schema cannot express this.
        returns: the results in schema syntax.
        is_plain: whether no argument and no result needs a conversion.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        mutates_args: str | Iterable[str],
        tags: Iterable[Tag] = (),
        *,
        structures: bool = True,
    ) -> None:
        self.function = function
        names = mutated_names(mutates_args)
        signature = signatures.signature(function)
        self._where = signatures.spell_function(function)
        self._structures = structures
        self._builder = _Builder(self._where, structures)
        self.parameters = tuple(map(self._parameter, signature.parameters.values()))
        form, returned = form_of(tags), signature.return_annotation
        self.result, self.returns = None, ""
        if form is Form.PLAIN:
            self.result, self.returns = self._result(returned)
        self.is_plain = self.result is None and all(p.is_plain for p in self.parameters)
        for parameter in self.parameters:
            self._set_default(parameter)
        self.positional, self.keyword_only = _arranged(self.parameters)
        _check_names(self.parameters)
        self.mutates_objects = False
        self.mutated = self._mutated(names)
        if form is not Form.PLAIN:
            leaves = [leaf.name for leaf in self.leaves]
            self.returns = returned_alias(form, self._where, returned, leaves, self.mutated)

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return (*self.positional, *self.keyword_only)

    @property
    def schema_text(self) -> str:
        arguments = []
        for index, leaf in enumerate(self.leaves):
            if index == len(self.positional):
                arguments.append("*")
            schema_type = leaf.schema_type
            if leaf.name in self.mutated:
                schema_type = with_write(schema_type, numbered_alias(index))
            default = ""
            if leaf.default is not MISSING:
                default = f"={defaults.render(leaf.default, leaf.schema_type)}"
            arguments.append(f"{schema_type} {leaf.name}{default}")
        return write(arguments, self.returns)

    def _parameter(self, declared: inspect.Parameter) -> Parameter:
        where = self._where
        self._check_kind(declared)
        if not is_plain(declared.name):
            raise _bad_name(where, declared.name)
        if declared.annotation is declared.empty:
            raise SchemaError(
                f"{where}: parameter {_spell(declared.name)} must have a type annotation"
                f"{self._missing(declared)}"
            )
        try:
            node = self._builder.build(declared.annotation, declared.name)
        except UnsupportedTypeError as error:
            place = "" if error.path == declared.name else f" at {error.path!r}"
            raise SchemaError(
                f"{where}: parameter {_spell(declared.name)} has unsupported type "
                f"{types.spell(error.annotation)}{place}; "
                f"{advice.instead(error.annotation, structures=self._structures)}."
            ) from None
        parameter = Parameter(declared, node)
        if parameter.keyword_only and node.holds_tensors and not isinstance(node, Leaf):
            raise mistake(
                f"custom_op with kwarg-only Tensor args ({declared.name}, which holds tensors): "
                "they could have no gradient. Move it before the '*'.",
                NotImplementedError,
            )
        return parameter

    def _check_kind(self, declared: inspect.Parameter) -> None:
        if declared.kind not in _INSTEAD or (
            self._structures and declared.kind is declared.POSITIONAL_ONLY
        ):
            return
        method = signatures.method_hint(self.function)
        bare = declared.replace(annotation=declared.empty, default=declared.empty)
        raise SchemaError(
            f"{self._where}: parameter {_spell(str(bare))} is "
            f"{declared.kind.description}, and a schema cannot express this (no positional-only "
            "args, varargs (*args) or varkwargs (**kwargs))"
            f"{f'.{method}' if method else f'; {_INSTEAD[declared.kind]}.'}"
        )

    def _missing(self, declared: inspect.Parameter) -> str:
        is_first = declared.name == next(iter(inspect.signature(self.function).parameters))
        if is_first and declared.name == "ctx":
            return ". Remove 'ctx', and save tensors in setup_context(ctx, inputs, output)."
        method = signatures.method_hint(self.function) if is_first else ""
        return f".{method}" if method else f"; supported are {advice.SUPPORTED}."

    def _result(self, annotation: Any) -> tuple[Node | None, str]:
        if annotation is inspect.Signature.empty:
            raise SchemaError(
                f"{self._where}: No return type annotation was provided. Please add one, such as "
                "-> Tensor, or -> None for a function that returns nothing."
            )
        text = return_type(annotation)
        if text is not None:
            return None, text
        supported, place = advice.RETURNABLE, ""
        if self._structures:
            try:
                result = build_result(annotation)
                results = [leaf.kind.schema for leaf in result.leaves()]
                results += ["SymInt"] * any(True for _ in result.statics())  # the layout
                return result, write_results(results)
            except UnsupportedTypeError as error:
                supported = advice.STRUCTURED_RETURNABLE
                place = "" if error.path == RESULT else f" at {error.path!r}"
                annotation = error.annotation
        raise SchemaError(
            f"{self._where}: return has unsupported type {types.spell(annotation)}{place}; "
            f"supported are {supported}."
        )

    def _set_default(self, parameter: Parameter) -> None:
        default, node = parameter.declared.default, parameter.node
        if not self.is_plain:
            try:
                node.set_default(default)
            except TypeError as error:  # includes ArgumentError
                raise SchemaError(
                    f"{self._where}: parameter {_spell(parameter.name)} has an unsupported "
                    f"default: {error}"
                ) from None
        elif parameter.has_default:
            assert isinstance(node, Leaf)
            try:
                node.set_plain_default(default)
            except SchemaError as error:
                spelled = types.spell(parameter.declared.annotation)
                raise SchemaError(
                    f"{self._where}: parameter {_spell(parameter.name)} ({spelled}) has the "
                    f"unsupported default {_spell(default)}: {error}."
                ) from None

    def _mutated(self, names: tuple[str, ...] | None) -> tuple[str, ...]:
        if names == ():
            return ()
        tensors = {leaf.path: leaf.name for leaf in self.leaves if leaf.is_tensor}
        others = {leaf.path: leaf.kind.schema for leaf in self.leaves if not leaf.is_tensor}
        others |= {p.name: types.spell(p.declared.annotation) for p in self.parameters}
        objects = [leaf.path for leaf in self.leaves if is_by_reference(leaf.kind.schema)]
        if not self._structures:  # `infer_schema` cannot express that an object is mutated
            objects = []
        self.mutates_objects = names is not None and any(
            is_inside(place, name) for place in objects for name in names
        )
        return mutated_arguments(self._where, names, tensors, others, objects)


_INSTEAD = {
    inspect.Parameter.POSITIONAL_ONLY: "write it without the '/'",
    inspect.Parameter.VAR_POSITIONAL: "give it a name and a type, such as list[Tensor]",
    inspect.Parameter.VAR_KEYWORD: "write each keyword behind a '*', with a type and a default, "
    "such as *, scale: float = 1.0",
}


def _spell(value: object) -> str:
    return signatures.shorten(repr(value))


def _bad_name(where: str, name: str) -> SchemaError:
    return SchemaError(
        f"{where}: parameter {_spell(name)} has a name that a schema cannot "
        "hold; use one of ASCII letters, digits and underscores that is not a keyword of Python or "
        "TorchScript."
    )


def _check_names(parameters: Iterable[Parameter]) -> None:
    places: dict[str, Leaf] = {}
    for leaf in (leaf for parameter in parameters for leaf in parameter.node.leaves()):
        other = places.setdefault(leaf.name, leaf)
        if other is not leaf:
            raise mistake(
                f"{other.path!r} and {leaf.path!r} would both be the argument {leaf.name!r} of the "
                "schema. Give one of them another name."
            )


def _arranged(parameters: Sequence[Parameter]) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    """Split the leaves into the positional and the keyword-only arguments of the schema.

    Tensors are positional, because PyTorch computes gradients only for positional arguments. All
    other values inside structures are keyword-only. So if an author adds a field with a default
    anywhere in a structure, existing calls, for example in exported programs, still pass every
    value to the right argument. For the same reason, tensors with a default come last.
    """
    required, with_default, nested, keyword_only = [], [], [], []
    for parameter in parameters:
        direct = isinstance(parameter.node, Leaf)
        for leaf in parameter.node.leaves():
            if parameter.keyword_only if direct else not leaf.is_tensor:
                keyword_only.append(leaf)
            elif leaf.default is MISSING:
                required.append(leaf)
            elif direct:
                with_default.append(leaf)
            else:
                nested.append(leaf)
    return (*required, *with_default, *nested), tuple(keyword_only)


# --------------------------------------------------------------------------------------------------
# The tree of one argument


class _Builder:
    """Builds the annotation trees of arguments."""

    def __init__(self, where: str, structures: bool) -> None:
        self.where = where
        self.structures = structures

    def build(self, annotation: Any, path: str, inside: tuple[Any, ...] = ()) -> Node:
        """Build the tree for the annotation of an argument or field.

        `path` names the argument or field, such as `cfg.scale`. `inside` lists the types of the
        enclosing structures, so that a structure that contains itself can be rejected.
        """
        annotation = without_annotated(annotation)
        if isinstance(annotation, GradientsOf):
            return annotation.node(path)
        kind = leaf_kind(annotation)
        if not self.structures:
            if kind is None or kind.inferred is None:
                raise UnsupportedTypeError(path, annotation)
            # Use the type that `infer_schema` infers, because it may differ from the type in
            # `kind`. For example, `infer_schema` treats an Enum as a script object, but `kind`
            # encodes it as a str.
            schema, optional = kind.inferred.removesuffix("?"), kind.is_optional
            kind = Kind(schema, unchanged, is_optional=optional, inferred=kind.inferred)
        if kind is not None:
            return Leaf(path, self._name(path), kind)
        inner, optional = types.strip_optional(annotation)
        if optional:
            flag = Leaf(path, self._name(f"{path}.given"), KINDS[bool])
            return Maybe(flag, self.build(inner, path, inside))
        node = (
            self._fields(annotation, path, inside)
            or self._pair(annotation, path)
            or self._rows(annotation, path, inside)
        )
        if node is None:
            raise UnsupportedTypeError(path, annotation)
        return node

    def _name(self, path: str) -> str:
        name = path.replace(".", "_")
        if is_plain(name) and schemas.is_identifier(name):
            return name
        if name == path:
            raise _bad_name(self.where, name)
        raise mistake(
            f"{path!r} would become the schema argument {name!r}, but that is not a valid name; "
            "use ASCII letters, digits and underscores, and no keyword of TorchScript."
        )

    def _fields(self, annotation: Any, path: str, inside: tuple[Any, ...]) -> Fields | None:
        shape = argument_shape(annotation)
        if shape is None:
            return None
        check_end(path, annotation, inside, "Pass")
        nodes = {
            name: self.build(field.annotation, f"{path}.{name}", (*inside, annotation))
            for name, field in shape.fields.items()
        }
        return Fields(path, nodes, shape)

    def _pair(self, annotation: Any, path: str) -> Pair | None:
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        convert: Callable[[Kind], Any]
        supported = _PAIRED_ITEMS
        if origin in (dict, _Mapping) and args and args[0] is str:
            item, names, convert = leaf_kind(args[1]), ("keys", "values"), pairs.mapping
            supported = CONVERTED_ITEMS
        else:
            outer = read_container(annotation)
            inner = None if outer is None else read_container(outer.item)
            if outer is None or inner is None:
                return None
            item, names = leaf_kind(inner.item), ("values", "lengths")
            convert = functools.partial(pairs.nested, outer, inner)
        if item is None or item.is_optional or "[" in item.schema:
            return None
        if not is_object(item) and (item.decode or item.schema not in supported):
            return None
        encode, decode = convert(item)
        items = {"values": item, "keys": KINDS[str], "lengths": KINDS[int]}

        def leaf(name: str) -> Leaf:
            place = f"{path}.{name}"
            return Leaf(place, self._name(place), list_of(items[name]))

        first, second = map(leaf, names)
        return Pair(path, (first, second), encode, decode)

    def _rows(self, annotation: Any, path: str, inside: tuple[Any, ...]) -> Node | None:
        container = read_container(annotation)
        if container is None or container.length is not None:
            return None
        item = without_annotated(container.item)
        row = self._fields(item, path, inside)
        if row is None:
            return None
        return Rows(path, row, tuple if container.is_tuple else list)


_Mapping = typing.get_origin(typing.Mapping[str, int])
_PAIRED_ITEMS = CONVERTED_ITEMS - {"Tensor"}
