from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.generation.engine.draw import draw, draw_key, gumbel, kept_tokens, penalized, token_logprob
from workers.generation.engine.protocol import SamplingParams
from workers.generation.engine.sampler import Drawn, Row, sample
from workers.generation.engine.sampler_state import SamplerState

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.5])
PLAIN = SamplingParams(temperature=1.0)


def one(state: SamplerState, position: int = 0, logits: torch.Tensor = LOGITS, *, note: bool = False) -> Drawn:
    """Draw one token, and count it if asked to."""
    (drawn,) = sample(logits[None], [Row(state, position)])
    assert isinstance(drawn, Drawn)
    if note:
        state.note(drawn.token_id)
    return drawn


def kept(params: SamplingParams, logits: torch.Tensor = LOGITS) -> set[int]:
    return set(kept_tokens(logits, params)[0].tolist())


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-4])
@pytest.mark.parametrize("top_p", [0.0, 1e-6, 1e-4, 1.0])
def test_cold_temperatures_give_the_argmax(temperature: float, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p)
    assert {draw(LOGITS * 100, params, key) for key in range(20)} == {1}


@pytest.mark.parametrize("top_p", [0.0, 1e-6, 1e-4])
def test_tiny_top_p_gives_the_argmax_at_any_temperature(top_p: float) -> None:
    assert {draw(LOGITS, SamplingParams(temperature=2.0, top_p=top_p), key) for key in range(50)} == {1}


def test_filters_keep_what_their_definitions_say() -> None:
    probabilities = torch.softmax(LOGITS, 0)
    assert kept(replace(PLAIN, top_k=2)) == {1, 2}
    assert kept(replace(PLAIN, top_p=float(probabilities[1]) + 0.01)) == {1, 2}
    assert kept(replace(PLAIN, top_p=float(probabilities[1]) - 0.01)) == {1}
    assert kept(replace(PLAIN, min_p=math.exp(-1.2))) == {1, 2}
    assert kept(PLAIN) == {0, 1, 2, 3, 4}


def warped(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """Return what the warpers of transformers leave, in its order."""
    from transformers.generation import logits_process as hf

    scores, ids = logits[None] / params.temperature, torch.zeros((1, 1), dtype=torch.int64)
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = hf.TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = hf.MinPLogitsWarper(params.min_p)(ids, scores)
    return set(torch.nonzero(torch.isfinite(scores[0])).flatten().tolist())


@pytest.mark.parametrize("size", [50, 5_000])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 0.9, 0), (40, 0.7, 0), (0, 1, 0.05), (2_000, 0.95, 0.001)])
def test_filters_agree_with_transformers(size: int, top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(temperature=0.8, top_k=min(top_k, size), top_p=top_p, min_p=min_p)
    for seed in range(5):
        logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2
        assert kept(params, logits) == warped(logits, params)


def test_draws_follow_the_distribution() -> None:
    params, total = SamplingParams(temperature=1.0), 20_000
    counts = Counter(draw(LOGITS, params, draw_key(7, 0, position)) for position in range(total))
    for token_id, probability in enumerate(torch.softmax(LOGITS, 0).tolist()):
        spread = math.sqrt(probability * (1 - probability) / total)
        assert abs(counts[token_id] / total - probability) < 4.5 * spread


def test_noise_depends_on_every_part_of_the_key_and_on_nothing_else() -> None:
    keys = {draw_key(seed, index, position) for seed in range(20) for index in range(4) for position in range(20)}
    assert len(keys) == 20 * 4 * 20
    alone, among = gumbel(torch.tensor([3]), 99), gumbel(torch.arange(10), 99)
    assert torch.equal(alone[0], among[3])


def test_repetition_penalty_equals_that_of_transformers_over_prompt_and_output() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(30, generator=torch.Generator().manual_seed(1)) * 3
    sampler = SamplerState(SamplingParams(temperature=0, repetition_penalty=1.7), [1, 2, 2, 5], index=0, vocab_size=30)
    seen, processor = [1, 2, 2, 5], RepetitionPenaltyLogitsProcessor(1.7)
    for position in range(10):
        expected = int(processor(torch.tensor([seen]), logits[None].clone())[0].argmax())
        token_id = one(sampler, position, logits, note=True).token_id
        assert token_id == expected
        seen.append(token_id)


def test_repetition_penalty_over_prompt_and_given_output_is_exactly_that_of_transformers() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(50, generator=torch.Generator().manual_seed(2)) * 3
    for penalty, prompt, output in product((0.5, 1.05, 1.2, 2.0), ([1, 2, 2, 5],), ([], [7], [7, 9, 7, 1, 49, 0])):
        sampler = SamplerState(SamplingParams(repetition_penalty=penalty), prompt, index=0, vocab_size=50)
        for token_id in output:
            sampler.note(token_id)
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[None].clone())[0]
        assert torch.equal(penalized(logits, sampler), expected)


