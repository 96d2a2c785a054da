"""Requests follow from the seed and are ones that the door accepts; a reader does what an application does."""

from __future__ import annotations

import pytest

from ops.bench.chaos.checker import Seen
from ops.bench.chaos.load import KINDS, LoadKind, conversation, take
from ops.bench.chaos.reference import Reference
from ops.bench.chaos.stack import Size, configuration
from schemas.codec import convert
from schemas.request import validate
from schemas.tokens import End, EndStatus, FinishReason
from streams.answer import Chunk
from workers.settings import Settings

ONE_OF_EACH = [planned for number in range(len(KINDS)) for planned in conversation("1-0", number, 160)]


def test_the_same_seed_draws_the_same_requests_and_another_seed_others() -> None:
    assert conversation("1-0", 3, 160) == conversation("1-0", 3, 160) != conversation("2-0", 3, 160)


def test_one_of_each_kind_is_drawn_and_valid() -> None:
    assert {planned.kind for planned in ONE_OF_EACH} == set(LoadKind)
    for planned in ONE_OF_EACH:
        validate(planned.request, max_tokens=512)
    assert len({planned.request_id for planned in ONE_OF_EACH}) == len(ONE_OF_EACH)


def test_a_conversation_has_turns_of_one_session() -> None:
    turns = [planned for planned in ONE_OF_EACH if planned.kind is LoadKind.SESSION]
    assert len(turns) == 3
    assert len({planned.request.session_id for planned in turns}) == 1


def test_a_reader_appends_withdraws_and_forgets() -> None:
    seen = Seen(request_id="r")
    take(seen, Chunk(text="hello", token_ids=(1, 2)), 10)
    take(seen, Chunk(retracted="lo"), 11)
    assert (seen.texts, seen.token_ids, seen.arrivals) == ({0: "hel"}, {0: [1, 2]}, [10])
    take(seen, Chunk(is_reset=True), 12)
    take(seen, Chunk(text="new", token_ids=(3,)), 13)
    take(seen, Chunk(end=End(status=EndStatus.COMPLETED, finish_reason=FinishReason.STOP)), 14)
    assert (seen.texts, seen.token_ids, seen.num_resets, len(seen.ends)) == ({0: "new"}, {0: [3]}, 1, 1)


@pytest.fixture
def settings() -> Settings:
    return convert(configuration(Size(), "127.0.0.1:9092", "redis://127.0.0.1:6379/0"), Settings)


async def test_the_reference_answers_every_kind_the_same_each_time(settings: Settings) -> None:
    async with Reference(settings) as reference:
        for planned in ONE_OF_EACH:
            answer = await reference.answer(planned)
            assert answer == await reference.answer(planned)
            assert answer.texts[0]
            assert len(answer.texts) == (planned.request.n or 1)


async def test_the_reference_remembers_what_it_is_given(settings: Settings) -> None:
    planned = next(planned for planned in ONE_OF_EACH if planned.kind is LoadKind.SESSION)
    async with Reference(settings) as reference:
        without, with_memory = (
            await reference.answer(planned),
            await reference.answer(planned, (("What?", "That."),)),
        )
    assert with_memory.prompt_tokens > without.prompt_tokens
    assert with_memory.texts != without.texts
