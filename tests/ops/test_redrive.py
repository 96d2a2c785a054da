"""What a letter is sent in again as, and that a repeat is one."""

from __future__ import annotations

import pytest

from ops.dlq import DeadLetterLog, LetterFilter, Stored
from ops.redrive import MAX_ID_CHARS, CannotRedriveError, Outcome, Step, plan_redrive, redrive_letters, redriven_id
from schemas.codec import pack, unpack
from schemas.envelope import JSON, MSGPACK, Headers, parse_request_headers
from schemas.errors import DecodeError, GeaError, InvalidRequestError
from schemas.failure import DeadLetter
from schemas.request import ID_PATTERN, GenerationRequest
from streams.topics import DEAD_LETTER, DOCUMENTS, REQUESTS, RETRY_SHORT
from tests.ops.letters import BODY, PUBLIC, ROUTED, UNREADABLE, Grave

GENERATION = "gea.generation.blue"


def stored(letter: DeadLetter, place: tuple[int, int] = (2, 15)) -> Stored:
    return Stored(partition=place[0], offset=place[1], size=1, letter=letter)


def letter(**fields: object) -> DeadLetter:
    values: dict[str, object] = {
        "code": "internal",
        "message": "boom",
        "topic": REQUESTS,
        "partition": 0,
        "offset": 4,
        "value": BODY,
        "key": b"r-1",
        "headers": PUBLIC,
        "request_id": "r-1",
    }
    return DeadLetter(**(values | fields))  # type: ignore[arg-type]


def test_a_public_request_goes_in_as_it_came_under_a_new_id_without_its_deadline() -> None:
    planned = plan_redrive(stored(letter()))
    assert (planned.topic, planned.value) == (REQUESTS, BODY)
    headers = parse_request_headers(planned.headers)
    assert headers.request_id == planned.request_id == "r-1:redrive-2-15"
    assert planned.key == b"r-1:redrive-2-15"
    assert (headers.tenant, headers.deadline_ms) == ("acme", None)
    assert (headers.reply_topic, headers.reply_partition) == ("gea.tokens.acme", None)
    assert dict(planned.headers)["redriven_from"] == b"2:15"


def test_a_session_keeps_its_key_and_json_its_content_type() -> None:
    headers: Headers = (("request_id", b"r-1"), ("content-type", JSON.encode()))
    planned = plan_redrive(stored(letter(key=b"s-1", headers=headers, value=b"{}")))
    assert planned.key == b"s-1"
    assert dict(planned.headers)["content-type"] == JSON.encode()


@pytest.mark.parametrize("topic", [GENERATION, "gea.intent.green", RETRY_SHORT])
def test_a_request_on_its_way_goes_in_as_the_client_sent_it(topic: str) -> None:
    order: Headers = (("target", b"gea.generation.blue"), ("not_before_ms", b"1"))
    planned = plan_redrive(stored(letter(topic=topic, value=pack(ROUTED), headers=order, request_id="r-routed")))
    assert planned.topic == REQUESTS
    assert unpack(planned.value, GenerationRequest) == ROUTED.request
    headers = parse_request_headers(planned.headers)
    assert (headers.request_id, headers.tenant) == ("r-routed:redrive-2-15", "acme")
    assert (headers.deadline_ms, headers.reply_topic, headers.content_type) == (None, None, MSGPACK)
    assert planned.key == b"s-1"
    assert not {"target", "not_before_ms"} & dict(planned.headers).keys()


def test_a_record_of_another_topic_goes_back_as_it_came() -> None:
    planned = plan_redrive(stored(letter(topic="gea.control", value=b"raw", key=b"k", headers=(("a", b"1"),))))
    assert (planned.topic, planned.value, planned.key, planned.request_id) == ("gea.control", b"raw", b"k", None)
    assert planned.headers == (("a", b"1"), ("redriven_from", b"2:15"))


@pytest.mark.parametrize(
    ("fields", "is_curable"),
    [
        ({"code": "undecodable", "value": b"\xc1"}, True),
        ({"topic": DOCUMENTS}, True),
        ({"value": None}, False),
        ({"value": None, "is_left_out": True}, False),
        ({"topic": GENERATION, "value": b"\xc1"}, False),
        ({"topic": GENERATION, "value": None}, False),
        ({"topic": GENERATION, "value": BODY}, False),
    ],
)
def test_what_would_fail_again_is_refused_and_some_of_it_can_be_forced(
    fields: dict[str, object], is_curable: bool
) -> None:
    with pytest.raises(CannotRedriveError):
        plan_redrive(stored(letter(**fields)))
    if is_curable:
        assert plan_redrive(stored(letter(**fields)), is_forced=True).value == letter(**fields).value
        return
    with pytest.raises(CannotRedriveError):
        plan_redrive(stored(letter(**fields)), is_forced=True)


