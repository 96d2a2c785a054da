"""Where a request goes next."""

from __future__ import annotations

import pytest

from schemas.envelope import Origin, Reply, RoutedRequest
from schemas.intent import IntentResult
from schemas.request import GenerationRequest, Retrieval, Strategy
from schemas.retrieval import Passage, RetrievalResult
from schemas.worker import Pool, RouteStamp
from workers.path import next_pool, next_topic, partition_key

QUESTION = IntentResult(intent="return_refund", confidence=0.9, needs_retrieval=True)
GREETING = IntentResult(intent="greeting", confidence=0.9, needs_retrieval=False)
FOUND = RetrievalResult(passages=(Passage(text="30 days"),))


def routed(
    request: GenerationRequest | None = None,
    intent: IntentResult | None = None,
    retrieval: RetrievalResult | None = None,
) -> RoutedRequest:
    return RoutedRequest(
        request_id="r-1",
        request=request or GenerationRequest(prompt="hello"),
        reply=Reply(topic="gea.tokens", partition=0),
        origin=Origin(partition=0, offset=0),
        seed=1,
        received_ms=0,
        deadline_ms=1,
        route=RouteStamp(intent="blue", retrieval="green", generation="blue"),
        intent=intent,
        retrieval=retrieval,
    )


@pytest.mark.parametrize(
    ("request_", "intent", "retrieval", "expected"),
    [
        (GenerationRequest(prompt="x"), None, None, Pool.INTENT),
        (GenerationRequest(prompt="x"), QUESTION, None, Pool.RETRIEVAL),
        (GenerationRequest(prompt="x"), QUESTION, FOUND, Pool.GENERATION),
        (GenerationRequest(prompt="x"), GREETING, None, Pool.GENERATION),
        (GenerationRequest(prompt="x", retrieval=Retrieval.OFF), QUESTION, None, Pool.GENERATION),
        (GenerationRequest(prompt="x", retrieval=Retrieval.ON), GREETING, None, Pool.RETRIEVAL),
        (GenerationRequest(prompt="x", passages=(Passage(text="y"),)), QUESTION, None, Pool.GENERATION),
        (GenerationRequest(prompt="x", passages=(Passage(text="y"),)), None, None, Pool.INTENT),
        (GenerationRequest(prompt="x", strategy=Strategy.DIALOGUE), None, None, Pool.GENERATION),
        (GenerationRequest(prompt="x", strategy=Strategy.CONTINUATION), None, None, Pool.GENERATION),
        (GenerationRequest(prompt="x", strategy=Strategy.DIALOGUE, retrieval=Retrieval.ON), None, None, Pool.RETRIEVAL),
        (GenerationRequest(prompt="x", strategy=Strategy.TEMPLATE), None, None, Pool.INTENT),
        (GenerationRequest(prompt="x", strategy=Strategy.TEMPLATE), QUESTION, None, Pool.GENERATION),
        (GenerationRequest(prompt="x", strategy=Strategy.KNOWLEDGE), None, None, Pool.RETRIEVAL),
        (GenerationRequest(prompt="x", strategy=Strategy.KNOWLEDGE), GREETING, None, Pool.RETRIEVAL),
        (GenerationRequest(prompt="x", strategy=Strategy.KNOWLEDGE), None, FOUND, Pool.GENERATION),
        (
            GenerationRequest(prompt="x", strategy=Strategy.DIALOGUE, retrieval=Retrieval.OFF),
            None,
            None,
            Pool.GENERATION,
        ),
        (
            GenerationRequest(prompt="x", strategy=Strategy.KNOWLEDGE, retrieval=Retrieval.ON),
            None,
            None,
            Pool.RETRIEVAL,
        ),
        (
            GenerationRequest(prompt="x", strategy=Strategy.KNOWLEDGE, passages=(Passage(text="y"),)),
            None,
            None,
            Pool.GENERATION,
        ),
    ],
)
def test_stages_are_skipped_where_their_result_is_there_or_not_wanted(
    request_: GenerationRequest,
    intent: IntentResult | None,
    retrieval: RetrievalResult | None,
    expected: Pool,
) -> None:
    assert next_pool(routed(request_, intent, retrieval)) is expected


def test_topic_is_that_of_the_chosen_colour() -> None:
    assert next_topic(routed()) == "gea.intent.blue"
    assert next_topic(routed(intent=QUESTION)) == "gea.retrieval.green"


def test_turns_of_a_session_share_their_key() -> None:
    assert partition_key(routed(GenerationRequest(prompt="x", session_id="s-1"))) == b"s-1"
    assert partition_key(routed()) == b"r-1"
