from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import torchop
from tests.integration.beginners.mistake import mistake, multiply_of, scale_of


@mistake(TypeError, cause="Expected a value of type 'List[float]'", fix="scales=[...]")
def number_for_a_list(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor, scales: list[float]) -> Tensor:
        return x * scales[0]

    f(torch.ones(1), 2.0)  # type: ignore[arg-type]


@mistake(TypeError, cause="instead found type 'int'", fix="y=torch.tensor(...)")
def number_for_a_tensor(n: str) -> None:
    multiply_of(n)(torch.ones(1), 2)


@mistake(TypeError, cause="instead found type 'ndarray'", fix="y=torch.from_numpy(...)")
def array_for_a_tensor(n: str) -> None:
    multiply_of(n)(torch.ones(1), np.ones(1))


@mistake(TypeError, cause="argument 'y' is None", fix="Pass a tensor")
def none_for_a_tensor(n: str) -> None:
    multiply_of(n)(torch.ones(1), None)


@mistake(TypeError, cause="instead found type 'Tensor'", fix="factor=tensor.item()")
def tensor_for_a_number(n: str) -> None:
    scale_of(n)(torch.ones(2), torch.ones(2))


@mistake(TypeError, cause="takes 1 positional argument(s) but 2", fix="Pass factor by keyword")
def keyword_only_argument_by_position(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor, *, factor: float) -> Tensor:
        return x * factor

    f(torch.ones(1), 2.0)  # type: ignore[misc]


@mistake(TypeError, cause="at most 2 argument(s) but received 3", fix="(Tensor x, float factor=2.)")
def too_many_arguments(n: str) -> None:
    scale_of(n)(torch.ones(1), 2.0, 3.0)


@mistake(TypeError, cause="missing value for argument 'y'", fix="(Tensor x, Tensor y)")
def too_few_arguments(n: str) -> None:
    multiply_of(n)(torch.ones(1))


@mistake(TypeError, cause="Unknown keyword argument 'facter'", fix="did you mean 'factor'?")
def keyword_with_a_typo(n: str) -> None:
    scale_of(n)(torch.ones(1), facter=3.0)


@mistake(NotImplementedError, cause="does not have a kernel registered for cpu", fix="('cpu')")
def kernel_for_another_device(n: str) -> None:
    scale_of(n, device_types="cuda")(torch.ones(1))
