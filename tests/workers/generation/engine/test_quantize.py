from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.generation.engine.quantize import GROUP_SIZE, STEPS, quantize_int8, rotate, split


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hadamard(size: int) -> torch.Tensor:
    """Return Sylvester's matrix by its definition: the sign is the parity of the bits that row and column share."""
    return torch.tensor([[(-1.0) ** (row & column).bit_count() for column in range(size)] for row in range(size)])


def test_a_group_is_multiplied_by_the_hadamard_matrix() -> None:
    rows = numbers(3, 2 * GROUP_SIZE)
    expected = split(rows) @ hadamard(GROUP_SIZE) / 8
    torch.testing.assert_close(rotate(rows), expected.flatten(-2))


@given(inputs=st.integers(1, 200), seed=st.integers(0, 99))
def test_rotated_twice_is_unchanged_and_products_stay_what_they_are(inputs: int, seed: int) -> None:
    rows, weight = numbers(2, inputs, seed=seed), numbers(3, inputs, seed=seed + 100)
    torch.testing.assert_close(rotate(rotate(rows))[:, :inputs], rows, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotate(rows) @ rotate(weight).T, rows @ weight.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inputs", [1, 63, 64, 65, 150])
def test_what_is_left_of_a_matrix_is_near_it(inputs: int) -> None:
    weight = numbers(20, inputs)
    weight[3] = 0
    left = quantize_int8(weight)
    assert left.values.abs().max() <= STEPS
    assert torch.equal(left.scales, left.scales.bfloat16().float())
    assert torch.equal(left.dequantize()[3], weight[3])
    assert (left.dequantize() - weight).norm() < 0.01 * weight.norm()


def test_an_outlier_harms_its_group_less_than_without_rotation() -> None:
    weight = numbers(1, GROUP_SIZE)
    weight[0, 5] = 100
    plain = (weight / (100 / STEPS)).round() * (100 / STEPS)
    rotated = quantize_int8(weight).dequantize()
    assert (rotated - weight).norm() < 0.5 * (plain - weight).norm()


def test_no_rows_stay_no_rows() -> None:
    assert rotate(torch.empty(0, 70)).shape == (0, 2 * GROUP_SIZE)
    assert quantize_int8(torch.empty(0, 70)).dequantize().shape == (0, 70)


def test_parts_of_a_matrix_are_its_rows() -> None:
    whole = quantize_int8(numbers(6, 70))
    picked = torch.tensor([4, 0, 4])
    assert torch.equal(whole.part(picked).dequantize(), whole.dequantize()[picked])
    assert torch.equal(whole.part(slice(1, 3)).dequantize(), whole.dequantize()[1:3])
