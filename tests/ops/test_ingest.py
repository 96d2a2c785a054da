"""What is published, what is left alone, and what is skipped with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.errors import CommandError
from ops.ingest import ingest, published_documents
from schemas.envelope import CE_TYPE, DOCUMENT_TYPE, header
from streams.memory import MemoryBroker
from streams.topics import DOCUMENTS, topic_specs

PAGE = "# Returns\n\n## Shoes\n<!-- id: returns-shoes -->\n\nYou have {days} days.\n\n## Hats\n\nHats too.\n"


@pytest.fixture
async def broker() -> MemoryBroker:
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(2))
    return broker


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


async def test_sections_are_published_under_their_ids(broker: MemoryBroker, tmp_path: Path) -> None:
    write(tmp_path, "en/returns.md", PAGE.format(days=30))
    write(tmp_path, "en/notes.txt", "no Markdown")
    report = await ingest(broker, [tmp_path])
    assert (report.published, report.unchanged, report.skipped) == (2, 0, ())
    records = {(record.key or b"").decode(): record for record in broker.records(DOCUMENTS)}
    assert "returns-shoes" in records
    assert header(records["returns-shoes"].headers, CE_TYPE) == DOCUMENT_TYPE
    assert (await published_documents(broker))["returns-shoes"].text == "You have 30 days."


async def test_only_what_has_changed_is_published_again(broker: MemoryBroker, tmp_path: Path) -> None:
    path = write(tmp_path, "returns.md", PAGE.format(days=30))
    await ingest(broker, [path])
    assert (await ingest(broker, [path])).summary() == "0 published, 2 unchanged"
    write(tmp_path, "returns.md", PAGE.format(days=45))
    assert (await ingest(broker, [path])).summary() == "1 published, 1 unchanged"
    assert (await published_documents(broker))["returns-shoes"].text == "You have 45 days."


async def test_deleted_document_is_published_again(broker: MemoryBroker, tmp_path: Path) -> None:
    path = write(tmp_path, "returns.md", PAGE.format(days=30))
    await ingest(broker, [path])
    producer = await broker.producer()
    await producer.send(DOCUMENTS, None, key=b"returns-shoes")
    assert (await ingest(broker, [path])).published == 1


async def test_bad_file_and_repeated_id_are_skipped_with_their_reason(broker: MemoryBroker, tmp_path: Path) -> None:
    write(tmp_path, "a.md", PAGE.format(days=30))
    write(tmp_path, "b.md", PAGE.format(days=60))
    write(tmp_path, "c.md", "---\n[not a map\n---\n# X\n\ntext\n")
    (tmp_path / "d.md").write_bytes(b"\xff\xfe")
    report = await ingest(broker, [tmp_path])
    reasons = {Path(each.what.split(":")[0]).name: each.why for each in report.skipped}
    assert set(reasons) == {"b.md", "c.md", "d.md"}
    assert reasons["b.md"] == "its id stands in a.md too"
    assert (await published_documents(broker))["returns-shoes"].text == "You have 30 days."


async def test_document_that_cannot_be_decoded_does_not_stop_others(broker: MemoryBroker, tmp_path: Path) -> None:
    producer = await broker.producer()
    await producer.send(DOCUMENTS, b"\xc1", key=b"broken")
    path = write(tmp_path, "returns.md", PAGE.format(days=30))
    assert (await ingest(broker, [path])).published == 2


async def test_missing_path_and_empty_folder_are_named(broker: MemoryBroker, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no such file or folder"):
        await ingest(broker, [tmp_path / "none"])
    with pytest.raises(CommandError, match="no Markdown file"):
        await ingest(broker, [tmp_path])


async def test_missing_topic_is_named_with_its_remedy(tmp_path: Path) -> None:
    path = write(tmp_path, "returns.md", PAGE.format(days=30))
    with pytest.raises(CommandError, match="gea topics apply"):
        await ingest(MemoryBroker(), [path])
