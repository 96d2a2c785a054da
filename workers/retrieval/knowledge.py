"""The knowledge base in memory: the catalog with both channels, kept in step and searched together.

Knows no topic. Each channel is owned by one thread, the catalog by the event loop: nothing is locked, and nothing of
torch, FAISS or tantivy runs on the loop. Tenants share nothing but the encoder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, Protocol, Self, TypeVar

from schemas.document import Document
from schemas.retrieval import Passage
from workers.encoder import Vectors
from workers.retrieval import terms
from workers.retrieval.catalog import Catalog, Changes
from workers.retrieval.keyword_index import KeywordHit, KeywordIndex
from workers.retrieval.ranking import RankingSettings, rank
from workers.retrieval.terms import is_mostly_cjk
from workers.retrieval.vector_index import VectorIndex

P = ParamSpec("P")
R = TypeVar("R")
Nearest = list[tuple[str, float]]

# Passages that are encoded between two looks at the queue of questions: about 0.1 s on two cores.
ENCODE_BATCH = 16
# What is carried over at once: one commit of the inverted index.
CHANGES_BATCH = 256
MAX_QUERY_CHARS = 2000


class TextEncoder(Protocol):
    """What retrieval needs of `workers.encoder.Encoder`."""

    identity: str

    @property
    def dimension(self) -> int:
        """Return the length of a vector."""
        ...

    async def encode_async(self, texts: Sequence[str]) -> Vectors:
        """Return one unit vector per text: (N, dimension) float32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One question of a tenant."""

    text: str
    tenant: str = "default"
    num_passages: int = 4


@dataclass(frozen=True, slots=True)
class _Channels:
    vectors: VectorIndex
    keywords: KeywordIndex


class KnowledgeBase:
    """Documents that can be changed and searched at any time. The owner calls `close`; the encoder is the caller's."""

    def __init__(self, encoder: TextEncoder, settings: RankingSettings | None = None) -> None:
        self.catalog = Catalog()
        self._encoder = encoder
        self._settings = settings or RankingSettings()
        self._channels: dict[str, _Channels] = {}
        self._semantic_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="semantic")
        self._keyword_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="keyword")

    def ranked_by(self, settings: RankingSettings) -> Self:
        """Rank by other settings from now on; returns itself."""
        self._settings = settings
        return self

    async def warm(self) -> None:
        """Load what the first question would wait for."""
        await self._on(self._keyword_thread, terms.warm)
        await self._encoder.encode_async(["warm"])

    async def put(self, documents: Sequence[Document]) -> None:
        """Put documents and make them visible."""
        for document in documents:
            self.catalog.upsert(document)
        await self.flush()

    async def flush(self) -> None:
        """Carry the catalog's changes over to both channels. If it fails, the changes are kept for the next call."""
        while (changes := self.catalog.take_changes(CHANGES_BATCH)) is not None:
            try:
                await self._carry_over(changes)
            except BaseException:
                self.catalog.give_back(changes)
                raise

    async def search(self, queries: Sequence[Query]) -> list[tuple[Passage, ...]]:
        """Return the passages for each question, best first; none where nothing fits."""
        texts = [_cut(query.text) for query in queries]
        semantic, keyword = await asyncio.gather(
            self._search_vectors(queries, texts), self._on(self._keyword_thread, self._search_words, queries, texts)
        )
        return [
            self._rank(query, text, near, hits)
            for query, text, near, hits in zip(queries, texts, semantic, keyword, strict=True)
        ]

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        for thread in (self._semantic_thread, self._keyword_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    def _rank(self, query: Query, text: str, near: Nearest, hits: list[KeywordHit]) -> tuple[Passage, ...]:
        ids = {*(id_ for id_, _ in near), *(hit.id for hit in hits)}
        found = {id_: self.catalog.passage(query.tenant, id_) for id_ in ids}
        # What has left the catalog while the channels were searched is left out.
        passages = {id_: passage for id_, passage in found.items() if passage is not None}
        return rank(text, near, hits, passages, num_passages=query.num_passages, settings=self._settings)

    async def _search_vectors(self, queries: Sequence[Query], texts: Sequence[str]) -> list[Nearest]:
        """Search the questions that the encoder understands; the whole batch is encoded at once."""
        found: list[Nearest] = [[] for _ in queries]
        places = [
            p for p, query in enumerate(queries) if query.tenant in self._channels and not is_mostly_cjk(texts[p])
        ]
        if not places:
            return found
        vectors = await self._encoder.encode_async([texts[place] for place in places])  # (N, D)
        by_tenant: dict[str, list[int]] = {}
        for row, place in enumerate(places):
            by_tenant.setdefault(queries[place].tenant, []).append(row)
        for tenant, rows in by_tenant.items():
            index = self._channels[tenant].vectors
            hits = await self._on(self._semantic_thread, index.search, vectors[rows], self._settings.candidates)
            for row, nearest in zip(rows, hits, strict=True):
                found[places[row]] = nearest
        return found

    def _search_words(self, queries: Sequence[Query], texts: Sequence[str]) -> list[list[KeywordHit]]:
        k = self._settings.candidates
        return [
            channels.keywords.search(text, k) if (channels := self._channels.get(query.tenant)) else []
            for query, text in zip(queries, texts, strict=True)
        ]

    async def _carry_over(self, changes: Changes) -> None:
        channels = self._channels.get(changes.tenant)
        if channels is None:
            channels = _Channels(VectorIndex(self._encoder.dimension), KeywordIndex())
            self._channels[changes.tenant] = channels
        texts = [(passage.passage_id, _indexed_text(passage)) for passage in changes.passages]
        await self._on(self._keyword_thread, channels.keywords.apply, texts, changes.removed)
        await self._on(self._semantic_thread, channels.vectors.remove, changes.removed)
        for start in range(0, len(texts), ENCODE_BATCH):
            batch = texts[start : start + ENCODE_BATCH]
            vectors = await self._encoder.encode_async([text for _, text in batch])  # (N, D)
            await self._on(self._semantic_thread, channels.vectors.upsert, [id_ for id_, _ in batch], vectors)

    async def _on(self, thread: ThreadPoolExecutor, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(thread, partial(function, *args, **kwargs))


def _indexed_text(passage: Passage) -> str:
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


def _cut(text: str) -> str:
    """Return the head and the tail of a text that is too long for a question: what is asked stands in one of them."""
    half, text = MAX_QUERY_CHARS // 2, " ".join(text.split())
    return text if len(text) <= MAX_QUERY_CHARS else f"{text[:half]}\n{text[-half:]}"
