"""The cached choice of a provider, in Python and in C++, is the one made without a cache.

Uses private names.
"""

import contextlib
import gc
import os
import random
import threading
import types
import weakref
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

import torchop
from tests._support.common import needs_native
from tests._support.devices import DEVICE, TYPE
from tests._support.forking import run_forked
from tests.rules.support import adding_one as define
from torchop import _hooks
from torchop._rules.kernels.rule import KernelRule
from torchop._rules.providers import choice as choosing

EXAMPLES = int(os.environ.get("TORCHOP_FUZZ_EXAMPLES", "600"))


def adding(amount):
    return lambda x: x + amount


def value(op, x=None) -> float:
    return op(torch.zeros(1) if x is None else x).flatten()[0].item()


def in_plan(op):
    return op._definition.plan[KernelRule].functions[TYPE]


@pytest.fixture(params=[pytest.param("C++", marks=needs_native), "Python"])
def table(request, monkeypatch) -> Iterator[str]:
    """Test both implementations of the table that caches choices, in Python and in C++."""
    if request.param == "Python":
        others = {**vars(_hooks.extension), "Choice": None}
        monkeypatch.setattr(_hooks, "extension", types.SimpleNamespace(**others))
    return request.param


# --------------------------------------------------------------------------------------------------
# Choices

SCHEMA = (
    "(Tensor x, Tensor? y, Tensor[] zs, int n, float f, str s, bool b, Scalar c, *, int[] sizes, "
    "ScalarType dtype, Device device, float? g=None, Layout? layout=None) -> Tensor"
)


def described(*args, **kwargs) -> str:
    def describe(item):
        if isinstance(item, torch.Tensor):
            return [tuple(item.shape), item.stride(), item.dtype, item.device]
        return list(map(describe, item)) if isinstance(item, (list, tuple)) else item

    return repr((describe(args), [(name, describe(item)) for name, item in kwargs.items()]))


def accepting(salt: int):
    return lambda *args, **kwargs: (
        random.Random(f"{salt}{described(*args, **kwargs)}").random() < 0.5
    )


def calls(chance: random.Random) -> Iterator[tuple[list, dict]]:
    """Generate calls that often differ only in one detail, which a cache key might omit."""
    base = torch.zeros(4, 4)
    tensors = [
        *(torch.zeros(2), torch.zeros(3), torch.zeros(2, 1), torch.zeros(1, 2), torch.tensor(0.0)),
        *(torch.zeros(2, dtype=torch.int64), torch.zeros(0), torch.zeros(0, 2), base[:2], base.t()),
        *(base[::2], base[:, ::2], base[:, :2], torch.zeros(2).expand(2, 2), torch.zeros(1, 0)),
        *(torch.nn.Parameter(torch.zeros(2)), torch.zeros(2, dtype=torch.complex64).conj()),
        *(torch.zeros(2).to_sparse(), torch.zeros(2, dtype=torch.complex64).imag),
    ]
    floats = [0.0, -0.0, 1.0, 1.5, float("nan"), float("inf")]
    texts = ["", "a", "b", "ab", "é", "ÿ", "日本", "\0", "a\0", "x" * 100]
    numbers = [0, 1, -1, 2**40, -(2**63), 2**63 - 1]
    devices = [DEVICE, torch.device("cuda", 0), torch.device("cuda", 1)]
    while True:
        args = [
            chance.choice(tensors),
            chance.choice([None, *tensors]),
            chance.choices(tensors, k=chance.randrange(3)),
            chance.choice(numbers),
            chance.choice(floats),
            chance.choice(texts),
            chance.choice([True, False]),
            chance.choice([0, 1, True, False, 1.0, 0.0, 1j, complex(-0.0, 1)]),
        ]
        kwargs = {
            "sizes": chance.choices(numbers, k=chance.randrange(3)),
            "dtype": chance.choice([torch.float32, torch.int64]),
            "device": chance.choice(devices),
        }
        if chance.random() < 0.5:
            kwargs["g"] = chance.choice([None, *floats])
        if chance.random() < 0.5:
            kwargs["layout"] = chance.choice([None, torch.strided, torch.sparse_coo])
        yield args, kwargs
        yield [chance.choice(tensors), *args[1:]], kwargs
        yield [*args[:3], chance.choice(numbers), *args[4:]], kwargs
        yield args, {**kwargs, "device": chance.choice(devices)}