def test_presence_and_frequency_penalties_follow_their_formula_over_given_output() -> None:
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=0.3)
    sampler, output = SamplerState(params, [1, 1, 3], index=0, vocab_size=5), [2, 2, 0, 2]
    for token_id in output:
        sampler.note(token_id)
    counts = torch.tensor([1.0, 0.0, 3.0, 0.0, 0.0])
    assert torch.equal(penalized(LOGITS, sampler), LOGITS - 0.3 * counts - 0.7 * (counts > 0))


@pytest.mark.parametrize("cut", range(9))
def test_sampler_that_is_told_the_output_draws_on_as_the_one_that_drew_it(cut: int) -> None:
    params = SamplingParams(seed=3, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.2, top_p=0.9)
    whole = SamplerState(params, [4], index=2, vocab_size=5)
    drawn = [one(whole, position, note=True).token_id for position in range(12)]
    rest = SamplerState(params, [4], index=2, vocab_size=5)
    for token_id in drawn[:cut]:
        rest.note(token_id)
    assert [one(rest, position, note=True).token_id for position in range(cut, 12)] == drawn[cut:]


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    params = SamplingParams(temperature=0, presence_penalty=0.4, frequency_penalty=0.4)
    sampler = SamplerState(params, [1, 1, 1], index=0, vocab_size=5)
    # 1 leads by 1.0: the first time no penalty, after one use 0.8, after two 1.2
    assert [one(sampler, position, note=True).token_id for position in range(3)] == [1, 1, 2]


def test_logit_bias_forces_and_bans_tokens_and_ignores_unknown_ids() -> None:
    for bias, expected in (({3: 100.0}, 3), ({1: -100.0}, 2), ({99: 100.0}, 1)):
        sampler = SamplerState(SamplingParams(temperature=0, logit_bias=bias), [0], index=0, vocab_size=5)
        assert one(sampler).token_id == expected


def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    params = SamplingParams(temperature=0.2, logit_bias={3: 100.0}, logprobs=2)
    drawn = one(SamplerState(params, [0], index=0, vocab_size=5))
    token_id, logprob = drawn.token_id, drawn.logprob
    expected = torch.log_softmax(LOGITS, 0)
    assert token_id == 3
    assert logprob is not None
    assert logprob.logprob == pytest.approx(float(expected[3]), abs=1e-5)
    assert list(logprob.top) == ["1", "2"]
    assert token_logprob(LOGITS, 0, 0).top == {}


def test_logits_that_are_not_finite_are_refused() -> None:
    rows = [Row(SamplerState(PLAIN, [0], index=0, vocab_size=5), 0) for _ in range(4)]
    logits = LOGITS.repeat(4, 1)
    logits[0, 3], logits[1, 0], logits[2, 4] = math.nan, math.inf, -math.inf
    *refused, drawn = sample(logits, rows)
    assert all(isinstance(error, ValueError) and "not finite" in str(error) for error in refused)
    assert isinstance(drawn, Drawn)


def test_mask_allows_what_its_bits_say() -> None:
    logits = torch.arange(70.0)
    for allowed in ({0}, {31}, {32, 5}, {69, 1}):
        bits = [sum(1 << (i % 32) for i in allowed if i // 32 == word) for word in range(3)]
        mask = torch.tensor(bits, dtype=torch.int64).to(torch.int32)
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=5)
            row = Row(SamplerState(params, [0], index=0, vocab_size=70), 0, mask)
            (drawn,) = sample(logits[None], [row])
            assert isinstance(drawn, Drawn)
            assert drawn.token_id in allowed
            assert temperature or drawn.token_id == max(allowed)


def test_mask_that_allows_nothing_is_the_error_of_its_row_alone() -> None:
    state = SamplerState(PLAIN, [0], index=0, vocab_size=5)
    nothing, beyond = torch.zeros(1, dtype=torch.int32), torch.tensor([-32], dtype=torch.int32)
    *refused, drawn = sample(LOGITS.repeat(3, 1), [Row(state, 0, nothing), Row(state, 0, beyond), Row(state, 0)])
    assert all(isinstance(error, ValueError) and "allows no token" in str(error) for error in refused)
    assert isinstance(drawn, Drawn)


@settings(max_examples=60)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=20),
    st.sampled_from([0.0, 1e-6, 1e-4, 1e-3, 0.7, 2.0]),
    st.sampled_from([0.0, 1e-6, 0.5, 1.0]),
    st.integers(0, 25),
    st.floats(0, 1),
)
def test_no_setting_in_its_range_fails(
    logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=3)
    state = SamplerState(params, [0], index=0, vocab_size=len(logits))
    assert 0 <= one(state, logits=torch.tensor(logits)).token_id < len(logits)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=5e-324),
        SamplingParams(repetition_penalty=1e300),
        SamplingParams(presence_penalty=1e300),
        SamplingParams(frequency_penalty=-1e300),
        SamplingParams(logit_bias={0: 1e300, 1: -1e300}),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_extreme_settings_leave_numbers_that_can_be_compared(params: SamplingParams, temperature: float) -> None:
    sampler = SamplerState(replace(params, temperature=temperature, top_p=0.9), (0, 1), index=0, vocab_size=5)
    for position in range(4):
        one(sampler, position, note=True)
        assert bool(torch.isfinite(penalized(LOGITS, sampler)).all())
