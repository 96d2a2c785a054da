"""What lies outside its range is refused wherever it is read."""

from __future__ import annotations

import msgspec
import pytest

from schemas.envelope import Origin, Reply, RoutedRequest
from schemas.errors import InvalidRequestError
from schemas.intent import IntentResult
from schemas.ranges import check_routed, check_status
from schemas.request import GenerationRequest
from schemas.retrieval import Passage, RetrievalResult
from schemas.worker import Pool, RouteStamp, WorkerState, WorkerStatus

ROUTED = RoutedRequest(
    request_id="r-1",
    request=GenerationRequest(prompt="x"),
    reply=Reply(topic="gea.tokens", partition=1, start=5),
    origin=Origin(partition=0, offset=0),
    seed=2**63 - 1,
    received_ms=1,
    deadline_ms=2,
    intent=IntentResult(intent="i", confidence=0.5, alternatives={"j": 0.2}),
    retrieval=RetrievalResult(passages=(Passage(text="t", score=-1.0),)),
)
STATUS = WorkerStatus(
    worker_id="w-1", pool=Pool.GENERATION, colour="blue", state=WorkerState.READY, updated_ms=1, partitions=(0, 63)
)


def test_what_our_workers_write_passes() -> None:
    check_routed(ROUTED)
    check_status(STATUS)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"tenant": "a b"}, "tenant"),
        ({"request": GenerationRequest(prompt="")}, "prompt"),
        ({"request": GenerationRequest(prompt="x", n=1_000_000)}, "n"),
        ({"request": GenerationRequest(prompt="x", temperature=float("nan"))}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"hop": -1}, "hop"),
        ({"attempt": 2**40}, "attempt"),
        ({"deadline_ms": -5}, "deadline_ms"),
        ({"received_ms": 2**60}, "received_ms"),
        ({"reply": Reply(topic="gea.tokens", partition=-1)}, "reply.partition"),
        ({"reply": Reply(topic="gea.tokens", partition=0, start=-1)}, "reply.start"),
        ({"origin": Origin(partition=0, offset=-1)}, "origin.offset"),
        ({"route": RouteStamp(version=-1)}, "route.version"),
        ({"traceparent": "x" * 513}, "traceparent"),
        ({"intent": IntentResult(intent="x" * 513, confidence=0.5)}, "intent.intent"),
        ({"intent": IntentResult(intent="x", confidence=float("inf"))}, "intent.confidence"),
        ({"intent": IntentResult(intent="x", confidence=0.5, alternatives={"a": -1.0})}, "intent.alternatives"),
        ({"retrieval": RetrievalResult(passages=(Passage(text="t", keyword_rank=-1),))}, "passages"),
        ({"retrieval": RetrievalResult(passages=(Passage(text="t"),) * 21)}, "retrieval.passages"),
        ({"retrieval": RetrievalResult(took_ms=float("nan"))}, "retrieval.took_ms"),
    ],
)
def test_a_routed_request_out_of_range_is_refused_by_its_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        check_routed(msgspec.structs.replace(ROUTED, **changes))
    assert refusal.value.field == field


@pytest.mark.parametrize(
    "changes",
    [
        {"lag": 2**63 - 1},
        {"tokens_in_flight": -1},
        {"num_queued": 2**50},
        {"updated_ms": -1},
        {"request_ms": float("nan")},
        {"step_ms": float("inf")},
        {"error_rate": -0.5},
        {"kv_usage": float("nan")},
        {"partitions": (-1,)},
        {"partitions": (2**31,)},
        {"partitions": tuple(range(70_000))},
        {"num_partitions": -1},
        {"worker_id": "x" * 1_000},
    ],
)
def test_a_status_out_of_range_is_refused_by_its_field(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        check_status(msgspec.structs.replace(STATUS, **changes))
    assert refusal.value.field in changes
