"""Whether a request can run here at all. Pure; asked before anything is queued.

The router has checked the public ranges already; this guards the engine against every caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from schemas.errors import InvalidRequestError, PromptTooLongError
from workers.generation.engine.batch import CacheLayout
from workers.generation.engine.protocol import EngineRequest, SamplingParams


def check_request(
    request: EngineRequest,
    *,
    vocab_size: int,
    max_context: int,
    max_sequences: int,
    layout: CacheLayout | None = None,
) -> None:
    """Raise PromptTooLongError if not one new token would fit, InvalidRequestError for a field that cannot run.

    Further choices need no more room than one: they can take turns.
    """
    num_tokens = len(request.prompt)
    max_context = _context(max_context, layout)
    if num_tokens == 0:
        raise InvalidRequestError("prompt: no tokens", field="prompt")
    if num_tokens >= max_context:
        raise PromptTooLongError(
            f"prompt: {num_tokens} tokens and one new do not fit into the context of {max_context}", field="prompt"
        )
    _check_ids("prompt", request.prompt, vocab_size)
    _check_sampling(request.sampling, max_sequences)
    if len(request.output) > request.sampling.n:
        raise InvalidRequestError(
            f"output: {len(request.output)} choices are given, n allows {request.sampling.n}", field="output"
        )
    for token_ids in request.output:
        _check_ids("output", token_ids, vocab_size)


def bounded_max_tokens(request: EngineRequest, max_context: int, layout: CacheLayout | None = None) -> int:
    """Return how many tokens a choice may get: what was asked for, or what context and cache have left for it alone."""
    return min(request.sampling.max_tokens, _context(max_context, layout) - len(request.prompt))


def _context(max_context: int, layout: CacheLayout | None) -> int:
    return max_context if layout is None else min(max_context, layout.num_blocks * layout.block_size)


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    _check_whole(field, token_ids)
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise InvalidRequestError(f"{field}: token ids of 0 to {vocab_size - 1} are allowed", field=field)


def _check_whole(field: str, token_ids: Iterable[object]) -> None:
    """Raise InvalidRequestError for what is no `int`: deeper down, 5.0 finds some tokens' tables and not others'."""
    for token_id in token_ids:
        if type(token_id) is not int:
            raise InvalidRequestError(f"{field}: {token_id!r} is no token id, which are whole numbers", field=field)


def _check_sampling(params: SamplingParams, max_sequences: int) -> None:
    _check_whole("stop_token_ids", params.stop_token_ids)
    _check_whole("logit_bias", params.logit_bias)
    allowed = {
        "max_tokens": params.max_tokens >= 1,
        "n": 1 <= params.n <= max_sequences,
        "temperature": math.isfinite(params.temperature) and params.temperature >= 0,
        "top_p": 0 <= params.top_p <= 1,
        "top_k": params.top_k >= 0,
        "min_p": 0 <= params.min_p <= 1,
        "repetition_penalty": math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0,
        "presence_penalty": math.isfinite(params.presence_penalty),
        "frequency_penalty": math.isfinite(params.frequency_penalty),
        "logit_bias": all(math.isfinite(value) for value in params.logit_bias.values()),
        "logprobs": params.logprobs is None or params.logprobs >= 0,
    }
    for field, is_allowed in allowed.items():
        if not is_allowed:
            raise InvalidRequestError(f"{field}: {getattr(params, field)!r} cannot be run", field=field)
