"""Define operators that are derived from another operator and deregistered with it.

Some derived operators, such as the in-place form of a functional operator, are called by users. The
others are helper operators: an operator `name__kind` replaces the operator `name` in compiled
graphs. Helper operators are defined at registration time rather than during tracing, because a
process may load a graph from a cache or a file without tracing it.

Each kind of helper operator is a subclass of `HelperOperator`:

| kind | replaces | defined in |
| --- | --- | --- |
| `mutable`, `functional` | calls that mutate arguments | `functionalization.helper_operators` |
| `training`, `backward` | calls with a derived formula | `autograd.derived.graph_operators` |
| `with_residuals` | calls that record a gradient | `residuals.training` |
| `backward_kernel` | the backward of the operator | `residuals.backward_kernel` |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch.library
from typing_extensions import Self  # in typing since Python 3.11

from torchop._compat import operators
from torchop._compat.classes import OpOverload, Tag
from torchop._core.call import as_tuple
from torchop._core.declaration import Declaration, Site
from torchop._core.define import all_or_nothing, define, deregister_with
from torchop._core.definition import NOTHING, CompiledRule, Definition
from torchop._core.lock import registration_lock
from torchop._core.registry import registration_site
from torchop._core.user_rule import follow_origin
from torchop._errors import SchemaError
from torchop._schema.convention import FLAT, Convention
from torchop._schema.forms import Form, form_of
from torchop._schema.layouts import Layout
from torchop._schema.naming import OpName
from torchop._schema.schema import MAX_ARGUMENTS, Schema, write_schema
from torchop._schema.text import results_of


class HelperOperator:
    """An operator `name__kind` that replaces the operator `name` in compiled graphs.

    Each subclass describes one kind of helper operator, and overrides the attributes and methods
    that differ from the operator `name`.

    Attributes:
        kind: the last part of the name.
        tags: additional tags. A helper operator also inherits the tags of the operator `name`,
            except for the tags of in-place and out= forms.
        further_results: the types of additional results, which follow the results of the operator
            `name`.
        error: raised if another library has already defined an operator `name__kind`.
        inlined: the compilers that trace `kernel` instead of the helper operator.
        convention: adapts functions that users register for the helper operator, so that they take
            and return the values in its schema.
        layouts: the declared memory layouts of arguments.
        kernel: the kernel, which takes the arguments in the schema. Most kernels call the operator
            `name` with different arguments.
        definition: the operator `name`.
        helper: the operator `name__kind`. `define` sets this attribute.
    """

    kind: ClassVar[str]
    tags: ClassVar[tuple[Tag, ...]] = ()
    further_results: Sequence[str] = ()
    error: ClassVar[type[RuntimeError]] = RuntimeError
    inlined: Any = None
    convention: Convention = FLAT
    layouts: Mapping[str, Layout] = NOTHING
    kernel: Callable[..., Any]
    helper: Definition

    def __init__(self, definition: Definition) -> None:
        self.definition = definition

    @classmethod
    def of(cls, definition: Definition) -> Self:
        """Return the operator's helper operator of this kind, defining it on first use.

        Registering another backward formula later does not redefine the helper operator, because
        compiled graphs call it by name.
        """
        helper = definition.helpers.get(cls.kind)
        if helper is None or not helper.is_registered:
            helper = cls(definition)
            if not helper.define():  # another thread has just defined it
                return cls.of(definition)
        return cast(Self, helper)

    @property
    def is_registered(self) -> bool:
        return self.helper.deregistration_reason is None

    @property
    def overload(self) -> OpOverload:
        return self.helper.overload

    @property
    def origin(self) -> Definition:
        """The operator from which the helper operator inherits public rules (`torchop.Rule`)."""
        return self.definition

    def written_arguments(self) -> list[str]:
        """Return the arguments of the helper operator, such as `["Tensor x", "*", "int n=1"]`."""
        return self.definition.schema.written_arguments

    def written_results(self) -> list[str]:
        """Return the types of the helper operator's results."""
        return [*results_of(self.definition.schema.written), *self.further_results]

    def named_schema(self, name: OpName) -> Schema:
        return write_schema(name, self.written_arguments(), self.written_results())

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        # Most kernels only call the operator `name`, so they can also serve as the fake kernel.
        return self.kernel(*args, **kwargs)

    def split(self, results: Any) -> tuple[Any, tuple[Any, ...]]:
        """Split the helper's results into the result of `name` and the additional results."""
        everything = as_tuple(self.helper.schema, results)
        count = len(self.definition.schema.returns)
        return everything[:count] if count > 1 else everything[0], everything[count:]

    def register_rules(self) -> None:
        """Register the new helper operator's rules, such as its backward formula or vmap rule."""

    def inherit(self, rule: CompiledRule[Any]) -> None:
        """Update the helper operator after a rule of `name`, such as its vmap rule, has changed."""

    def define(self) -> bool:
        """Define the operator `name__kind`. If a step fails, undo the previous steps.

        Return False if another thread has already defined it.
        """
        definition, kind = self.definition, self.kind
        name = definition.name._replace(name=f"{definition.name.name}__{kind}")
        inherited = (tag for tag in definition.declaration.tags if form_of((tag,)) is Form.PLAIN)
        declaration = Declaration(
            name,
            self.named_schema(name),
            self.kernel,
            definition.declaration.site or Site(__name__, str(name), __file__, 0),
            tags=tuple(dict.fromkeys((Tag.pt2_compliant_tag, *inherited, *self.tags))),
            fake=self.fake,
            inlined=self.inlined,
            convention=self.convention,
            layouts=self.layouts,
            is_helper=True,
        )

        def build() -> bool:
            with registration_lock:
                definition.check_defined()
                before = definition.helpers.get(kind)
                if before is not None and before.is_registered:
                    return False
                if operators.is_registered(name.packet, name.overload):
                    raise self.error(
                        f"{definition}: a compiled graph needs an operator {name}, but another "
                        f"library defined one at {registration_site(name)}. Rename that operator."
                    )
                self.helper = define_owned(declaration, definition)
                self.register_rules()
                definition.helpers = {**definition.helpers, kind: self}
            follow_origin(self.origin, self.helper, kind)  # without the lock: this runs user code
            return True

        return all_or_nothing(name, build)


