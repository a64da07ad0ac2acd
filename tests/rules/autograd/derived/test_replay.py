"""The second run of a body gets the random state and other settings of the first.

Uses private names.
"""

import contextlib
import functools

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native
from tests.rules.autograd.derived.support import derived
from torchop import _hooks
from torchop._compat import devices
from torchop._rules.autograd.derived import replay
from torchop._rules.autograd.derived.replay import ambient_state, packed_size

X = torch.ones(2)
# The first argument, an operator's definition, is only used in error messages about graph capture.
replayed = functools.partial(replay.replayed, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_number_cached_by_the_generator_is_part_of_the_state(dtype: torch.dtype) -> None:
    """`randn` computes two numbers at a time, and the generator keeps the second for later.

    The state that is saved and restored must contain this number.
    """

    def draw() -> Tensor:
        return torch.randn(1, dtype=dtype)

    draw()
    packed = ambient_state([X]).packed
    drawn = draw()
    assert ambient_state([X]).packed is not packed
    assert torch.equal(replayed(packed, [X], draw), drawn)
    assert not torch.equal(draw(), drawn)


@pytest.mark.parametrize("fails", [False, True])
def test_current_state_is_restored_after_a_body_draws(fails: bool) -> None:
    before, packed = torch.get_rng_state(), ambient_state([X]).packed
    drawn: list[Tensor] = []

    def draw() -> None:
        drawn.append(torch.rand(3))
        if fails:
            raise KeyError

    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        replayed(packed, [X], draw)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn[0], torch.rand(3))


def test_random_state_is_restored_after_an_error():
    packed = ambient_state([X]).packed
    torch.rand(5)
    state = torch.get_rng_state()

    def draw_and_fail():
        torch.rand(1)
        raise KeyError

    with pytest.raises(KeyError):
        replayed(packed, [X], draw_and_fail)
    assert torch.equal(torch.get_rng_state(), state)


