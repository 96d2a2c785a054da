"""Publish Markdown as documents: what is new or changed goes into `gea.documents`, the rest is left alone.

Documents are keyed by their id, so that publishing again replaces. Nothing is deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ops.errors import CommandError
from schemas.codec import pack, unpack
from schemas.document import Document
from schemas.envelope import CE_TYPE, CONTENT_TYPE, DOCUMENT_TYPE, MSGPACK
from schemas.errors import DecodeError, InvalidRequestError
from streams.broker import Broker, Producer, TopicPartition
from streams.reading import read_until
from streams.topics import DOCUMENTS
from workers.retrieval.markdown import parse_markdown

MAX_CONCURRENT_SENDS = 64
SUFFIXES = (".md", ".markdown")
HEADERS = ((CE_TYPE, DOCUMENT_TYPE.encode()), (CONTENT_TYPE, MSGPACK.encode()))

OnPublished = Callable[[int, int], None]
"""Called with the number published so far and the number to publish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Something that was not published, and why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an ingestion did."""

    published: int
    unchanged: int
    skipped: tuple[Skipped, ...] = ()

    def summary(self) -> str:
        """Return the report in a few words."""
        words = [f"{self.published} published"]
        words += [f"{self.unchanged} unchanged"] if self.unchanged else []
        words += [f"{len(self.skipped)} skipped"] if self.skipped else []
        return ", ".join(words)

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        skipped = [{"what": each.what, "why": each.why} for each in self.skipped]
        return {"published": self.published, "unchanged": self.unchanged, "skipped": skipped}


async def ingest(
    broker: Broker, paths: Sequence[Path], *, tenant: str = "default", on_published: OnPublished = lambda *_: None
) -> Report:
    """Publish the documents of Markdown files and folders.

    Raises CommandError for a path that holds none, UnavailableError when Kafka does not answer.
    """
    documents, skipped = await asyncio.to_thread(read_documents, paths, tenant)
    if not documents and not skipped:
        raise CommandError(f"no Markdown file in {', '.join(map(str, paths))}")
    known = await published_documents(broker)
    changed = [each for each in documents if known.get(each.document_id) != _content(each)]
    producer = await broker.producer()
    try:
        await _publish(producer, changed, on_published)
    finally:
        await producer.close()
    return Report(published=len(changed), unchanged=len(documents) - len(changed), skipped=tuple(skipped))


def read_documents(paths: Sequence[Path], tenant: str) -> tuple[list[Document], list[Skipped]]:
    """Read and check the documents; blocks. What cannot be published is returned with its reason.

    Raises CommandError for a path that does not exist.
    """
    documents: dict[str, Document] = {}
    skipped = []
    for file, source in _markdown_files(paths).items():
        try:
            found = parse_markdown(file.read_text(encoding="utf-8"), source=source, tenant=tenant)
        except (InvalidRequestError, OSError, UnicodeDecodeError) as error:
            skipped.append(Skipped(what=str(file), why=str(error)))
            continue
        for document in found:
            other = documents.setdefault(document.document_id, document)
            if other is not document:
                why = f"its id stands in {other.source} too"
                skipped.append(Skipped(what=f"{file}: {document.document_id}", why=why))
    return list(documents.values()), skipped


async def published_documents(broker: Broker) -> dict[str, Document]:
    """Return what the topic holds now, by id."""
    num_partitions = await broker.partitions(DOCUMENTS)
    if not num_partitions:
        raise CommandError(f"there is no topic {DOCUMENTS}: `gea topics apply` creates it")
    reader = await broker.reader({TopicPartition(DOCUMENTS, number): None for number in range(num_partitions)})
    known: dict[str, Document] = {}
    try:
        begins, ends = await asyncio.gather(reader.begin_offsets(), reader.end_offsets())
        for place, begin in begins.items():
            reader.seek(place, begin)
        async for records in read_until(reader, ends, timeout_ms=200):
            for record in records:
                key = (record.key or b"").decode(errors="replace")
                known.pop(key, None)
                if record.value is not None and (document := _decode(record.value)) is not None:
                    known[key] = _content(document)
    finally:
        await reader.close()
    return known


async def _publish(producer: Producer, documents: Sequence[Document], on_published: OnPublished) -> None:
    slots = asyncio.Semaphore(MAX_CONCURRENT_SENDS)
    num_published = 0

    async def send(document: Document) -> None:
        nonlocal num_published
        async with slots:
            await producer.send(DOCUMENTS, pack(document), key=document.document_id.encode(), headers=HEADERS)
        num_published += 1
        on_published(num_published, len(documents))

    async with asyncio.TaskGroup() as group:
        for document in documents:
            group.create_task(send(document))


def _markdown_files(paths: Iterable[Path]) -> dict[Path, str]:
    """Return the files in order, each with its name below the folder that was given."""
    files: dict[Path, str] = {}
    for path in paths:
        if path.is_dir():
            found = sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES and each.is_file())
            files |= {each: each.relative_to(path).as_posix() for each in found}
        elif path.is_file():
            files[path] = path.name
        else:
            raise CommandError(f"{path}: there is no such file or folder")
    return files


def _content(document: Document) -> Document:
    """Return the document without its time, by which alone it is not changed."""
    return msgspec.structs.replace(document, updated_ms=0)


def _decode(value: bytes) -> Document | None:
    try:
        return unpack(value, Document)
    except (DecodeError, InvalidRequestError):
        return None
