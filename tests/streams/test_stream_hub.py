"""The hub: every follower gets its records, over slow followers, lost brokers and take-overs."""

from __future__ import annotations

import asyncio

import pytest

from schemas.errors import (
    BrokerUnavailableError,
    StreamExpiredError,
)
from schemas.tokens import Claim, End, EndStatus, Epoch, FinishReason, Kind, See, TokenRecord
from streams.stream_events import Event, StreamEnded, TextAppended
from streams.stream_hub import StreamHub
from streams.token_reader import StreamReader
from streams.token_record import point_to, send_token
from streams.token_writer import TokenWriter
from streams.topics import TOKENS
from tests.streams.token_fakes import COMPLETED, REPLY, broker_with_topics, until
from tests.streams.token_streams import EPOCH, PLACE, write


async def test_the_hub_hands_each_request_its_records() -> None:
    broker = await broker_with_topics()
    await write(broker, "before", "x")
    async with StreamHub(broker, TOKENS) as hub:
        readers = {}
        for name in ("r1", "r2"):
            inbox = hub.follow(name, 1)
            assert inbox.start == 2
            readers[name] = StreamReader(broker, name, PLACE, inbox.start, inbox=inbox)
        await write(broker, "r2", "two")
        await write(broker, "r1", "one")
        for name, reader in readers.items():
            while not reader.view.is_ended:
                await reader.next_events(1)
            await reader.close()
            assert reader.view.text() == {"r1": "one", "r2": "two"}[name]
        assert hub.statistics()["inboxes"] == 0


@pytest.mark.parametrize("comes_first", [True, False])
async def test_who_sends_a_request_again_while_another_run_takes_it_over_gets_it_from_its_start(
    comes_first: bool,
) -> None:
    broker = await broker_with_topics()
    await write(broker, "r1", "before ", is_ended=False)
    async with StreamHub(broker, TOKENS) as hub:
        inbox = hub.follow("r1", 1)
        reader = StreamReader(broker, "r1", PLACE, inbox.start, inbox=inbox)
        producer = await broker.producer()
        see = See(topic=TOKENS, partition=1, offset=0)
        epoch = Epoch(0, 2)
        await send_token(
            producer, REPLY, "r1", TokenRecord(kind=Kind.CLAIM, epoch=epoch, owner="b", seq=7, claim=Claim())
        )
        if comes_first:
            await point_to(producer, REPLY, "r1", epoch=Epoch(-1, 1), see=see)
        delta = TokenRecord(kind=Kind.DELTA, epoch=epoch, owner="b", seq=7, text="after", token_ids=(1,) * 5)
        await send_token(producer, REPLY, "r1", delta)
        if not comes_first:
            await point_to(producer, REPLY, "r1", epoch=Epoch(-1, 1), see=see)
        end = TokenRecord(kind=Kind.END, epoch=epoch, owner="b", seq=12, end=COMPLETED)
        await send_token(producer, REPLY, "r1", end)
        events: list[Event] = []
        while not reader.view.is_ended:
            found = await reader.next_events(2)
            assert found, "nothing came"
            events += found
        await reader.close()
    assert "".join(event.text for event in events if isinstance(event, TextAppended)) == "before after"
    assert isinstance(events[-1], StreamEnded)


async def test_a_slow_follower_is_dropped_and_reads_on_by_itself_while_others_go_on() -> None:
    broker = await broker_with_topics()
    async with StreamHub(broker, TOKENS, max_records=3) as hub:
        inbox, fast = hub.follow("slow", 1), hub.follow("fast", 1)
        slow = StreamReader(broker, "slow", PLACE, inbox.start, inbox=inbox)
        await write(broker, "slow", *"abcdefgh")
        await write(broker, "fast", "quick")
        await until(lambda: hub.statistics()["records"] == 11)
        assert inbox.is_overflowed
        assert hub.statistics()["dropped"] == 1
        assert len(await fast.poll(1)) == 2
        while not slow.view.is_ended:
            await slow.next_events(1)
        assert slow.view.text() == "abcdefgh"
        await slow.close()


async def test_the_hub_reads_what_was_written_while_the_broker_was_away() -> None:
    broker = await broker_with_topics()
    async with StreamHub(broker, TOKENS) as hub:
        inbox = hub.follow("r1", 1)
        broker.down = True
        await until(lambda: hub.statistics()["reconnects"] >= 1)
        broker.down = False
        await write(broker, "r1", "late")
        assert len(await inbox.poll(5)) >= 1


async def test_the_hub_goes_on_when_the_log_has_moved_past_it() -> None:
    broker = await broker_with_topics()
    await write(broker, "old", "abc")
    async with StreamHub(broker, TOKENS) as hub:
        inbox = hub.follow("r1", 1)
        broker.down = True
        await until(lambda: hub.statistics()["reconnects"] >= 1)
        broker.down = False
        broker.append(TOKENS, b"gone", b"r1", (), 1)
        broker.expire(TOKENS, 1, 3)
        reader = StreamReader(broker, "r1", PLACE, inbox.start, inbox=inbox)
        with pytest.raises(StreamExpiredError):
            await reader.next_events(5)
        await reader.close()


async def test_following_a_hub_that_is_closed_is_refused() -> None:
    broker = await broker_with_topics()
    hub = StreamHub(broker, TOKENS)
    with pytest.raises(BrokerUnavailableError):
        hub.follow("r1", 1)
    async with hub:
        pass
    with pytest.raises(BrokerUnavailableError):
        hub.follow("r1", 1)
    with pytest.raises(BrokerUnavailableError):
        await StreamHub(broker, "gea.nothing").start()


async def test_writer_and_hub_reader_agree_over_a_long_answer() -> None:
    broker = await broker_with_topics()
    async with StreamHub(broker, TOKENS) as hub:
        inbox = hub.follow("r1", 1)
        reader = StreamReader(broker, "r1", PLACE, inbox.start, inbox=inbox)
        text = "🌶️ 你好 é👨‍👩‍👧 " * 40

        async def produce() -> None:
            async with TokenWriter(await broker.producer(), REPLY, "r1", epoch=EPOCH) as writer:
                for character in text:
                    await writer.append(0, character, (ord(character),))
                await writer.end(End(status=EndStatus.COMPLETED, finish_reason=FinishReason.STOP))

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            while not reader.view.is_ended:
                await reader.next_events(5)
        assert reader.view.text() == text
