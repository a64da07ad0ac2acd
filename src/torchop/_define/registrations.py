"""Methods of operator handles that register rules, such as `register_fake`.

For each method, `_rules` has a function that takes the operator as the first parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torchop._core.registry import Handle
from torchop._rules import autocast, effect, layout, providers, torch_dispatch
from torchop._rules.autograd import register as autograd
from torchop._rules.fake import rule as fake
from torchop._rules.kernels import register as kernels
from torchop._rules.user import checkpoint_policy, examples, flop_formula, inverse, sharding
from torchop._rules.vmap import rule as vmap

Function = TypeVar("Function", bound=Callable[..., Any])


class SameAs(Generic[Function]):
    """A decorator that replaces a stub method with a function.

    Workaround for Pyright: with a plain assignment of the function to the class attribute, Pyright
    would use the type that the base class `CustomOpDef` declares for the attribute. If this
    decorator were a function, Pyright would lose the type variables.
    """

    def __init__(self, function: Function) -> None:
        self.function = function

    def __call__(self, replaced: object) -> Function:
        return self.function


class Registrations(Handle):
    @SameAs(kernels.register_kernel)
    def register_kernel(self) -> None: ...

    set_priority = providers.set_priority
    set_tuning = providers.set_tuning

    @SameAs(fake.register_fake)
    def register_fake(self) -> None: ...

    @SameAs(autograd.register_autograd)
    def register_autograd(self) -> None: ...  # type: ignore[override]  # PyTorch's returns None

    register_jvp = autograd.register_jvp
    derive_autograd = autograd.derive_autograd

    @SameAs(vmap.register_vmap)
    def register_vmap(self) -> None: ...

    @SameAs(autocast.register_autocast)
    def register_autocast(self) -> None: ...

    register_layout = layout.register_layout

    @SameAs(torch_dispatch.register_torch_dispatch)
    def register_torch_dispatch(self) -> None: ...

    @SameAs(effect.register_effect)
    def register_effect(self) -> None: ...

    # Methods that register a value for an instance of torchop.Rule
    register_inverse = inverse.register_inverse
    register_right_inverse = inverse.register_right_inverse
    register_flop_formula = flop_formula.register_flop_formula
    register_checkpoint_policy = checkpoint_policy.register_checkpoint_policy
    register_sharding = sharding.register_sharding
    register_examples = examples.register_examples
    examples = examples.make_examples
