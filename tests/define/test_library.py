import re
import textwrap

import pytest
import torch

import torchop
from tests._support.devices import AUTOGRAD, BACKEND, TYPE

T = torch.zeros(2)
LIBRARIES = pytest.mark.parametrize("make", [torchop.Library, torch.library.Library])


def packet(namespace, name="op"):
    return getattr(getattr(torch.ops, namespace), name)


def is_defined(namespace, name="op") -> bool:
    return torch._C._get_operation_overload(f"{namespace}::{name}", "") is not None


# --------------------------------------------------------------------------------------------------
# Library


def test_only_one_def_library_per_namespace(namespace):
    with torchop.Library(namespace, "DEF") as library:
        library.define("op(Tensor x) -> Tensor")
        with pytest.raises(RuntimeError, match="Only a single TORCH_LIBRARY") as caught:
            torchop.Library(namespace, "DEF")
        assert f"the namespace {namespace}" in str(caught.value)
    with torchop.Library(namespace, "DEF") as library:
        library.define("op(Tensor x) -> Tensor")


def test_fragments_share_a_namespace(namespace):
    with (
        torchop.Library(namespace, "FRAGMENT") as one,
        torchop.Library(namespace, "FRAGMENT") as two,
    ):
        one.define("first(Tensor x) -> Tensor")
        two.define("second(Tensor x) -> Tensor")
        one.impl("second", lambda x: x + 1, BACKEND)
        assert packet(namespace, "second")(T).tolist() == [1, 1]
    assert not is_defined(namespace, "first")
    assert not is_defined(namespace, "second")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ns", "NEW"), "Unsupported kind: 'NEW'"),
        (("", "DEF"), "needs the name of a namespace, got ''"),
        ((" ns", "DEF"), "needs the name of a namespace"),
        (("ns::op", "DEF"), "needs the name of a namespace, got 'ns::op'"),
        ((None, "DEF"), "needs the name of a namespace, got None"),
        (("prim", "DEF"), "'prim' is the reserved namespace"),
        (("prim", "FRAGMENT"), "'prim' is the reserved namespace"),
        (("ns", "FRAGMENT", "CPU"), "dispatch_key='CPU' is only allowed for libraries"),
        (("ns", "DEF", "CPU"), "dispatch_key='CPU' is only allowed for libraries"),
    ],
)
def test_wrong_library_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        torchop.Library(*arguments)


def test_unknown_library_key_raises_the_same_error_as_pytorch():
    with pytest.raises(RuntimeError, match=r"'cpu' is not a dispatch key; .* such as 'CPU'"):
        torchop.Library("ns", "IMPL", "cpu")
    with pytest.raises(RuntimeError, match="dispatch key"):
        torch.library.Library("ns", "IMPL", "cpu")


def test_library_of_a_key_implements_at_that_key(namespace):
    with (
        torchop.Library(namespace, "FRAGMENT") as home,
        torchop.Library(namespace, "IMPL", BACKEND) as library,
    ):
        home.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x + 1)
        assert packet(namespace)(T).tolist() == [1, 1]
        with pytest.raises(NotImplementedError):
            packet(namespace)(T.to("meta"))


@pytest.mark.parametrize(
    "use",
    [
        lambda library: library.define("op(Tensor x) -> Tensor"),
        lambda library: library.impl("op", lambda x: x, BACKEND),
        lambda library: library.fallback(torchop.fallthrough_kernel, "CPU"),
        lambda library: library.__enter__(),
        lambda library: torchop.define(f"{library.ns}::op", "(Tensor x) -> Tensor", lib=library),
        lambda library: torchop.impl(f"{library.ns}::op", TYPE, lambda x: x, lib=library),
    ],
    ids=["define", "impl", "fallback", "with", "torchop.define", "torchop.impl"],
)
def test_closed_library_raises(namespace, use):
    library = torchop.Library(namespace, "FRAGMENT")
    library.close()
    with pytest.raises(torchop.OperatorGoneError, match=f"{namespace}.* has been destroyed"):
        use(library)


def test_closing_twice_has_no_effect(namespace):
    library = torchop.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.close()
    with torchop.Library(namespace, "FRAGMENT") as later:
        later.define("op(Tensor x) -> Tensor")
        library.close()
        assert is_defined(namespace)


# --------------------------------------------------------------------------------------------------
# define


