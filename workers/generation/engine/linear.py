"""Matrix products with weights of each number format, and rows of the embedding.

Knows one matrix at a time, no layers. The reference for 8 bits: weights are expanded for each product, activations are
rotated as the weights are, but not rounded. The invariant: a row's result depends on its own row only, up to the
rounding of a product that has more rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from schemas.errors import ConfigError
from workers.generation.engine.cuda_linear import Fp8Linear, Int8Linear
from workers.generation.engine.protocol import Precision
from workers.generation.engine.quantize import GROUP_SIZE, Int8Weight, quantize_int8, rotate

FLOATS = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
SLICE_NUMBERS = 1 << 22  # expanded at once: 16 MiB, so that a large vocabulary needs little memory besides


class Linear(Protocol):
    """One weight matrix, ready for products."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `(N, outputs)` for `rows` `(N, inputs)`, in their number format."""
        ...

    @property
    def num_bytes(self) -> int:
        """Return the memory of the matrix with its scales."""
        ...


LinearFactory = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""Makes a `Linear` of a weight `(outputs, inputs)` and a bias `(outputs,)`, both on the device."""


class FloatLinear:
    """A matrix in floats."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self._bias = weight, bias  # (outputs, inputs), (outputs,)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `(N, outputs)` for `rows` `(N, inputs)`."""
        return F.linear(rows, self.weight, self._bias)

    @property
    def num_bytes(self) -> int:
        """Return the memory of the matrix."""
        return self.weight.nbytes


class GroupedInt8Linear:
    """A matrix in 8 bits with a scale for each group of inputs, expanded slice by slice for each product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        outputs, inputs = weight.shape
        num_groups = -(-inputs // GROUP_SIZE)
        count = max(1, SLICE_NUMBERS // inputs)
        values = torch.empty((outputs, num_groups * GROUP_SIZE), dtype=torch.int8, device=weight.device)
        self.weight = Int8Weight(values, torch.empty((outputs, num_groups), device=weight.device), inputs)
        for place in range(0, outputs, count):
            part = quantize_int8(weight[place : place + count])
            values[place : place + count], self.weight.scales[place : place + count] = part.values, part.scales
        self._bias, self._count = bias, count

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `(N, outputs)` for `rows` `(N, inputs)`."""
        outputs = len(self.weight.values)
        found = rows.new_empty((len(rows), outputs))  # (N, outputs)
        rotated = rotate(rows)  # (N, groups * GROUP_SIZE)
        for place in range(0, outputs, self._count):
            part = self.weight.part(slice(place, place + self._count))
            found[:, place : place + self._count] = F.linear(rotated, part.expand().to(rows.dtype))
        return found if self._bias is None else found + self._bias

    @property
    def num_bytes(self) -> int:
        """Return the memory of the matrix with its scales."""
        return self.weight.values.nbytes + self.weight.scales.nbytes


def embed(table: torch.Tensor | GroupedInt8Linear, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows `(T, hidden)` of an embedding in floats or 8 bits."""
    if isinstance(table, torch.Tensor):
        return F.embedding(token_ids, table)
    return table.weight.part(token_ids).dequantize().to(dtype)


def activation_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the number format between the products: as the weights; fp32 or, on CUDA, bf16 for 8-bit weights."""
    if precision in FLOATS:
        return FLOATS[precision]
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def linear_factory(precision: Precision, device: torch.device) -> LinearFactory:
    """Return what makes the products of a precision on a device. Raises ConfigError where there is none."""
    if precision in FLOATS:
        return FloatLinear
    if device.type == "cuda":
        return Int8Linear if precision is Precision.INT8 else Fp8Linear
    if precision is Precision.INT8:
        return GroupedInt8Linear
    raise ConfigError(f"generation.precision: {precision} needs a CUDA device, not {device.type}")


def head_factory(precision: Precision, device: torch.device) -> LinearFactory:
    """Return what makes the output projection: floats on CUDA, where 8 bits have one scale for a whole row of it.

    There it costs a third of int8's loss, and a tied one is shared with the embedding.
    """
    return FloatLinear if device.type == "cuda" else linear_factory(precision, device)
