"""8-bit weights: symmetric, with one scale for each group of inputs of an output.

Knows matrices, no models. Groups of 64 keep an outlier's harm within its group and cost 1/16 byte a weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

GROUP_SIZE = 64
STEPS = 127


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A matrix `(outputs, inputs)` in 8 bits: `values` int8, `scales` `(outputs, ceil(inputs / GROUP_SIZE))` fp32."""

    values: torch.Tensor
    scales: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Return the matrix in fp32."""
        wide = self.scales.repeat_interleave(GROUP_SIZE, dim=1)[:, : self.values.shape[1]]  # (outputs, inputs)
        return self.values.float() * wide


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """Quantize a matrix `(outputs, inputs)` of floats. The last group may be shorter than the others."""
    outputs, inputs = weight.shape
    num_groups = -(-inputs // GROUP_SIZE)
    padded = F.pad(weight.float(), (0, num_groups * GROUP_SIZE - inputs))
    groups = padded.view(outputs, num_groups, GROUP_SIZE)
    scales = groups.abs().amax(dim=-1) / STEPS  # (outputs, num_groups)
    safe = torch.where(scales > 0, scales, torch.ones_like(scales))
    values = (groups / safe[..., None]).round().clamp(-STEPS, STEPS).to(torch.int8)
    return Int8Weight(values.view(outputs, -1)[:, :inputs].contiguous(), scales)