def define_derived(
    origin: Definition,
    declaration: Declaration,
    kind: str,
    register_rules: Callable[[Definition], None],
    *,
    lib: torch.library.Library | None = None,
) -> Definition:
    """Define an operator that is derived from `origin` and inherits its public rules.

    Public rules, such as sharding rules, may behave differently depending on `kind`, for example
    for `"inplace"`. `register_rules` must register all other rules of the derived operator.
    Deregistering `origin` or closing `lib` also deregisters the derived operator.
    """

    def build() -> Definition:
        derived = define_owned(declaration, origin, lib)
        follow_origin(origin, derived, kind)
        register_rules(derived)
        return derived

    return all_or_nothing(declaration.name, build)


def define_owned(
    declaration: Declaration, owner: Definition, lib: torch.library.Library | None = None
) -> Definition:
    """Define an operator that is deregistered when `owner` is deregistered or `lib` is closed."""
    name, owners_name, reference = declaration.name, str(owner), weakref.ref(owner)
    count = len(declaration.schema.arguments)
    if count > MAX_ARGUMENTS:
        raise SchemaError(
            f"{owner}: this needs an operator {name} with {count} arguments, but PyTorch takes at "
            f"most {MAX_ARGUMENTS}. Pass values of one type as a list, or write a formula with "
            "register_autograd."
        )

    def reason() -> str:
        text = f"{name} belongs to {owners_name}, which was deregistered."
        alive = reference()
        return f"{text} {(alive and alive.deregistration_reason) or ''}".rstrip()

    derived = define(declaration, lib)
    deregister_with(owner.library, derived, reason)
    return derived


def free_name(name: str, schema: Schema) -> str:
    while any(argument.name == name for argument in schema.arguments):
        name += "_"
    return name
