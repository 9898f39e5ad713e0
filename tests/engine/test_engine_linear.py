"""Products of linear layers and LoRA factors, compared with plain torch in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from engine.compute.linear import frozen_linear, linear, lora_linear

SCALE = 4.0


def operands(*batch: int, bias: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias, dtype=dtype).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x, a, b = (torch.randn(*shape, generator=generator) for shape in ((*batch, 24), (8, 24), (40, 8)))
    return x.to(dtype).requires_grad_(), layer, a.requires_grad_(), b.requires_grad_()


def differentiate(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return the output of a function, and the gradients of a random projection of it."""
    output = function(*inputs)
    projection = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output, *torch.autograd.grad((output * projection).sum(), inputs)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch", [(1,), (7,), (3, 5), (2, 1)])
def test_values_and_gradients_equal_those_of_torch(batch: tuple[int, ...], bias: bool) -> None:
    x, layer, a, b = operands(*batch, bias=bias)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, a, b)]
    weight, bias_y = layer.weight.double(), layer.bias.double() if bias else None

    actual = differentiate(lambda x, a, b: lora_linear(x, layer, a, b, SCALE), x, a, b)
    expected = differentiate(lambda x, a, b: nn.functional.linear(x, weight, bias_y) + SCALE * x @ a.t() @ b.t(), *wide)
    torch.testing.assert_close(actual, [tensor.float() for tensor in expected], rtol=1e-5, atol=1e-4)

    actual = differentiate(lambda x: frozen_linear(x, layer), x)
    expected = differentiate(lambda x: nn.functional.linear(x, weight, bias_y), wide[0])
    torch.testing.assert_close(actual, [tensor.float() for tensor in expected], rtol=1e-5, atol=1e-4)


def test_operands_may_have_any_strides() -> None:
    x, layer, *_ = operands(6, bias=False)
    wide = x.detach().repeat_interleave(2, dim=1)[:, ::2]
    assert not wide.is_contiguous()
    torch.testing.assert_close(linear(wide, layer.weight), x @ layer.weight.t())
    torch.testing.assert_close(linear(wide.t(), x.detach().t()), x.t() @ x)


def test_gradients_of_frozen_inputs_are_not_computed() -> None:
    x, layer, a, b = operands(5, bias=False)
    output = lora_linear(x.detach(), layer, a, b.detach(), SCALE)
    output.sum().backward()
    assert [tensor.grad is None for tensor in (x, a, b)] == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_computed_by_torch(dtype: torch.dtype) -> None:
    x, layer, a, b = operands(5, bias=True, dtype=dtype)
    output = lora_linear(x, layer, a, b, SCALE)
    assert output.dtype == dtype
    expected = (
        x.double() @ layer.weight.double().t()
        + layer.bias.double()
        + SCALE * x.double() @ a.double().t() @ b.double().t()
    )
    torch.testing.assert_close(output.double(), expected, rtol=0.03, atol=0.5)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(576, 576), (1536, 576), (576, 1536), (8, 576), (264, 32)])
@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_rows_have_the_same_bits_in_products_of_two_or_more_rows(
    num_outputs: int, num_inputs: int, num_threads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    x_RH = torch.randn(160, num_inputs, generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        y_RH = linear(x_RH, weight)
        for num_rows in (*range(2, 20), 31, 48, 63, 64, 65, 127, 128):
            first = (num_rows * 7) % 32
            assert torch.equal(linear(x_RH[first : first + num_rows], weight), y_RH[first : first + num_rows]), num_rows
    finally:
        torch.set_num_threads(threads)
