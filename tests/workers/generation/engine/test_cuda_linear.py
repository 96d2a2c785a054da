from __future__ import annotations

import pytest
import torch

from workers.generation.engine.cuda_linear import (
    ACTIVATION_STEPS,
    FP8_MAX,
    Fp8Linear,
    Int8Linear,
    quantize_fp8,
    quantize_rows,
)
from workers.generation.engine.linear import FloatLinear, GroupedInt8Linear, head_factory, linear_factory
from workers.generation.engine.protocol import Precision

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]
HAS_FP8 = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)
SHAPES = [(64, 48), (70, 100), (576, 192), (33, 8)]  # inputs and outputs


def matrix(inputs: int, outputs: int) -> torch.Tensor:
    """Return a weight whose outputs differ in size by a factor of 100."""
    generator = torch.Generator().manual_seed(inputs)
    sizes = torch.logspace(-1, 1, outputs)[:, None]
    return torch.randn((outputs, inputs), generator=generator) * sizes


def rows_of(count: int, inputs: int) -> torch.Tensor:
    """Return rows whose sizes differ by a factor of 10,000, with an outlier in each."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn((count, inputs), generator=generator) * torch.logspace(-2, 2, count)[:, None]
    rows[:, 3] *= 20
    return rows


def error(found: torch.Tensor, exact: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> float:
    """Return the largest error of a product, over the lengths of its row and its output's weights."""
    lengths = rows.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    return float(((found.cpu().double() - exact).abs() / lengths).max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("count", [1, 7, 16, 17, 33, 130])
def test_int8_product_equals_the_dequantized_one(device: str, inputs: int, outputs: int, count: int) -> None:
    weight, rows = matrix(inputs, outputs), rows_of(count, inputs)
    values, scales = quantize_rows(weight, 127)
    exact = rows.double() @ (values.double() * scales.double()[:, None]).t()  # activations as they are
    found = Int8Linear(weight.to(device))(rows.to(device))
    assert found.shape == (count, outputs)
    assert error(found, exact, rows, weight) < 1e-4  # half a step of 16,255 in each of 33 to 576 inputs
    assert error(found, rows.double() @ weight.double().t(), rows, weight) < 1e-2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_row_is_the_same_bits_in_any_batch(device: str, dtype: torch.dtype) -> None:
    linear, rows = Int8Linear(matrix(64, 48).to(device)), rows_of(40, 64).to(device, dtype)
    together = linear(rows)
    assert together.dtype is dtype
    for row in (0, 20, 39):
        assert torch.equal(linear(rows[row : row + 1])[0], together[row])
    assert torch.equal(linear(rows[10:31]), together[10:31])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("count", [1, 7, 33])
@pytest.mark.skipif(not HAS_FP8, reason="the device has no 8-bit floats")
def test_fp8_product_equals_the_dequantized_one(device: str, inputs: int, outputs: int, count: int) -> None:
    weight, rows = matrix(inputs, outputs), rows_of(count, inputs)
    (values, scales), (numbers, row_scales) = quantize_fp8(weight), quantize_fp8(rows)
    exact = (numbers.double() * row_scales.double()[:, None]) @ (values.double() * scales.double()[:, None]).t()
    found = Fp8Linear(weight.to(device))(rows.to(device))
    assert found.shape == (count, outputs)
    assert error(found, exact, rows, weight) < 4e-3  # the result is bf16
    assert error(found, rows.double() @ weight.double().t(), rows, weight) < 6e-2


@pytest.mark.parametrize("linear", [Int8Linear, Fp8Linear])
def test_bias_is_added_as_it_is(linear: type[Int8Linear] | type[Fp8Linear]) -> None:
    weight, rows, bias = matrix(64, 48), rows_of(3, 64), torch.arange(48.0)
    assert torch.equal(linear(weight, bias)(rows), linear(weight)(rows) + bias)


@pytest.mark.parametrize("linear", [Int8Linear, Fp8Linear])
def test_row_of_zeros_gives_zeros(linear: type[Int8Linear] | type[Fp8Linear]) -> None:
    rows = rows_of(3, 64)
    rows[1] = 0
    result = linear(matrix(64, 48))(rows)
    assert not result[1].any() and bool(torch.isfinite(result).all())


def test_largest_numbers_of_a_row_neither_overflow_nor_turn_to_nan() -> None:
    numbers, _ = quantize_rows(torch.tensor([[1e30, -1e30, 1.0]]), ACTIVATION_STEPS)
    assert numbers.tolist() == [[ACTIVATION_STEPS, -ACTIVATION_STEPS, 0]]
    floats, _ = quantize_fp8(torch.tensor([[3e38, -3e38, 1e-30]]))
    assert floats.float().tolist() == [[FP8_MAX, -FP8_MAX, 0]]


def test_weights_take_one_byte_each() -> None:
    assert Int8Linear(matrix(64, 48)).num_bytes == Fp8Linear(matrix(64, 48)).num_bytes == 64 * 48 + 48 * 4


@pytest.mark.parametrize(("precision", "made"), [(Precision.INT8, Int8Linear), (Precision.FP8, Fp8Linear)])
def test_output_projection_stays_in_floats_on_cuda(precision: Precision, made: type[Int8Linear]) -> None:
    device = torch.device("cuda")
    assert linear_factory(precision, device) is made
    assert head_factory(precision, device) is FloatLinear


def test_output_projection_is_in_8_bits_on_the_cpu() -> None:
    assert head_factory(Precision.INT8, torch.device("cpu")) is GroupedInt8Linear
