"""What retrieval hands on: passages in their fused order, with the place that each channel gave them."""

from __future__ import annotations

import msgspec


class Passage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of a document. A client may send its own with only `text`.

    `score` is the fused score (higher is better); ranks count from 1, 0 means "not found by that channel".
    """

    text: str
    passage_id: str = ""
    document_id: str = ""
    title: str = ""
    language: str = ""
    score: float = 0.0
    semantic_rank: int = 0
    keyword_rank: int = 0
    semantic_score: float = 0.0
    keyword_score: float = 0.0


class RetrievalResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fused hits, best first. `index_version` counts the document records that the index had applied."""

    passages: tuple[Passage, ...] = ()
    index_version: int = 0
    took_ms: float = 0.0
    failure: str = ""
    """Why the look-up was given up (an error code); the request goes on without passages."""
