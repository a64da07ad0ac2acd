"""The order in which providers are tried for a call. Uses private names."""

import asyncio
import concurrent.futures
import contextlib
import linecache
import logging
import re
import threading
import warnings
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torchop
from tests._support.common import assert_clean
from tests._support.devices import OTHER, TYPE
from tests._support.forking import run_forked
from tests.rules.support import adding_one as define


def adding(amount):
    return lambda x: x + amount


def value(op, x=None) -> float:
    return op(torch.zeros(1) if x is None else x).flatten()[0].item()


@pytest.fixture
def op(namespace):
    """Define an operator that adds 1. With the provider "ten" it adds 10, with "twenty" 20."""
    op = define(namespace)
    op.register_kernel(TYPE, adding(10), provider="ten")
    op.register_kernel(None, adding(20), provider="twenty")
    yield op
    torchop.set_priority({f"{namespace}::*": None, op.name: None})


# --------------------------------------------------------------------------------------------------
# Sources of the order, and calls without one


def test_an_unselected_provider_changes_nothing(op):
    assert value(op) == 1
    assert torchop.explain(op, torch.zeros(1)).provider == "reference"


def test_the_authors_order(op):
    op.set_priority(["ten"])
    assert value(op) == 10
    op.set_priority(["twenty", "ten"])
    assert value(op) == 20
    op.set_priority([])
    assert value(op) == 1


def test_the_authors_order_is_for_device_types(op):
    op.set_priority(["ten"], device_types=OTHER)
    assert value(op) == 1
    op.set_priority(["twenty"], device_types=[OTHER, TYPE])
    assert value(op) == 20


def test_the_order_of_the_definition_names_providers_that_come_later(namespace):
    op = define(namespace, priority=["ten"])
    op.register_kernel(TYPE, adding(10), provider="ten")
    assert value(op) == 10


def test_block_precedes_process_and_process_precedes_author(op):
    op.set_priority(["ten"])
    torchop.set_priority({op.name: ["twenty"]})
    assert value(op) == 20
    with torchop.priority({op.name: ["reference"]}):
        assert value(op) == 1
    assert value(op) == 20
    torchop.set_priority({op: None})
    assert value(op) == 10


def test_name_precedes_pattern_and_longer_pattern_precedes_shorter(namespace, op):
    torchop.set_priority({f"{namespace}::*": ["ten"]})
    assert value(op) == 10
    with torchop.priority({f"{namespace}::*": ["ten"], f"{namespace}::o*": ["twenty"]}):
        assert value(op) == 20
    torchop.set_priority({op.name: ["twenty"]})
    assert value(op) == 20


def test_order_for_a_device_precedes_one_for_all(op):
    torchop.set_priority({op.name: ["ten"]})
    torchop.set_priority({op.name: ["twenty"]}, device_types=TYPE)
    assert value(op) == 20
    torchop.set_priority({op.name: None}, device_types=TYPE)
    assert value(op) == 10


def test_an_order_that_was_set_before_the_operator_was_defined(namespace):
    torchop.set_priority({f"{namespace}::op": ["ten"]})
    op = define(namespace)
    op.register_kernel(TYPE, adding(10), provider="ten")
    assert value(op) == 10


def test_environment_precedes_process():
    program = """
        import torch, torchop
        schema = "(Tensor x) -> Tensor"
        op = torchop.custom_op("lib::op", lambda x: x + 1, mutates_args=(), schema=schema)
        op.register_kernel("cpu", lambda x: x + 10, provider="ten")
        op.register_kernel("cpu", lambda x: x + 20, provider="twenty")
        torchop.set_priority({"lib::op": ["twenty"]})
        print(op(torch.zeros(1)).item())
        with torchop.priority({"lib::*": ["reference"]}):
            print(op(torch.zeros(1)).item())
    """
    done = run_forked(program, TORCHOP_PRIORITY="lib::op = ten, twenty; other::*=x")
    assert assert_clean(done).split() == ["10.0", "1.0"]


