from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from schemas.codec import pack
from schemas.document import Document
from schemas.envelope import Origin, Reply, RoutedRequest
from schemas.errors import BrokerUnavailableError, ConfigError, InternalError
from schemas.intent import IntentResult
from schemas.request import GenerationRequest, Retrieval
from schemas.retrieval import Passage, RetrievalResult
from schemas.worker import Pool
from streams.broker import TopicSpec
from streams.memory import MemoryBroker
from tests.workers.tiny_encoder import write_tiny_encoder
from workers.retrieval.ranking import RankingSettings
from workers.retrieval.stage import RetrievalStage

TOPIC = "documents"
# The random weights of the tiny encoder know no meaning: words decide.
RANKING = RankingSettings(min_cosine=2.0, min_coverage=0.3)


class Shop:
    """A broker with a topic of documents, and stages that are stopped at the end."""

    def __init__(self, encoder_folder: Path) -> None:
        self.broker = MemoryBroker()
        self.encoder_folder = encoder_folder
        self.stages: list[RetrievalStage] = []

    async def put(self, document_id: str, text: str, tenant: str = "default") -> None:
        await self.write(document_id, pack(Document(document_id=document_id, text=text, tenant=tenant)))

    async def write(self, key: str | None, value: bytes | None, headers: tuple[tuple[str, bytes], ...] = ()) -> None:
        producer = await self.broker.producer()
        await producer.send(TOPIC, value, key=None if key is None else key.encode(), headers=headers)

    async def stage(self) -> RetrievalStage:
        stage = RetrievalStage(self.broker, topic=TOPIC, encoder_folder=self.encoder_folder, ranking=RANKING)
        self.stages.append(stage)
        await stage.start()
        return stage


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Shop]:
    made = Shop(write_tiny_encoder(tmp_path))
    await made.broker.create_topics([TopicSpec(name=TOPIC, num_partitions=3)])
    yield made
    for stage in made.stages:
        await stage.stop()


def routed(prompt: str = "return shoes", tenant: str = "default", **fields: object) -> RoutedRequest:
    request = GenerationRequest(prompt=prompt, **fields)  # type: ignore[arg-type]
    return RoutedRequest(
        request_id="r",
        request=request,
        reply=Reply(topic="t", partition=0),
        origin=Origin(partition=0, offset=0),
        seed=1,
        received_ms=0,
        deadline_ms=1,
        tenant=tenant,
    )


async def result(stage: RetrievalStage, request: RoutedRequest) -> RetrievalResult:
    [answered] = await stage.annotate([request])
    assert answered.retrieval is not None
    return answered.retrieval


async def ids(stage: RetrievalStage, request: RoutedRequest) -> list[str]:
    return [passage.passage_id for passage in (await result(stage, request)).passages]


async def test_empty_topic_is_ready_at_once_and_finds_nothing(shop: Shop) -> None:
    found = await result(await shop.stage(), routed())
    assert (found.passages, found.index_version, found.failure) == ((), 0, "")


async def test_missing_topic_stops_the_start(shop: Shop) -> None:
    stage = RetrievalStage(shop.broker, topic="elsewhere", encoder_folder=shop.encoder_folder)
    with pytest.raises(ConfigError, match="elsewhere"):
        await stage.start()


async def test_what_stood_in_the_topic_at_start_is_found(shop: Shop) -> None:
    for number in range(20):
        await shop.put(f"d{number}", f"filler number {number}")
    await shop.put("old", "tents")
    await shop.put("shoes", "return shoes")
    await shop.write("old", None)
    stage = await shop.stage()
    assert await ids(stage, routed()) == ["shoes"]
    assert await ids(stage, routed("tents")) == []
    assert stage.index_version == 23


async def test_upserts_and_deletes_are_followed(shop: Shop) -> None:
    await shop.put("shoes", "return shoes")
    stage = await shop.stage()
    await shop.put("tent", "a tent for two")
    await stage.until_index_version(2)
    assert await ids(stage, routed("tent")) == ["tent"]
    await shop.put("tent", "a stove")
    await shop.write("shoes", None)
    await stage.until_index_version(4)
    assert await ids(stage, routed("tent")) == [] == await ids(stage, routed("shoes"))
    assert await ids(stage, routed("stove")) == ["tent"]


async def test_tenants_find_their_own_passages_only(shop: Shop) -> None:
    await shop.put("mine", "return shoes", tenant="one")
    await shop.put("theirs", "return shoes", tenant="two")
    stage = await shop.stage()
    answered = await stage.annotate([routed(tenant="one"), routed(tenant="two"), routed(tenant="three")])
    found = [[p.passage_id for p in each.retrieval.passages] for each in answered if each.retrieval]
    assert found == [["mine"], ["theirs"], []]


