from __future__ import annotations

import msgspec

from schemas.envelope import Origin, Reply, RoutedRequest
from schemas.errors import InternalError
from schemas.request import GenerationRequest, Strategy
from schemas.retrieval import Passage, RetrievalResult
from schemas.tokens import FinishReason, Usage
from workers.generation.answer import Draft, broken_end, end_of, passages_of
from workers.generation.engine.fake import FakeEngine
from workers.generation.engine.protocol import ChoiceEnd, Finished, SamplingParams
from workers.generation.strategies import Plan


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


def test_no_time_is_below_zero_though_the_routers_clock_is_ahead_and_ours_is_set_back() -> None:
    ahead = msgspec.structs.replace(routed(None), received_ms=10_000)
    draft = Draft(routed=ahead, plan=Plan(strategy=Strategy.DIALOGUE, sampling=SamplingParams()))
    for now_ms in (9_000, 9_500, 9_400):
        draft.publish(now_ms)
    end = ChoiceEnd(index=0, finish_reason=FinishReason.STOP, num_tokens=1, stop_reason=None)
    draft.finished = Finished(choices=(end,), usage=Usage())
    timings = end_of(draft, FakeEngine().identity, 9_400).timings
    assert (timings.ttft_ms, timings.total_ms, draft.gaps_ms) == (0.0, 0.0, [500, 0])
    assert broken_end(ahead, InternalError("x"), 9_400).timings.total_ms == 0.0