@pytest.mark.parametrize("text", ["lib::op", "op=ten"])
def test_an_environment_that_is_wrong(monkeypatch, op, text):
    from torchop._rules.providers import priority

    monkeypatch.setenv("TORCHOP_PRIORITY", text)
    priority._of_environment.cache_clear()
    try:
        op.set_priority(["ten"])  # makes a new plan, which reads the environment
        with pytest.raises(ValueError, match=r"TORCHOP_PRIORITY expects orders such as"):
            value(op)
    finally:
        monkeypatch.undo()
        priority._of_environment.cache_clear()
    assert value(op) == 10


# --------------------------------------------------------------------------------------------------
# Blocks


def test_blocks_are_nested_and_restored_after_exceptions(op):
    with torchop.priority({op: ["ten"]}):
        with contextlib.suppress(ZeroDivisionError), torchop.priority({op: ["twenty"]}):
            assert value(op) == 20
            raise ZeroDivisionError
        with torchop.priority({"other::*": ["nothing"]}):
            assert value(op) == 10
    assert value(op) == 1


@pytest.mark.parametrize("has_block", [False, True])
def test_checkpoint_recomputes_with_the_forwards_priority(namespace, op, has_block):
    ran = []

    def noting(x):
        ran.append("ten")
        return x + 10

    op.register_kernel(TYPE, noting, provider="ten")
    op.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: None)
    blocks = contextlib.nullcontext(), torchop.priority({op.name: ["ten"]})
    options = {"context_fn": lambda: blocks} if has_block else {}
    x = torch.zeros(1, requires_grad=True)
    with torchop.priority({op.name: ["ten"]}):
        y = checkpoint(lambda x: op(x).exp(), x, use_reentrant=False, **options)
    y.backward()
    assert ran == ["ten"] * (1 + has_block)


def test_a_block_is_for_one_thread(op):
    entered, seen = threading.Event(), threading.Event()
    values = {}

    def other():
        with torchop.priority({op: ["ten"]}):
            entered.set()
            seen.wait()
            values["other"] = value(op)

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    values["main"] = value(op)
    seen.set()
    thread.join()
    assert values == {"main": 1, "other": 10}


def test_a_block_is_for_one_task(op):
    async def inside(turn, other):
        with torchop.priority({op: ["ten"]}):
            other.set()
            await turn.wait()
            return value(op)

    async def outside(turn, other):
        await turn.wait()
        found = value(op)
        other.set()
        return found

    async def both():
        first, second = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(inside(first, second), outside(second, first))

    assert asyncio.run(both()) == [10, 1]


# --------------------------------------------------------------------------------------------------
# Filters, fallbacks and their messages


def test_only_batch_invariant_and_only_deterministic_kernels(namespace):
    op = define(namespace, priority=["random", "invariant"])
    op.register_kernel(TYPE, adding(10), provider="random", deterministic=False)
    op.register_kernel(TYPE, adding(20), provider="invariant", batch_invariant=True)
    assert value(op) == 10
    with torchop.priority(batch_invariant_only=True):
        assert value(op) == 20
    with torchop.priority(deterministic_only=True):
        assert value(op) == 20
        with torchop.priority(deterministic_only=False):
            assert value(op) == 10


@pytest.mark.parametrize("opens_block", [False, True])
def test_pytorchs_deterministic_mode_implies_deterministic_kernels(namespace, opens_block):
    op = define(namespace, priority=["random", "reference"])
    op.register_kernel(TYPE, adding(10), provider="random", deterministic=False)
    with torchop.priority() if opens_block else contextlib.nullcontext():
        assert value(op) == 10
        torch.use_deterministic_algorithms(True)
        try:
            assert value(op) == 1
        finally:
            torch.use_deterministic_algorithms(False)
        assert value(op) == 10


def test_a_provider_that_is_not_supported_is_reported_once(namespace, caplog):
    asked = []
    op = define(namespace, priority=["absent"])
    op.register_kernel(TYPE, adding(10), provider="absent", supported=lambda: bool(asked.append(1)))
    assert asked == []  # `supported` must not run at import, when packages register kernels
    match = rf"{namespace}::op: the provider 'absent' is skipped on {TYPE}, because `supported`"
    with pytest.warns(torchop.ProviderWarning, match=match):
        assert value(op) == 1
    op.register_kernel(TYPE, adding(20), provider="other")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value(op) == 1
    assert asked == [1]


