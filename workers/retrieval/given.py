"""The passages that a request brought. Pure; loads nothing of retrieval itself, because generation asks too."""

from __future__ import annotations

import msgspec

from schemas.request import GenerationRequest
from schemas.retrieval import Passage


def given_passages(request: GenerationRequest) -> tuple[Passage, ...]:
    """Return the passages that a request brought, as they are; those without an id become `client-1`, …"""
    return tuple(
        passage if passage.passage_id else msgspec.structs.replace(passage, passage_id=f"client-{number}")
        for number, passage in enumerate(request.passages or (), start=1)
    )