@pytest.mark.filterwarnings("ignore::torchop.ProviderWarning")
def test_cached_choice_equals_the_uncached_choice(namespace, table):
    chosen = []

    def kernel(name):
        def run(x, *args, **kwargs):
            chosen.append(name)
            return torch.zeros(1)

        return run

    op = torchop.custom_op(f"{namespace}::op", kernel("reference"), mutates_args=(), schema=SCHEMA)
    for salt, name in enumerate(("first", "second")):
        op.register_kernel(None, kernel(name), provider=name, supports=accepting(salt))
    op.set_priority(["first", "second"])
    chance = random.Random(int(os.environ.get("TORCHOP_FUZZ_SEED", "0")))
    seen = set()
    with torch.no_grad():
        for _, (args, kwargs) in zip(range(EXAMPLES), calls(chance), strict=False):
            expected = torchop.explain(op, *args, **kwargs).provider
            seen.add(expected)
            chosen.clear()
            op(*args, **kwargs)
            op(*args, **kwargs)
            with torchop.native.disabled():
                op(*args, **kwargs)
            assert chosen == [expected] * 3, described(*args, **kwargs)
    assert seen == {"first", "second", "reference"}


def test_supports_is_called_once_for_equal_calls(namespace, table):
    asked = []
    op = define(namespace, priority=["fast"])
    op.register_kernel(
        TYPE, adding(10), provider="fast", supports=lambda x: asked.append(x.shape) is None
    )
    for _ in range(3):
        assert [value(op, torch.zeros(size)) for size in (1, 2, 3)] == [10, 10, 10]
    assert len(asked) == 3
    assert type(in_plan(op)).__module__.endswith("_call_path") is (table == "C++")


def test_tables_are_bounded(namespace, table, monkeypatch):
    most = 4096 if table == "C++" else 100
    monkeypatch.setattr(choosing, "_MOST_KEYS", 100)  # in Python; the limit in C++ is 4096
    sizes = []
    op = define(namespace, priority=["fast"])
    op.register_kernel(
        TYPE,
        lambda x: x[:1] + 10,
        provider="fast",
        supports=lambda x: sizes.append(x.shape[0]) is None,
    )
    base = torch.zeros(5000)
    for size in range(1, most + 10):
        assert value(op, base[:size]) == 10
        if size < most // 2:
            assert value(op, base[:1]) == 10
    assert sizes == [*range(1, most + 10)]
    assert value(op, base[:1]) == 10
    assert sizes[-1] == 1  # the table was cleared


def test_supports_may_call_the_operator(namespace, table):
    op = define(namespace, priority=["fast"])

    def supports(x):
        return x.shape[0] == 1 or value(op, torch.zeros(x.shape[0] - 1)) == 10

    op.register_kernel(TYPE, adding(10), provider="fast", supports=supports)
    assert value(op, torch.zeros(5)) == 10


def test_keywords_in_another_order(namespace, table):
    """Call plans pass keywords in the schema's order, but the table must accept any order."""
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x, *, g, h: x + 1,
        mutates_args=(),
        schema="(Tensor x, *, float g, float h) -> Tensor",
    )
    op.register_kernel(
        TYPE, lambda x, **_: x + 10, provider="fast", supports=lambda x, *, g, h: g < h
    )
    op.set_priority(["fast", "reference"])
    chosen = in_plan(op)
    for _ in range(2):
        assert value(lambda x: chosen(x, g=1.0, h=2.0)) == 10
        assert value(lambda x: chosen(x, h=1.0, g=2.0)) == 1


# --------------------------------------------------------------------------------------------------
# Events that clear a table


@pytest.fixture
def seen(namespace, table):
    """Return an operator that was called twice, so that it has cached its choice of provider.

    Its provider "ten" supports only one-dimensional tensors.
    """
    op = define(namespace, priority=["ten"])
    op.register_kernel(TYPE, adding(10), provider="ten", supports=lambda x: x.ndim == 1)
    assert value(op) == value(op) == 10
    yield op
    torchop.set_priority({op: None})


def test_an_order_that_changes(seen):
    torchop.set_priority({seen: ["reference"]})
    assert value(seen) == 1
    torchop.set_priority({seen: None})
    assert value(seen) == 10
    seen.set_priority([])
    assert value(seen) == 1


def test_blocks(seen):
    for _ in range(3):
        with torchop.priority({seen: ["reference"]}):
            assert value(seen) == 1
            with torchop.priority({seen: ["ten"]}):
                assert value(seen) == 10
        assert value(seen) == 10
    with torchop.priority(batch_invariant_only=True), pytest.warns(torchop.ProviderWarning):
        assert value(seen) == 1


def test_deterministic_mode(namespace, table):
    op = define(namespace, priority=["loose"])
    options = {"provider": "loose", "deterministic": False, "supports": lambda x: True}
    op.register_kernel(TYPE, adding(10), **options)
    assert value(op) == 10
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.warns(torchop.ProviderWarning, match="not deterministic"):
            assert value(op) == 1
    finally:
        torch.use_deterministic_algorithms(False)
    assert value(op) == 10


@pytest.mark.filterwarnings("ignore::torchop.RedefinitionWarning")
def test_registering_and_removing_clears_the_table(seen, namespace):
    seen.register_kernel(TYPE, adding(20), provider="ten", supports=lambda x: x.ndim == 1)
    assert value(seen) == 20
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        seen.register_kernel(TYPE, adding(30), provider="ten", lib=library)
        assert value(seen) == 30
    with pytest.warns(torchop.ProviderWarning, match="'ten' is skipped.* it was removed"):
        assert value(seen) == 1
    op = define(namespace)
    assert value(op) == 1


