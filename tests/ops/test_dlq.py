"""Letters by filter, up to the end at the start, and what was redriven."""

from __future__ import annotations

import pytest

from ops.dlq import DeadLetterLog, LetterFilter, Stored, restore
from schemas.codec import pack
from schemas.envelope import REDRIVEN_FROM, Headers
from schemas.errors import InvalidRequestError
from schemas.failure import DeadLetter
from streams.memory import MemoryBroker
from streams.topics import DEAD_LETTER, REQUESTS
from tests.ops.letters import BODY, PUBLIC, ROUTED, UNREADABLE, Grave

GENERATION = "gea.generation.blue"


async def found(grave: Grave, wanted: LetterFilter) -> list[str]:
    log = await DeadLetterLog.open(grave.broker)
    return [stored.letter.message async for stored in log.letters(wanted)]


async def mixed() -> Grave:
    grave = await Grave.dig()
    await grave.bury(b"\xc1", error=UNREADABLE)
    await grave.bury()
    await grave.bury(pack(ROUTED), (("request_id", b"r-routed"),), topic=GENERATION, key=b"s-1")
    return grave


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        (LetterFilter(), 3),
        (LetterFilter(code="undecodable"), 1),
        (LetterFilter(code="internal"), 2),
        (LetterFilter(topic=GENERATION), 1),
        (LetterFilter(request_id="r-1"), 2),
        (LetterFilter(tenant="acme"), 2),
        (LetterFilter(tenant="default"), 1),
        (LetterFilter(code="internal", request_id="r-1"), 1),
        (LetterFilter(since_ms=0, until_ms=2**50), 3),
        (LetterFilter(since_ms=2**50), 0),
        (LetterFilter(until_ms=1), 0),
        (LetterFilter(places=frozenset({"9:0"})), 0),
    ],
)
async def test_a_filter_finds_what_fits_all_its_fields(wanted: LetterFilter, count: int) -> None:
    assert len(await found(await mixed(), wanted)) == count


async def test_a_letter_is_found_by_its_place() -> None:
    grave = await mixed()
    log = await DeadLetterLog.open(grave.broker)
    places = [stored.place async for stored in log.letters(LetterFilter())]
    assert len(set(places)) == 3
    for place in places:
        assert [s.place async for s in log.letters(LetterFilter(places=frozenset({place})))] == [place]


async def test_what_is_put_aside_after_the_start_is_not_seen_and_what_is_no_letter_is_counted() -> None:
    grave = await mixed()
    grave.broker.append(DEAD_LETTER, b"\xc1", b"k", (), None)
    log = await DeadLetterLog.open(grave.broker)
    await grave.bury()
    assert len([stored async for stored in log.letters(LetterFilter())]) == 3
    assert log.num_unreadable == 1


async def test_more_letters_than_a_page_are_all_read() -> None:
    grave = await Grave.dig()
    for _ in range(250):
        await grave.bury()
    assert len(await found(grave, LetterFilter())) == 250


async def test_without_the_topic_the_remedy_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="gea topics apply"):
        await DeadLetterLog.open(MemoryBroker())


async def test_an_empty_topic_and_one_whose_letters_have_expired_have_none() -> None:
    grave = await Grave.dig()
    assert await found(grave, LetterFilter()) == []
    await grave.bury()
    for number in range(2):
        grave.broker.expire(DEAD_LETTER, number, 99)
    assert await found(grave, LetterFilter()) == []


async def the_letter(grave: Grave) -> Stored:
    log = await DeadLetterLog.open(grave.broker)
    (stored,) = [stored async for stored in log.letters(LetterFilter())]
    return stored


async def test_what_was_left_out_is_fetched_from_where_it_came_from() -> None:
    grave = await Grave.dig()
    record = await grave.bury(b"x" * 1_048_400)
    stored = await the_letter(grave)
    assert stored.letter.is_left_out
    whole = await restore(grave.broker, stored)
    assert (whole.letter.value, whole.letter.key, whole.letter.headers) == (record.value, b"r-1", PUBLIC)
    assert not whole.letter.is_left_out
    grave.broker.expire(REQUESTS, record.partition, record.offset + 1)
    assert (await restore(grave.broker, stored)).letter.is_left_out


@pytest.mark.parametrize(
    ("request_id", "headers", "origin"),
    [("r-1", (), ""), ("r-1:redrive-2-15", (), "2:15"), ("r-1", ((REDRIVEN_FROM, b"0:7"),), "0:7")],
)
def test_a_letter_says_which_letter_it_was_redriven_from(request_id: str, headers: Headers, origin: str) -> None:
    letter = DeadLetter(code="c", message="m", topic="t", partition=0, offset=0, request_id=request_id, headers=headers)
    assert Stored(partition=0, offset=0, size=0, letter=letter).redriven_from == origin


async def test_an_own_body_is_not_left_out() -> None:
    grave = await Grave.dig()
    await grave.bury(BODY)
    stored = await the_letter(grave)
    assert await restore(grave.broker, stored) is stored
