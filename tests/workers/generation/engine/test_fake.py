"""The scripted engine: its texts, its pace, and what it reports."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import unicodedata

import pytest

from schemas.errors import ConfigError
from workers.generation.engine.byte_tokenizer import END_OF_SEQUENCE, ByteTokenizer
from workers.generation.engine.fake import FakeEngine, paced
from workers.generation.engine.protocol import EngineRequest, Finished, SamplingParams, TokenChunk
from workers.generation.engine.script import seeded_script, seeded_text

PROMPT = tuple(b"Where is my parcel?")


async def texts_of(engine: FakeEngine, request: EngineRequest) -> list[str]:
    texts = [""] * request.sampling.n
    async for event in engine.submit(request):
        if isinstance(event, TokenChunk):
            texts[event.index] += event.text
    return texts


def test_seeded_text_is_a_function_of_prompt_seed_and_index() -> None:
    assert seeded_text(PROMPT, 7) == seeded_text(list(PROMPT), 7)
    assert len({seeded_text(PROMPT, 7), seeded_text(PROMPT, 8), seeded_text(PROMPT, 7, 1), seeded_text((1,), 7)}) == 4


def test_seeded_text_never_changes() -> None:
    assert seeded_text((1, 2, 3), 4, min_tokens=1, max_tokens=40) == "please at opens at. 🌶️ 鞋子"


def test_seeded_texts_have_many_lengths_within_their_range() -> None:
    lengths = [len(seeded_text(PROMPT, seed, min_tokens=30, max_tokens=90).encode()) for seed in range(300)]
    assert min(lengths) >= 29 and max(lengths) < 90 + 26  # the last word is whole
    assert len(set(lengths)) > 50


def test_seeded_texts_are_hard_to_cut() -> None:
    text = "".join(seeded_text(PROMPT, seed) for seed in range(50))
    assert "🌶️" in text and "👨‍👩‍👧" in text and "你好" in text
    assert any(unicodedata.combining(character) for character in text)
    assert "." in text


@pytest.mark.parametrize("bounds", [(0, 10), (11, 10), (-1, -1)])
def test_empty_range_of_lengths_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="min_tokens"):
        seeded_script(min_tokens=bounds[0], max_tokens=bounds[1])


async def test_engine_speaks_each_choices_seeded_text_and_continues_it() -> None:
    engine = FakeEngine(seeded_script(max_tokens=60))
    await engine.start()
    request = EngineRequest(request_id="r", prompt=PROMPT, sampling=SamplingParams(n=3, seed=5))
    expected = [seeded_text(PROMPT, 5, index, max_tokens=60) for index in range(3)]
    assert await texts_of(engine, request) == expected
    output = tuple(ByteTokenizer().encode(text)[: 9 * index] for index, text in enumerate(expected))
    continued = EngineRequest(request_id="r", prompt=PROMPT, sampling=request.sampling, output=output)
    assert await texts_of(engine, continued) == expected
    await engine.stop()


async def test_output_of_another_text_is_replayed_and_comes_to_an_end() -> None:
    engine = FakeEngine("short")
    await engine.start()
    request = EngineRequest(request_id="r", prompt=PROMPT, output=(tuple(b"something longer"),))
    assert await texts_of(engine, request) == ["something longer"]
    request = EngineRequest(request_id="r", prompt=PROMPT, output=(tuple(b"Th"),))
    assert await texts_of(engine, request) == ["Thort"]
    await engine.stop()


async def test_engine_reports_its_steps_and_the_tokens_of_what_runs() -> None:
    may_step = asyncio.Event()
    engine = FakeEngine("abc", pause=lambda: _wait(may_step), max_sequences=1)
    await engine.start()
    request = EngineRequest(request_id="a", prompt=PROMPT, sampling=SamplingParams(n=1), output=(tuple(b"a"),))
    stream = engine.submit(request)
    waiting = engine.submit(EngineRequest(request_id="b", prompt=PROMPT))
    await anext(stream)  # the given token
    await asyncio.sleep(0)
    found = engine.statistics()
    assert (found.running, found.waiting) == (1, 1)
    assert found.tokens_in_flight == len(PROMPT) + 1
    may_step.set()
    for running in (stream, waiting):
        assert [event async for event in running if isinstance(event, Finished)]
    found = engine.statistics()
    assert (found.tokens_in_flight, found.num_steps, found.num_finished) == (0, 3 + 4, 2)
    assert found.step_ms > 0
    await engine.stop()


async def test_answer_that_was_whole_waits_for_no_slot() -> None:
    may_step = asyncio.Event()
    engine = FakeEngine("abc", pause=lambda: _wait(may_step), max_sequences=1)
    await engine.start()
    busy = engine.submit(EngineRequest(request_id="busy", prompt=PROMPT))
    await asyncio.sleep(0)
    whole = EngineRequest(request_id="whole", prompt=PROMPT, output=((*b"abc", END_OF_SEQUENCE),))
    assert await texts_of(engine, whole) == ["abc"]
    may_step.set()
    assert [event async for event in busy if isinstance(event, Finished)]
    await engine.stop()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
    await asyncio.sleep(0)


async def test_pace_is_the_time_of_each_token() -> None:
    loop = asyncio.get_running_loop()
    engine = FakeEngine("abc", pause=paced(20))
    await engine.start()
    started_s = loop.time()
    assert await texts_of(engine, EngineRequest(request_id="r", prompt=PROMPT)) == ["abc"]
    assert loop.time() - started_s >= 4 * 0.02 - 0.01  # three bytes and the end
    assert engine.statistics().step_ms >= 19
    await engine.stop()


def test_scripted_engine_loads_no_torch() -> None:
    code = "import sys, workers.generation.engine.script; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
