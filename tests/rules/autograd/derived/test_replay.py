"""What a body finds around it: written into bytes, and put back."""

import contextlib

import pytest
import torch

import torchop
from tests.support import needs_native
from torchop._native.switch import native_module
from torchop._rules.autograd.derived import replay
from torchop._rules.autograd.derived.replay import current_surroundings, packed_size, replayed

X = torch.ones(2)


def test_random_numbers_are_drawn_again_and_the_stream_goes_on():
    packed = current_surroundings([X]).packed
    first, after = torch.rand(3), torch.get_rng_state()
    torch.rand(5)
    state = torch.get_rng_state()
    drawn, then = replayed(packed, [X], lambda: (torch.rand(3), torch.get_rng_state()))
    assert torch.equal(drawn, first)
    assert torch.equal(then, after)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_stream_is_put_back_after_an_error():
    packed = current_surroundings([X]).packed
    torch.rand(5)
    state = torch.get_rng_state()

    def draw_and_fail():
        torch.rand(1)
        raise KeyError

    with pytest.raises(KeyError):
        replayed(packed, [X], draw_and_fail)
    assert torch.equal(torch.get_rng_state(), state)


def test_generators_among_the_arguments_are_put_back():
    generator = torch.Generator().manual_seed(3)
    packed = current_surroundings([X, generator]).packed
    first = torch.rand(3, generator=generator)
    state = generator.get_state()
    drawn = replayed(packed, [X, generator], lambda: torch.rand(3, generator=generator))
    assert torch.equal(drawn, first)
    assert torch.equal(generator.get_state(), state)


def autocast():
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_put_back(dtype):
    with torch.autocast("cpu", dtype):
        packed = current_surroundings([X]).packed
        assert replayed(None, [X], autocast)[0] is False
        assert autocast() == (True, dtype)
    before = autocast()
    assert replayed(packed, [X], autocast) == (True, dtype)
    assert autocast() == before


def test_the_size_is_known_without_running_anything():
    for values in ([X], [[X, None], torch.Generator(), 3]):
        assert packed_size(values) == current_surroundings(values).packed.numel()
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(2)
        assert packed_size([fake]) == packed_size([X])
        on_cuda = torch.empty(2, device="cuda")
        # A seed and an offset, their length, and a flag and dtype of autocast.
        assert packed_size([fake, on_cuda]) == packed_size([X]) + 16 + 4 + 2


@pytest.mark.cuda
def test_the_generators_of_the_devices_of_the_inputs_are_put_back():
    x = torch.ones(2, device="cuda")
    packed = current_surroundings([x]).packed
    assert packed.numel() == packed_size([x])
    first = torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    drawn = replayed(packed, [x], lambda: torch.rand(3, device="cuda"))
    assert torch.equal(drawn, first)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_the_tag_of_random_operators_keeps_a_state_that_the_body_puts_back(namespace):
    @torchop.custom_op(
        f"{namespace}::drop", mutates_args=(), tags=torch.Tag.nondeterministic_seeded
    )
    def drop(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            return x * torch.rand(8)

    drop.derive_autograd()
    for _ in range(2):  # the first call that records a gradient is never native
        x = torch.ones(8, requires_grad=True)
        result = drop(x)
        torch.rand(1)
        assert torch.equal(torch.autograd.grad(result.sum(), x)[0], result)


class _Elsewhere(torch.Tensor):
    """What a subclass says of its device may be anything."""

    is_cpu = False


@needs_native
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        (),
        (torch.ones(2), 1, 1.0, True, "a", 1j, None, torch.float32),
        [torch.nn.Parameter(torch.ones(2))],
        (torch.ones(2), torch.Generator()),
        (torch.ones(2), torch.device("cpu")),
        (torch.ones(2), [1, 2]),
        (torch.ones(2), [torch.ones(2, device="meta")]),
        (torch.ones(2, device="meta"),),
        (torch.ones(2).as_subclass(_Elsewhere),),
    ],
    ids=[
        "nothing",
        "plain values",
        "a parameter",
        "a generator",
        "a device",
        "numbers in a list",
        "a tensor elsewhere in a list",
        "a tensor elsewhere",
        "a subclass",
    ],
)
def test_surroundings_are_packed_as_in_python(values, autocast):
    native = native_module()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        packed = native.pack_on_cpu(values)
        expected = replay._pack_on_cpu(values)
        assert replay.pack_on_cpu is native.pack_on_cpu
    if packed is None:  # then `current_surroundings` asks for each generator and device
        assert expected is None
    else:
        assert torch.equal(packed, expected)
        assert packed.dtype is torch.uint8


@needs_native
def test_surroundings_are_packed_of_sequences_only():
    with pytest.raises(TypeError, match="pack_on_cpu expects a sequence"):
        native_module().pack_on_cpu(1)
