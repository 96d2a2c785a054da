"""The sampler as the core asks for it, a row at a time over the present `Sampler`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from schemas.tokens import TokenLogprob
from workers.generation.engine.sampler import Sampler as SamplerState
from workers.generation.engine.sampler import draw, draw_key, token_logprob

__all__ = ["Drawn", "Row", "SamplerState", "sample"]


@dataclass(slots=True)
class Row:
    """Whose logits, for which place of the output, and what is allowed there."""

    state: SamplerState
    position: int
    mask: torch.Tensor | None = None


@dataclass(slots=True)
class Drawn:
    """A token, and its log-probability where it was asked for."""

    token_id: int
    logprob: TokenLogprob | None


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[Drawn | Exception]:
    """Draw one token for each row of `logits` `(N, vocab)`."""
    return [_sample(row_logits, row) for row_logits, row in zip(logits, rows, strict=True)]


def _sample(logits: torch.Tensor, row: Row) -> Drawn | Exception:
    if not bool(torch.isfinite(logits).all()):
        return ValueError("the model returned logits that are not finite")
    params = row.state._params
    scores = row.state._penalized(logits)
    if row.mask is not None:
        bits = (row.mask[:, None] >> torch.arange(32)) & 1
        allowed = bits.flatten()[: len(logits)].bool()
        if not bool(allowed.any()):
            return ValueError("no token is allowed here")
        scores = scores.masked_fill(~allowed, float("-inf"))
    token_id = draw(scores, params, draw_key(params.seed, row.state._index, row.position))
    wanted = params.logprobs
    return Drawn(token_id, None if wanted is None else token_logprob(logits, token_id, wanted))
