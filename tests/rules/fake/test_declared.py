import contextlib

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.meta_utils import assert_eq, assert_metadata_eq
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import torchop


def define(namespace, schema, name="op"):
    """Define an operator whose kernel fails the test if it runs instead of the fake kernel."""

    def kernel(*args, **kwargs):
        raise AssertionError("the kernel is not called")

    return torchop.custom_op(f"{namespace}::{name}", kernel, mutates_args=(), schema=schema)


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def described(*tensors):
    return [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]


# --------------------------------------------------------------------------------------------------
# Supported declarations


def test_an_output_like_an_argument(namespace):
    op = define(namespace, "(Tensor x, Tensor y) -> Tensor")
    assert op.register_fake(like="y") is None
    assert "fake" in repr(op)
    transposed = meta(2, 3, dtype=torch.int64).t()
    assert described(op(meta(1), transposed)) == [((3, 2), (1, 3), torch.int64)]
    with FakeTensorMode():
        fake = op(torch.empty(1), torch.empty(4, device="cuda"))
        assert fake.device.type == "cuda"


LIKE = {
    "contiguous": lambda: torch.empty(2, 3),
    "on another device": lambda: torch.empty(2, 3, device="cuda"),
    "transposed": lambda: torch.empty(2, 3).t(),
    "channels last": lambda: torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "of one channel": lambda: torch.empty(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.empty(1, 3).expand(2, 3),
    "with holes": lambda: torch.empty(4, 6)[::2, ::2],
    "of one row": lambda: torch.empty_strided((1, 3), (7, 1)),
    "empty": lambda: torch.empty(0, 3),
    "a scalar": lambda: torch.empty(()),
    "conjugate": lambda: torch.empty(3, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.empty(3).to_sparse(),
    "a part": lambda: torch.empty(9)[3:],
    "a leaf": lambda: torch.empty(3, requires_grad=True),
}


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("make", LIKE.values(), ids=LIKE)
def test_output_equals_the_one_of_fake_tensors(namespace, make, dtype):
    op = define(namespace, "(Tensor x) -> (Tensor, Tensor)")
    op.register_fake(like=("x", None), shape=(None, lambda x: (2, *x.shape)), dtype=(dtype,) * 2)
    for mode in (FakeTensorMode(), torch.inference_mode()):
        with FakeTensorMode(), mode, torch.no_grad():
            x = make()
            expected = (
                torch.empty_like(x, dtype=dtype),
                x.new_empty((2, *x.shape), dtype=dtype),
            )
            for output, like in zip(op(x), expected, strict=True):
                assert_metadata_eq(assert_eq, output, like)
                assert (output.device, output.fake_mode) == (like.device, like.fake_mode)
                assert torch._C._dispatch_keys(output) == torch._C._dispatch_keys(like)


SYMBOLIC = {
    "contiguous": lambda: torch.empty(3, 4),
    "transposed": lambda: torch.empty(3, 4).t(),
    "channels last": LIKE["channels last"],
    "expanded": lambda: torch.empty(1, 3).expand(2, 3),
    "columns": lambda: torch.empty(3, 6)[:, :4],
    "with holes": LIKE["with holes"],
    "of one row": LIKE["of one row"],
    "a scalar": LIKE["a scalar"],
}


@pytest.mark.parametrize("make", SYMBOLIC.values(), ids=list(SYMBOLIC))
def test_output_with_symbolic_sizes_equals_the_one_of_fake_tensors(namespace, monkeypatch, make):
    op = define(namespace, "(Tensor x) -> Tensor")
    op.register_fake(like="x")
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    x = make()
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * x.dim())
    fake = mode.from_tensor(x, symbolic_context=dynamic, source=ConstantSource("x"))
    assert fake._has_symbolic_sizes_strides is (x.dim() > 0)
    with mode:
        output = op(fake)
        guards = [str(guard.expr) for guard in environment.guards]
        expected = torch.empty_like(fake)
    assert [str(guard.expr) for guard in environment.guards] == guards
    for described in (torch.Tensor.size, torch.Tensor.stride):
        symbols = [[str(s) for s in described(tensor)] for tensor in (output, expected)]
        assert symbols[0] == symbols[1]
    assert (output.dtype, output.device) == (expected.dtype, expected.device)
    # For a contiguous tensor, torchop must not call `empty_like`, which is slow. Replace
    # `empty_like` by None, so that a call would raise.
    if x.is_contiguous() and x.shape[:1] != (1,):
        monkeypatch.setattr(torch, "empty_like", None)
        with mode:
            assert op(fake).shape == expected.shape


def test_output_with_data_dependent_size_equals_the_one_of_fake_tensors(namespace):
    op = define(namespace, "(Tensor x) -> Tensor")
    op.register_fake(like="x")
    with FakeTensorMode(shape_env=ShapeEnv()):
        found = torch.ones(3, 4).nonzero()
        output, expected = op(found), torch.empty_like(found)
        assert list(map(str, output.shape)) == list(map(str, expected.shape))
        assert list(map(str, output.stride())) == list(map(str, expected.stride()))


def test_the_dtype_alone_may_differ(namespace):
    op = define(namespace, "(Tensor x, ScalarType kind=int, Tensor? y=None) -> Tensor")
    op.register_fake(like="x", dtype=torch.bool)
    assert described(op(meta(2, 3).t())) == [((3, 2), (1, 3), torch.bool)]
    op.register_fake(like="x", dtype="kind")
    assert op(meta(2), torch.float64).dtype is torch.float64
    assert op(meta(2)).dtype is torch.int32


def test_a_shape_is_computed_from_the_arguments_that_it_names(namespace):
    op = define(namespace, "(Tensor x, Tensor weight, *, int n=3) -> Tensor")
    op.register_fake(shape=lambda weight, x, n: (x.shape[0], weight.shape[1], n), dtype="weight")
    result = op(meta(2, 5), meta(5, 7, dtype=torch.float16).t().contiguous().t(), n=4)
    assert described(result) == [((2, 7, 4), (28, 4, 1), torch.float16)]
    assert op(meta(2, 5), meta(5, 7)).shape == (2, 7, 3)


FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last)


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode])
@pytest.mark.parametrize("make", ["transposed", "channels last", "expanded", "conjugate", "a part"])
def test_memory_format_equals_empty_like(namespace, make, mode, memory_format):
    op = define(namespace, "(Tensor x) -> Tensor")
    op.register_fake(like="x", memory_format=memory_format)
    with mode() as fake:
        x = LIKE[make]()
        x = x.to("meta") if fake is None else fake.from_tensor(x)
        if memory_format is torch.channels_last and x.dim() != 4:
            with pytest.raises(RuntimeError, match="required rank 4 tensor"):
                op(x)
            return
        expected = torch.empty_like(x, memory_format=memory_format)
        assert described(op(x)) == described(expected)
        assert op(x).device == x.device


