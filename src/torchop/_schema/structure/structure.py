"""Convert between structured values, such as dataclasses, and the arguments of a flat schema.

A schema cannot express an argument with fields, so the schema has a separate argument for each
field instead. We call the operator with this schema the *flat* operator, and its arguments the
*flat* arguments.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torchop._errors import GradientError
from torchop._schema import signatures
from torchop._schema.structure.agreement import Decisions
from torchop._schema.structure.layouts import Layouts
from torchop._schema.structure.nodes import Fields, Leaf, Node, Parameter
from torchop._schema.structure.result_nodes import result_leaf
from torchop._schema.structure.shapes import TupleShape
from torchop._schema.structure.source import Source
from torchop._schema.text import results_of
from torchop._schema.tree import FunctionTree

_LAYOUT = "(layout)"


class Structure:
    """Generates the functions that convert between objects and flat values (single fields).

    Attributes:
        result: the annotation tree of the result, which is a single leaf if the result needs no
            conversion.
        result_count: the number of gradients that a backward formula receives.
        positional: the leaves that are positional arguments of the flat operator.
        keyword_only: the leaves that are keyword-only arguments of the flat operator.
        overload: the flat operator, once it is defined.
    """

    def __init__(self, op: object, tree: FunctionTree) -> None:
        self.op = op
        self.function = tree.function
        self.parameters = tree.parameters
        self.returns_objects = tree.result is not None
        self.result = tree.result or result_leaf("the result", "Tensor")
        self.positional, self.keyword_only = tree.positional, tree.keyword_only
        self.flat_signature = self._flat_signature()
        shape = getattr(self.result, "shape", None)
        self._returns_tuple = isinstance(shape, TupleShape)
        if tree.result is None:
            self.result_count = len(results_of(tree.schema_text))
        else:
            self.result_count = len(shape.fields) if isinstance(shape, TupleShape) else 1
        self._statics = [static.name for static in self.result.statics()]
        self.layouts = None
        if self._statics:
            places = [static.path for static in self.result.statics()]
            self.layouts = Layouts(op, places)
        # The results of the flat operator (the operator as PyTorch sees it). If the author's result
        # has parts that are not tensors, the last flat result is an int that stands for the values
        # of all these parts (see `layouts`).
        self._flat = [leaf.name for leaf in self.result.leaves()]
        self._flat += [_LAYOUT] * bool(self._statics)
        self.decisions = Decisions(op, [n.path for n in self.result.leaves()], self._layout_of)
        self.overload: Callable[..., Any] | None = None
        self.on_deregister: Callable[[], None] | None = None
        self._bind: Callable[..., Any] | None = None
        # The generated functions that call the flat operator, each paired with the name of the
        # global variable that holds the operator.
        self._callers: list[tuple[Any, str]] = []

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return (*self.positional, *self.keyword_only)

    @property
    def positional_parameters(self) -> tuple[Parameter, ...]:
        return tuple(parameter for parameter in self.parameters if not parameter.keyword_only)

    @property
    def results(self) -> list[tuple[Any, Node]]:
        """The results that need a conversion, as (annotation, tree) pairs.

        If the function returns a tuple, each item is a result.
        """
        if not self.returns_objects:
            return []
        returned = signatures.signature(self.function).return_annotation
        if not isinstance(self.result, Fields) or not self._returns_tuple:
            return [(returned, self.result)]
        return list(zip(typing.get_args(returned), self.result.fields.values(), strict=True))

    def gather(
        self, values: Iterable[Any], statics: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[Any, ...]:
        """Group values by parameter.

        `values` holds one value, such as a tangent, for each positional argument of the schema. The
        returned tuple holds one item for each positional parameter of the author's function. For a
        structure, such as a dataclass, the item is a mapping from field names to values. `statics`
        is the result of `statics_of_call`.
        """
        flat = {**statics, **dict(zip([x.name for x in self.positional], values, strict=False))}
        return tuple(parameter.node.gather(flat) for parameter in self.positional_parameters)

    def statics_of_call(self, kwargs: Mapping[str, Any], flat: Any) -> dict[str, Any]:
        """Return the non-tensor values of a call that determine the structure of its gradients.

        The returned dict contains the keys of dicts in the arguments, and the static (non-tensor)
        parts of the result. `flat` is the result of the operator as PyTorch sees it, with one
        tensor or number per field.
        """
        statics = self.keys_of_call(kwargs)
        if self.layouts is not None:
            statics |= self.statics_of_layout(flat[-1] if len(self._flat) > 1 else flat)
        return statics

    def statics_of_layout(self, number: int) -> dict[str, Any]:
        assert self.layouts is not None
        return dict(zip(self._statics, self.layouts.values_of(number), strict=True))

    def _layout_of(self, number: int) -> list[tuple[str, Any]]:
        assert self.layouts is not None
        values = zip(self.result.statics(), self.layouts.values_of(number), strict=True)
        return [part for static, value in values for part in static.described(value)]

    def keys_of_call(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {leaf.name: kwargs.get(leaf.name) for leaf in self.keys}

    @functools.cached_property
    def keys(self) -> list[Leaf]:
        """The arguments that hold dict keys, for dicts with tensor values."""
        nodes = [parameter.node for parameter in self.parameters]
        return [key for node in nodes for key in node.keys_of_tensors()]

    def gather_each_result(
        self, flat: tuple[Any, ...], statics: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Convert the flat results' gradients to arguments for the author's backward formula.

        `statics` holds the static (non-tensor) parts of the result.
        """
        if not self.returns_objects:
            return flat
        gathered = self.result.gather({**statics, **dict(zip(self._flat, flat, strict=False))})
        return gathered if self._returns_tuple else (gathered,)

    def spread_gradients(self, returned: Any, statics: Mapping[str, Any]) -> dict[str, Any]:
        """Split the gradients from a backward formula into one gradient per schema argument."""
        inputs = self.positional_parameters
        # Only a plain tuple holds the gradients of several arguments. A NamedTuple is the gradient
        # of a single structured argument.
        gradients = returned if type(returned) is tuple else (returned,)
        while len(gradients) > len(inputs) and gradients[-1] is None:
            gradients = gradients[:-1]
        if len(gradients) > len(inputs) or any(
            parameter.node.holds_tensors and not parameter.has_default
            for parameter in inputs[len(gradients) :]
        ):
            raise GradientError(
                f"{self.op}: backward returned an incorrect number of gradients (expected "
                f"{len(inputs)}, got {len(gradients)}). It must return one for each input: "
                f"{', '.join(parameter.name for parameter in inputs)}."
            )
        flat: dict[str, Any] = {}
        try:
            for parameter, gradient in zip(inputs, gradients, strict=False):
                flat |= parameter.node.spread(gradient, statics)
        except GradientError as error:
            raise GradientError(f"{self.op}: {error}") from None
        return flat

    def gather_result(self, flat: Any) -> Any:
        """Pack one value per flat result, such as shapes, into the author's structure.

        The author's structure is the one that the decorated function returns, such as a NamedTuple.
        """
        values = (flat,) if len(self._flat) == 1 else flat or ()
        return self.result.gather(dict(zip(self._flat, values, strict=False)))

    def spread_result(self, value: Any) -> Any:
        """Split a value shaped like the author's result into one value per result of the schema."""
        flat = self.result.spread(value, {})
        values = tuple(flat.get(name) for name in self._flat)
        return values[0] if len(values) == 1 else values

    def _flat_signature(self) -> inspect.Signature:
        parameters = []
        for leaf in self.leaves:
            kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
            if leaf in self.keyword_only:
                kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(leaf.name, kind, default=leaf.default))
        return inspect.Signature(parameters)

    # ----------------------------------------------------------------------------------------------
    # Functions that take objects and call the flat operator

    def caller(
        self,
        overload: Callable[..., Any],
        name: str,
        *,
        is_method: bool = False,
        is_flat: bool = False,
    ) -> Callable[..., Any]:
        """Generate a function that takes objects (e.g. dataclasses) and calls the flat operator.

        The flat operator is the operator as PyTorch sees it, with one argument per field.

        If `is_method` is true, the function has an additional first parameter for the handle, i.e.
        the object that `custom_op` returns. If `is_flat` is true, the function returns the flat
        result, and `invalidate` leaves the function unchanged.
        """
        source, variables = self._source(f"{'flat ' * is_flat}call")
        name = f"{name}"  # a plain str, because `__name__` may be an instance of a subclass
        written_name = source.variable(name if name.isidentifier() else "call")
        called = source.object(overload, "operator")
        call = f"{called}({self._flat_call(variables)})"
        handle = source.variable("handle") if is_method else None
        with source.block(f"def {written_name}{self._declared(source, handle)}:"):
            for parameter in self.parameters:
                parameter.node.flatten(source, parameter.name, variables)
            result = source.variable("result")
            if handle is not None:
                self._write_explained_call(source, handle, result, call)
                call = result
            if is_flat or not self.returns_objects:
                source.line(f"return {call}")
            else:
                if handle is None:
                    source.line(f"{result} = {call}")
                self._write_return(source, result)
        function = source.function(written_name)
        function.__name__ = function.__qualname__ = name
        if not is_flat:
            self._callers.append((function, called))
        return function

    @functools.cached_property
    def flat_arguments(self) -> Callable[..., Any]:
        """The function that converts a call's arguments to those in the operator's schema."""
        return self.caller(_collect, "arguments", is_flat=True)

    def invalidate(self, raise_error: Callable[..., Any]) -> None:
        """Make the generated functions raise an error once the operator is deregistered.

        In eager mode, calling the deregistered overload already raises an error, but a compiled
        graph would call a new operator of the same name. So this method replaces the overload, a
        global variable of the generated functions, with `raise_error`. Dynamo's guards then fail,
        so Dynamo traces the call again and reaches `raise_error`.
        """
        for function, called in self._callers:
            function.__globals__[called] = raise_error
        if self.on_deregister is not None:
            self.on_deregister()

    @functools.cached_property
    def call(self) -> Callable[..., Any]:
        """The function that takes objects, such as dataclasses, and calls the flat operator."""
        assert self.overload is not None  # set when the operator was defined
        return self.caller(self.overload, "call")

    def _write_explained_call(self, source: Source, handle: str, result: str, call: str) -> None:
        """Emit `result = call`, and a handler that turns dispatcher errors into clearer ones."""
        error, explained = source.variable("error"), source.variable("explained")
        with source.block("try:"):
            source.line(f"{result} = {call}")
        with source.block(f"except {source.object(RuntimeError)} as {error}:"):
            source.line(f"{explained} = {handle}._explain_refusal({error})")
            with source.block(f"if {explained} is None:"):
                source.line("raise")
            source.line(f"raise {explained} from None")

    def _variables_of_result(self, source: Source, result: str) -> dict[str, str]:
        if isinstance(self.result, Leaf):
            return {self.result.name: result}
        names = (*self._flat, *self._statics)
        return {name: source.variable(f"{result}_{index}") for index, name in enumerate(names)}

    def _write_return(self, source: Source, result: str) -> None:
        variables = self._variables_of_result(source, result)
        flat = ", ".join(variables[name] for name in self._flat)
        if flat and flat != result:
            source.line(f"{flat} = {result}")
        if self.layouts is not None:
            values_of = source.object(self.layouts.values_of, "layout")
            statics = "".join(f"{variables[name]}, " for name in self._statics)
            source.line(f"{statics}= {values_of}({variables[_LAYOUT]})")
        source.line(f"return {self.result.rebuild(source, variables)}")

    # ----------------------------------------------------------------------------------------------
    # Functions that take flat values and call the author's functions

    @functools.cached_property
    def flat_function(self) -> Callable[..., Any]:
        return self.kernel(self.function)

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a kernel so that it takes and returns flat values, i.e. single fields.

        The kernel as the author wrote it takes and returns objects, such as dataclasses.
        """
        if self._bind is None:
            self._bind = self._binder("kernel")
        flat = self._bind(function)
        functools.update_wrapper(flat, function)
        flat.__signature__ = self.flat_signature
        return flat  # type: ignore[no-any-return]

    def fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a fake kernel like `kernel` does, and record the structure of its results."""
        flat = self._binder("fake kernel")(function)
        decisions, names = self.decisions, [leaf.name for leaf in self.keyword_only]
        decisions.made.clear()  # another fake kernel made these decisions

        def fake(*args: Any, **kwargs: Any) -> Any:
            result = flat(*args, **kwargs)
            results = (result,) if len(self._flat) == 1 else result
            decisions.record((*args, *[kwargs.get(name) for name in names]), results)
            return result

        functools.update_wrapper(fake, function)
        fake.__signature__ = self.flat_signature  # type: ignore[attr-defined]
        return fake if self.returns_objects else flat

    @functools.cached_property
    def objects(self) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        """The function that converts flat arguments to `(args, kwargs)`, with objects rebuilt."""
        return self._binder("arguments")(_collect)  # type: ignore[no-any-return]

    def _binder(self, what: str) -> Callable[..., Any]:
        """Generate `bind(function)`, which returns a wrapper that takes flat arguments.

        The wrapper rebuilds objects, such as dataclasses, from the flat arguments and passes them
        to `function`. If `what` is "kernel", it also flattens the result.
        """
        source, variables = self._source(what, flat=True)
        function = source.variable("function")
        with source.block(f"def bind({function}):"):
            with source.block(f"def kernel{_written(self.flat_signature, source)}:"):
                objects = [p.node.rebuild(source, variables) for p in self.parameters]
                call = f"{function}({self._user_call(objects)})"
                if what == "arguments":
                    source.line(f"return {call}")
                else:
                    self._write_flat_return(source, call, is_checked=what == "kernel")
            source.line("return kernel")
        return source.function("bind")

    def _write_flat_return(self, source: Source, call: str, *, is_checked: bool = False) -> None:
        result = source.variable("result")
        source.line(f"{result} = {call}")
        variables = self._variables_of_result(source, result)
        self.result.flatten(source, result, variables)
        if self.layouts is not None:
            number_of = source.object(self.layouts.number_of, "layout")
            statics = "".join(f"{variables[name]}, " for name in self._statics)
            # The key of a layout includes the text of each number, because numbers of different
            # types or signs may be equal, such as 1 and 1.0, but need different layouts.
            text_of = source.object(repr)
            texts = "".join(
                f"{text_of}({variables[static.name]}), "
                for static in self.result.statics()
                if static.is_number
            )
            exact = f", ({texts})" * bool(texts)
            source.line(f"{variables[_LAYOUT]} = {number_of}(({statics}){exact})")
        flat = ", ".join(variables[name] for name in self._flat)
        if is_checked and self.returns_objects:
            with source.block(f"if {source.object(self.decisions.made, 'decisions')}:"):
                check = source.object(self.decisions.check, "check_decisions")
                names = "".join(f"{leaf.name}, " for leaf in self.leaves)
                source.line(f"{check}(({names}), ({flat},))")
        source.line(f"return {flat or None}")

    @functools.cached_property
    def rebuilt_result(self) -> Callable[[Any], Any]:
        """The function that rebuilds the author's result (e.g. a dataclass) from flat results."""
        source = Source(self.op, "result", ("result",))
        with source.block("def rebuilt(result):"):
            self._write_return(source, "result")
        return source.function("rebuilt")

    @functools.cached_property
    def flat_result(self) -> Callable[[Any], Any]:
        """The function that splits the author's result into the flat results."""
        source = Source(self.op, "flat result", ("returned",))
        with source.block("def flat(returned):"):
            self._write_flat_return(source, "returned")
        return source.function("flat")

    # ----------------------------------------------------------------------------------------------
    # Parts of the generated source

    def _source(self, title: str, *, flat: bool = False) -> tuple[Source, dict[str, str]]:
        """Return an empty `Source`, and a dict from flat arguments to generated variables.

        If `flat` is set, the generated function takes the flat arguments. Otherwise, it takes the
        same parameters as the author's function.
        """
        names = [leaf.name for leaf in self.leaves] if flat else [p.name for p in self.parameters]
        source = Source(self.op, title, names)
        variables = {}
        for leaf in self.leaves:
            is_parameter = leaf.name == leaf.path and leaf.name in names
            variables[leaf.name] = leaf.name if flat or is_parameter else source.variable(leaf.name)
        return source, variables

    def _declared(self, source: Source, handle: str | None) -> str:
        parameters = [parameter.declared for parameter in self.parameters]
        if handle is not None:  # positional-only, in case another parameter has the same name
            parameters.insert(0, inspect.Parameter(handle, inspect.Parameter.POSITIONAL_ONLY))
        return _written(inspect.Signature(parameters), source)

    def _flat_call(self, variables: Mapping[str, str]) -> str:
        positional = [variables[leaf.name] for leaf in self.positional]
        keywords = [f"{leaf.name}={variables[leaf.name]}" for leaf in self.keyword_only]
        return ", ".join((*positional, *keywords))

    def _user_call(self, values: Sequence[str]) -> str:
        return ", ".join(
            f"{parameter.name}={value}" if parameter.keyword_only else value
            for parameter, value in zip(self.parameters, values, strict=True)
        )


def _collect(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


class _Expression:
    """A parameter default that `str(inspect.Signature)` writes as the expression `text`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _written(signature: inspect.Signature, source: Source) -> str:
    parameters = []
    for parameter in signature.parameters.values():
        default = parameter.default
        if default is not parameter.empty:
            default = _Expression(source.object(default, f"default_{parameter.name}"))
        parameters.append(parameter.replace(annotation=parameter.empty, default=default))
    return str(inspect.Signature(parameters))