def test_define_returns_the_name_without_the_overload(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        assert library.define("op(Tensor x) -> Tensor") == "op"
        assert library.define("op.two(Tensor x, Tensor y) -> Tensor") == "op"
        assert library.define(f"{namespace}::third(Tensor x) -> Tensor") == "third"


def test_overload_appears_on_a_packet_that_exists(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        op = packet(namespace)
        assert op.overloads() == ["default"]
        library.define("op.two(Tensor x, Tensor y) -> Tensor")
        library.impl("op", lambda x: x + 1, BACKEND)
        library.impl("op.two", lambda x, y: x + 2, BACKEND)
        assert op(T).tolist() == [1, 1]
        assert op(T, T).tolist() == [2, 2]
        assert op.two(T, T).tolist() == [2, 2]


@pytest.mark.parametrize("tags", [torch.Tag.pointwise, (torch.Tag.pointwise,)])
def test_tags_are_one_or_several(namespace, tags):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor", tags=tags)
        torchop.define(f"{namespace}::other", "(Tensor x) -> Tensor", lib=library, tags=tags)
        assert torch.Tag.pointwise in packet(namespace).default.tags
        assert torch.Tag.pointwise in packet(namespace, "other").default.tags


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ("op(Tensor x -> Tensor", RuntimeError),
        ("op(Mystery x) -> Tensor", RuntimeError),
        ("elsewhere::op(Tensor x) -> Tensor", RuntimeError),
        (None, TypeError),
    ],
)
def test_wrong_schema_defines_nothing(namespace, schema, error):
    with torchop.Library(namespace, "FRAGMENT") as library:
        with pytest.raises(error):
            library.define(schema)
        assert not is_defined(namespace)
        library.define("op(Tensor x) -> Tensor")


def _first(x: torch.Tensor) -> torch.Tensor:
    return x + 1


# Functions that define an operator. The test then defines the operator a second time.
_EARLIER = {
    "define": lambda name: torchop.define(name, "(Tensor x) -> Tensor"),
    "custom_op": lambda name: torchop.custom_op(name, _first, mutates_args=()),
    "torch.library.custom_op": lambda name: torch.library.custom_op(name, _first, mutates_args=()),
}
_AGAIN = {
    "define": lambda name: torchop.define(name, "(Tensor x) -> Tensor"),
    "define in a library": lambda name: torchop.define(
        torchop.Library(name.partition("::")[0], "FRAGMENT"), "op(Tensor x) -> Tensor"
    )(_first),
    "Library.define": lambda name: torchop.Library(name.partition("::")[0], "FRAGMENT").define(
        "op(Tensor x) -> Tensor"
    ),
    "define in a library of PyTorch": lambda name: torchop.define(
        name, "(Tensor x) -> Tensor", lib=torch.library.Library(name.partition("::")[0], "FRAGMENT")
    ),
}


@pytest.mark.parametrize("again", _AGAIN.values(), ids=_AGAIN)
@pytest.mark.parametrize("earlier", _EARLIER.values(), ids=_EARLIER)
def test_an_operator_that_exists_is_not_defined_again(namespace, earlier, again):
    earlier(f"{namespace}::op")
    with pytest.raises(RuntimeError) as caught:
        again(f"{namespace}::op")
    lines = re.findall(rf"{re.escape(__file__)}:(\d+)", str(caught.value))
    assert len(lines) == 2
    assert "it exists already, registered at" in str(caught.value)
    assert "torchop/_" not in str(caught.value)


@pytest.mark.parametrize(
    ("qualname", "schema", "words"),
    [
        ("op", "(Tensor x) -> Tensor", "does not have the form namespace::name"),
        (3, "(Tensor x) -> Tensor", "expected qualname to be a str"),
        ("{ns}::op", "op(Tensor x) -> Tensor", "without the name of the operator"),
        ("{ns}::op", " (Tensor x) -> Tensor", "expected schema to look like"),
        ("{ns}::op", "(Tensor x)", "expected schema to look like"),
    ],
)
def test_wrong_name_or_schema_is_refused(namespace, qualname, schema, words):
    if isinstance(qualname, str):
        qualname = qualname.format(ns=namespace)
    with pytest.raises(ValueError, match=words):
        torchop.define(qualname, schema)


