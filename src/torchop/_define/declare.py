"""Create the `Declaration` of an operator from a function and the options of `custom_op`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.library

from torchop._compat import compilers
from torchop._core.declaration import Declaration, Site
from torchop._core.define import all_or_nothing, define
from torchop._core.library import check_callers_library
from torchop._errors import Place, SchemaError
from torchop._rules.effect import Effect, declared_effect, effect_on_objects
from torchop._rules.inlining import Compile, declared_inlining
from torchop._rules.kernels.devices import DeviceTypes, known_devices
from torchop._rules.residuals import declare_residuals
from torchop._schema.callables import check_callable, check_no_generator
from torchop._schema.declared import Tags, checked_tags, declared_schema
from torchop._schema.forms import form_tags
from torchop._schema.layouts import check_layouts, declared_layouts
from torchop._schema.naming import OpName


def new_name(name: object, lib: torch.library.Library | None) -> OpName:
    op_name = OpName.parse_new(name)
    if lib is not None:
        check_callers_library(op_name, lib)
    return op_name


def declare(
    name: OpName,
    function: Callable[..., Any],
    place: Place,
    *,
    mutates_args: str | Iterable[str] = (),
    device_types: DeviceTypes = None,
    schema: str | None = None,
    tags: Tags = None,
    effects: Effect = None,
    compile: Compile = "opaque",
    residuals: Mapping[str, Any] | None = None,
    launches: bool = False,
    is_lenient: bool = False,
) -> Declaration:
    """Check a function and the options of `custom_op`, and return the operator's declaration.

    This makes all checks that are possible before the operator exists. `place` is the line of user
    code that defines the operator, and `launches` is True for a `triton_op`.
    """
    what = f"custom_op({str(name)!r})"
    check_callable(what, function)
    devices = known_devices(name, device_types)
    saved = declare_residuals(name, function, residuals)
    written = declared_layouts(function)
    if saved is not None:
        function = saved.wrap(function)
    all_tags = checked_tags(name, tags)
    parsed, kernel, convention = declared_schema(name, function, schema, mutates_args, all_tags)
    check_no_generator(what, function, parsed)
    layouts = convention.of_tensors(written)
    check_layouts(name, parsed, layouts)
    if compile == "opaque" and not launches:
        effects = effect_on_objects(name, effects, parsed, is_certain=convention.mutates_objects)
    effect = declared_effect(name, effects, parsed)
    inlined = declared_inlining(name, compile, effect, launches=launches)
    if saved is not None:
        saved.check_operator(parsed)
        if launches:
            raise SchemaError(
                f"{name}: triton_op does not support residuals. Define the operator with custom_op."
            )
    return Declaration(
        name,
        parsed,
        kernel,
        Site.of(inspect.unwrap(function) if saved else function, place),
        devices,
        # Compilers recognize in-place and out= operators only by their tags, so add the tags here.
        tags=tuple(dict.fromkeys((*all_tags, *form_tags(parsed.form)))),
        effect=effect,
        inlined=inlined,
        launch=convention.kernel(_launching(function)) if launches else None,
        residuals=saved,
        convention=convention,
        layouts=layouts,
        is_lenient=is_lenient,
    )


def _launching(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that `wrap_triton` launches kernels directly, without tracing them."""

    @functools.wraps(function)
    def launch(*args: Any, **kwargs: Any) -> Any:
        with compilers.launching_triton():
            return function(*args, **kwargs)

    return launch


def define_operator(
    declared: Declaration, lib: torch.library.Library | None, priority: Sequence[str] = ()
) -> Any:
    def build() -> Any:
        handle = define(declared, lib).handle
        handle.set_priority(priority)
        return handle

    return all_or_nothing(declared.name, build) if priority else define(declared, lib).handle
