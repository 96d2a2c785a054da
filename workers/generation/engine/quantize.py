"""8-bit weights: groups of 64 inputs of an output, rotated, then symmetric with one scale for each group.

Knows matrices, no models. A group is multiplied by the Hadamard matrix of its size (QuaRot, Ashkboos et al. 2024): that
spreads an outlier over the group, so that rounding costs less, for the weights and, where they are rounded too, for the
activations. The matrix is orthogonal and its own inverse: rotated rows times rotated weights are rows times weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

GROUP_SIZE = 64
STEPS = 127


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A matrix `(outputs, inputs)` in 8 bits.

    `values` are int8 `(outputs, groups * GROUP_SIZE)`, rotated, the inputs that are missing in the last group as
    zeros before that; `scales` `(outputs, groups)` are fp32 that bf16 can hold.
    """

    values: torch.Tensor
    scales: torch.Tensor
    inputs: int

    def part(self, outputs: slice | torch.Tensor) -> Int8Weight:
        """Return some outputs of the matrix, by a slice or by their numbers."""
        return Int8Weight(self.values[outputs], self.scales[outputs], self.inputs)

    def expand(self) -> torch.Tensor:
        """Return the rotated matrix `(outputs, groups * GROUP_SIZE)` in fp32: for products with rotated rows."""
        return (split(self.values) * self.scales[..., None]).flatten(-2)

    def dequantize(self) -> torch.Tensor:
        """Return the matrix `(outputs, inputs)` in fp32."""
        return rotate(self.expand())[..., : self.inputs]


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """Quantize a matrix `(outputs, inputs)` of floats."""
    groups = split(rotate(weight.float()))  # (outputs, groups, GROUP_SIZE)
    scales = _round_up_to_bf16(groups.abs().amax(dim=-1) / STEPS)  # (outputs, groups)
    safe = torch.where(scales > 0, scales, torch.ones_like(scales))
    values = (groups / safe[..., None]).round().to(torch.int8)
    return Int8Weight(values.flatten(-2), scales, weight.shape[-1])


def rotate(rows: torch.Tensor) -> torch.Tensor:
    """Return rows `(..., inputs)` with each group multiplied by the Hadamard matrix: `(..., groups * GROUP_SIZE)`.

    The fast Walsh-Hadamard transform, its stages from neighbours to halves, as the native kernels do it.
    """
    padded: torch.Tensor = F.pad(rows, (0, -rows.shape[-1] % GROUP_SIZE))
    distance = 1
    while distance < GROUP_SIZE:
        num_pairs = padded.shape[-1] // (2 * distance)
        first, second = padded.reshape(*rows.shape[:-1], num_pairs, 2, distance).unbind(-2)
        padded = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        distance *= 2
    return padded / math.sqrt(GROUP_SIZE)


def split(rows: torch.Tensor) -> torch.Tensor:
    """Return whole groups `(..., groups * GROUP_SIZE)` as `(..., groups, GROUP_SIZE)`."""
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // GROUP_SIZE, GROUP_SIZE)


def _round_up_to_bf16(numbers: torch.Tensor) -> torch.Tensor:
    """Return the next number that bf16 can hold: such a scale leaves no value beyond the steps. `numbers` are >= 0."""
    bits = numbers.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)
