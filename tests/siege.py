"""An installation under fuzz: what was sent is accounted for, good requests are answered, views are as before.

Serves the in-memory test and the one on Kafka; what differs (how offsets are asked for, how logs are emptied) is
the caller's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import msgpack

from schemas.codec import unpack
from schemas.control import Control, ControlKind
from schemas.errors import BrokerUnavailableError, DecodeError, InvalidRequestError
from schemas.failure import DeadLetter
from schemas.worker import Pool
from streams.broker import Broker, Producer, Record, TopicPartition
from streams.claims import StreamView
from streams.client import GeaClient
from streams.control import send_control
from streams.reading import read_until
from streams.token_reader import decode_token
from streams.topics import DEAD_LETTER, TOKENS
from tests.flow.harness import DIALOGUE, Installation
from tests.fuzz_draft import WORK_TOPICS
from tests.fuzzing import FuzzRecord
from workers.router.stage import RouterHandler

TEXT = "Within 30 days."
PATIENCE_S = 60.0
NUM_PACE = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A fuzzed record, and where it stands; None if the broker itself refused it."""

    fuzz: FuzzRecord
    record: Record | None


async def eventually(is_true: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds that no event tells of: the state of a real broker."""
    async with asyncio.timeout(PATIENCE_S):
        while not await is_true():  # noqa: ASYNC110 - a broker's state sets no event here
            await asyncio.sleep(0.01)


async def send_all(producer: Producer, records: Iterable[FuzzRecord]) -> list[Sent]:
    """Produce records; what no broker takes is noted."""
    sent = []
    for fuzz in records:
        try:
            record = await producer.send(fuzz.topic, fuzz.value, key=fuzz.key, headers=fuzz.headers)
        except InvalidRequestError:
            record = None
        except BrokerUnavailableError:
            if fuzz.key is not None:
                raise
            record = None  # Kafka takes no record without a key on a compacted topic
        sent.append(Sent(fuzz=fuzz, record=record))
    return sent


class Ledger:
    """What the workers have written so far: streams by request, and dead letters by the place they came from."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._positions: dict[TopicPartition, int] = {}
        self.views: dict[str, StreamView] = {}
        self.letters: set[tuple[str, int, int] | str] = set()
        self.num_letters = 0

    async def refresh(self) -> None:
        """Read on to the end."""
        places = [
            TopicPartition(topic, number)
            for topic in (TOKENS, DEAD_LETTER)
            for number in range(await self._broker.partitions(topic))
        ]
        reader = await self._broker.reader({place: self._positions.get(place, 0) for place in places})
        try:
            async for records in read_until(reader, await reader.end_offsets(), timeout_ms=200):
                for record in records:
                    self._take(record)
            self._positions = {place: reader.position(place) for place in places}
        finally:
            await reader.close()

    def forget(self) -> None:
        """Drop what is settled, so that memory is measured without it."""
        self.views.clear()
        self.letters.clear()

    def accounts_for(self, sent: Sent) -> bool:
        """Return whether a record was put aside, or its request has ended."""
        if sent.record is None or sent.fuzz.topic not in WORK_TOPICS:
            return True
        place = (sent.record.topic, sent.record.partition, sent.record.offset)
        return place in self.letters or any(
            name in self.letters or (name in self.views and self.views[name].is_ended) for name in _names(sent)
        )

    def _take(self, record: Record) -> None:
        if record.topic == DEAD_LETTER:
            letter = unpack(record.value, DeadLetter)
            self.letters |= {(letter.topic, letter.partition, letter.offset), letter.request_id}
            self.num_letters += 1
            return
        try:
            token = decode_token(record)
        except (DecodeError, InvalidRequestError):
            return
        key = (record.key or b"").decode(errors="replace")
        self.views.setdefault(key, StreamView()).apply(token, record.offset)


def _names(sent: Sent) -> set[str]:
    """Return the ids under which a record may have been answered."""
    names = {sent.fuzz.request_id} if sent.fuzz.request_id else set()
    try:
        body = msgpack.unpackb(sent.fuzz.value or b"", strict_map_key=False)
    except Exception:  # it was made to fail
        return names
    name = body.get("request_id") if isinstance(body, dict) else None
    return names | ({name} if isinstance(name, str) else set())


class Siege:
    """Fuzz against a running installation, round by round."""

    def __init__(
        self,
        gea: Installation,
        client: GeaClient,
        producer: Producer,
        is_committed: Callable[[], Awaitable[bool]],
    ) -> None:
        self.gea = gea
        self.client = client
        self.producer = producer
        self.ledger = Ledger(gea.broker)
        self._is_committed = is_committed
        self.num_sent = 0
        self.num_good = 0

    async def round(self, records: Sequence[FuzzRecord], victim: str) -> None:
        """Send records while good requests run; return when everything is accounted for and committed."""
        good = asyncio.create_task(self._ask_good(victim))
        sent = await send_all(self.producer, records)
        self.num_sent += len(sent)
        await good
        await self._until_accounted(sent)
        await eventually(self._is_committed)
        self.assert_alive()

    async def pace(self) -> float:
        """Return good requests per second of our processor time, which neighbours disturb least: the best of three."""
        best = 0.0
        for _ in range(3):
            began = time.process_time()
            await asyncio.gather(*(self._ask() for _ in range(NUM_PACE)))
            best = max(best, NUM_PACE / (time.process_time() - began))
        return best

    def figures(self) -> str:
        """Return what has been done, for people."""
        return f"{self.num_sent} fuzzed, {self.ledger.num_letters} dead letters, {self.num_good} good requests answered"

    def assert_alive(self) -> None:
        """No worker has died."""
        for name, running in self.gea.workers.items():
            assert not running.task.done(), (name, running.task.exception())

    async def assert_views_intact(self) -> None:
        """Nobody's view of workers and routes holds fuzz, and what is said about requests is still heard."""
        router = self.gea.workers["router-1"].handler
        assert isinstance(router, RouterHandler)
        workers = router._directory.workers(state=None)
        assert {status.pool for status in workers} == set(Pool)
        assert not [status.worker_id for status in workers if status.worker_id.startswith("fuzz")]
        assert not router._book.tables
        await send_control(self.producer, Control(kind=ControlKind.CANCEL, request_id="heard"))

        async def is_heard() -> bool:
            return all(each.cancellations.is_cancelled("heard", "default") for each in self.gea.workers.values())

        await eventually(is_heard)
        assert all(each.control.num_skipped > 0 for each in self.gea.workers.values())

    async def _ask_good(self, victim: str) -> None:
        await asyncio.gather(self._ask(victim), *(self._ask() for _ in range(4)))

    async def _ask(self, request_id: str | None = None) -> None:
        answer = await self.client.complete("tell me", request_id=request_id, **DIALOGUE)
        assert answer.text == TEXT, answer
        self.num_good += 1

    async def _until_accounted(self, sent: Sequence[Sent]) -> None:
        left = list(sent)

        async def is_settled() -> bool:
            await self.ledger.refresh()
            left[:] = [each for each in left if not self.ledger.accounts_for(each)]
            self.assert_alive()
            return not left

        try:
            await eventually(is_settled)
        except TimeoutError:
            raise AssertionError(f"not accounted for: {[_told(each) for each in left[:10]]}") from None


def _told(sent: Sent) -> tuple[str, str, bytes, object]:
    fuzz = sent.fuzz
    return fuzz.topic, fuzz.kind, (fuzz.value or b"")[:300], fuzz.headers[:8]