@needs_native
def test_deregistering_an_operator_frees_its_table(namespace):
    def make():
        op = define(namespace, priority=["ten"])
        op.register_kernel(TYPE, adding(10), provider="ten", supports=lambda x: x.ndim == 1)
        assert value(op) == 10
        return weakref.ref(op._definition)

    gone = make()
    define(namespace)
    gc.collect()
    assert gone() is None


def test_sixteen_threads_while_everything_changes(namespace, table):
    """A thread in a `priority` block gets the provider of its own block.

    Meanwhile, other threads use other providers, and the main thread changes and redefines the
    operator.
    """
    amounts = {"ten": 10.0, "twenty": 20.0, "reference": 1.0}
    name = f"{namespace}::op"
    made = threading.Lock()
    wrong, done = [], threading.Event()

    def make():
        op = define(namespace)
        for provider in ("ten", "twenty"):
            op.register_kernel(
                TYPE, adding(amounts[provider]), provider=provider, supports=lambda x: x.ndim == 1
            )
        return op

    current = [make()]

    def call(provider, number):
        chance = random.Random(number)
        while not done.is_set():
            x = torch.zeros(chance.randrange(1, 30))
            try:
                with made:
                    block = torchop.priority({name: [provider]})
                with block:
                    found = current[0](x)[0].item()
                if found != amounts[provider]:
                    wrong.append((provider, found))
                if current[0](x)[0].item() not in (*amounts.values(), 30.0):
                    wrong.append((None, found))
            except torchop.OperatorGoneError:
                pass

    threads = [
        threading.Thread(target=call, args=([*amounts][number % 3], number)) for number in range(16)
    ]
    for thread in threads:
        thread.start()
    try:
        for turn in range(60):
            torchop.set_priority({name: [[*amounts][turn % 3]]})
            with torch.library._scoped_library(namespace, "FRAGMENT") as library:
                current[0].register_kernel(TYPE, adding(30.0), provider="thirty", lib=library)
                current[0].set_priority(["thirty"])
                current[0].set_priority([])
            if turn % 10 == 9:
                with made:
                    current[0] = make()
    finally:
        done.set()
        for thread in threads:
            thread.join()
        torchop.set_priority({name: None})
    assert wrong == []


# --------------------------------------------------------------------------------------------------
# With and without the extension


@needs_native
def test_extension_loaded_later_makes_the_choices():
    """Python chooses in the first call, which loads the extension. Afterwards, C++ chooses."""
    program = """
        import torch, torchop
        from torchop import _hooks
        from torchop._rules.kernels import rule

        schema = "(Tensor x) -> Tensor"
        op = torchop.custom_op("lib::op", lambda x: x + 1, mutates_args=(), schema=schema)
        op.register_kernel("cpu", lambda x: x + 10, provider="ten", supports=lambda x: True)
        op.set_priority(["ten"])
        print(_hooks.extension.Choice, op(torch.zeros(1)).item())
        torchop.native.wait()
        print(op(torch.zeros(1)).item())
        print(type(op._definition.plan[rule.KernelRule].functions["cpu"]).__name__)
    """
    done = run_forked(program, TORCHOP_NATIVE="auto")
    assert done.stdout.split() == ["None", "10.0", "10.0", "Choice"]


class Answering(torch.Tensor):
    """A tensor that reports an incorrect shape, and records which functions were called on it."""

    asked: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.asked.append(func.__name__)
        if getattr(getattr(func, "__self__", None), "__name__", None) == "shape":
            return torch.Size([7])
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("is_native", [False, True])
def test_subclass_does_not_notice_that_supports_reads_it(namespace, table, is_native):
    """`supports` reads the shape without calling `__torch_function__`.

    Choices are cached, so otherwise the subclass would see this access in some calls only.
    """
    shapes = []

    # PyTorch does not look for subclasses in a list that begins with None, so it calls the kernel
    # instead of `__torch_function__`.
    @torchop.custom_op(
        f"{namespace}::first", mutates_args=(), schema="(Tensor?[] xs) -> Tensor", device_types=TYPE
    )
    def op(xs):
        raise AssertionError("the reference")

    def supports(xs):
        shapes.append(tuple(xs[1].shape))
        return True

    op.register_kernel(TYPE, lambda xs: torch.zeros(1), provider="other", supports=supports)
    op.set_priority(["other", "reference"])
    x = torch.zeros(2, 3, device=DEVICE).as_subclass(Answering)
    for _ in range(2):
        Answering.asked.clear()
        with contextlib.nullcontext() if is_native else torchop.native.disabled():
            op([None, x])
        assert Answering.asked == []
    assert shapes == [(2, 3)]