def test_a_provider_that_was_removed_is_reported_once(namespace):
    op = define(namespace, priority=["gone"])
    library = torchop.Library(namespace, "FRAGMENT")
    torchop.register_kernel(
        op, TYPE, adding(10), provider="gone", supports=lambda x: x.ndim == 1, lib=library
    )
    with pytest.warns(torchop.ProviderWarning, match="`supports` returned False"):
        assert value(op, torch.zeros(1, 1)) == 1
    library._destroy()
    match = (
        rf"^{namespace}::op: the provider 'gone' is skipped( on {TYPE})?, because it was "
        r"removed, with the library that it was registered through, and the reference runs "
        r"instead\. It"
    )
    with pytest.warns(torchop.ProviderWarning, match=match):
        assert value(op) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value(op) == 1
    with torchop.priority(strict=True):
        with pytest.raises(torchop.ProviderError, match=r"\(gone: it was removed, with the lib"):
            op(torch.zeros(1))
        op.register_kernel(TYPE, adding(20), provider="gone")
        assert value(op) == 20


@pytest.mark.parametrize(
    "way", ["handle", "torch.ops", "vmap", "backward", "aot_eager", "inductor"]
)
def test_a_warning_points_at_the_users_line(namespace, way):
    op = define(namespace, priority=["absent"])
    op.register_fake(torch.empty_like)
    op.register_kernel(TYPE, adding(10), provider="absent", supported=False)
    x = torch.zeros(1)
    function = getattr(torch.ops, namespace).op if way == "torch.ops" else op
    places = ("call",)
    if way == "vmap":
        op.register_vmap("sequential")
        function, x = torch.vmap(op), torch.zeros(1, 1)
    elif way == "backward":
        other = define(f"{namespace}_other")
        places = ("formula",)
        other.register_autograd(lambda ctx, grad: op(grad))  # formula
        function, x = other(torch.ones(1, requires_grad=True)).backward, torch.ones(1)
    elif way in ("aot_eager", "inductor"):
        # The operator reads its priority while it is traced, or when the graph first runs.
        places = ("call", "compiled function")
        function = torch.compile(lambda x: op(x) * 1, backend=way)  # compiled function
    with pytest.warns(torchop.ProviderWarning, match="'absent' is skipped") as caught:
        function(x)  # call
    (warning,) = [w for w in caught if w.category is torchop.ProviderWarning]
    assert warning.filename == __file__
    assert linecache.getline(__file__, warning.lineno).rpartition("  # ")[2].strip() in places


def test_the_exception_of_supported_is_the_reason(namespace):
    def supported():
        raise ImportError("no module named vendor")

    op = define(namespace, priority=["vendor"])
    op.register_kernel(TYPE, adding(10), provider="vendor", supported=supported)
    with pytest.warns(torchop.ProviderWarning, match="raised ImportError: no module named vendor"):
        assert value(op) == 1


def test_intended_fallback_does_not_warn(namespace):
    for order in (["small", "reference"], []):  # the two messages suggest these orders
        op = define(namespace, priority=order)
        op.register_kernel(TYPE, adding(10), provider="small", supports=lambda x: len(x) < 10)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert value(op, torch.zeros(50)) == 1
    op = define(namespace, priority=["vendor", "reference"])
    op.register_kernel(TYPE, adding(10), provider="vendor", supported=lambda: "there is no library")
    with pytest.warns(torchop.ProviderWarning, match="If that is intended, leave it out of that"):
        assert value(op) == 1


