"""The object that custom_op returns looks like its function and like its operator.

Uses private names.
"""

import copy
import doctest
import functools
import inspect
import io
import pickle
import sys
import textwrap
import types
import typing

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from tests._support.common import adding, assert_clean, on_both
from tests._support.forking import run_forked
from torchop._compat import torch_ops

T = torch.zeros(2)


def scale(x: Tensor, factor: float = 2.0, *, flag: bool = False) -> Tensor:
    """Multiplies by a factor."""
    return x * factor + 1


def define(namespace, library=torchop, **options):
    return library.custom_op(f"{namespace}::op", scale, mutates_args=(), **options)


# --------------------------------------------------------------------------------------------------
# Attributes of the function


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("__name__", "scale"),
        ("__qualname__", "scale"),
        ("__doc__", "Multiplies by a factor."),
        ("__module__", __name__),
        ("__wrapped__", scale),
    ],
)
def test_handle_looks_like_its_function(namespace, attribute, expected):
    def scenario(library, namespace):
        return getattr(define(namespace, library), attribute, None)

    both = on_both(scenario, namespace)
    assert both.ours == expected
    assert both.stock != expected


def test_handle_has_the_signature_of_its_function(namespace):
    def scenario(library, namespace):
        return str(inspect.signature(define(namespace, library)))

    both = on_both(scenario, namespace)
    assert both.ours == str(inspect.signature(scale))
    assert both.stock == "(*args, **kwargs)"