@pytest.mark.parametrize("old_id", ["r-1", "x" * 128, "", "a b", "é", "r\N{REPLACEMENT CHARACTER}", "a:redrive-", ":x"])
@pytest.mark.parametrize("place", [(0, 0), (1023, 2**62)])
def test_a_new_id_is_an_id_by_the_rules_and_always_the_same(old_id: str, place: tuple[int, int]) -> None:
    one = redriven_id(old_id, stored(letter(), place))
    assert ID_PATTERN.fullmatch(one)
    assert len(one) <= MAX_ID_CHARS
    assert one == redriven_id(old_id, stored(letter(), place))
    assert one != redriven_id(old_id, stored(letter(), (place[0], place[1] + 1)))


def test_long_ids_that_differ_at_their_ends_stay_different_and_ids_do_not_grow() -> None:
    assert redriven_id("x" * 127 + "a", stored(letter())) != redriven_id("x" * 127 + "b", stored(letter()))
    assert redriven_id("r-1:redrive-0-3", stored(letter())) == "r-1:redrive-2-15"


async def steps(grave: Grave, **options: object) -> list[Step]:
    wanted = options.pop("wanted", LetterFilter())
    log = await DeadLetterLog.open(grave.broker)
    return [step async for step in redrive_letters(grave.broker, log, wanted, **options)]  # type: ignore[arg-type]


async def test_a_redrive_sends_notes_and_skips_next_time_unless_asked_again() -> None:
    grave = await Grave.dig()
    await grave.bury()
    num_before = len(grave.broker.records(REQUESTS))
    (first,) = await steps(grave)
    assert (first.outcome, first.topic) == (Outcome.SENT, REQUESTS)
    (second,) = await steps(grave)
    assert (second.outcome, second.request_id) == (Outcome.SKIPPED, first.request_id)
    assert len(grave.broker.records(REQUESTS)) == num_before + 1
    (third,) = await steps(grave, is_again=True)
    assert (third.outcome, third.request_id) == (Outcome.SENT, first.request_id)
    log = await DeadLetterLog.open(grave.broker)
    (note,) = (await log.redriven()).values()
    assert note.request_id == first.request_id


async def test_a_dry_run_sends_and_notes_nothing() -> None:
    grave = await Grave.dig()
    await grave.bury()
    before = {topic: len(grave.broker.records(topic)) for topic in (REQUESTS, DEAD_LETTER)}
    (step,) = await steps(grave, is_dry=True)
    assert step.outcome is Outcome.SENT
    assert step.request_id.startswith("r-1:redrive-")
    assert {topic: len(grave.broker.records(topic)) for topic in before} == before


async def test_the_limit_counts_what_is_sent_and_the_oldest_come_first() -> None:
    grave = await Grave.dig()
    await grave.bury(b"\xc1", error=UNREADABLE)
    for _ in range(5):
        await grave.bury()
    done = await steps(grave, limit=2)
    assert [step.outcome for step in done] == [Outcome.REFUSED, Outcome.SENT, Outcome.SENT]


@pytest.mark.parametrize(
    ("topic", "error"),
    [("gea.gone", InvalidRequestError("x")), (REQUESTS, DecodeError("x"))],
)
async def test_a_letter_that_cannot_be_sent_says_why_and_the_others_go(topic: str, error: GeaError) -> None:
    grave = await Grave.dig()
    gone = letter(topic=topic, code=error.code, value=b"\xc1")
    grave.broker.append(DEAD_LETTER, pack(gone), b"k", (), 0)
    await grave.bury()
    outcomes = {step.outcome: step.reason for step in await steps(grave)}
    assert set(outcomes) == {Outcome.REFUSED, Outcome.SENT}
    assert outcomes[Outcome.REFUSED]


async def test_a_left_out_value_is_fetched_from_its_topic_while_it_stands_there() -> None:
    grave = await Grave.dig()
    record = await grave.bury(b"x" * 1_048_300)
    (step,) = await steps(grave, is_dry=True)
    assert step.outcome is Outcome.SENT
    grave.broker.expire(REQUESTS, record.partition, record.offset + 1)
    (step,) = await steps(grave, is_dry=True)
    assert step.outcome is Outcome.REFUSED