def test_warnings_name_each_provider_of_the_order_when_all_decline(namespace):
    op = define(namespace, priority=["small", "large"])
    op.register_kernel(TYPE, adding(10), provider="small", supports=lambda x: len(x) < 10)
    op.register_kernel(TYPE, adding(20), provider="large", supports=lambda x: len(x) < 100)
    assert value(op, torch.zeros(5)) == 10
    assert value(op, torch.zeros(50)) == 20
    with pytest.warns(torchop.ProviderWarning) as caught:
        assert value(op, torch.zeros(500)) == 1
    assert [str(w.message).split("'")[1] for w in caught] == ["small", "large"]
    intended = (
        "It is in the order of the operator's author. If that is intended, end that order with "
        "'reference'."
    )
    assert all(str(w.message).endswith(intended) for w in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value(op, torch.zeros(600)) == 1


def test_skipped_providers_are_logged(namespace, caplog):
    op = define(namespace, priority=["absent", "reference"])
    op.register_kernel(TYPE, adding(10), provider="absent", supported=False)
    names = [n for n in logging.root.manager.loggerDict if "torchop_calls" in n]
    logger = logging.getLogger(names[0])
    logger.addHandler(caplog.handler)
    level, logger.disabled = logger.level, False
    logger.setLevel(logging.INFO)
    try:
        with pytest.warns(torchop.ProviderWarning):
            value(op)
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(level)
    assert (
        f"'absent' is skipped on {TYPE}, because it is registered with supported=False"
        in caplog.text
    )


def test_strict_makes_falling_back_an_error(namespace):
    op = define(namespace)
    op.register_kernel(TYPE, adding(10), provider="flat", supports=lambda x: x.ndim == 1)
    with torchop.priority({op: ["flat"]}, strict=True):
        assert value(op) == 10
        match = rf"torchop.priority can run this call on {TYPE} \(flat: `supports`"
        for _ in range(2):  # the second call uses the cached choice
            with pytest.raises(torchop.ProviderError, match=match):
                op(torch.zeros(1, 1))
        with torchop.priority({op: ["flat", "reference"]}):
            assert value(op, torch.zeros(1, 1)) == 1
        with torchop.priority(strict=False), pytest.warns(torchop.ProviderWarning):
            assert value(op, torch.zeros(1, 1)) == 1


def test_a_device_without_a_reference(namespace):
    op = torchop.custom_op(f"{namespace}::op", adding(1), mutates_args=(), device_types=OTHER,
                           schema="(Tensor x) -> Tensor")  # fmt: skip
    op.register_kernel(TYPE, adding(10), provider="ten", supports=lambda x: x.ndim == 1)
    with pytest.raises(torchop.MissingKernelError, match=r"no order names: ten\. Name one"):
        value(op)
    op.set_priority(["ten"])
    assert value(op) == 10
    with pytest.raises(torchop.MissingKernelError, match=r"can run this call \(ten: `supports`"):
        op(torch.zeros(1, 1))


def test_a_kernel_that_is_switched_off_leaves_the_function_of_the_definition(op):
    op.register_kernel(TYPE, adding(2))
    op.set_priority(["ten"])
    with op.set_kernel_enabled(TYPE, enabled=False):
        assert value(op) == 1
        assert torchop.explain(op, torch.zeros(1)).provider is None
    assert value(op) == 10


# --------------------------------------------------------------------------------------------------
# Invalid orders


def test_an_unknown_provider(namespace, op):
    match = r"has no provider 'tem' \(did you mean 'ten'\?\); it has: reference, ten, twenty"
    for act in (
        lambda: op.set_priority(["tem"]),
        lambda: torchop.set_priority({op.name: ["tem"]}),
        lambda: torchop.priority({op: ["tem"]}),
        lambda: torchop.priority({f"{namespace}::*": ["ten", "tem"]}),
    ):
        with pytest.raises(torchop.ProviderError, match=match):
            act()
    late = define(f"{namespace}_late", priority=["tem"])
    late.register_kernel(TYPE, adding(10), provider="ten")
    for _ in range(2):
        with pytest.raises(torchop.ProviderError, match=r"the operator's author: .* 'tem'"):
            value(late)


@pytest.mark.parametrize(
    ("orders", "error", "words"),
    [
        (["ten"], TypeError, "expects a dict of orders by operator"),
        ({"op": ["ten"]}, ValueError, "expects names of operators, or patterns"),
        ({"lib::op": "ten"}, TypeError, "expects a list of names of providers"),
        ({"lib::op": [1]}, TypeError, "strings, got 1 of type int"),
    ],
)
def test_invalid_orders_are_rejected(orders, error, words):
    for act in (torchop.set_priority, torchop.priority):
        with pytest.raises(error, match=words):
            act(orders)


@pytest.mark.parametrize("flag", ["strict", "batch_invariant_only", "profile"])
@pytest.mark.parametrize("value", ["no", 1, []])
def test_invalid_flags_are_rejected(flag, value):
    with pytest.raises(TypeError, match=f"{flag} expects a bool or None, got "):
        torchop.priority(**{flag: value})


def test_a_block_that_is_exited_where_it_was_not_entered(op):
    block = torchop.priority({op: ["ten"]})
    with pytest.raises(RuntimeError, match="was exited, but it was not entered in this thread"):
        block.__exit__(None, None, None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(block)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            left = pool.submit(block.__exit__, None, None, None)
            with pytest.raises(RuntimeError, match="not entered in this thread or task"):
                left.result()
        assert value(op) == 10
    assert value(op) == 1


# --------------------------------------------------------------------------------------------------
# Orders in explanations and listings


def test_explain_names_the_provider_and_why_others_are_skipped(namespace):
    op = define(namespace)
    op.register_kernel(TYPE, adding(10), provider="absent", supported=False)
    op.register_kernel(TYPE, adding(20), provider="flat", supports=lambda x: x.ndim == 1)
    op.register_kernel(TYPE, adding(30), provider="any")
    op.register_kernel(TYPE, adding(40), provider="last")
    op.register_kernel(TYPE, adding(50), provider="unasked")
    op.register_kernel(OTHER, adding(60), provider="gpu")
    with torchop.priority({op: ["gpu", "absent", "flat", "any", "last"]}):
        found = torchop.explain(op, torch.zeros(1, 1))
    assert found.provider == "any"
    _, _, shown = re.sub(r" \(\S+\.py:\d+\)", "", str(found)).partition("providers ")
    assert shown.splitlines() == [
        "(the first one that supports the call runs):",
        f"  1. gpu ({OTHER}): it has no kernel for {TYPE}",
        f"  2. absent ({TYPE}): it is registered with supported=False",
        f"  3. flat ({TYPE}): `supports` returned False",
        f"  4. any ({TYPE}): runs",
        f"  5. last ({TYPE}): any comes before it",
        f"  unasked ({TYPE}): the order of torchop.priority does not name it",
        "  reference (every device): any comes before it",
    ]


def test_explain_distinguishes_kernels_of_other_devices(namespace):
    op = define(namespace, priority=["tuned"])
    op.register_kernel(OTHER, adding(10))
    op.register_kernel(OTHER, adding(20), provider="gpu")
    op.register_kernel(TYPE, adding(30), provider="ten")
    found = torchop.explain(op, torch.zeros(1)).providers
    assert [text.rpartition(" (/")[0] or text for text in found] == [
        "1. tuned: no measurement matches the call",
        f"gpu ({OTHER}): it is for other devices",
        f"ten ({TYPE}): the order of the operator's author does not name it",
        "reference (every device): runs",
        f"reference ({OTHER}): it is for other devices",
    ]


def test_a_profiler_shows_the_provider_when_asked(op):
    def shown(**flags):
        with torchop.priority({op: ["ten"]}, **flags), torch.profiler.profile() as profile:
            op(torch.zeros(1))
        return {event.key for event in profile.key_averages()}

    assert f"{op.name}[ten]" in shown(profile=True)
    assert not any("[ten]" in key for key in shown())


def test_class_form(namespace):
    flat = {"device_types": TYPE, "function": adding(10), "supports": lambda x: x.ndim == 1}

    class Forward:
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x + 1

    @torchop.operator(f"{namespace}::op")
    class op(Forward):
        priority = ("flat",)
        providers: ClassVar = {"flat": flat}

    assert value(op) == 10
    with pytest.raises(TypeError, match="each provider to a dict with"):

        @torchop.operator(f"{namespace}::wrong")
        class wrong(Forward):
            providers: ClassVar = {"ten": adding(10)}
