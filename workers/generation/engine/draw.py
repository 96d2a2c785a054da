"""Draws a token from a row of logits in torch: what the compiled sampler does too, and is tested against.

The draw is the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014): argmax of log-probability plus noise, where the
noise of each token is a hash of key and token id. So a draw needs no generator state, is the same whatever else runs,
and hardly changes where the logits differ in their last digits.

Knows one row at a time. The invariant: no setting in its range gives NaN, and of equal logits the lowest id goes first.
"""

from __future__ import annotations

import math

import torch

from schemas.tokens import TokenLogprob
from workers.generation.engine.protocol import SamplingParams
from workers.generation.engine.sampler_state import MAX_SHIFT, MIN_DIVISOR, SamplerState, bounded

GREEDY_BELOW = 1e-3  # below, a difference of 0.02 in the logits is already a factor of e^20
HEAD_SIZE = 1_024  # most top_p heads lie within; sorting 50,000 logits takes ten times as long
NOT_FINITE_ERROR = "the model returned logits that are not finite"
NOTHING_ALLOWED_ERROR = "the form of the answer allows no token here"
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def draw_row(logits: torch.Tensor, state: SamplerState, position: int, mask: torch.Tensor | None = None) -> int:
    """Return the token for `position` (0 is the first of the output); `logits` `(vocab,)` fp32 are not changed.

    `mask` `(ceil(vocab / 32),)` int32: bit i of word w allows token 32 w + i. Raises ValueError if the logits are not
    finite or nothing is allowed.
    """
    if not bool(torch.isfinite(logits).all()):
        raise ValueError(NOT_FINITE_ERROR)
    scores = penalized(logits, state)
    if mask is not None:
        allowed = allowed_tokens(mask, len(logits))
        if not bool(allowed.any()):
            raise ValueError(NOTHING_ALLOWED_ERROR)
        scores = scores.masked_fill(~allowed, -math.inf)
    return draw(scores, state.params, draw_key(state.params.seed, state.index, position))


def penalized(logits: torch.Tensor, state: SamplerState) -> torch.Tensor:
    """Return the logits `(vocab,)` after penalties and bias; they themselves are not changed."""
    params, scores = state.params, logits
    if state.seen:  # Keskar et al. 2019, section 4.1, as in transformers
        ids = torch.tensor(list(state.seen))
        factor, divisor = min(params.repetition_penalty, MAX_SHIFT), max(params.repetition_penalty, MIN_DIVISOR)
        found = scores[ids]
        scores = scores.index_copy(0, ids, torch.where(found < 0, found * factor, found / divisor))
    if state.counted:  # as in the OpenAI API
        ids, counts = torch.tensor(list(state.counted)), torch.tensor(state.counts)
        frequency, presence = bounded(params.frequency_penalty), bounded(params.presence_penalty)
        scores = scores.index_copy(0, ids, scores[ids] - frequency * counts - presence * (counts > 0))
    if state.bias_ids:
        scores = scores.index_add(0, torch.tensor(state.bias_ids), torch.tensor(state.bias))
    return scores


def allowed_tokens(mask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return a bit mask as `(vocab,)` bool."""
    bits = (mask[:, None] >> torch.arange(32)) & 1  # (words, 32)
    return bits.flatten()[:vocab_size].bool()


def is_greedy(params: SamplingParams) -> bool:
    """Say whether only the likeliest token can be drawn."""
    return params.temperature < GREEDY_BELOW or params.top_k == 1 or params.top_p <= 0


def draw(scores: torch.Tensor, params: SamplingParams, key: int) -> int:
    """Return a token id: argmax for temperatures near 0, else one of the kept tokens by its probability."""
    if is_greedy(params):
        return int(scores.argmax())
    token_ids, log_weights = kept_tokens(scores, params)
    if len(token_ids) == 1:
        return int(token_ids[0])
    return int(token_ids[int((log_weights + gumbel(token_ids, key)).argmax())])


def kept_tokens(scores: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and log-weights (up to one constant) of the tokens that top_k, top_p and min_p leave, likeliest first.

    The most likely token always stays. top_p keeps the shortest head whose probability reaches it. Without filters the
    order is that of the ids.
    """
    scaled = (scores - scores.max()) / params.temperature  # at most 0: no overflow
    if not params.top_k and params.top_p >= 1 and params.min_p <= 0:
        return torch.arange(len(scaled)), scaled
    size = min(params.top_k, len(scaled)) if params.top_k else len(scaled)
    total = math.inf if params.top_k else float(scaled.double().exp().sum())  # of a top_k it is not known yet
    values, token_ids = _likeliest(scaled, min(size, HEAD_SIZE))
    if size > len(values) and not _is_enough(values, total, params):
        values, token_ids = _likeliest(scaled, size)
    weights = values.double().exp()
    if params.top_k:
        total = float(weights[:size].sum())
    before = weights.cumsum(0) - weights  # mass in front of each token
    keep = (before < params.top_p * total) if params.top_p < 1 else torch.ones_like(before, dtype=torch.bool)
    if params.min_p > 0:
        keep &= values >= math.log(params.min_p)
    keep[0] = True
    return token_ids[keep], values[keep]


def _likeliest(scaled: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest values and their ids, in order; of equal ones the lowest ids."""
    least = torch.topk(scaled, size).values[-1]
    ids = torch.nonzero(scaled >= least).flatten()
    values, order = torch.sort(scaled[ids], descending=True, stable=True)
    return values[:size], ids[order[:size]]


def _is_enough(values: torch.Tensor, total: float, params: SamplingParams) -> bool:
    """Say whether nothing beyond these likeliest values could be kept."""
    if params.min_p > 0 and bool(values[-1] < math.log(params.min_p)):
        return not params.top_k or params.top_p >= 1
    return params.top_p < 1 and float(values.double().exp().sum()) >= params.top_p * total


def token_logprob(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Return the log-probability of a token under the unmodified distribution, with the likeliest `num_top` tokens."""
    total = torch.logsumexp(logits, 0)
    values, ids = torch.topk(logits, min(num_top, len(logits)))
    top = {str(int(other)): float(value - total) for other, value in zip(ids, values, strict=True)}
    return TokenLogprob(token_id=token_id, logprob=float(logits[token_id] - total), top=top)


def draw_key(seed: int, index: int, position: int) -> int:
    """Return the 64-bit key of one draw: a chain of the SplitMix64 finalizer over its three numbers."""
    key = 0
    for number in (seed, index, position):
        key = _mix((key + _GOLDEN + number) & _MASK)
    return key


def gumbel(token_ids: torch.Tensor, key: int) -> torch.Tensor:
    """Return Gumbel noise `(len(token_ids),)` fp64 for the tokens under one key.

    The bits are SplitMix64 (Steele, Lea, Flood 2014) at state key + id; 53 of them make a number inside (0, 1).
    """
    start = torch.tensor(_signed(key), dtype=torch.int64)
    state = start + (token_ids.to(torch.int64) + 1) * _signed(_GOLDEN)  # wraps, as it should
    state = (state ^ _shift(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shift(state, 27)) * _signed(0x94D049BB133111EB)
    bits = _shift(state ^ _shift(state, 31), 11)  # 53 bits
    uniform = (bits.double() + 0.5) / (1 << 53)
    return -torch.log(-torch.log(uniform))


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(value: torch.Tensor, places: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (value >> places) & ((1 << (64 - places)) - 1)
