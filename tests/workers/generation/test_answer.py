from __future__ import annotations

from schemas.envelope import Origin, Reply, RoutedRequest
from schemas.request import GenerationRequest
from schemas.retrieval import Passage, RetrievalResult
from workers.generation.answer import passages_of


def routed(passages: tuple[Passage, ...] | None, found: tuple[Passage, ...] = ()) -> RoutedRequest:
    return RoutedRequest(
        request_id="r",
        request=GenerationRequest(prompt="x", passages=passages),
        reply=Reply(topic="t", partition=0),
        origin=Origin(partition=0, offset=0),
        seed=1,
        received_ms=0,
        deadline_ms=1,
        retrieval=RetrievalResult(passages=found),
    )


def test_passages_that_a_client_brings_can_be_cited_without_an_id_of_theirs() -> None:
    brought = (Passage(text="a"), Passage(text="b", passage_id="own"), Passage(text="c"))
    assert [p.passage_id for p in passages_of(routed(brought))] == ["client-1", "own", "client-3"]


def test_passages_are_those_of_the_client_else_those_that_were_found() -> None:
    found = (Passage(text="f", passage_id="found"),)
    assert passages_of(routed(None, found)) == found
    assert passages_of(routed((), found)) == ()
