"""A saved program lists the providers that its operators used. Loading reports missing ones."""

import io

import pytest
import torch
from torch import Tensor

import torchop
import torchop.export
from torchop.export.programs import modules_of


class Model(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, x):
        return self.op(x)


def define(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    op.register_fake(torch.empty_like)
    return op


def saved(program) -> io.BytesIO:
    file = io.BytesIO()
    torchop.export.save(program, file)
    file.seek(0)
    return file


def test_a_missing_provider_is_reported_with_its_module(namespace):
    op = define(namespace)
    program = torch.export.export(Model(op), (torch.ones(2),))
    with torchop.Library(namespace, "FRAGMENT") as library:
        for name, amount, options in (
            ("asked", 10, {}),
            ("broken", 20, {"supported": False}),
            ("unasked", 30, {}),
        ):
            op.register_kernel(
                "cpu",
                lambda x, amount=amount: x + amount,
                provider=name,
                lib=library,
                **options,
            )
        with torchop.priority({op: ["broken", "asked"]}):
            file = saved(program)
            asked = modules_of(program)
        assert torchop.export.load(file).module()(torch.zeros(2)).tolist() == [1, 1]
        file.seek(0)
    assert asked == (f'{{"{namespace}::op": "{__name__}", "{namespace}::op[asked]": "{__name__}"}}')
    with pytest.warns(
        torchop.ProviderWarning,
        match=rf"the exported program calls {namespace}::op, and used the kernel of the provider "
        rf"'asked' when the program was saved\. .* Import the module '{__name__}'",
    ) as told:
        loaded = torchop.export.load(file)
    assert len(told) == 1
    assert loaded.module()(torch.zeros(2)).tolist() == [1, 1]


def test_without_an_order_nothing_is_reported(namespace):
    op = define(namespace)
    program = torch.export.export(Model(op), (torch.ones(2),))
    with torchop.Library(namespace, "FRAGMENT") as library:
        op.register_kernel("cpu", lambda x: x + 10, provider="ten", lib=library)
        file = saved(program)
    assert torchop.export.load(file).module()(torch.zeros(2)).tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["x[", "]", "a::b[c]]", "[]", "no_name[x]", "a::b[\n]"])
def test_forged_names_of_providers_do_no_harm(namespace, name, monkeypatch):
    op = define(namespace)
    program = torch.export.export(Model(op), (torch.ones(2),))
    monkeypatch.setattr("torchop.export.programs.modules_of", lambda ep: f'{{"{name}": "m"}}')
    file = saved(program)
    assert torchop.export.load(file).module()(torch.zeros(2)).tolist() == [1, 1]
