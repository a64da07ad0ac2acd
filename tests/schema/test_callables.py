"""torchop checks whether a function can be called with an operator's arguments.

Uses private names.
"""

import functools
import inspect
import itertools

import pytest

from torchop import RuleSignatureError
from torchop._schema.callables import accepts, check_callable, check_signature


class Callable:
    def __call__(self, x, y):
        return x

    def method(self, x, y):
        return x


ACCEPTED = {
    "function": lambda x, y: x,
    "other names": lambda a, b: a,
    "default": lambda x, y=1, z=2: x,
    "variadic": lambda *args: args,
    "object": Callable(),
    "method": Callable().method,
    "partial": functools.partial(lambda a, x, y: x, 1),
    "builtin without a signature": print,
    "builtin": divmod,
}
REFUSED = {
    "too few": lambda x: x,
    "too many": lambda x, y, z: x,
    "none": lambda: None,
    "keyword-only": lambda x, *, y: x,
    "required keyword": lambda x, y, *, z: x,
    "partial": functools.partial(lambda x, y: x, 1),
    "object": Callable.__call__,
}


@pytest.mark.parametrize("function", ACCEPTED.values(), ids=ACCEPTED)
def test_function_that_takes_the_arguments_is_accepted(function):
    assert accepts(function, ("x", "y"))
    check_signature("a rule", function, ("x", "y"))


@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED)
def test_function_that_does_not_take_the_arguments_is_refused(function):
    assert not accepts(function, ("x", "y"))
    with pytest.raises(RuleSignatureError, match=r"a rule is called with \(x, y\), but .* takes"):
        check_signature("a rule", function, ("x", "y"))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, *, k: x, True),
        (lambda x, **kwargs: x, True),
        (lambda x, k: x, True),
        (lambda x: x, False),
        (lambda x, *, other: x, False),
        (lambda x, k, /: x, False),
    ],
)
def test_keywords_must_have_their_names(function, expected):
    assert accepts(function, ("x",), ("k",)) is expected


PARAMETERS = ("", "a", "a, b", "b, a", "a, /, b", "a, b=1", "a=1, b=2", "a, *, b", "a, *b", "**b")


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_accepted_calls_are_those_that_python_binds(parameters):
    function = eval(f"lambda {parameters}: None")
    for count, names in itertools.product(range(4), ((), ("a",), ("b",), ("a", "b"), ("b", "c"))):
        positional = ("value",) * count
        try:
            inspect.signature(function).bind(*positional, **dict.fromkeys(names))
        except TypeError:
            assert not accepts(function, positional, names), (count, names)
        else:
            assert accepts(function, positional, names), (count, names)


def test_message_shows_both_signatures_and_the_function():
    def fake(x, wrong):
        return x

    with pytest.raises(RuleSignatureError) as caught:
        check_signature("lib::op: a fake kernel", fake, ("x",), ("flag", "n"))
    message = str(caught.value)
    assert "lib::op: a fake kernel is called with (x, *, flag, n)" in message
    assert "test_message_shows_both_signatures_and_the_function.<locals>.fake" in message
    assert message.endswith("takes (x, wrong). Give it these parameters.")


@pytest.mark.parametrize("value", [None, 1, "f", [], (print,)])
def test_non_function_is_rejected_with_its_type(value):
    with pytest.raises(TypeError, match="a rule must be a function, got") as caught:
        check_callable("a rule", value)
    assert isinstance(caught.value, RuleSignatureError)
    assert repr(value) in str(caught.value)
    assert f"of type {type(value).__name__}" in str(caught.value)


@pytest.mark.parametrize("function", [print, int, Callable(), functools.partial(print)])
def test_functions_of_every_kind_are_accepted(function):
    assert check_callable("a rule", function) is None
