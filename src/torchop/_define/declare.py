"""Create the `Declaration` of an operator from a function and the options of `custom_op`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torchop._compat import compilers
from torchop._core.declaration import Declaration, Site
from torchop._errors import Place, mistake, naming
from torchop._rules.effect import Effect, declared_effect
from torchop._rules.inlining import Compile, declared_inlining
from torchop._rules.kernels.devices import DeviceTypes, known_devices
from torchop._rules.residuals.annotation import declared_types
from torchop._schema import signatures
from torchop._schema.callables import check_callable, check_no_generator
from torchop._schema.declared import Tags, checked_tags, declared_schema
from torchop._schema.layouts import check_layouts, declared_layouts
from torchop._schema.naming import OpName


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
    priority: Sequence[str] = (),
    residuals: Mapping[str, Any] | None = None,
    launches: bool = False,
    is_lenient: bool = False,
) -> Declaration:
    """Check a function and the options of `custom_op`, and return the operator's declaration.

    All checks that are possible before the operator exists happen here. `place` is the line of user
    code that defines the operator, and `launches` is True for a `triton_op`.
    """
    what = f"custom_op({str(name)!r})"
    check_callable(what, function)
    with naming(name):
        devices = known_devices(device_types)
        all_tags = checked_tags(tags)
        annotations = signatures.written_annotations(function)
        written = declared_layouts(annotations)
        types = declared_types(annotations.get("return"), residuals)
        saved = None
        if types is not None:
            from torchop._rules.residuals.declared import Declared  # rarely used

            saved = Declared(name, types)
            function = saved.wrap(function)
        parsed, kernel, convention = declared_schema(name, function, schema, mutates_args, all_tags)
        check_no_generator(what, function, parsed)
        layouts = convention.of_tensors(written)
        check_layouts(parsed, layouts)
        inlined = declared_inlining(compile, launches=launches)
        effect = declared_effect(effects, parsed, convention, is_inlined=inlined is not None)
        if saved is not None:
            saved.check_operator(parsed)
            if launches:
                raise mistake(
                    "triton_op does not support residuals. Define the operator with custom_op."
                )
    return Declaration(
        name,
        parsed,
        kernel,
        Site.of(inspect.unwrap(function) if saved else function, place),
        devices,
        # Add the tags for in-place and out= operators, because compilers recognize these operators
        # only by their tags.
        tags=tuple(dict.fromkeys((*all_tags, *parsed.form.tags))),
        effect=effect,
        inlined=inlined,
        launch=convention.kernel(_launching(function)) if launches else None,
        priority=priority,
        residuals=saved,
        convention=convention,
        layouts=layouts,
        is_lenient=is_lenient,
    )


def _launching(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that `wrap_triton` launches kernels directly instead of tracing them."""

    @functools.wraps(function)
    def launch(*args: Any, **kwargs: Any) -> Any:
        with compilers.launching_triton():
            return function(*args, **kwargs)

    return launch
