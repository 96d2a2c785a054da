"""The rotary tables of a model (Su et al. 2021), stretched as its configuration says.

Knows frequencies and positions, no weights. Pairs stand in the half-split order of transformers: dimension i turns with
i + head_dim / 2. The invariant: a position's row does not depend on the length of any context.
"""

from __future__ import annotations

import math

import torch

from workers.generation.engine.config import ModelConfig, RopeConfig, RopeType


def rope_table(config: ModelConfig, max_context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of positions 0 to max_context, `(max_context, head_dim // 2)` fp32 on the CPU each.

    Both carry the attention factor.
    """
    places = torch.arange(max_context, dtype=torch.float32)
    angles = torch.outer(places, inverse_frequencies(config.rope, config.head_dim))  # (max_context, head_dim / 2)
    factor = config.rope.attention_factor
    return angles.cos() * factor, angles.sin() * factor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle of each pair at position 1, `(head_dim // 2,)` fp32; operations in the order of transformers."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents  # (head_dim / 2,)
    if rope.divisors:
        return plain / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.rope_type is RopeType.LINEAR:
        return plain / rope.factor
    if rope.rope_type is RopeType.LLAMA3:
        return _llama3(rope, plain)
    if rope.rope_type is RopeType.YARN:
        return _yarn(rope, head_dim, plain)
    return plain


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn heads `(tokens, heads, head_dim)` by tables `(tokens, 1, head_dim // 2)` in their number format."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Divide waves longer than the training's context, leave short ones, blend between (Llama 3.1's reference code)."""
    turns = rope.original_max_position * plain / (2 * math.pi)  # (head_dim / 2,) full turns within the context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = blend.clamp(0, 1)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(rope: RopeConfig, head_dim: int, plain: torch.Tensor) -> torch.Tensor:
    """Blend between stretched and plain frequencies by how often they turn within the training's context (§3.2)."""

    def dimension(turns: float) -> float:
        share = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(share) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers has it: no division by zero
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * stretch + plain * (1 - stretch)
