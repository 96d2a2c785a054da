"""A request that is put aside until its retry is due."""

from __future__ import annotations

import msgspec
import pytest

from schemas.codec import unpack
from schemas.envelope import ATTEMPT, CE_TYPE, HOP, REQUEST_ID, ROUTED_TYPE, TENANT, RoutedRequest, header
from schemas.errors import InvalidRequestError
from schemas.request import GenerationRequest
from schemas.retrieval import Passage
from streams.memory import MemoryBroker
from streams.retry import RetryOrder, read_order, without_order
from streams.topics import RETRY_LONG, topic_specs
from tests.workers.routed import ROUTED
from workers.failure_policy import Decision, Verdict
from workers.outbox import Outbox

TARGET = "gea.generation.blue"
AGAIN = msgspec.structs.replace(ROUTED, tenant="acme", hop=2, attempt=1)
DECISION = Decision(verdict=Verdict.RETRY, topic=RETRY_LONG, not_before_ms=1_700_000_060_000)


async def retried(routed: RoutedRequest) -> MemoryBroker:
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(2))
    outbox = Outbox(await broker.producer(), worker_id="w-1", num_token_partitions=2)
    await outbox.retry(routed, DECISION, TARGET)
    return broker


async def test_a_retry_says_where_it_returns_to_and_when_and_counts_itself() -> None:
    (record,) = (await retried(AGAIN)).records(RETRY_LONG)
    assert record.key == b"r-1"
    assert read_order(record.headers) == RetryOrder(target=TARGET, not_before_ms=DECISION.not_before_ms)
    again = unpack(record.value, RoutedRequest)
    assert (again.attempt, again.hop, again.request, again.seed) == (2, 3, AGAIN.request, 7)
    named = {name: header(record.headers, name) for name in (ATTEMPT, HOP, REQUEST_ID, TENANT, CE_TYPE)}
    assert named == {ATTEMPT: "2", HOP: "3", REQUEST_ID: "r-1", TENANT: "acme", CE_TYPE: ROUTED_TYPE}


async def test_a_request_too_large_for_a_record_is_refused() -> None:
    huge = GenerationRequest(prompt="x", passages=(Passage(text="x" * 2_000_000),))
    with pytest.raises(InvalidRequestError):
        await retried(msgspec.structs.replace(AGAIN, request=huge))


def test_the_order_is_left_out_of_what_the_target_reads() -> None:
    order = RetryOrder(target=TARGET, not_before_ms=5)
    assert without_order((("a", b"1"), *order.headers(), ("b", b"2"))) == (("a", b"1"), ("b", b"2"))


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ((), "target"),
        ((("target", b""), ("not_before_ms", b"1")), "target"),
        ((("target", b"\xff"), ("not_before_ms", b"1")), "target"),
        ((("target", b"t"),), "not_before_ms"),
        ((("target", b"t"), ("not_before_ms", b"soon")), "not_before_ms"),
        ((("target", b"t"), ("not_before_ms", b"-1")), "not_before_ms"),
        ((("target", b"t"), ("not_before_ms", b"9" * 30)), "not_before_ms"),
    ],
)
def test_an_order_that_is_none_names_its_header(headers: tuple[tuple[str, bytes], ...], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read_order(headers)
    assert refusal.value.field == field
