"""Draws the next token of one sequence from its logits.

Knows one row at a time, so that no request's settings can reach a neighbour. The invariants: the result is a function
of the logits, the settings, the earlier tokens and the key (seed, index, position) alone; and no setting in its
range gives NaN.

The draw is the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014): argmax of log-probability plus noise, where the
noise of each token is a hash of key and token id. So a draw needs no generator state, is the same whatever else runs,
and hardly changes where the logits differ in their last digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from schemas.tokens import TokenLogprob
from workers.generation.engine.protocol import SamplingParams

GREEDY_BELOW = 1e-3  # below, a difference of 0.02 in the logits is already a factor of e^20
MIN_DIVISOR = 1e-30  # below, a logit over it leaves the range of fp32
MAX_SHIFT = 1e30  # above, sums of shifts do; no logit is of that size
HEAD_SIZE = 1_024  # most top_p heads lie within; sorting 50,000 logits takes ten times as long
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Sampler:
    """Settings and earlier tokens of one sequence."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], *, index: int, vocab_size: int) -> None:
        self._params = params
        self._index = index
        self._seen: torch.Tensor | None = None  # (vocab,) bool
        self._counts: torch.Tensor | None = None  # (vocab,) fp32
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[torch.tensor(prompt, dtype=torch.int64)] = True
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab_size)
        bias = {token_id: value for token_id, value in params.logit_bias.items() if 0 <= token_id < vocab_size}
        self._bias_ids = torch.tensor(list(bias), dtype=torch.int64)
        self._bias = torch.tensor([_bounded(value) for value in bias.values()], dtype=torch.float32)

    def sample(self, logits: torch.Tensor, position: int) -> tuple[int, TokenLogprob | None]:
        """Return the token for `position` (0 is the first of the output) and its log-probability, if asked for.

        `logits` `(vocab,)` fp32 on the CPU are not changed. Raises ValueError if they are not finite.
        """
        if not bool(torch.isfinite(logits).all()):
            raise ValueError("the model returned logits that are not finite")
        token_id = draw(self._penalized(logits), self._params, draw_key(self._params.seed, self._index, position))
        self.note(token_id)
        wanted = self._params.logprobs
        return token_id, None if wanted is None else token_logprob(logits, token_id, wanted)

    def note(self, token_id: int) -> None:
        """Count a token of the output, whoever has drawn it."""
        if self._seen is not None:
            self._seen[token_id] = True
        if self._counts is not None:
            self._counts[token_id] += 1

    def _penalized(self, logits: torch.Tensor) -> torch.Tensor:
        params, scores = self._params, logits
        if self._seen is not None:  # Keskar et al. 2019, section 4.1, as in transformers
            factor, divisor = min(params.repetition_penalty, MAX_SHIFT), max(params.repetition_penalty, MIN_DIVISOR)
            shrunk = torch.where(scores < 0, scores * factor, scores / divisor)
            scores = torch.where(self._seen, shrunk, scores)
        if self._counts is not None:  # as in the OpenAI API
            frequency, presence = _bounded(params.frequency_penalty), _bounded(params.presence_penalty)
            scores = scores - frequency * self._counts - presence * (self._counts > 0)
        if len(self._bias_ids):
            scores = scores.index_add(0, self._bias_ids, self._bias)
        return scores


def draw(scores: torch.Tensor, params: SamplingParams, key: int) -> int:
    """Return a token id: argmax for temperatures near 0, else one of the kept tokens by its probability."""
    if params.temperature < GREEDY_BELOW or params.top_k == 1 or params.top_p <= 0:
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
    values, token_ids = torch.topk(scaled, min(size, HEAD_SIZE))
    total = torch.logsumexp(scaled, 0)
    if size > len(values) and not _is_enough(values, total, params):
        values, token_ids = torch.topk(scaled, size)
    if params.top_k:
        total = torch.logsumexp(values[:size], 0)
    probabilities = (values - total).double().exp()
    before = probabilities.cumsum(0) - probabilities  # mass in front of each token
    keep = (before < params.top_p) if params.top_p < 1 else torch.ones_like(before, dtype=torch.bool)
    if params.min_p > 0:
        keep &= values >= values[0] + math.log(params.min_p)
    keep[0] = True
    return token_ids[keep], values[keep]


def _is_enough(values: torch.Tensor, total: torch.Tensor, params: SamplingParams) -> bool:
    """Say whether nothing beyond these likeliest values could be kept. Of a larger top_k the mass is not known yet."""
    if params.min_p > 0 and bool(values[-1] < values[0] + math.log(params.min_p)):
        return not params.top_k or params.top_p >= 1
    mass = float((values - total).double().exp().sum())
    return not params.top_k and params.top_p < 1 and mass >= params.top_p


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


def _bounded(shift: float) -> float:
    return max(-MAX_SHIFT, min(MAX_SHIFT, shift))


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(value: torch.Tensor, places: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (value >> places) & ((1 << (64 - places)) - 1)
