from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from schemas.envelope import Origin, Reply, RoutedRequest
from schemas.errors import ConfigError, EngineUnavailableError
from schemas.request import GenerationRequest, Retrieval
from tests.workers.intent.conftest import WordEncoder
from workers.intent.classifier import IntentClassifier
from workers.intent.head import Head
from workers.intent.stage import IntentStage, load_needs_retrieval


@pytest.fixture
async def stage(encoder: WordEncoder, head: Head) -> AsyncIterator[IntentStage]:
    stage = IntentStage(
        Path("unused"), intents={"greeting": False, "returns": True}, classifier=IntentClassifier(encoder, head)
    )
    await stage.start()
    yield stage
    await stage.stop()
    await stage.stop()


def routed(**fields: object) -> RoutedRequest:
    request = GenerationRequest(**({"prompt": "hello there"} | fields))  # type: ignore[arg-type]
    return RoutedRequest(
        request_id="r",
        request=request,
        reply=Reply(topic="t", partition=0),
        origin=Origin(partition=0, offset=0),
        seed=1,
        received_ms=0,
        deadline_ms=1,
    )


async def test_requests_keep_their_order_and_get_their_intent(stage: IntentStage) -> None:
    found = await stage.annotate([routed(), routed(prompt="return the boots please"), routed(intent="custom")])
    intents = [item.intent for item in found if item.intent]
    assert [intent.intent for intent in intents] == ["greeting", "returns", "custom"]
    assert [intent.needs_retrieval for intent in intents] == [False, True, True]
    assert (intents[2].confidence, intents[2].model) == (1.0, "request")
    assert intents[0].model.startswith("intent-head@") and len(intents[0].alternatives) <= 3
    assert stage.snapshot().last_step_ms > 0 and stage.snapshot().num_queued == 0


async def test_retrieval_on_and_off_have_the_last_word(stage: IntentStage) -> None:
    found = await stage.annotate(
        [routed(retrieval=Retrieval.ON), routed(prompt="return the boots please", retrieval=Retrieval.OFF)]
    )
    assert [item.intent.needs_retrieval for item in found if item.intent] == [True, False]


async def test_an_empty_batch_stays_empty(stage: IntentStage) -> None:
    assert list(await stage.annotate([])) == []


def test_giving_up_says_why_and_asks_for_retrieval() -> None:
    given_up = IntentStage(Path("unused")).give_up(routed(prompt="怎么退货"), EngineUnavailableError("gone"))
    assert given_up.intent is not None
    assert (given_up.intent.intent, given_up.intent.failure) == ("out_of_scope", "engine_unavailable")
    assert given_up.intent.needs_retrieval and given_up.intent.language == "zh"


def test_intent_descriptions_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "intents.yaml"
    path.write_text("greeting: {needs_retrieval: false}\n", encoding="utf-8")
    assert load_needs_retrieval(path) == {"greeting": False}
    path.write_text("greeting: {needs_retrieval: 3}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"greeting.needs_retrieval"):
        load_needs_retrieval(path)