def test_memory_formats_of_shapes_several_outputs_and_lists(namespace):
    op = define(namespace, "(Tensor x, Tensor[] xs) -> (Tensor, Tensor, Tensor[])")
    op.register_fake(
        like=("x", "x", "xs"),
        shape=(None, lambda x: (1, 2, 3, 4), None),
        memory_format=(torch.contiguous_format, torch.channels_last, torch.contiguous_format),
    )
    x = meta(2, 3).t()
    first, second, (third, fourth) = op(x, [x, meta(3)])
    assert described(first, third, fourth) == described(
        *map(torch.empty_like, (meta(3, 2), meta(3, 2), meta(3)))
    )
    assert second.shape == (1, 2, 3, 4)
    assert second.is_contiguous(memory_format=torch.channels_last)


def test_opcheck_says_how_to_declare_other_strides(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    op.register_fake(like="x")
    with pytest.raises(torchop.testing.OpCheckError, match=r"memory_format=torch\.contiguous"):
        torchop.opcheck(op, (torch.ones(3, 2).t(),))


def test_several_outputs_and_lists(namespace):
    op = define(namespace, "(Tensor x, Tensor[] ys) -> (Tensor, Tensor[], Tensor?)")
    op.register_fake(
        like=(None, "ys", "x"),
        shape=[lambda x: x.shape[:1], None, None],
        dtype=(torch.int64, None, None),
    )
    first, (a, b), last = op(meta(2, 3), [meta(4), meta(5, dtype=torch.double)])
    assert described(first, a, b, last) == [
        ((2,), (1,), torch.int64),
        ((4,), (1,), torch.float32),
        ((5,), (1,), torch.float64),
        ((2, 3), (3, 1), torch.float32),
    ]


def test_an_operator_of_another_library(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x, int n) -> Tensor")
        name = f"{namespace}::op"
        torchop.register_fake(name, shape=lambda n: (n, n), lib=library)
        assert torch.ops.__getattr__(namespace).op(meta(1), 3).shape == (3, 3)
        with pytest.raises(RuntimeError, match=f"at the declared outputs of {name}; pass"):
            torchop.register_fake(name, like="x", lib=library, allow_override=False)


def test_shapes_stay_symbolic(namespace):
    @torchop.custom_op(f"{namespace}::outer", mutates_args=())
    def outer(x: Tensor, y: Tensor) -> Tensor:
        return x[:, None] * y

    outer.register_fake(shape=lambda x, y: (x.shape[0], y.shape[0]))
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(outer, fullgraph=True, backend=frames, dynamic=True)
    for n in (3, 4, 5):
        x, y = torch.randn(n), torch.randn(n + 2)
        assert torch.equal(compiled(x, y), x[:, None] * y)
    assert frames.frame_count == 1
    torchop.opcheck(outer, (torch.randn(3), torch.randn(4)))


def test_the_tag_for_compile_caches_distinguishes_declarations(namespace):
    op = define(namespace, "(Tensor x, Tensor y) -> Tensor")
    tags = set()
    for said in (
        {"like": "x"},
        {"like": "y"},
        {"like": "x", "dtype": torch.int8},
        {"like": "x", "dtype": torch.int16},
        {"shape": lambda x: (x.shape[0],)},
        {"shape": lambda x: (x.shape[1],)},
        {"like": "x", "memory_format": torch.contiguous_format},
        {"like": "x", "memory_format": torch.channels_last},
    ):
        op.register_fake(**said)
        tags.add(torchop.cache_key_tag())
    assert len(tags) == 8


# --------------------------------------------------------------------------------------------------
# Rejected declarations

_ONE = "(Tensor x, int n, Tensor? maybe, Tensor[] xs) -> Tensor"
_TWO = "(Tensor x, Tensor[] xs) -> (Tensor, Tensor[])"


@pytest.mark.parametrize(
    ("schema", "said", "message"),
    [
        (_ONE, {"like": "z"}, "like for output 0 must be one of the arguments x, n, .*, got 'z'"),
        (_ONE, {"like": 0}, "like for output 0 must be one of the arguments x, n, .*, got 0"),
        (_ONE, {"like": "n"}, "output 0 is a Tensor, but like='n' is of type int"),
        (_ONE, {"like": "maybe"}, r"but like='maybe' is of type Optional\[Tensor\]"),
        (_ONE, {"like": "xs"}, r"output 0 is a Tensor, but like='xs' is of type List\[Tensor\]"),
        (_ONE, {"like": ("x", "x")}, "like has 2 entries, but the operator has 1 output:?"),
        (_ONE, {"dtype": torch.int8}, "output 0 has neither like= nor shape="),
        (_ONE, {"like": "x", "dtype": "n"}, "dtype='n' for output 0 must name a Tensor or a torch"),
        (_ONE, {"like": "x", "dtype": 3}, "dtype for output 0 must be an argument or a dtype"),
        (_ONE, {"like": "x", "memory_format": "channels_last"}, "must be a torch.memory_format"),
        (_ONE, {"memory_format": torch.channels_last}, "output 0 has neither like= nor shape="),
        (
            _TWO,
            {"like": ("x", "xs"), "memory_format": torch.contiguous_format},
            "memory_format must be a tuple with an entry for each of the 2 outputs",
        ),
        (_ONE, {"shape": lambda x, k: x.shape}, "shape for output 0 takes k, but the arguments"),
        (
            _ONE,
            {"shape": lambda *, x: x.shape},
            "shape for output 0 takes arguments by keyword only",
        ),
        (_ONE, {"shape": max}, "shape for output 0 must name .*function max> has no signature"),
        (_TWO, {"like": "x"}, "like must be a tuple with an entry for each of the 2 outputs"),
        (_TWO, {"like": ("x", "x")}, r"output 1 is a List\[Tensor\], but like='x' is of type Tens"),
        (
            _TWO,
            {"like": ("x", "xs"), "shape": (None, lambda x: x.shape)},
            "output 1 is a list, so shape= cannot describe it",
        ),
        ("(int n) -> Tensor", {"shape": lambda n: (n,)}, "output 0 has no device"),
        ("(Tensor x) -> int", {"like": "x"}, "output 0 is of type int, so a declaration"),
        ("(Tensor x) -> ()", {"like": "x"}, "the operator returns nothing"),
    ],
)
@pytest.mark.filterwarnings("ignore::torchop.SchemaWarning")
def test_a_declaration_that_does_not_fit_is_refused(namespace, schema, said, message):
    op = define(namespace, schema)
    with pytest.raises(torchop.RuleSignatureError, match=message) as caught:
        op.register_fake(**said)
    assert f"{namespace}::op: a fake kernel by declaration does not fit" in str(caught.value)
    assert "fake" not in repr(op)


def test_a_shape_that_is_no_function_is_refused(namespace):
    op = define(namespace, _ONE)
    with pytest.raises(TypeError, match=r"op: shape for output 0 must be a function, got 3"):
        op.register_fake(shape=3)


def test_a_function_and_a_declaration_are_refused(namespace):
    op = define(namespace, "(Tensor x) -> Tensor")
    with pytest.raises(torchop.RuleSignatureError, match="takes a function or a declaration"):
        op.register_fake(torch.empty_like, like="x")


def test_invalid_shape_is_reported_when_it_is_computed(namespace):
    op = define(namespace, "(Tensor x) -> Tensor")
    op.register_fake(shape=lambda x: x.shape[0])
    with pytest.raises(torchop.FakeKernelError, match=r"must return a tuple of ints.* got 2"):
        op(meta(2))
