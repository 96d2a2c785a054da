"""Markdown to documents: one for each `##` section. Pure, but for `read_documents`, which reads files.

A file may open with YAML front matter (`language`, `tags`). `# Title` names the page; the line `<!-- id: xyz -->`
below a heading gives its section a lasting id, without it the id is made of the file's name and the heading. Text
before the first section is a document of its own, so that a plain page without sections works too.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import yaml

from schemas.document import Document, validate_document
from schemas.errors import InvalidRequestError

_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*\r?$\n?", re.DOTALL | re.MULTILINE)
_ID_COMMENT = re.compile(r"^[ \t]*<!--\s*id:\s*(\S+)\s*-->[ \t]*$", re.MULTILINE)
_FENCE = re.compile(r"\s{0,3}(```|~~~)")
_SUFFIXES = (".md", ".markdown")


@dataclass(slots=True)
class _Section:
    heading: str
    lines: list[str] = field(default_factory=list)


def parse_markdown(text: str, *, source: str, tenant: str = "default", updated_ms: int = 0) -> list[Document]:
    """Return the documents of one page in order. `source` is its path, for ids and for people.

    Raises InvalidRequestError that names the source if its front matter or an id is malformed or given twice.
    """
    front, body = _front_matter(text.lstrip("\ufeff"), source)
    title, sections = _sections(body)
    title = str(front.get("title") or title or PurePath(source).stem)
    documents: dict[str, Document] = {}
    for section in sections:
        document = _document(section, title, source, front, tenant, updated_ms)
        if document is None:
            continue
        if document.document_id in documents:
            raise InvalidRequestError(f"{source}: id {document.document_id!r} is given twice", field="document_id")
        documents[document.document_id] = document
    return list(documents.values())


def read_documents(path: Path, *, tenant: str = "default", updated_ms: int = 0) -> list[Document]:
    """Read a Markdown file, or all of them below a folder, in the order of their paths.

    Raises InvalidRequestError if a file is no UTF-8 or malformed, or if two of them give the same id.
    """
    root = path if path.is_dir() else path.parent
    files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES) if path.is_dir() else [path]
    found: dict[str, Document] = {}
    for file in files:
        source = file.relative_to(root).as_posix()
        for document in parse_markdown(_read(file), source=source, tenant=tenant, updated_ms=updated_ms):
            other = found.setdefault(document.document_id, document)
            if other is not document:
                message = f"{source}: id {document.document_id!r} is given in {other.source} too"
                raise InvalidRequestError(message, field="document_id")
    return list(found.values())


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{file}: not UTF-8", field="text") from error


def _front_matter(text: str, source: str) -> tuple[dict[str, Any], str]:
    match = _FRONT_MATTER.match(text)
    if match is None:
        return {}, text
    try:
        front = yaml.safe_load(match[1]) or {}
    except yaml.YAMLError as error:
        raise InvalidRequestError(f"{source}: front matter is no YAML: {error}") from error
    if not isinstance(front, dict):
        raise InvalidRequestError(f"{source}: front matter must be a map")
    return front, text[match.end() :]


def _sections(body: str) -> tuple[str, list[_Section]]:
    """Return the page's title and its sections; the first, without a heading, is what stands before the others."""
    title, sections, is_code = "", [_Section("")], False
    for line in body.splitlines():
        is_code ^= _FENCE.match(line) is not None  # a "##" in a program is no heading
        if not is_code and line.startswith("## "):
            sections.append(_Section(_heading(line)))
        elif not is_code and line.startswith("# ") and not title:
            title = _heading(line)
        else:
            sections[-1].lines.append(line)
    return title, sections


def _heading(line: str) -> str:
    return line.lstrip("#").strip().rstrip("#").strip()


def _document(
    section: _Section, title: str, source: str, front: dict[str, Any], tenant: str, updated_ms: int
) -> Document | None:
    body = "\n".join(section.lines)
    comment = _ID_COMMENT.search(body)
    text = _ID_COMMENT.sub("", body).strip()
    if not text:
        return None
    document = Document(
        document_id=comment[1] if comment else "-".join(_id_parts(source, section.heading)),
        text=text,
        title=f"{title}: {section.heading}" if section.heading else title,
        language=str(front.get("language") or ""),
        tags=tuple(_tags(front.get("tags"))),
        tenant=tenant,
        source=source,
        updated_ms=updated_ms,
    )
    try:
        validate_document(document)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{source}, section {section.heading!r}: {error}", field=error.field) from error
    return document


def _tags(value: object) -> Sequence[str]:
    if isinstance(value, list):
        return [str(tag) for tag in value]
    return [tag.strip() for tag in value.split(",") if tag.strip()] if isinstance(value, str) else []


def _id_parts(source: str, heading: str) -> Iterator[str]:
    yield _slug(PurePath(source).with_suffix("").as_posix())
    if heading:
        yield _slug(heading)


def _slug(text: str) -> str:
    """Return letters and digits of ASCII with hyphens; text that loses letters by that gets a short hash of itself."""
    folded = unicodedata.normalize("NFKD", text).casefold()
    folded = "".join(character for character in folded if not unicodedata.combining(character))
    slug = re.sub(r"[^a-z0-9]+", "-", folded).strip("-")[:48].strip("-")
    is_whole = all(character.isascii() for character in folded if character.isalnum()) and len(folded) <= 48
    if slug and is_whole:
        return slug
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{slug}-{digest}" if slug else digest
