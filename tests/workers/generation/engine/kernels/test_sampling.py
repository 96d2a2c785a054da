"""The compiled sampler draws the tokens of the torch one, whatever the settings, masks and logits are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.generation.engine.draw import NOT_FINITE_ERROR, draw_row
from workers.generation.engine.kernels.sampling import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    NativeSampler,
    can_draw,
    native_sampler,
)
from workers.generation.engine.protocol import SamplingParams
from workers.generation.engine.sampler_state import SamplerState

FOUND = native_sampler()
pytestmark = pytest.mark.skipif(FOUND is None, reason="no kernels on this machine")

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-4, 1e-3, 0.3, 0.7, 1.0, 2.0, 1e3]),
    top_p=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 2_000, 10**6]),
    min_p=st.sampled_from([0.0, 1e-30, 0.01, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.2, 10.0, 5e-324, 1e300]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0, 1e300]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.1, -1e300]),
    logit_bias=st.dictionaries(st.integers(-1, 80), st.sampled_from([-100.0, 3.5, 100.0, 1e300]), max_size=4),
    seed=st.integers(0, 2**63 - 1),
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # of torch, beside those of the kernel
    yield
    torch.set_num_threads(before)


def native() -> NativeSampler:
    assert FOUND is not None
    return FOUND


def expected(logits: torch.Tensor, state: SamplerState, position: int, mask: torch.Tensor | None) -> int:
    try:
        return draw_row(logits, state, position, mask)
    except ValueError as error:
        return NOT_FINITE if str(error) == NOT_FINITE_ERROR else NOTHING_ALLOWED


def check(
    logits: torch.Tensor, states: list[SamplerState], masks: list[torch.Tensor | None], num_positions: int = 3
) -> list[int]:
    """Draw a few positions both ways, noting each token."""
    drawn: list[int] = []
    for position in range(num_positions):
        ours = native().draw(logits, states, [position] * len(states), masks)
        rows = zip(logits, states, masks, strict=True)
        theirs = [expected(row, state, position, mask) for row, state, mask in rows]
        assert ours == theirs
        for state, token_id in zip(states, ours, strict=True):
            if token_id >= 0:
                state.note(token_id)
        drawn += ours
    return drawn


def states_of(params: list[SamplingParams], vocab_size: int) -> list[SamplerState]:
    return [
        SamplerState(each, [1, 1, 3 + place], index=place, vocab_size=vocab_size) for place, each in enumerate(params)
    ]


def logits_of(num_rows: int, vocab_size: int, seed: int, *, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


@settings(max_examples=80, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=5), st.integers(5, 300), st.integers(0, 2**20), st.data())
def test_every_setting_and_mask_draws_the_same_tokens(
    params: list[SamplingParams], vocab_size: int, seed: int, data: st.DataObject
) -> None:
    logits = logits_of(len(params), vocab_size, seed, spread=data.draw(st.sampled_from([0.0, 0.1, 3.0, 1e4])))
    generator = np.random.default_rng(seed)
    words = (vocab_size + 31) // 32
    masks = [
        torch.from_numpy(generator.integers(-(2**31), 2**31, words).astype(np.int32)) if kind == "some"
        else torch.zeros(words, dtype=torch.int32) if kind == "none" else None
        for kind in data.draw(st.lists(st.sampled_from(["some", "none", "all"]), min_size=5, max_size=5))
    ][: len(params)]  # fmt: skip
    check(logits, states_of(params, vocab_size), masks)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32), min_size=5, max_size=80), PARAMS)
def test_logits_of_any_bits_are_drawn_from_or_refused_alike(values: list[float], params: SamplingParams) -> None:
    harmless = replace(params, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1, logit_bias={})
    values = [value if abs(value) < 1e30 or not math.isfinite(value) else 0.0 for value in values]
    check(torch.tensor([values]), states_of([harmless], len(values)), [None])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 31, 32, 999, 1_000, 1_003])
def test_one_number_that_is_not_finite_is_found_wherever_it_stands(bad: float, place: int) -> None:
    logits = logits_of(3, 1_004, 1)
    logits[1, place] = bad
    drawn = check(logits, states_of([SamplingParams(temperature=0)] * 3, 1_004), [None] * 3)
    assert [token_id == NOT_FINITE for token_id in drawn[:3]] == [False, True, False]


@pytest.mark.parametrize("spread", [0.5, 4.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(temperature=2.0, top_p=0.999),
        SamplingParams(temperature=0.7, top_k=3_000, top_p=0.95, min_p=1e-4),
        SamplingParams(temperature=1.5, min_p=0.02, presence_penalty=0.4),
    ],
)
def test_rows_of_a_large_vocabulary_are_drawn_alike_on_all_threads(params: SamplingParams, spread: float) -> None:
    rows = [replace(params, seed=seed) for seed in range(5)]  # enough for more than one thread
    check(logits_of(5, 49_152, 3, spread=spread), states_of(rows, 49_152), [None] * 5, num_positions=1)


@pytest.mark.parametrize(("lead", "top_p"), [(11.0, 0.8), (14.0, 0.98), (17.0, 0.9995), (40.0, 0.999999)])
def test_a_head_that_ends_far_below_the_likeliest_token_is_drawn_alike(lead: float, top_p: float) -> None:
    logits = logits_of(3, 49_152, 5, spread=0.5)
    logits[:, 7] = lead
    rows = [SamplingParams(temperature=1.0, top_p=top_p, seed=seed) for seed in range(3)]
    drawn = check(logits, states_of(rows, 49_152), [None] * 3, num_positions=6)
    assert 7 in drawn


def test_equal_logits_go_to_the_lowest_ids() -> None:
    for params in (SamplingParams(top_k=3), SamplingParams(top_p=0.25), SamplingParams(top_k=4, top_p=0.5)):
        states = states_of([replace(params, seed=seed) for seed in range(40)], 12)
        assert set(check(torch.zeros(40, 12), states, [None] * 40)) <= {0, 1, 2}


def test_prompts_and_tokens_that_are_noted_reach_the_penalties() -> None:
    state = SamplerState(SamplingParams(temperature=0, repetition_penalty=9.0), [4], index=0, vocab_size=5)
    logits = torch.tensor([[1.0, 1.1, 1.2, 1.3, 1.4]])
    drawn = []
    for position in range(5):
        drawn += native().draw(logits, [state], [position], [None])
        state.note(drawn[-1])
    assert drawn == [3, 2, 1, 0, 4]


def test_logits_that_the_kernel_cannot_read_are_told() -> None:
    logits = torch.zeros(2, 8)
    assert can_draw(logits)
    assert not any(map(can_draw, (logits.double(), logits.T, torch.empty(0, 8))))
