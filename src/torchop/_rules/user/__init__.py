"""The rules of the public kind, `torchop.Rule`, that torchop ships: a file and a line each."""

from torchop._compat.classes import CustomOpDef
from torchop._rules.user import checkpoint_policy, flop_formula, inverse, onnx
from torchop._rules.user.examples import make_examples, register_examples
from torchop._rules.user.sharding.rule import register_for_handle


class ShippedRules(CustomOpDef):
    """The table: each rule as the method of a handle that registers it."""

    register_inverse = inverse.register_inverse
    register_right_inverse = inverse.register_right_inverse
    register_flop_formula = flop_formula.register_flop_formula
    register_checkpoint_policy = checkpoint_policy.register_checkpoint_policy
    register_sharding = register_for_handle
    register_onnx = onnx.register_onnx
    register_examples = register_examples
    examples = make_examples
