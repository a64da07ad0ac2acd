from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests._support.devices import AUTOGRAD, BACKEND, DEVICE
from tests.integration.differential.chance import one_in
from tests.integration.differential.spec import (
    FORMS,
    KINDS,
    RETURNS,
    Kind,
    OperatorSpec,
    Override,
    Parameter,
)

_KIND = {kind.schema: kind for kind in KINDS}
_MUTABLE = ("Tensor", "Tensor?", "Tensor[]", "Tensor?[]")
_NAMES = ("x", "y", "self", "other", "n", "dim", "out", "alpha")


def _kinds(*schemas: str) -> st.SearchStrategy[Kind]:
    return st.sampled_from([_KIND[schema] for schema in schemas])


# Most parameters have common types, and the first is nearly always a tensor. Without tensors, calls
# are not native, because the dispatcher selects the kernel by other arguments.
_first = st.one_of(
    *[_kinds("Tensor")] * 12, _kinds("Tensor[]"), _kinds("Tensor?"), _kinds("Tensor?[]")
)
_common = _kinds("Tensor", "Tensor", "Tensor?", "Tensor[]", "SymInt", "float", "bool", "SymInt[]")
_any = st.one_of(_common, st.sampled_from(KINDS))


def _keyword_kinds() -> st.SearchStrategy[Kind]:
    return st.sampled_from([kind for kind in KINDS if not kind.holds_tensors])


@st.composite
def _parameters(draw: DrawFn, *, tensors: bool) -> tuple[Parameter, ...]:
    names = iter(_NAMES)
    result = []
    if tensors:
        result.append(Parameter(next(names), draw(_first)))
    needs_default = False
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(_any if tensors else _keyword_kinds())
        default = _default(draw, kind, needs_default)
        if needs_default and default is None:
            break
        needs_default = default is not None
        result.append(Parameter(next(names), kind, default=default))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        kind = draw(_keyword_kinds())
        result.append(
            Parameter(next(names), kind, keyword_only=True, default=_default(draw, kind, False))
        )
    return tuple(result)


def _default(draw: DrawFn, kind: Kind, needed: bool) -> int | None:
    if not kind.defaults or not (needed or draw(st.booleans())):
        return None
    return draw(st.integers(0, len(kind.defaults) - 1))


def _inferable(parameters: tuple[Parameter, ...]) -> bool:
    # Kinds without an annotation cannot be inferred. An example is int[2], whose schema would show
    # the default [1, 1] as "1".
    return all(p.kind.annotation is not None for p in parameters)


@st.composite
def operators(draw: DrawFn, focus: str = "plain") -> OperatorSpec:
    """Generate an operator that suits `focus`, the unusual feature of the example."""
    parameters = draw(_parameters(tensors=focus != "no tensors"))
    form = "plain"
    if focus == "mutation":
        form = draw(st.sampled_from(["plain", *FORMS]))
    elif draw(one_in(10)):
        form = draw(st.sampled_from(FORMS))
        focus = "mutation"
    returns = draw(
        st.one_of(
            *[st.just("Tensor")] * 3,
            st.sampled_from([text for text in RETURNS if text != "Scalar"]),
        )
    )
    if focus == "mutation" and parameters:
        parameters, returns = _mutating(draw, parameters, form, returns)
    elif form != "plain":
        form = "plain"
    if focus == "operator":
        returns = "Scalar"
    style = draw(st.sampled_from(["schema", "kernel without defaults", "inferred"]))
    if style == "inferred" and not _inferable(parameters):
        style = "schema"
    formula = "none"
    if focus in ("gradient", "anomaly") or draw(st.booleans()):
        formula = draw(st.sampled_from(["setup_context", "setup_context", "backward", "none"]))
    if not _differentiable(parameters, form, returns):
        formula = "none"
    elif formula != "none" and _derivable(parameters, form, returns) and draw(one_in(4)):
        formula = "derived"
    devices = None
    if any(p.kind.holds_tensors for p in parameters) and draw(one_in(4)):
        devices = DEVICE.type
    override = None
    if focus == "override":
        override = Override(
            draw(st.sampled_from(_OVERRIDDEN)), draw(st.booleans()), draw(one_in(4))
        )
    if focus == "kernel" and form == "plain":
        kernel = draw(st.sampled_from(["wrapped", "signed", "replaced defaults", "plain"]))
        registration = draw(st.sampled_from(_REGISTRATIONS))
        if registration not in _TAKE_FORMULAS or any(p.mutated for p in parameters):
            formula = "none"
        if registration != "custom_op":
            formula = "none" if formula == "derived" else formula
            return OperatorSpec(
                parameters, returns, kernel=kernel, registration=registration, formula=formula
            )
    else:
        kernel = draw(st.sampled_from(["plain"] * 8 + ["wrapped", "signed", "replaced defaults"]))
    return OperatorSpec(
        parameters,
        returns,
        kernel=kernel,
        form=form,
        style=style,
        formula=formula,
        autocast=focus == "autocast" or draw(one_in(8)),
        fake=draw(one_in(4)),
        devices=devices,
        called_before=not draw(one_in(8)),
        override=override,
        provider=draw(st.sampled_from(_PROVIDERS)),
    )


_PROVIDERS = ("none",) * 6 + ("by priority", "supports", "supports")
_REGISTRATIONS = (
    *("custom_op", "custom_op", "impl", "impl", "register_kernel", "register_kernel for all"),
    *("impl beside register_kernel", "impl with keys", "two keys", "keys later"),
)
_TAKE_FORMULAS = ("custom_op", "impl", "impl beside register_kernel") + (
    *("register_kernel", "register_kernel for all"),
)
_OVERRIDDEN = (
    *(BACKEND, BACKEND, "Autograd", AUTOGRAD, "ADInplaceOrView"),
    *("CompositeExplicitAutograd", "BackendSelect"),
)


def _mutating(
    draw: DrawFn, parameters: tuple[Parameter, ...], form: str, returns: str
) -> tuple[tuple[Parameter, ...], str]:
    if form == "inplace":
        first = Parameter(parameters[0].name, _KIND["Tensor"], mutated=True)
        return (first, *parameters[1:]), "Tensor"
    if form == "out":
        count = draw(st.integers(1, 2))
        names = ("out0", "out1")[:count]
        outs = [Parameter(name, _KIND["Tensor"], keyword_only=True, mutated=True) for name in names]
        return (*parameters, *outs), ("Tensor", "(Tensor, Tensor)")[count - 1]
    places = [i for i, p in enumerate(parameters) if p.kind.schema in _MUTABLE]
    if not places:
        return parameters, returns
    chosen = draw(st.lists(st.sampled_from(places), min_size=1, unique=True))
    changed = tuple(p._replace(mutated=i in chosen) for i, p in enumerate(parameters))
    return changed, draw(st.sampled_from(["()", "()", "Tensor", "(Tensor, Tensor)", "SymInt"]))


def _derivable(parameters: tuple[Parameter, ...], form: str, returns: str) -> bool:
    takes_tensors = any(p.kind.holds_tensors and not p.keyword_only for p in parameters)
    mutates = any(p.mutated for p in parameters)
    return form == "plain" and takes_tensors and not mutates and "Tensor" in returns


def _differentiable(parameters: tuple[Parameter, ...], form: str, returns: str) -> bool:
    if form != "plain":
        return form == "inplace"
    kept = any(p.kind.holds_tensors and not p.mutated for p in parameters)
    return returns != "()" and (kept or not any(p.mutated for p in parameters))
