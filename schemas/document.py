"""A document of the knowledge base, as it stands in the compacted topic of documents.

The key of the record is `document_id`; a record without a value deletes the document.
"""

from __future__ import annotations

import msgspec

from schemas.errors import InvalidRequestError
from schemas.request import MAX_NAME_CHARS, check_id

MAX_DOCUMENT_CHARS = 200_000


class Document(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Text with its place. `tenant` owns it: only requests of the same tenant find it."""

    document_id: str
    text: str
    title: str = ""
    language: str = ""
    tags: tuple[str, ...] = ()
    tenant: str = "default"
    source: str = ""
    updated_ms: int = 0


def validate_document(document: Document) -> None:
    """Check ids and sizes. Raises InvalidRequestError with the field and the allowed range."""
    check_id("document_id", document.document_id)
    check_id("tenant", document.tenant)
    if not document.text.strip() or len(document.text) > MAX_DOCUMENT_CHARS:
        raise InvalidRequestError(f"text: 1 to {MAX_DOCUMENT_CHARS} characters are allowed", field="text")
    if len(document.title) > MAX_NAME_CHARS:
        raise InvalidRequestError(f"title: at most {MAX_NAME_CHARS} characters are allowed", field="title")
