"""Follows the topic of documents from its first record, in no group, and keeps a knowledge base in step.

The invariant: what is searched is the last record of each document id that was read. A record that is no document
(undecodable, out of range, under another key) is counted and skipped: the version before it stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import structlog

from schemas.codec import unpack
from schemas.document import Document, validate_document
from schemas.envelope import DOCUMENT_TYPE, check_type
from schemas.errors import ConfigError, GeaError, InvalidRequestError, StreamExpiredError
from streams.broker import Broker, LogReader, Record, TopicPartition
from workers.retrieval.knowledge import KnowledgeBase

log = structlog.get_logger(__name__)

POLL_MS = 500
RETRY_S = 1.0


class DocumentFollower:
    """Reads one topic of documents into a knowledge base. `catch_up` once, then `follow` until cancelled."""

    def __init__(self, broker: Broker, topic: str, knowledge: KnowledgeBase, *, retry_s: float = RETRY_S) -> None:
        self._broker = broker
        self._topic = topic
        self._knowledge = knowledge
        self._retry_s = retry_s
        self._reader: LogReader | None = None
        self._positions: dict[TopicPartition, int] = {}
        self._num_read = 0
        self._advanced = asyncio.Event()
        self.num_applied = 0
        self.num_broken = 0

    async def catch_up(self) -> None:
        """Read to the ends that the partitions have now, then index all at once. An empty topic is done at once.

        Raises ConfigError if there is no such topic.
        """
        reader = await self._open()
        ends = await reader.end_offsets()
        while not _has_reached(self._positions, ends):
            await self._read(reader)
        # Only what the topic says at its end is encoded, not every version on the way.
        await self._flush()
        log.info(
            "documents_loaded",
            topic=self._topic,
            documents=self._knowledge.catalog.num_documents,
            passages=self._knowledge.catalog.num_passages,
            broken=self.num_broken,
        )

    async def follow(self) -> None:
        """Apply what comes, for ever. What fails is logged and tried again; meanwhile the last state is searched."""
        while True:
            try:
                reader = self._reader or await self._open()
                await self._read(reader)
                await self._flush()
            except StreamExpiredError:
                # Records that were not read are gone, deletions among them: begin anew.
                log.warning("documents_expired", topic=self._topic)
                self._knowledge.catalog.clear()
                self._positions.clear()
                await self.close()
            except Exception:
                log.exception("documents_failed", topic=self._topic)
                await self.close()
                await asyncio.sleep(self._retry_s)

    async def until_applied(self, num_applied: int) -> None:
        """Wait until that many records can be found."""
        while self.num_applied < num_applied:
            await self._advanced.wait()

    async def close(self) -> None:
        """Close the reader. Idempotent; `follow` would open another one."""
        reader, self._reader = self._reader, None
        if reader is not None:
            try:
                await reader.close()
            except GeaError as error:
                log.warning("documents_close_failed", topic=self._topic, code=error.code)

    async def _open(self) -> LogReader:
        num_partitions = await self._broker.partitions(self._topic)
        if num_partitions == 0:
            raise ConfigError(f"topic {self._topic!r} does not exist: create the topics first")
        places = [TopicPartition(self._topic, number) for number in range(num_partitions)]
        reader = await self._broker.reader({place: self._positions.get(place) for place in places})
        self._reader = reader
        begins = await reader.begin_offsets()
        for place in places:
            if place not in self._positions:
                self._positions[place] = begins[place]
                reader.seek(place, begins[place])
        return reader

    async def _read(self, reader: LogReader) -> None:
        records = await reader.poll(timeout_ms=POLL_MS)
        self._apply(records)
        # Not from the last record: a reader steps over what compaction has removed.
        self._positions = {place: reader.position(place) for place in self._positions}

    async def _flush(self) -> None:
        num_read = self._num_read
        await self._knowledge.flush()
        if num_read != self.num_applied:
            self.num_applied = num_read
            advanced, self._advanced = self._advanced, asyncio.Event()
            advanced.set()

    def _apply(self, records: Sequence[Record]) -> None:
        for record in records:
            try:
                self._apply_one(record)
            except GeaError as error:
                self.num_broken += 1
                log.warning(
                    "document_skipped",
                    topic=record.topic,
                    partition=record.partition,
                    offset=record.offset,
                    code=error.code,
                    reason=error.message,
                )
            else:
                self._num_read += 1

    def _apply_one(self, record: Record) -> None:
        document_id = _document_id(record)
        if record.value is None:
            self._knowledge.catalog.delete(document_id)
            return
        check_type(record.headers, DOCUMENT_TYPE)
        document = unpack(record.value, Document)
        validate_document(document)
        if document.document_id != document_id:
            # Under another key compaction would drop the wrong record later.
            raise InvalidRequestError(f"document_id: the record's key is {document_id!r}", field="document_id")
        self._knowledge.catalog.upsert(document)


def _document_id(record: Record) -> str:
    try:
        return (record.key or b"").decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError("key: not UTF-8", field="document_id") from error


def _has_reached(positions: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> bool:
    return all(positions.get(place, 0) >= end for place, end in ends.items())
