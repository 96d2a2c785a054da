"""The keyword channel: an inverted index of one tenant's passages, ranked by BM25, in memory.

Tantivy keeps it, because passages come and go at any time: an upsert is visible within 10 ms at 50,000 passages,
where an index that is built in one piece (bm25s) takes 2 s for each change and plain Python 40 ms for each question.
An index per tenant keeps term statistics apart: scores tell nothing about other tenants' texts. Not thread-safe: one
thread owns an index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tantivy

from workers.retrieval.terms import PAIR_MARK, terms

MAX_QUERY_TERMS = 64  # a question of a thousand words is searched by its rarest ones
_ID, _TERMS = "id", "terms"
# Room for one batch of changes; tantivy refuses less than 15 MB for a thread.
_WRITER_BYTES = 15_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KeywordHit:
    """A passage found by its words.

    `score` is BM25 (k1 1.2, b 0.75). `coverage` is the score over the weight of all words of the question, unknown
    ones included: about 1 where the passage has every word once, near 0 where it shares a common word only.
    """

    id: str
    score: float
    coverage: float


class KeywordIndex:
    """Texts under string ids, found by their terms."""

    def __init__(self) -> None:
        builder = tantivy.SchemaBuilder()
        builder.add_text_field(_ID, stored=True, tokenizer_name="raw", index_option="basic")
        builder.add_text_field(_TERMS, tokenizer_name="whitespace", index_option="freq")
        self._schema = builder.build()
        self._index = tantivy.Index(self._schema)

    def __len__(self) -> int:
        return self._index.searcher().num_docs

    def apply(self, upserts: Sequence[tuple[str, str]], removed: Sequence[str] = ()) -> None:
        """Put texts under ids, in the place of earlier ones, and drop the ids in `removed`; then all is visible."""
        if not upserts and not removed:
            return
        # A writer that is kept costs its threads and memory for every tenant, and its commits become slower.
        writer = self._index.writer(_WRITER_BYTES, 1)
        for id_ in (*removed, *(id_ for id_, _ in upserts)):
            writer.delete_documents_by_term(_ID, id_)
        for id_, text in upserts:
            writer.add_document(tantivy.Document(**{_ID: id_, _TERMS: " ".join(terms(text))}))
        writer.commit()
        writer.wait_merging_threads()
        self._index.reload()

    def search(self, text: str, k: int) -> list[KeywordHit]:
        """Return at most k passages that share a term with the text, best first; equal scores in order of the ids."""
        searcher = self._index.searcher()
        weights = {term: _idf(searcher, term) for term in terms(text)}
        # Pairs of characters are evidence on top: those at the seams of a question's words are in no passage.
        total = sum(weight for term, weight in weights.items() if not term.endswith(PAIR_MARK)) or math.inf
        rarest = sorted(weights, key=lambda term: (-weights[term], term))[:MAX_QUERY_TERMS]
        if k <= 0 or not rarest or not searcher.num_docs:
            return []
        query = tantivy.Query.boolean_query(
            [(tantivy.Occur.Should, tantivy.Query.term_query(self._schema, _TERMS, term)) for term in rarest]
        )
        hits = [
            KeywordHit(id=str(searcher.doc(address).get_first(_ID)), score=score, coverage=score / total)
            for score, address in searcher.search(query, k, count=False).hits
        ]
        return sorted(hits, key=lambda hit: (-hit.score, hit.id))


def _idf(searcher: tantivy.Searcher, term: str) -> float:
    """Return the term's weight, as Lucene and tantivy define it."""
    num_docs = searcher.num_docs
    frequency = min(searcher.doc_freq(_TERMS, term), num_docs)  # passages that were deleted count until a merge
    return math.log(1 + (num_docs - frequency + 0.5) / (frequency + 0.5))
