"""What the topic of documents says now: documents by id, and their passages by tenant.

Knows no index; `take_changes` tells what an index has to do to follow. The invariant: the catalog depends on the last
record of each document id alone, as the compacted topic does, so that a worker that reads late sees the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.document import Document
from schemas.retrieval import Passage
from workers.retrieval.splitting import split_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What one tenant's indexes have to do: put `passages`, drop the ids in `removed`."""

    tenant: str
    passages: tuple[Passage, ...]
    removed: tuple[str, ...]


@dataclass(slots=True)
class Catalog:
    """Documents and their passages. Not thread-safe: one task writes."""

    _tenant_of: dict[str, str] = field(default_factory=dict)  # document_id -> tenant
    _ids_of: dict[str, tuple[str, ...]] = field(default_factory=dict)  # document_id -> passage ids
    _passages: dict[str, dict[str, Passage]] = field(default_factory=dict)  # tenant -> passage_id -> passage
    _changed: dict[tuple[str, str], None] = field(default_factory=dict)  # an ordered set of (tenant, passage_id)

    @property
    def num_documents(self) -> int:
        """Return how many documents there are, all tenants together."""
        return len(self._tenant_of)

    @property
    def num_passages(self) -> int:
        """Return how many passages there are, all tenants together."""
        return sum(len(passages) for passages in self._passages.values())

    @property
    def has_changes(self) -> bool:
        """Return whether `take_changes` has something to give."""
        return bool(self._changed)

    def passage(self, tenant: str, passage_id: str) -> Passage | None:
        """Return a passage of a tenant, None if it is not there (any more)."""
        return self._passages.get(tenant, {}).get(passage_id)

    def upsert(self, document: Document) -> None:
        """Put a document in the place of an earlier one of the same id, whoever owned that."""
        fresh = {passage.passage_id: passage for passage in passages_of(document)}
        document_id, tenant = document.document_id, document.tenant
        if self._tenant_of.get(document_id, tenant) != tenant:
            self.delete(document_id)
        known = self._passages.setdefault(tenant, {})
        for passage_id in self._ids_of.get(document_id, ()):
            if passage_id not in fresh:
                self._drop(tenant, passage_id)
        for passage_id, passage in fresh.items():
            if known.get(passage_id) != passage:  # a document that is published again unchanged costs nothing
                known[passage_id] = passage
                self._changed[tenant, passage_id] = None
        self._tenant_of[document_id] = tenant
        self._ids_of[document_id] = tuple(fresh)

    def delete(self, document_id: str) -> None:
        """Forget a document; an unknown one is fine."""
        tenant = self._tenant_of.pop(document_id, None)
        if tenant is not None:
            for passage_id in self._ids_of.pop(document_id):
                self._drop(tenant, passage_id)

    def clear(self) -> None:
        """Forget all documents, to read the topic anew."""
        for document_id in list(self._tenant_of):
            self.delete(document_id)

    def take_changes(self, max_passages: int) -> Changes | None:
        """Return the oldest changes, of one tenant and at most `max_passages`; None if there are none.

        However often a passage has changed since the last call, it is told once, as it is now.
        """
        if not self._changed:
            return None
        tenant = next(iter(self._changed))[0]
        taken = [passage_id for owner, passage_id in self._changed if owner == tenant][:max_passages]
        for passage_id in taken:
            del self._changed[tenant, passage_id]
        known = self._passages.get(tenant, {})
        return Changes(
            tenant=tenant,
            passages=tuple(known[passage_id] for passage_id in taken if passage_id in known),
            removed=tuple(passage_id for passage_id in taken if passage_id not in known),
        )

    def give_back(self, changes: Changes) -> None:
        """Tell these changes again: they could not be carried out."""
        for passage_id in (*(passage.passage_id for passage in changes.passages), *changes.removed):
            self._changed[changes.tenant, passage_id] = None

    def _drop(self, tenant: str, passage_id: str) -> None:
        del self._passages[tenant][passage_id]
        self._changed[tenant, passage_id] = None


def passages_of(document: Document) -> tuple[Passage, ...]:
    """Split a document into its passages: `doc-id`, `doc-id#2`, …"""
    return tuple(
        Passage(
            text=text,
            passage_id=document.document_id if number == 1 else f"{document.document_id}#{number}",
            document_id=document.document_id,
            title=document.title,
            language=document.language,
        )
        for number, text in enumerate(split_text(document.text), start=1)
    )