def test_library_of_another_namespace_is_used_with_a_warning(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        with pytest.warns(UserWarning, match=f"namespace '{namespace}', so the operator is"):
            torchop.define("elsewhere::op", "(Tensor x) -> Tensor", lib=library)
        assert is_defined(namespace)


@LIBRARIES
def test_older_form_of_define_defines_and_implements(namespace, make):
    library = make(namespace, "FRAGMENT")

    @torchop.define(library, "op(Tensor x) -> Tensor")
    def kernel(x):
        return x + 1

    assert kernel(T).tolist() == [1, 1]
    assert packet(namespace)(T).tolist() == [1, 1]
    library._destroy()


# --------------------------------------------------------------------------------------------------
# fallthrough and fallback


def test_fallthrough_passes_on_to_the_next_key(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", torchop.fallthrough_kernel, AUTOGRAD)
        library.impl("op", lambda x: x + 1, BACKEND)
        assert packet(namespace)(torch.zeros(2, requires_grad=True)).tolist() == [1, 1]


def test_fallthrough_is_never_called():
    with pytest.raises(NotImplementedError):
        torchop.fallthrough_kernel()


@pytest.mark.parametrize("with_keyset", [False, True])
def test_fallback_serves_every_operator_without_a_kernel(namespace, with_keyset):
    seen = []

    def kernel(*arguments):
        op, x = arguments[-2:]
        seen.append((len(arguments), op))
        return x.clone() if op._name == f"{namespace}::op" else (x, x, x)

    with torchop.Library(namespace, "FRAGMENT") as home:
        home.define("op(Tensor x) -> Tensor")
        home.define("two(Tensor x) -> (Tensor, Tensor)")
        op, two = packet(namespace).default, packet(namespace, "two").default
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.HPU)
        with torchop.Library("_", "IMPL") as library:
            library.fallback(kernel, "HPU", with_keyset=with_keyset)
            assert op.redispatch(keys, T).tolist() == [0, 0]
            with pytest.raises(torchop.ResultError, match=f"{namespace}::two: the fallback must"):
                two.redispatch(keys, T)
        assert seen == [(2 + with_keyset, op), (2 + with_keyset, two)]
        with pytest.raises(NotImplementedError):
            op.redispatch(keys, T)


def test_fallback_is_for_the_global_namespace(namespace):
    with (
        torchop.Library(namespace, "FRAGMENT") as library,
        pytest.raises(RuntimeError, match="global namespace"),
    ):
        library.fallback(torchop.fallthrough_kernel, "CPU")


def test_fallback_needs_a_key_and_a_function():
    with torchop.Library("_", "IMPL") as library:
        with pytest.raises(ValueError, match="needs a dispatch key"):
            library.fallback(torchop.fallthrough_kernel)
        with pytest.raises(TypeError, match="expects a function"):
            library.fallback(3, "HPU")


def test_wrong_number_of_results_under_a_library_of_pytorch_does_not_crash(namespace):
    # If a kernel returns too many results, PyTorch reads past the end of the schema's results. So
    # torchop must raise an error first.
    library = torch.library.Library(namespace, "FRAGMENT")
    torchop.define(f"{namespace}::op", "(Tensor x) -> (Tensor, Tensor)", lib=library)
    torchop.impl(f"{namespace}::op", TYPE, lambda x: (x, x, x), lib=library)
    with pytest.raises(torchop.ResultError, match="a tuple of 3"):
        packet(namespace)(T)
    torchop.define(library, "other(Tensor x) -> (Tensor, Tensor)")(lambda x: (x, x, x))
    with pytest.raises(torchop.ResultError, match="a tuple of 3"):
        packet(namespace, "other")(T)
    torchop.impl(library, "op", AUTOGRAD)(lambda x: x)
    with pytest.raises(torchop.ResultError, match="must return 2 values"):
        packet(namespace)(T.clone().requires_grad_())
    library._destroy()


DEFINITIONS = {
    "Library": """
        library = torchop.Library(namespace, "FRAGMENT")
        library.define("sine(Tensor x) -> Tensor")
        library.impl("sine", lambda x: x.sin(), "CPU")
        torchop.register_fake(f"{namespace}::sine", torch.empty_like)
    """,
    "define": """
        torchop.define(f"{namespace}::sine", "(Tensor x) -> Tensor")
        torchop.impl(f"{namespace}::sine", "cpu")(lambda x: x.sin())
        torchop.register_fake(f"{namespace}::sine")(lambda x: torch.empty_like(x))
    """,
    "custom_op": """
        @torchop.custom_op(f"{namespace}::sine", mutates_args=())
        def sine(x: torch.Tensor) -> torch.Tensor:
            return x.sin()
        sine.register_fake(lambda x: torch.empty_like(x))
    """,
    "operator": """
        @torchop.operator(f"{namespace}::sine")
        class sine:
            @staticmethod
            def forward(x: torch.Tensor) -> torch.Tensor:
                return x.sin()
            @staticmethod
            def fake(x):
                return torch.empty_like(x)
    """,
}


@pytest.mark.parametrize("definition", DEFINITIONS.values(), ids=DEFINITIONS)
def test_operators_are_defined_inside_a_compiled_function(namespace, definition):
    body = textwrap.indent(textwrap.dedent(definition), "    ")
    scope = {"torch": torch, "torchop": torchop, "namespace": namespace}
    exec(f"def make():\n    global library\n{body}", scope)
    defined = []

    def call(x):
        if not defined:
            scope["make"]()
            defined.append(True)
        return getattr(torch.ops, namespace).sine(x * 2) + 1

    x = torch.ones(3)
    torch.testing.assert_close(torch.compile(call, backend="aot_eager")(x), (x * 2).sin() + 1)


def test_error_names_the_line_that_defined_the_operator_and_not_its_library(namespace):
    library = torchop.Library(namespace, "FRAGMENT")
    code = compile("\n\n\nlibrary.define('f() -> ()')", "/site/package.py", "exec")
    exec(code, {"__name__": "package", "library": library})
    with pytest.raises(RuntimeError, match=r"it exists already, registered at /site/package.py:4"):
        torchop.define(f"{namespace}::f", "() -> ()")


@pytest.mark.parametrize("kind", ["Tensor[]?", "Tensor?[]?", "Tensor[][]"])
def test_an_argument_whose_tensors_the_dispatcher_ignores_causes_a_warning(namespace, kind):
    message = f"{namespace}::f: the dispatcher ignores the tensors in the argument 'xs'"
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("g(Tensor?[] xs, Tensor[2] pair, int[]? sizes) -> Tensor")
        with pytest.warns(torchop.SchemaWarning, match=message) as caught:
            library.define(f"f({kind} xs, int[]? sizes) -> Tensor")
    assert [warning.filename for warning in caught] == [__file__]
