"""Whatever runs together, every choice gets exactly the tokens of a naive loop that runs it alone, token by token."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from schemas.errors import PromptTooLongError
from schemas.tokens import FinishReason
from tests.workers.generation.engine.readers import Reader, run
from tests.workers.generation.fakes import PagedModel, scripted_core
from workers.generation.engine.admission import bounded_max_tokens, check_request
from workers.generation.engine.batch import CacheLayout
from workers.generation.engine.byte_tokenizer import END_OF_SEQUENCE, VOCABULARY_SIZE, ByteTokenizer
from workers.generation.engine.detokenizer import Detokenizer
from workers.generation.engine.protocol import EngineRequest, SamplingParams
from workers.generation.engine.sampler import Drawn, Row, sample
from workers.generation.engine.sampler_state import SamplerState
from workers.generation.engine.settings import Preemption

ALPHABET = torch.tensor([*b"abcdef. ", END_OF_SEQUENCE])
TOKENIZER = ByteTokenizer()
MAX_CONTEXT = 96
WARM = SamplingParams(temperature=1.0, max_tokens=30)
SAMPLINGS = (
    SamplingParams(temperature=0, max_tokens=40),
    replace(WARM, top_p=0.8),
    replace(WARM, top_k=3, logprobs=2),
    replace(WARM, repetition_penalty=1.4, presence_penalty=0.5),
    replace(WARM, frequency_penalty=-0.5, logit_bias={97: 1.0, END_OF_SEQUENCE: -20.0}),
    replace(WARM, temperature=0.5, stop=("ab", "f. ")),
    replace(WARM, stop_token_ids=frozenset({ord("d")}), min_p=0.05),
    SamplingParams(temperature=0, max_tokens=3),
)


def logits_of(history: Sequence[int]) -> torch.Tensor:
    """Depend on every token before, and mostly on the last one: so that guesses are right now and then."""
    digest = hashlib.blake2b(repr(list(history)).encode(), digest_size=len(ALPHABET)).digest()
    logits = torch.full((VOCABULARY_SIZE,), -30.0)
    logits[ALPHABET] = torch.tensor(list(digest)) / 64
    logits[ALPHABET[(history[-1] * 5 + 3) % (len(ALPHABET) - 1)]] += 2.5
    logits[END_OF_SEQUENCE] -= 3
    return logits


@dataclass(frozen=True)
class Asked:
    """A request, and when it comes and goes."""

    prompt: bytes
    sampling: SamplingParams
    priority: int
    salt: str
    given: tuple[int, ...]
    at_step: int
    abort_after: int | None

    def request(self, name: str) -> EngineRequest:
        return EngineRequest(
            request_id=name,
            prompt=tuple(self.prompt),
            sampling=self.sampling,
            priority=self.priority,
            cache_salt=self.salt,
        )


def naive(request: EngineRequest, index: int, max_tokens: int) -> tuple[int, ...]:
    """Return the tokens of one choice, each from the logits of all before it."""
    sampling, tokens = request.sampling, list(request.prompt)
    state = SamplerState(sampling, request.prompt, index=index, vocab_size=VOCABULARY_SIZE)
    detokenizer = Detokenizer(sampling.stop)
    for position in range(max_tokens):
        (drawn,) = sample(logits_of(tokens)[None], [Row(state, position)])
        assert isinstance(drawn, Drawn)
        tokens.append(drawn.token_id)
        state.note(drawn.token_id)
        detokenizer.push(TOKENIZER.token_bytes(drawn.token_id))
        is_end = drawn.token_id in sampling.stop_token_ids or drawn.token_id == END_OF_SEQUENCE
        if is_end or detokenizer.matched is not None:
            break
    return tuple(tokens[len(request.prompt) :])


PROMPTS = st.sampled_from([b"a", b"abcabcab", b"the quick", b"abcabcabcabcabc the quick brown fox", b"x" * 33])
ASKED = st.builds(
    Asked,
    prompt=st.builds(lambda head, tail: head + tail, PROMPTS, st.binary(max_size=4)),
    sampling=st.builds(
        lambda sampling, n, seed: replace(sampling, n=n, seed=seed),
        st.sampled_from(SAMPLINGS),
        st.sampled_from([1, 1, 1, 2, 3]),
        st.integers(0, 9),
    ),
    priority=st.integers(0, 2),
    salt=st.sampled_from(["", "tenant"]),
    given=st.sampled_from([(), (), (5,), (0, 9), (30, 2, 7)]),
    at_step=st.integers(0, 30),
    abort_after=st.sampled_from([None, None, None, 0, 3, 11]),
)
ENGINES = st.fixed_dictionaries(
    {
        "num_slots": st.sampled_from([3, 4, 8]),
        "prefill_chunk": st.sampled_from([4, 16, 256]),
        "max_batched_tokens": st.sampled_from([2, 7, 24, 512]),
        "max_draft": st.sampled_from([0, 3, 8]),
        "max_speculative_rows": st.sampled_from([4, 32]),
        "preemption": st.sampled_from([Preemption.SWAP, Preemption.RECOMPUTE, Preemption.SWAP]),
        "swap_blocks": st.sampled_from([0, 5, 1_000, 1_000]),
        "has_prefix_cache": st.booleans(),
    }
)
POOLS = st.tuples(st.sampled_from([(64, 1), (24, 2), (12, 4), (16, 4), (7, 8), (256, 16)]), st.sampled_from([None, 5]))


@settings(max_examples=50, deadline=None)
@given(st.lists(ASKED, min_size=1, max_size=7), ENGINES, POOLS)
def test_every_mix_gives_the_tokens_of_the_naive_loop(
    asked: list[Asked], engine: dict[str, object], pool: tuple[tuple[int, int], int | None]
) -> None:
    (num_blocks, block_size), max_rows = pool
    model = PagedModel(logits_of, num_blocks=num_blocks, block_size=block_size)
    model.max_rows = max_rows
    core = scripted_core(model, max_context=MAX_CONTEXT, **engine)  # type: ignore[arg-type]
    expected, readers, active = {}, {}, {}
    for step in range(max(each.at_step + (each.abort_after or 0) for each in asked) + 1):
        for place, each in enumerate(asked):
            if each.at_step == step and fits(each.request(str(place)), model.layout):
                request = each.request(str(place))
                max_tokens = bounded_max_tokens(request, MAX_CONTEXT, model.layout)
                expected[place] = [naive(request, index, max_tokens) for index in range(request.sampling.n)]
                output = tuple(ids[:cut] for ids, cut in zip(expected[place], each.given, strict=False))
                readers[place] = Reader()
                active[place] = core.add(replace(request, output=output), readers[place].events.append)
            found = active.get(place)
            if each.abort_after is not None and step == each.at_step + each.abort_after and found is not None:
                core.abort(found)
        core.step()
    run(core, max_steps=4_000)
    note(str(core.statistics()))
    for place, reader in readers.items():
        check(reader, expected[place])


def check(reader: Reader, expected: list[tuple[int, ...]]) -> None:
    for end, ids in zip(reader.finished.choices, expected, strict=True):
        found = reader.token_ids(end.index)
        assert end.num_tokens == len(found)
        if end.finish_reason is FinishReason.ABORT:
            assert found == ids[: len(found)]
        else:
            assert found == ids


def fits(request: EngineRequest, layout: CacheLayout) -> bool:
    try:
        check_request(request, vocab_size=VOCABULARY_SIZE, max_context=MAX_CONTEXT, max_sequences=3, layout=layout)
    except PromptTooLongError:
        return False
    return True
