from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from schemas.errors import ConfigError
from workers.generation.engine import linear
from workers.generation.engine.linear import (
    FloatLinear,
    GroupedInt8Linear,
    activation_dtype,
    embed,
    linear_factory,
)
from workers.generation.engine.protocol import Precision
from workers.generation.engine.quantize import quantize_int8

CPU = torch.device("cpu")


@pytest.mark.parametrize("inputs", [64, 100, 192])
@pytest.mark.parametrize("has_bias", [False, True])
def test_8_bit_products_are_those_of_the_expanded_matrix(
    inputs: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "SLICE_NUMBERS", 7 * inputs)  # 24 outputs in four slices
    weight, rows = torch.randn(24, inputs), torch.randn(5, inputs)
    bias = torch.randn(24) if has_bias else None
    expected = F.linear(rows, quantize_int8(weight).dequantize(), bias)
    torch.testing.assert_close(GroupedInt8Linear(weight, bias)(rows), expected, atol=1e-4, rtol=1e-4)


def test_a_row_of_8_bit_products_does_not_depend_on_its_neighbours_size() -> None:
    product = GroupedInt8Linear(torch.randn(24, 64))
    rows = torch.randn(3, 64)
    loud = torch.cat((rows[:1], 1e4 * rows[1:]))
    torch.testing.assert_close(product(loud)[0], product(rows)[0], atol=1e-4, rtol=1e-4)


def test_memory_of_8_bits_is_a_byte_a_number_of_whole_groups_and_a_scale_for_each() -> None:
    assert GroupedInt8Linear(torch.randn(10, 130)).num_bytes == 10 * 192 + 10 * 3 * 4
    assert FloatLinear(torch.randn(10, 130).half()).num_bytes == 2 * 10 * 130


def test_rows_of_an_embedding_are_those_of_the_matrix() -> None:
    table, tokens = torch.randn(20, 70), torch.tensor([3, 0, 3])
    assert torch.equal(embed(table, tokens, torch.float32), table[tokens])
    expected = quantize_int8(table).dequantize()[tokens]
    assert torch.equal(embed(GroupedInt8Linear(table), tokens, torch.float32), expected)


def test_each_precision_has_its_product_and_fp8_is_refused_on_the_cpu() -> None:
    for precision in (Precision.FP32, Precision.BF16, Precision.FP16):
        assert linear_factory(precision, CPU) is FloatLinear
    assert linear_factory(Precision.INT8, CPU) is GroupedInt8Linear
    assert activation_dtype(Precision.INT8, CPU) is torch.float32
    assert activation_dtype(Precision.BF16, CPU) is torch.bfloat16
    with pytest.raises(ConfigError, match="fp8"):
        linear_factory(Precision.FP8, CPU)
