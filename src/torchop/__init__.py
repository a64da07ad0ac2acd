"""Define PyTorch operators from Python functions."""

import importlib
import typing

from torch.library import wrap_triton

from torchop import _errors
from torchop import native as native
from torchop._compat import compile_caches as _compile_caches
from torchop._compat import inductor_results as _inductor_results
from torchop._compat import planned_outputs as _planned_outputs
from torchop._compat.classes import CustomOpDef, EffectType
from torchop._core.user_rule import Rule, get_rule
from torchop._define import out_op as _families
from torchop._define.class_form import operator
from torchop._define.custom_op import custom_op, triton_op
from torchop._define.handle import CustomOp
from torchop._define.handle import _unpickle as _unpickle  # pickled handles refer to it
from torchop._define.library import Library, fallthrough_kernel
from torchop._define.low_level import define, impl
from torchop._define.maybe_out import maybe_out
from torchop._define.out_op import OperatorFamily, out_op
from torchop._errors import *  # noqa: F403  # all exceptions and warnings
from torchop._native.switch import start as _start_native
from torchop._rules.autocast import register_autocast
from torchop._rules.autograd.formula import derived
from torchop._rules.autograd.register import register_autograd, register_jvp
from torchop._rules.effect import register_effect
from torchop._rules.fake import cache as _fake_cache
from torchop._rules.fake.context import get_ctx
from torchop._rules.fake.rule import impl_abstract, register_fake
from torchop._rules.kernels.register import register_kernel
from torchop._rules.layout import register_layout
from torchop._rules.providers.priority import priority, set_priority
from torchop._rules.residuals import Residuals, records_gradient, residuals
from torchop._rules.torch_dispatch import register_torch_dispatch
from torchop._rules.user.inverse import inverse, right_inverse
from torchop._rules.user.sharding import register_sharding, sharding
from torchop._rules.vmap.rule import register_vmap
from torchop._schema.infer import infer_schema
from torchop._schema.layouts import channels_last, contiguous
from torchop._schema.opaque import opaque

# To keep `import torchop` fast, `__getattr__` imports these names on first use.
if typing.TYPE_CHECKING:
    from torchop import compat as compat
    from torchop import export as export
    from torchop import testing as testing
    from torchop._accelerate.accelerate import AcceleratedOperator, Acceleration, accelerate
    from torchop._inspect.cache_key import cache_key_tag
    from torchop._inspect.explain import Explanation, explain
    from torchop._inspect.get_kernel import get_kernel
    from torchop._inspect.providers import Provided, providers
    from torchop._inspect.record import Recorded, record
    from torchop.testing import opcheck

__version__ = "0.1.0"

# Other packages import these private names from torch.library. torchop defines them too, so that
# these packages can use torchop instead.
_scoped_library = Library
_register_effectful_op = register_effect

_start_native()
_families.plan_outputs = _planned_outputs.plan
_compile_caches.identify_operators(
    lambda names: importlib.import_module("torchop._inspect.cache_key").identify(names)
)
_inductor_results.check_results()
_fake_cache.digest_of = lambda function: importlib.import_module(
    "torchop._inspect.cache_key"
).digest_of_function(function)

_LATE = {
    "_accelerate.accelerate": ("AcceleratedOperator", "Acceleration", "accelerate"),
    "_inspect.cache_key": ("cache_key_tag",),
    "_inspect.explain": ("Explanation", "explain"),
    "_inspect.get_kernel": ("get_kernel",),
    "_inspect.providers": ("Provided", "providers"),
    "_inspect.record": ("Recorded", "record"),
    "testing": ("opcheck",),
}
_MODULES = ("compat", "export", "testing")  # submodules imported on first attribute access

if not typing.TYPE_CHECKING:  # type checkers would accept any name in a module with `__getattr__`

    def __getattr__(name: str) -> typing.Any:
        for module, names in _LATE.items():
            if name in names:
                value = getattr(importlib.import_module(f"torchop.{module}"), name)
                return globals().setdefault(name, value)
        if name in _MODULES:
            return importlib.import_module(f"torchop.{name}")
        raise AttributeError(f"module 'torchop' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*__all__, *_MODULES, "native", *(n for n in globals() if n[:2] == "__")})


__all__ = [
    # defining an operator
    "custom_op",
    "operator",
    "triton_op",
    "wrap_triton",
    "CustomOp",
    "CustomOpDef",
    "infer_schema",
    "opaque",
    # the functional, in-place and out= variants of one operator
    "out_op",
    "OperatorFamily",
    "maybe_out",
    # registering rules
    "register_kernel",
    "register_fake",
    "register_autograd",
    "register_jvp",
    "derived",
    "Residuals",
    "residuals",
    "records_gradient",
    "register_vmap",
    "register_autocast",
    "register_layout",
    "contiguous",
    "channels_last",
    "register_torch_dispatch",
    "register_effect",
    "EffectType",
    "get_ctx",
    "impl_abstract",
    "cache_key_tag",
    # rules beyond PyTorch's dispatcher, such as inverses; `Rule` creates new kinds
    "Rule",
    "get_rule",
    "inverse",
    "right_inverse",
    "register_sharding",
    "sharding",
    # several kernels of one operator
    "priority",
    "set_priority",
    "providers",
    "Provided",
    # testing operators and explaining calls
    "opcheck",
    "explain",
    "Explanation",
    # operators of other packages
    "accelerate",
    "Acceleration",
    "AcceleratedOperator",
    "record",
    "Recorded",
    # the low level
    "Library",
    "define",
    "impl",
    "fallthrough_kernel",
    "get_kernel",
]
__all__ += _errors.__all__
