"""torchop: write a Python function once, and it behaves like a native PyTorch operator."""

from torch.library import wrap_triton as wrap_triton

from torchop import native as native
from torchop._accelerate.accelerate import AcceleratedOperator as AcceleratedOperator
from torchop._accelerate.accelerate import Acceleration as Acceleration
from torchop._accelerate.accelerate import accelerate as accelerate
from torchop._compat.classes import CustomOpDef as CustomOpDef
from torchop._compat.classes import EffectType as EffectType
from torchop._core.checking import checking as checking
from torchop._core.user_rule import Rule as Rule
from torchop._core.user_rule import get_rule as get_rule
from torchop._define.class_form import operator as operator
from torchop._define.custom_op import custom_op as custom_op
from torchop._define.family import OperatorFamily as OperatorFamily
from torchop._define.handle import CustomOp as CustomOp
from torchop._define.library import Library as Library
from torchop._define.library import fallthrough_kernel as fallthrough_kernel
from torchop._define.low_level import define as define
from torchop._define.low_level import impl as impl
from torchop._define.maybe_out import maybe_out as maybe_out
from torchop._define.out_op import out_op as out_op
from torchop._define.triton_op import triton_op as triton_op
from torchop._errors import AliasError as AliasError
from torchop._errors import ArgumentError as ArgumentError
from torchop._errors import ArgumentValueError as ArgumentValueError
from torchop._errors import BackwardNotTraceableError as BackwardNotTraceableError
from torchop._errors import DataDependentError as DataDependentError
from torchop._errors import DerivedFormulaError as DerivedFormulaError
from torchop._errors import EffectError as EffectError
from torchop._errors import FakeKernelError as FakeKernelError
from torchop._errors import ForwardModeError as ForwardModeError
from torchop._errors import FunctionalizationError as FunctionalizationError
from torchop._errors import GradientError as GradientError
from torchop._errors import InliningError as InliningError
from torchop._errors import MissingEffectError as MissingEffectError
from torchop._errors import MissingEffectWarning as MissingEffectWarning
from torchop._errors import MissingFakeError as MissingFakeError
from torchop._errors import MissingFormulaError as MissingFormulaError
from torchop._errors import MissingKernelError as MissingKernelError
from torchop._errors import MissingRuleError as MissingRuleError
from torchop._errors import MutationError as MutationError
from torchop._errors import NativeBuildWarning as NativeBuildWarning
from torchop._errors import NativeUnavailableError as NativeUnavailableError
from torchop._errors import NothingToAccelerateWarning as NothingToAccelerateWarning
from torchop._errors import OpaqueBackwardError as OpaqueBackwardError
from torchop._errors import OpCheckError as OpCheckError
from torchop._errors import OperatorClassError as OperatorClassError
from torchop._errors import OperatorGoneError as OperatorGoneError
from torchop._errors import OperatorNameError as OperatorNameError
from torchop._errors import OperatorNotFoundError as OperatorNotFoundError
from torchop._errors import RecordingError as RecordingError
from torchop._errors import RedefinitionWarning as RedefinitionWarning
from torchop._errors import ResultError as ResultError
from torchop._errors import RuleNameError as RuleNameError
from torchop._errors import RuleSignatureError as RuleSignatureError
from torchop._errors import SchemaError as SchemaError
from torchop._errors import SchemaWarning as SchemaWarning
from torchop._errors import UndeclaredMutationError as UndeclaredMutationError
from torchop._inspect.cache_key import cache_key_tag as cache_key_tag
from torchop._inspect.call_record import CallRecord as CallRecord
from torchop._inspect.call_record import TensorRecord as TensorRecord
from torchop._inspect.call_record import TypeRecord as TypeRecord
from torchop._inspect.explain import Explanation as Explanation
from torchop._inspect.explain import explain as explain
from torchop._inspect.get_kernel import get_kernel as get_kernel
from torchop._inspect.record import Recorded as Recorded
from torchop._inspect.record import record as record
from torchop._native.switch import start as _start_native
from torchop._rules.autocast import register_autocast as register_autocast
from torchop._rules.autograd.formula import derived as derived
from torchop._rules.autograd.register import register_autograd as register_autograd
from torchop._rules.autograd.register import register_jvp as register_jvp
from torchop._rules.effect import register_effect as register_effect
from torchop._rules.fake.context import get_ctx as get_ctx
from torchop._rules.fake.rule import impl_abstract as impl_abstract
from torchop._rules.fake.rule import register_fake as register_fake
from torchop._rules.kernels.rule import register_kernel as register_kernel
from torchop._rules.torch_dispatch import register_torch_dispatch as register_torch_dispatch
from torchop._rules.user.inverse import inverse as inverse
from torchop._rules.user.inverse import right_inverse as right_inverse
from torchop._rules.vmap.rule import register_vmap as register_vmap
from torchop._schema.infer import infer_schema as infer_schema
from torchop._schema.structure.argument_types import (
    register_argument_type as register_argument_type,
)
from torchop._schema.structure.values import data_dependent as data_dependent
from torchop.testing import opcheck as opcheck

__version__ = "0.1.0"

# torch.library's names for these two, which its users import in spite of the underscore.
_scoped_library = Library
_register_effectful_op = register_effect

_start_native()

__all__ = [
    # defining an operator
    "custom_op",
    "operator",
    "triton_op",
    "wrap_triton",
    "CustomOp",
    "CustomOpDef",
    "infer_schema",
    "register_argument_type",
    "data_dependent",
    # the forms of one operator
    "out_op",
    "OperatorFamily",
    "maybe_out",
    # registering rules
    "register_kernel",
    "register_fake",
    "register_autograd",
    "register_jvp",
    "derived",
    "register_vmap",
    "register_autocast",
    "register_torch_dispatch",
    "register_effect",
    "EffectType",
    "get_ctx",
    "impl_abstract",
    "cache_key_tag",
    # rules that the dispatcher knows nothing of, yours included
    "Rule",
    "get_rule",
    "inverse",
    "right_inverse",
    # testing and asking
    "opcheck",
    "checking",
    "explain",
    "Explanation",
    # operators of others
    "accelerate",
    "Acceleration",
    "AcceleratedOperator",
    "record",
    "Recorded",
    "CallRecord",
    "TensorRecord",
    "TypeRecord",
    # the low level
    "Library",
    "define",
    "impl",
    "fallthrough_kernel",
    "get_kernel",
    # errors and warnings
    "AliasError",
    "ArgumentError",
    "ArgumentValueError",
    "BackwardNotTraceableError",
    "DerivedFormulaError",
    "DataDependentError",
    "EffectError",
    "FakeKernelError",
    "ForwardModeError",
    "FunctionalizationError",
    "GradientError",
    "InliningError",
    "MissingEffectError",
    "MissingEffectWarning",
    "MissingFakeError",
    "MissingFormulaError",
    "MissingKernelError",
    "MissingRuleError",
    "MutationError",
    "NativeBuildWarning",
    "NativeUnavailableError",
    "NothingToAccelerateWarning",
    "OpCheckError",
    "OpaqueBackwardError",
    "OperatorClassError",
    "OperatorGoneError",
    "OperatorNameError",
    "OperatorNotFoundError",
    "RecordingError",
    "RedefinitionWarning",
    "ResultError",
    "RuleNameError",
    "RuleSignatureError",
    "SchemaError",
    "SchemaWarning",
    "UndeclaredMutationError",
]