def test_settings_are_restored_after_an_error(namespace):
    @torchop.custom_op(f"{namespace}::f", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            settings = torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
            raise RuntimeError(f"differentiated with {settings} on {torch.empty(0).device}")
        return x * 2

    op.derive_autograd()
    x = torch.ones(2, requires_grad=True)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu"):
            y = op(x)
    finally:
        torch.set_default_dtype(torch.float32)
    grad = torch.ones(2)
    with torch.device("meta"):
        with pytest.raises(RuntimeError, match=r"with \(torch.float64, True\) on cpu"):
            torch.autograd.grad(y, x, grad)
        assert torch.empty(0).device.type == "meta"
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()


def autocast():
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


@pytest.mark.cuda
def test_generators_of_the_inputs_devices_are_restored():
    x = torch.ones(2, device="cuda")
    packed = ambient_state([x]).packed
    assert ambient_state([x], in_graph=True).packed.numel() == packed_size([x])
    first = torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    drawn = replayed(packed, [x], lambda: torch.rand(3, device="cuda"))
    assert torch.equal(drawn, first)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_nondeterministic_tag_saves_a_state_that_the_body_restores(namespace):
    @torchop.custom_op(
        f"{namespace}::drop", mutates_args=(), tags=torch.Tag.nondeterministic_seeded
    )
    def drop(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            return x * torch.rand(8)

    drop.derive_autograd()
    for _ in range(2):  # the first call uses the dispatcher, the second one is native
        x = torch.ones(8, requires_grad=True)
        result = drop(x)
        torch.rand(1)
        assert torch.equal(torch.autograd.grad(result.sum(), x)[0], result)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_backward_uses_the_forwards_default_dtype(namespace, native, in_forward, dtype):
    def body(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.rand(8)).float()

    op = derived(f"{namespace}::f", body)
    setting, plain = default_dtype(dtype), contextlib.nullcontext()
    with contextlib.nullcontext() if native else torchop.native.disabled():
        for _ in range(2):  # the first call uses the dispatcher, the second one is native
            x = torch.ones(8, dtype=torch.float32, requires_grad=True)
            with setting if in_forward else plain:
                result = op(x)
            setting = default_dtype(dtype)
            with plain if in_forward else setting:
                (gradient,) = torch.autograd.grad(result.sum(), x)
                assert torch.get_default_dtype() is (torch.float32 if in_forward else dtype)
            setting = default_dtype(dtype)
            assert torch.equal(gradient, result)


@pytest.mark.parametrize("in_forward", [True, False])
def test_backward_uses_the_forwards_default_device(namespace, in_forward):
    devices = []

    def body(x: torch.Tensor) -> torch.Tensor:
        devices.append(torch.empty(1).device.type)
        return x * 2

    op = derived(f"{namespace}::f", body)
    x = torch.ones(8, requires_grad=True)
    with torch.device("meta") if in_forward else contextlib.nullcontext():
        result = op(x).sum()
    with contextlib.nullcontext() if in_forward else torch.device("meta"):
        torch.autograd.grad(result, x, torch.ones((), device="cpu"))
        assert torch.empty(1).device.type == ("cpu" if in_forward else "meta")
    # The mode that sets the default device does not apply inside of a kernel, so the forward runs
    # the body on the CPU. The backward must do so too.
    assert set(devices) == {"cpu"}


def restores(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    noise = torch.rand(8)
    torch.set_rng_state(state)
    return x * noise


def restores_by_fork(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        return x * torch.rand(8)


def restores_by_the_generator(x: torch.Tensor) -> torch.Tensor:
    state = torch.default_generator.get_state()
    noise = torch.rand(8)
    torch.default_generator.set_state(state)
    return x * noise


def reads(x: torch.Tensor) -> torch.Tensor:
    # The result depends on the state of the default generator, but drawing from a copy of the
    # generator leaves that state unchanged.
    other = torch.Generator()
    other.set_state(torch.get_rng_state())
    return x * torch.rand(8, generator=other)


def seeds(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.initial_seed() % 1000)


BODIES = [restores, restores_by_fork, restores_by_the_generator, reads, seeds]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("native", [True, False])
def test_a_body_without_the_tag_may_restore_or_read_the_state(namespace, body, native):
    op = derived(f"{namespace}::f", body)
    with contextlib.nullcontext() if native else torchop.native.disabled():
        for _ in range(2):
            torch.manual_seed(7)
            x = torch.ones(8, requires_grad=True)
            result = op(x)
            torch.manual_seed(8)
            state = torch.get_rng_state()
            assert torch.equal(torch.autograd.grad(result.sum(), x)[0], result)
            assert torch.equal(torch.get_rng_state(), state)


def test_calls_share_a_state_until_numbers_are_drawn(namespace):
    op = derived(f"{namespace}::f", lambda x: x * 2, schema="(Tensor x) -> Tensor")
    x = torch.ones(8, requires_grad=True)

    results = [op(x), op(x)]
    torch.rand(1)
    results.append(op(x))
    first, second, third = (y.grad_fn.saved_tensors[-1].data_ptr() for y in results)
    assert first == second != third


class _Elsewhere(torch.Tensor):
    is_cpu = False


@needs_native
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        (),
        (torch.ones(2), 1, 1.0, True, "a", 1j, None, torch.float32),
        [torch.nn.Parameter(torch.ones(2))],
    ],
    ids=["nothing", "plain values", "a parameter"],
)
def test_a_plain_state_is_packed_as_in_python(values, autocast):
    with torch.autocast(X.device.type, torch.bfloat16) if autocast else contextlib.nullcontext():
        packed = _pack_plain(values)
        if autocast:
            assert packed is None
            return
        assert packed.dtype is torch.uint8
        for _ in range(2):
            expected = replay._of_all_devices(values, devices.accelerator_count(), False).packed
            assert torch.equal(packed.cpu(), expected.cpu())
            assert _pack_plain(values, expected) is expected
            torch.rand(1)
            packed = _pack_plain(values, expected)
            assert packed is not expected


@needs_native
@pytest.mark.parametrize(
    "values",
    [
        (torch.ones(2), torch.Generator()),
        (torch.ones(2), torch.device("cpu")),
        (torch.ones(2), [1, 2]),
        (torch.ones(2), [torch.ones(2, device="meta")]),
        (torch.ones(2, device="meta"),),
        (torch.ones(2).as_subclass(_Elsewhere),),
    ],
    ids=[
        "a generator",
        "a device",
        "numbers in a list",
        "a tensor elsewhere in a list",
        "a tensor elsewhere",
        "a subclass",
    ],
)
def test_arguments_that_may_contain_other_devices_are_packed_in_python(values):
    assert _pack_plain(values) is None


def _pack_plain(values, latest=None):
    return _hooks.extension.pack_plain(values, latest, devices.accelerator_count())