@pytest.mark.parametrize(
    ("key", "value", "headers"),
    [
        ("bad", b"\xc1 no msgpack", ()),
        ("bad", pack(Document(document_id="bad", text="  ")), ()),
        ("bad", pack(Document(document_id="other", text="shoes")), ()),
        (None, pack(Document(document_id="bad", text="shoes")), ()),
        ("bad", pack(Document(document_id="bad", text="shoes")), (("ce_type", b"gea.document.v9"),)),
    ],
)
async def test_broken_document_is_counted_and_skipped(
    shop: Shop, key: str | None, value: bytes, headers: tuple[tuple[str, bytes], ...]
) -> None:
    await shop.write(key, value, headers)
    stage = await shop.stage()
    await shop.write(key, value, headers)
    await shop.put("good", "shoes")
    await stage.until_index_version(1)
    assert await ids(stage, routed("shoes")) == ["good"]
    await shop.put("again", "tent")
    await stage.until_index_version(2)
    assert stage.num_broken_documents == 2


async def test_request_may_ask_for_none_or_bring_its_own(shop: Shop) -> None:
    await shop.put("shoes", "return shoes")
    stage = await shop.stage()
    assert await ids(stage, routed(retrieval=Retrieval.OFF)) == []
    own = (Passage(text="mine"), Passage(text="named", passage_id="x"))
    assert (await result(stage, routed(passages=own))).passages == (
        Passage(text="mine", passage_id="client-1"),
        Passage(text="named", passage_id="x"),
    )
    assert await ids(stage, routed(passages=())) == []


async def test_intent_decides_unless_the_request_does(shop: Shop) -> None:
    await shop.put("shoes", "return shoes")
    stage = await shop.stage()
    small_talk = IntentResult(intent="greeting", confidence=1.0, needs_retrieval=False)

    def with_intent(request: RoutedRequest) -> RoutedRequest:
        return RoutedRequest(
            **{**{name: getattr(request, name) for name in request.__struct_fields__}, "intent": small_talk}
        )

    assert await ids(stage, with_intent(routed())) == []
    assert await ids(stage, with_intent(routed(retrieval=Retrieval.ON))) == ["shoes"]


async def test_number_of_passages_is_the_requests_or_four(shop: Shop) -> None:
    for number in range(9):
        await shop.put(f"d{number}", "return shoes")
    stage = await shop.stage()
    assert len(await ids(stage, routed())) == 4
    assert len(await ids(stage, routed(num_passages=7))) == 7


async def test_batch_keeps_its_order(shop: Shop) -> None:
    await shop.put("shoes", "return shoes")
    await shop.put("tent", "a tent")
    stage = await shop.stage()
    answered = await stage.annotate([routed("tent"), routed(retrieval=Retrieval.OFF), routed("shoes")])
    assert [[p.passage_id for p in each.retrieval.passages] for each in answered if each.retrieval] == [
        ["tent"],
        [],
        ["shoes"],
    ]


async def test_following_goes_on_after_the_broker_was_away(shop: Shop) -> None:
    await shop.put("shoes", "return shoes")
    stage = await shop.stage()
    shop.broker.down = True
    assert await ids(stage, routed()) == ["shoes"]
    shop.broker.down = False
    await shop.put("tent", "a tent")
    await stage.until_index_version(2)
    assert await ids(stage, routed("tent")) == ["tent"]


async def test_given_up_request_goes_on_with_what_it_brought(shop: Shop) -> None:
    stage = RetrievalStage(shop.broker, topic=TOPIC, encoder_folder=shop.encoder_folder)
    given_up = stage.give_up(routed(passages=(Passage(text="mine"),)), BrokerUnavailableError("away"))
    assert given_up.retrieval == RetrievalResult(
        passages=(Passage(text="mine", passage_id="client-1"),), failure="broker_unavailable"
    )


async def test_stage_says_what_it_is_and_refuses_work_when_stopped(shop: Shop) -> None:
    stage = await shop.stage()
    assert stage.pool is Pool.RETRIEVAL
    await stage.annotate([routed()])
    snapshot = stage.snapshot()
    assert "@" in snapshot.model and snapshot.last_step_ms > 0 and snapshot.num_queued == 0
    await stage.stop()
    await stage.stop()
    with pytest.raises(InternalError):
        await stage.annotate([routed()])
