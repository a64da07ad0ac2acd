"""The part of a handle that registers rules which the dispatcher knows nothing of."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from torchop._compat.classes import CustomOpDef
from torchop._core.definition import Definition
from torchop._core.user_rule import get_rule, rule_names
from torchop._rules.user.checkpoint_policy import CHECKPOINT_POLICY
from torchop._rules.user.examples import EXAMPLES, Example, make_examples
from torchop._rules.user.flop_formula import FLOP_FORMULA, Formula
from torchop._rules.user.inverse import INVERSE, RIGHT_INVERSE
from torchop._schema.callables import Function, decorator_or_call

Registered = TypeVar("Registered")


class RuleMethods(CustomOpDef):
    """The methods of `CustomOp` for rules of `torchop.Rule`."""

    _definition: Definition

    def _live(self) -> Definition:
        self._definition.check_defined()
        return self._definition

    @typing.overload
    def register(self, rule: str, value: None = None, /) -> Callable[[Function], Function]: ...
    @typing.overload
    def register(self, rule: str, value: Registered, /) -> Registered: ...

    def register(self, rule: str, value: Any = None, /) -> Any:
        """Registers something under a rule of your own; see `torchop.Rule`.

        `op.register("cost", fn)` is also written `op.register_cost(fn)`.

        Args:
            rule: the name of a `torchop.Rule`, of torchop's or of any package's.
            value: what the rule accepts, usually a function; without it, a decorator is returned.

        Returns:
            `value`.

        Raises:
            RuleNameError: a `ValueError`: there is no such rule.
            TypeError, ValueError: what the rule has to say.
        """
        self._live()
        return get_rule(rule).register(self, value)

    @typing.overload
    def register_inverse(self, fn: None = None, /) -> Callable[[Function], Function]: ...
    @typing.overload
    def register_inverse(self, fn: Function, /) -> Function: ...

    def register_inverse(self, fn: Any = None, /) -> Any:
        """Registers what undoes the operator, for `torchop.inverse`.

        Args:
            fn: `fn(output, *rest)`, where `rest` are the other arguments of the call that returned
                `output`. It is called as it is, so it is built of operators, as any function is.
        """
        self._live()
        return INVERSE.register(self, fn)

    @typing.overload
    def register_right_inverse(self, fn: None = None, /) -> Callable[[Function], Function]: ...
    @typing.overload
    def register_right_inverse(self, fn: Function, /) -> Function: ...

    def register_right_inverse(self, fn: Any = None, /) -> Any:
        """Registers what the operator undoes, for `torchop.right_inverse`.

        Args:
            fn: as in `register_inverse`.
        """
        self._live()
        return RIGHT_INVERSE.register(self, fn)

    @typing.overload
    def register_flop_formula(
        self, fn: None = None, /, *, get_raw: bool = False
    ) -> Callable[[Function], Function]: ...
    @typing.overload
    def register_flop_formula(self, fn: Function, /, *, get_raw: bool = False) -> Function: ...

    def register_flop_formula(self, fn: Any = None, /, *, get_raw: bool = False) -> Any:
        """Registers how many operations a call takes, for `torch.utils.flop_counter`.

        Args:
            fn: takes the operator's arguments, with shapes (`torch.Size`) in the place of tensors,
                and returns an int. If it takes `out_shape=`, that is the shape of the result.
            get_raw: whether it takes the tensors instead, and the result as `out_val=`.
        """
        self._live()
        return decorator_or_call(
            lambda function: FLOP_FORMULA.register(self, Formula(function, get_raw)), fn
        )

    def register_checkpoint_policy(self, policy: Registered, /) -> Registered:
        """Registers what selective activation checkpointing does with the operator's results.

        It holds in every region whose contexts come from
        `torch.utils.checkpoint.create_selective_checkpoint_contexts`, where the region's own policy
        only prefers something; a policy that is a must wins, the operator's before the region's.

        Args:
            policy: `"save"`, `"recompute"`, a `torch.utils.checkpoint.CheckpointPolicy`, or a
                function `(ctx, *arguments)` that returns one of these.
        """
        self._live()
        return CHECKPOINT_POLICY.register(self, policy)

    @typing.overload
    def register_examples(self, fn: None = None, /) -> Callable[[Function], Function]: ...
    @typing.overload
    def register_examples(self, fn: Function, /) -> Function: ...

    def register_examples(self, fn: Any = None, /) -> Any:
        """Registers sample inputs, which `opcheck` uses where it is given none.

        Args:
            fn: takes nothing and yields examples, each a tuple of positional arguments or a dict of
                arguments by name. It is called for new ones each time.
        """
        self._live()
        return EXAMPLES.register(self, fn)

    def examples(self) -> list[Example]:
        """Makes the sample inputs that were registered.

        Returns:
            For each example the positional arguments, a tuple, and those by keyword, a dict.

        Raises:
            MissingRuleError: none were registered.
            RuleSignatureError: a `TypeError`: one of them is not a call of the operator.
        """
        self._live()
        return make_examples(self)

    if not typing.TYPE_CHECKING:  # they would accept every name

        def __getattr__(self, name: str) -> Any:
            """The method `register_<name>` of a rule that another package made."""
            kind, _, rule = name.partition("register_")
            if kind or rule not in rule_names():
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
                )
            return functools.partial(self.register, rule)
