"""Draws the next tokens of many choices, each by its own settings, from the logits of one step.

Knows rows, no sequences and no form's grammar. The invariants: the result of a row is a function of its logits, its
state, its mask and the key (seed, index, position) alone, so that no neighbour can reach it; and what is wrong with one
row is the result of that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from schemas.tokens import TokenLogprob
from workers.generation.engine.draw import NOT_FINITE_ERROR, NOTHING_ALLOWED_ERROR, draw_row, token_logprob
from workers.generation.engine.kernels.sampling import NOT_FINITE, NOTHING_ALLOWED, can_draw, native_sampler
from workers.generation.engine.sampler_state import SamplerState


@dataclass(slots=True)
class Row:
    """Whose logits, for which place of the output (0 is the first), and what is allowed there.

    `mask` `(ceil(vocab / 32),)` int32: bit i of word w allows token 32 w + i; None allows all.
    """

    state: SamplerState
    position: int
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token, and its log-probability under the unmodified distribution where it was asked for."""

    token_id: int
    logprob: TokenLogprob | None


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[Drawn | Exception]:
    """Draw one token for each row of `logits` `(len(rows), vocab)` fp32 on the CPU, which are not changed.

    A row whose logits are not finite, or whose mask allows nothing, has a ValueError instead. Nothing is noted.
    """
    assert len(logits) == len(rows)
    native = native_sampler() if can_draw(logits) else None
    if native is None:
        return [_drawn(row_logits, row) for row_logits, row in zip(logits, rows, strict=True)]
    states, positions = [row.state for row in rows], [row.position for row in rows]
    drawn = native.draw(logits, states, positions, [row.mask for row in rows])
    return [_told(token_id, each, row) for token_id, each, row in zip(drawn, logits, rows, strict=True)]


def _drawn(logits: torch.Tensor, row: Row) -> Drawn | Exception:
    try:
        return _told(draw_row(logits, row.state, row.position, row.mask), logits, row)
    except ValueError as error:
        return error


def _told(token_id: int, logits: torch.Tensor, row: Row) -> Drawn | Exception:
    if token_id == NOT_FINITE:
        return ValueError(NOT_FINITE_ERROR)
    if token_id == NOTHING_ALLOWED:
        return ValueError(NOTHING_ALLOWED_ERROR)
    wanted = row.state.params.logprobs
    return Drawn(token_id, None if wanted is None else token_logprob(logits, token_id, wanted))
