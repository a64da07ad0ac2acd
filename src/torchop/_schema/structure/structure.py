"""The structure of an operator: its flat schema, and the ways between both forms of a call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchop._compat import compilers
from torchop._schema import defaults
from torchop._schema.structure import values as _values
from torchop._schema.structure.nodes import MISSING, Leaf, Node
from torchop._schema.structure.results import Result, Several, Value
from torchop._schema.structure.source import Source
from torchop._schema.text import with_write, write, write_results, written_tensor


class Parameter(NamedTuple):
    """A parameter of the user's function, and the tree of what it takes."""

    declared: inspect.Parameter
    node: Node

    @property
    def name(self) -> str:
        return self.declared.name

    @property
    def keyword_only(self) -> bool:
        return self.declared.kind is inspect.Parameter.KEYWORD_ONLY


class Structure:
    """What the functions of an operator take and return, and how that is flat.

    Attributes:
        op: the name of the operator.
        function: as the user wrote it.
        schema_text: the flat schema, without the name.
        mutated: the flat arguments that the operator writes into.
        value_places: how messages name the results that are no tensors.
        overload: the flat operator, when it is defined.
        fake: the user's fake kernel, when there is one.
        compared: the metadata of inputs for which a kernel and the fake kernel agreed.
    """

    def __init__(
        self,
        op: str,
        function: Callable[..., Any],
        parameters: Sequence[Parameter],
        result: Result | None,
        returns: str | None,
        mutated: tuple[str, ...],
    ) -> None:
        self.op = op
        self.function = function
        self.parameters = tuple(parameters)
        self.result = result
        self.mutated = mutated
        self.positional, self.keyword_only = _arranged(self.parameters)
        if returns is None:
            returns = self._written_results()
        self.schema_text = write(self._written_arguments(), returns)
        self.flat_signature = self._flat_signature()
        self.value_places = () if result is None else tuple(_value_places(result))
        self.overload: Callable[..., Any] | None = None
        self.fake: Callable[..., Any] | None = None
        self.compared: set[Any] = set()
        # The functions that call the flat operator, and what it is called in them.
        self._callers: list[tuple[Any, str]] = []

    def set_fake(self, fake: Callable[..., Any]) -> None:
        """Notes the fake kernel, which computes what a tracer is to see beside tensors."""
        self.fake = fake
        self.compared = set()

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return (*self.positional, *self.keyword_only)

    @property
    def results(self) -> tuple[Result, ...] | None:
        """The results one by one, as a backward formula gets their gradients."""
        if isinstance(self.result, Several) and self.result.is_tuple:
            return tuple(self.result.parts.values())
        return None if self.result is None else (self.result,)

    def _written_arguments(self) -> list[str]:
        written = []
        for index, leaf in enumerate(self.leaves):
            if index == len(self.positional):
                written.append("*")
            schema_type = leaf.schema_type
            if leaf.name in self.mutated:
                schema_type = with_write(schema_type, index)
            default = ""
            if leaf.default is not MISSING:
                default = f"={defaults.render(leaf.default, leaf.schema_type)}"
            written.append(f"{schema_type} {leaf.name}{default}")
        return written

    def _written_results(self) -> str:
        """The results of an operator that returns what it writes into."""
        places = [index for index, leaf in enumerate(self.leaves) if leaf.name in self.mutated]
        return write_results([written_tensor(index) for index in places])

    def _flat_signature(self) -> inspect.Signature:
        parameters = []
        for leaf in self.leaves:
            kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
            if leaf in self.keyword_only:
                kind = inspect.Parameter.KEYWORD_ONLY
            default = inspect.Parameter.empty if leaf.default is MISSING else leaf.default
            parameters.append(inspect.Parameter(leaf.name, kind, default=default))
        return inspect.Signature(parameters)

    # ----------------------------------------------------------------------------------------------
    # From a call of the handle to one of the flat operator

    def caller(
        self, overload: Callable[..., Any], name: str, *, is_method: bool = False
    ) -> Callable[..., Any]:
        """The function behind the handle: it takes objects apart and calls the flat operator.

        Args:
            overload: the flat operator.
            name: the name of the function, which error messages of Python show.
            is_method: whether the function is called with the handle before the arguments.
        """
        name = name if name.isidentifier() else "call"
        source, variables = self._source(f"call of {self.op}", function=name)
        arguments = self._flat_call(variables)
        called = source.object(overload, "operator")
        with source.block(f"def {name}({self._declared(source, is_method=is_method)}):"):
            for parameter in self.parameters:
                parameter.node.flatten(source, parameter.name, variables)
            self._write_call(source, f"{called}({arguments})", variables)
        function = source.function(name)
        self._callers.append((function, called))
        return function

    def retire(self, refuse: Callable[..., Any]) -> None:
        """Lets what called the flat operator call `refuse`, because the operator is gone.

        The operator itself refuses too, but graphs find a new one by its name: the guards of Dynamo
        have to see that the function behind the handle is another.
        """
        for function, called in self._callers:
            function.__globals__[called] = refuse

    @functools.cached_property
    def call(self) -> Callable[..., Any]:
        """What the handle does, without the handle."""
        assert self.overload is not None  # the operator is called
        return self.caller(self.overload, "call")

    def _write_call(self, source: Source, call: str, variables: Mapping[str, str]) -> None:
        if self.result is None:
            source.line(f"return {call}")
            return
        result = source.variable("result")
        if not self.value_places:
            source.line(f"{result} = {call}")
            self._write_return(source, result, ())
            return
        known, traced = source.object(_values.known, "known"), source.variable("described")
        names = [source.variable(f"value_{index}") for index in range(len(self.value_places))]
        structure = source.object(self, "structure")
        with source.block(f"if {source.object(compilers.is_dynamo_compiling, 'traced')}():"):
            source.line(f"{result} = {call}")
            fake = source.object(_values.traced_fake, "traced_fake")
            source.line(f"{traced} = {fake}({structure})({self._user_call()})")
            found: list[str] = []
            self.result.flatten(source, traced, [], found)
            source.line(f"{', '.join(names)}, = {known}({self.op!r}, ({', '.join(found)},))")
        with source.block("else:"):
            waiting = source.object(_values.Call, "Call")
            call_name = source.variable("waiting")
            with source.block(f"with {waiting}({structure}) as {call_name}:"):
                source.line(f"{result} = {call}")
            passed = "".join(f"{variables[leaf.name]}, " for leaf in self.positional)
            source.line(f"{', '.join(names)}, = {call_name}.values(({passed}))")
        self._write_return(source, result, names)

    def _write_return(self, source: Source, result: str, values: Sequence[str]) -> None:
        assert self.result is not None
        tensors = self._unpacked(source, result)
        made = self.result.rebuild(iter(tensors), iter(values), source)
        source.line(f"return {made}")

    def _unpacked(self, source: Source, result: str) -> list[str]:
        assert self.result is not None
        count = len(list(self.result.flat()))
        if count <= 1:
            return [result] * count
        names = [source.variable(f"{result}_{index}") for index in range(count)]
        source.line(f"{', '.join(names)} = {result}")
        return names

    @functools.cached_property
    def flat_arguments(self) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        """`flat_arguments(*args, **kwargs)`: the arguments of a call of the flat operator."""
        source, variables = self._source(f"flat arguments of {self.op}")
        with source.block(f"def arguments({self._declared(source)}):"):
            for parameter in self.parameters:
                parameter.node.flatten(source, parameter.name, variables)
            positional = "".join(f"{variables[leaf.name]}, " for leaf in self.positional)
            keywords = ", ".join(f"{a.name!r}: {variables[a.name]}" for a in self.keyword_only)
            source.line(f"return ({positional}), {{{keywords}}}")
        return source.function("arguments")

    # ----------------------------------------------------------------------------------------------
    # From a call of the flat operator to one of the user's functions

    def kernel(self, function: Callable[..., Any], *, is_fake: bool = False) -> Callable[..., Any]:
        """The flat kernel that calls `function` with objects, and takes apart what it returns."""
        bind = self._fake_binder if is_fake else self._kernel_binder
        return self.as_flat(bind(function), function)

    def as_flat(self, flat: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        """Gives a flat function the identity of the one that it calls, and its own signature."""
        functools.update_wrapper(flat, function)
        flat.__signature__ = self.flat_signature  # type: ignore[attr-defined]
        return flat

    @functools.cached_property
    def _kernel_binder(self) -> Callable[..., Any]:
        return self._binder(is_fake=False)

    @functools.cached_property
    def _fake_binder(self) -> Callable[..., Any]:
        return self._binder(is_fake=True)

    def _binder(self, *, is_fake: bool) -> Callable[..., Any]:
        source, variables = self._source(f"{'fake ' * is_fake}kernel of {self.op}", flat=True)
        function = source.variable("function")
        with source.block(f"def bind({function}):"):
            with source.block(f"def kernel({self._flat_declared(source, variables)}):"):
                flat = ""
                if self.value_places and not is_fake:
                    flat = source.variable("flat")
                    items = (f"{leaf.name!r}: {variables[leaf.name]}" for leaf in self.leaves)
                    source.line(f"{flat} = {{{', '.join(items)}}}")
                made = self._rebuilt(source, variables)
                call = f"{function}({self._user_call(made)})"
                self._write_flat_return(source, call, flat)
            source.line("return kernel")
        return source.function("bind")

    def _write_flat_return(self, source: Source, call: str, flat: str) -> None:
        if self.result is None:
            source.line(f"return {call}")
            return
        result = source.variable("result")
        source.line(f"{result} = {call}")
        tensors: list[str] = []
        found: list[str] = []
        self.result.flatten(source, result, tensors, found)
        if found:
            structure = source.object(self, "structure")
            values = source.variable("values")
            source.line(f"{values} = ({', '.join(found)},)")
            if flat:
                compare = source.object(_values.compare, "compare")
                source.line(f"{compare}({structure}, {flat}, {values})")
            hand_over = source.object(_values.hand_over, "hand_over")
            source.line(f"{hand_over}({structure}, {values})")
        if len(tensors) == 1:
            source.line(f"return {tensors[0]}")
        else:
            source.line(f"return ({', '.join(tensors)})" if tensors else "return None")

    @functools.cached_property
    def objects(self) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        """`objects(*args, **kwargs)`: of flat arguments, those that users' functions take."""
        source, variables = self._source(f"arguments of {self.op}", flat=True)
        with source.block(f"def objects({self._flat_declared(source, variables)}):"):
            made = self._rebuilt(source, variables)
            positional = "".join(
                f"{value}, "
                for parameter, value in zip(self.parameters, made, strict=True)
                if not parameter.keyword_only
            )
            keywords = ", ".join(
                f"{parameter.name!r}: {value}"
                for parameter, value in zip(self.parameters, made, strict=True)
                if parameter.keyword_only
            )
            source.line(f"return ({positional}), {{{keywords}}}")
        return source.function("objects")

    @functools.cached_property
    def rebuilt_result(self) -> Callable[[Any, tuple[Any, ...]], Any]:
        """`rebuilt_result(flat_result, values)`: the result as the user's functions return it."""
        source = Source(f"result of {self.op}", ("result", "values"))
        with source.block("def rebuilt(result, values):"):
            if self.result is None:
                source.line("return result")
            else:
                names = [f"values[{index}]" for index in range(len(self.value_places))]
                self._write_return(source, "result", names)
        return source.function("rebuilt")

    @functools.cached_property
    def flat_result(self) -> Callable[[Any], Any]:
        """`flat_result(result)`: the tensors of it; the values are handed over."""
        source = Source(f"flat result of {self.op}", ("returned",))
        with source.block("def flat(returned):"):
            self._write_flat_return(source, "returned", "")
        return source.function("flat")

    # ----------------------------------------------------------------------------------------------
    # Pieces of source

    def _source(
        self, title: str, *, flat: bool = False, function: str = ""
    ) -> tuple[Source, dict[str, str]]:
        """A source, and what the flat arguments are called in it.

        Args:
            title: what messages call it.
            flat: whether the function takes the flat arguments.
            function: its name, if a user chose it: it hides what has the same.
        """
        names = [leaf.name for leaf in self.leaves] if flat else [p.name for p in self.parameters]
        source = Source(title, (function, *names))
        variables = {}
        for leaf in self.leaves:
            is_parameter = leaf.name == leaf.path and leaf.name in names
            variables[leaf.name] = leaf.name if flat or is_parameter else source.variable(leaf.name)
        return source, variables

    def _declared(self, source: Source, *, is_method: bool = False) -> str:
        """The parameters of the user's function, with its own defaults."""
        kinds = [parameter.declared.kind for parameter in self.parameters]
        parts = [source.variable("handle")] if is_method else []
        if is_method and inspect.Parameter.POSITIONAL_ONLY not in kinds:
            parts.append("/")  # a parameter may have any name
        for index, (declared, _) in enumerate(self.parameters):
            if (
                declared.kind is declared.KEYWORD_ONLY
                and declared.KEYWORD_ONLY not in kinds[:index]
            ):
                parts.append("*")
            default = ""
            if declared.default is not declared.empty:
                default = f"={source.object(declared.default, f'default_{declared.name}')}"
            parts.append(f"{declared.name}{default}")
            if declared.kind is declared.POSITIONAL_ONLY and (
                index + 1 == len(kinds) or kinds[index + 1] is not declared.POSITIONAL_ONLY
            ):
                parts.append("/")
        return ", ".join(parts)

    def _flat_declared(self, source: Source, variables: Mapping[str, str]) -> str:
        parts = []
        for index, leaf in enumerate(self.leaves):
            if index == len(self.positional):
                parts.append("*")
            default = ""
            if leaf.default is not MISSING:
                default = f"={source.object(leaf.default, f'default_{leaf.name}')}"
            parts.append(f"{variables[leaf.name]}{default}")
        return ", ".join(parts)

    def _flat_call(self, variables: Mapping[str, str]) -> str:
        positional = [variables[leaf.name] for leaf in self.positional]
        keywords = [f"{leaf.name}={variables[leaf.name]}" for leaf in self.keyword_only]
        return ", ".join((*positional, *keywords))

    def _user_call(self, made: Sequence[str] | None = None) -> str:
        values = [parameter.name for parameter in self.parameters] if made is None else made
        return ", ".join(
            f"{parameter.name}={value}" if parameter.keyword_only else value
            for parameter, value in zip(self.parameters, values, strict=True)
        )

    def _rebuilt(self, source: Source, variables: Mapping[str, str]) -> list[str]:
        return [parameter.node.rebuild(source, variables) for parameter in self.parameters]


def _arranged(parameters: Sequence[Parameter]) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    """The flat arguments: what graphs hold by position, and what they hold by name.

    By name is everything in a structure that is no tensor, so that a field with a default can be
    added anywhere. Tensors have to be positional to have gradients; those that may be missing come
    last, for the same reason.
    """
    ranked: list[tuple[int, Leaf]] = []
    keyword_only = []
    for parameter in parameters:
        direct = isinstance(parameter.node, Leaf)
        for leaf in parameter.node.leaves():
            if parameter.keyword_only if direct else not leaf.kind.holds_tensors:
                keyword_only.append(leaf)
            elif leaf.default is MISSING:
                ranked.append((0, leaf))
            else:
                ranked.append((1 if direct else 2, leaf))
    positional = [leaf for _, leaf in sorted(ranked, key=lambda pair: pair[0])]
    return tuple(positional), tuple(keyword_only)


def _value_places(result: Result) -> Iterator[str]:
    """How messages name the results that are no tensors."""
    if isinstance(result, Value):
        yield result.where.partition(": ")[2]
    elif isinstance(result, Several):
        for part in result.parts.values():
            yield from _value_places(part)