def test_handle_of_a_nameless_function_has_the_operators_name(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        functools.partial(torch.add, other=1),
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    assert (op.__name__, op.__qualname__) == ("op", "op")
    assert op(T).tolist() == [1, 1]


def test_source_and_annotations_are_found_through_the_handle(namespace):
    op = define(namespace)
    assert inspect.unwrap(op) is scale
    assert inspect.getsource(inspect.unwrap(op)).startswith("def scale(")


def test_handle_has_the_functions_annotations(namespace):
    expected = {"x": Tensor, "factor": float, "flag": bool, "return": Tensor}

    def scenario(library, namespace):
        return typing.get_type_hints(define(namespace, library))

    both = on_both(scenario, namespace)
    assert both.ours == expected
    assert both.stock != expected


def test_callable_without_annotations_uses_its_signature(namespace):
    class Scale:
        factor: float = 2.0

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.factor

    def scaled(x: Tensor, by: float) -> Tensor:
        return x * by

    both = {"x": Tensor, "return": Tensor}
    for index, function in enumerate([Scale(), functools.partial(scaled, by=2.0)]):
        op = torchop.custom_op(f"{namespace}::op{index}", mutates_args=())(function)
        hints = typing.get_type_hints(op)
        assert {name: hints[name] for name in both} == both
    op = torchop.custom_op(
        f"{namespace}::b", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    assert op.__annotations__ == {}


def test_annotations_of_structures_and_of_all_forms(namespace):
    @torchop.custom_op(f"{namespace}::sides", mutates_args=())
    def sides(x: Tensor, sizes: tuple[int, int]) -> Tensor:
        return x.clone()

    @torchop.out_op(f"{namespace}::copy", like="x")
    def copy(x: Tensor, *, out: Tensor) -> None:
        out.copy_(x)

    hints = typing.get_type_hints(sides)
    assert hints == {"x": Tensor, "sizes": tuple[int, int], "return": Tensor}
    for handle in (copy.functional, copy.out):
        assert list(typing.get_type_hints(handle)) == [
            *inspect.signature(handle).parameters,
            "return",
        ]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_the_torchscript_error_names_the_overload_to_compile(namespace):
    op = define(namespace)
    with pytest.raises(
        TypeError, match=rf"{namespace}::op: TorchScript .*torch\.ops\.{namespace}\.op"
    ):
        torch.jit.script(op)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_torchscript_compiles_a_function_that_calls_a_handle(namespace):
    def scenario(library, namespace):
        op = define(namespace, library)

        def in_full(x: Tensor) -> Tensor:
            return op(x, 3.0) + op(x, 3.0)

        def with_defaults(x: Tensor) -> Tensor:
            return op(x)

        class Module(torch.nn.Module):
            def forward(self, x):
                return op(x, 3.0)

        @torch.jit.ignore
        def ignored(x: Tensor) -> Tensor:
            return op(x, factor=5.0)

        def calls_ignored(x: Tensor) -> Tensor:
            return ignored(x)

        def by_keyword(x: Tensor) -> Tensor:
            return op(x, factor=3.0)

        scripted = [torch.jit.script(f) for f in (in_full, with_defaults, Module(), calls_ignored)]
        traced = [torch.jit.trace(f, torch.ones(2)) for f in (in_full, Module())]
        with pytest.raises(RuntimeError, match="Keyword argument factor unknown"):
            torch.jit.script(by_keyword)
        calls = str(scripted[0].graph).count("Tensor = ^")
        return [f(torch.ones(2)).tolist() for f in scripted + traced], calls

    both = on_both(scenario, namespace)
    assert both.ours == both.stock == ([[8, 8], [3, 3], [4, 4], [6, 6], [8, 8], [4, 4]], 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_torchscript_calls_an_overload_before_and_after_redefinition(namespace):
    def define_shift(by):
        return torchop.custom_op(
            f"{namespace}::f.shift",
            lambda x: x + by,
            mutates_args=(),
            schema="(Tensor x) -> Tensor",
        )

    shift = define_shift(1)

    def shifted(x: Tensor) -> Tensor:
        return shift(x)

    compiled = torch.jit.script(shifted)
    assert compiled(T).tolist() == [1, 1]
    define_shift(2)
    with pytest.raises(RuntimeError, match=rf"OperatorGoneError: .*{namespace}::f\.shift"):
        compiled(T)


def test_doctests_of_a_function_are_found_through_its_handle(namespace):
    module = types.ModuleType(namespace)
    source = f'''
import torch, torchop

@torchop.custom_op("{namespace}::op", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    """Adds one.

    >>> op(torch.zeros(1))
    tensor([1.])
    """
    return x + 1
'''
    exec(source, vars(module))
    (test,) = (t for t in doctest.DocTestFinder().find(module) if t.examples)
    assert test.name == f"{namespace}.op"
    assert doctest.DocTestRunner().run(test) == (0, 1)


def test_handle_in_a_class_body_is_no_method(namespace):
    class Holder:
        op = define(namespace)

    assert Holder().op(T).tolist() == [1, 1]


# --------------------------------------------------------------------------------------------------
# Attributes of the operator


def test_handle_has_name_schema_tags_and_overload(namespace):
    op = define(namespace, tags=torch.Tag.pointwise)
    text = f"{namespace}::op(Tensor x, float factor=2., *, bool flag=False) -> Tensor"
    assert op.name == f"{namespace}::op"
    assert isinstance(op.schema, torch.FunctionSchema)
    assert str(op.schema) == text
    assert torch.Tag.pointwise in op.tags
    assert op.overload is getattr(torch.ops, namespace).op.default
    assert isinstance(op.overload, torch._ops.OpOverload)


def test_notebook_repr_shows_registrations(namespace):
    op = torchop.custom_op(f"{namespace}::op", scale, mutates_args=(), device_types="cpu")
    op.__doc__ = "Smaller <b>and</b> larger."
    shown = op._repr_html_()
    assert shown.startswith(f"<p><code>{namespace}::op(Tensor x, float factor=2., *, bool")
    assert "-&gt; Tensor</code></p><ul><li>Smaller &lt;b&gt;and&lt;/b&gt; larger.</li>" in shown
    assert "<li>kernels for cpu</li>" in shown
    op._definition.deregister("for the test")
    shown = f"&lt;torchop.CustomOp {namespace}::op, deregistered&gt;"
    assert op._repr_html_() == f"<p><code>{shown}</code></p>"


@pytest.mark.exhaustive
def test_editors_complete_handles(namespace):
    """IPython and editors complete names with Jedi, which does not run the code."""
    jedi = pytest.importorskip("jedi", reason="requirements/dev.txt has it")
    op = torchop.custom_op(f"{namespace}::op", scale, mutates_args=())
    op.__doc__ = "Multiplies."

    def completions(code):
        prompt = jedi.Interpreter(code, [{"op": op, "x": torch.ones(2)}])
        return {completion.name_with_symbols for completion in prompt.complete()}

    assert {"register_fake", "register_vmap", "register_examples"} <= completions("op.regi")
    assert "factor=" in completions("op(x, fac")
    assert "like=" in completions("op.register_fake(li")
    prompt = jedi.Interpreter("op(", [{"op": op}])
    assert "(x: torch.Tensor, factor: float=2.0, *, flag" in prompt.get_signatures()[0].to_string()
    assert prompt.help(1, 1)[0].docstring(raw=True) == "Multiplies."
    source = """
import torch, torchop
@torchop.custom_op("mylib::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor
scale.regi"""
    assert "register_fake" in {completion.name for completion in jedi.Script(source).complete()}
    called = jedi.Script(source.removesuffix(".regi") + "(").get_signatures()
    assert [signature.to_string() for signature in called] == [
        "scale(x: torch.Tensor, factor: float=2.0) -> torch.Tensor"
    ]


def test_repr_shows_registrations(namespace):
    op = define(namespace, device_types="cuda")
    text = f"{namespace}::op(Tensor x, float factor=2., *, bool flag=False) -> Tensor"
    assert repr(op) == f"<torchop.CustomOp {text}; kernels for cuda>"
    op.register_kernel(["cpu", None])(scale)
    op.register_fake(scale)
    op.register_autograd(lambda ctx, grad: grad)
    op.register_vmap(lambda info, in_dims, x, factor, *, flag: x)
    op.register_autocast("cpu", torch.bfloat16)
    op.register_torch_dispatch(TorchDispatchMode, print)
    op.register_effect(torchop.EffectType.ORDERED)
    for words in (
        "kernels for cuda, cpu, every device; ",
        "fake; ",
        "autograd; ",
        "vmap; ",
        "autocast cpu to torch.bfloat16; ",
        "torch_dispatch for TorchDispatchMode; ",
        "effect ORDERED>",
    ):
        assert words in repr(op)


def test_copies_of_a_handle_are_the_handle(namespace):
    op = define(namespace)
    assert copy.copy(op) is op
    assert copy.deepcopy(op) is op
    assert copy.deepcopy({"op": [op]})["op"][0] is op


def test_handle_is_hashed_and_compared_by_identity(namespace):
    one, two = define(namespace), define(f"{namespace}_two")
    assert {one: 1, two: 2}[one] == 1
    assert one != two


def test_handle_is_pickled_by_name(namespace):
    def scenario(library, namespace):
        op = define(namespace, library)
        return pickle.loads(pickle.dumps(op)) is op

    both = on_both(scenario, namespace)
    assert both.ours is True
    assert isinstance(both.stock, Exception)


def test_file_of_torch_save_holds_the_name(namespace):
    file = io.BytesIO()
    torch.save({"op": define(namespace)}, file)
    again = define(namespace)
    file.seek(0)
    assert torch.load(file, weights_only=False)["op"] is again


def test_pickle_of_an_earlier_version_is_loaded(namespace):
    op = define(namespace)
    written = f"ctorchop\n_unpickle\n(V{namespace}::op\nV{__name__}\ntR.".encode()
    assert pickle.loads(written) is op
    assert b"ctorchop\n_unpickle\n" in pickle.dumps(op, protocol=0)


def test_pickle_imports_the_module_that_defines_the_operator(tmp_path, namespace):
    module = textwrap.dedent(f"""
        import torch, torchop

        @torchop.custom_op("{namespace}::op", mutates_args=())
        def op(x: torch.Tensor) -> torch.Tensor:
            return x + 1
    """)
    (tmp_path / f"module_of_{namespace}.py").write_text(module)
    code = f"import pickle, module_of_{namespace} as m; print(pickle.dumps(m.op).hex())"
    written = bytes.fromhex(assert_clean(run_forked(code, PYTHONPATH=str(tmp_path))))
    with pytest.raises(torchop.OperatorNotFoundError) as caught:
        pickle.loads(written)
    assert f"the module 'module_of_{namespace}' that defines it cannot be imported" in str(
        caught.value
    )
    sys.path.insert(0, str(tmp_path))
    try:
        assert pickle.loads(written)(T).tolist() == [1, 1]
    finally:
        sys.path.remove(str(tmp_path))


def test_unpickling_raises_if_the_module_does_not_define_the_operator(namespace):
    op = define(namespace)
    written = pickle.dumps(op)
    op._definition.deregister("for the test")
    with pytest.raises(torchop.OperatorNotFoundError, match=f"importing '{__name__}' did not"):
        pickle.loads(written)


@pytest.mark.filterwarnings("ignore::torchop.RedefinitionWarning")
def test_handle_whose_operator_is_deregistered_during_the_lookup(namespace, monkeypatch):
    """Another thread may replace the operator while the handle looks up its overload.

    The handle must not return the overload of the new operator.
    """
    op = adding(namespace)
    lookup = torch_ops.lookup_overload

    def ending(*name: str) -> object:
        monkeypatch.undo()
        adding(namespace, 3)
        return lookup(*name)

    monkeypatch.setattr(torch_ops, "lookup_overload", ending)
    with pytest.raises(torchop.OperatorGoneError, match="It was replaced"):
        _ = op.overload
