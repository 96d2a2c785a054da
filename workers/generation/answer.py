"""What one run has produced so far, and the end record that sums it up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from schemas.envelope import RoutedRequest
from schemas.errors import GeaError
from schemas.retrieval import Passage
from schemas.tokens import (
    Choice,
    Citation,
    End,
    EndStatus,
    Explanation,
    FinishReason,
    Timings,
)
from streams.claims import StreamView
from workers.generation.engine import EngineIdentity, Finished, TokenChunk
from workers.generation.strategies import Plan
from workers.outbox import early_end
from workers.retrieval.given import given_passages


@dataclass(slots=True)
class Draft:
    """An answer in the making, all of it: what an earlier run has written (`begun`) and what this one adds.

    Times are Unix milliseconds; `first_token_ms` may be that of an earlier run.
    """

    routed: RoutedRequest
    plan: Plan
    reason: str = ""
    begun: StreamView = field(default_factory=StreamView)
    texts: dict[int, list[str]] = field(default_factory=dict)
    first_token_ms: int = 0
    last_token_ms: int = 0
    gaps_ms: list[int] = field(default_factory=list)
    num_tokens: int = 0
    finished: Finished | None = None

    @property
    def max_tokens(self) -> int:
        """Return how many tokens all choices together may have."""
        return self.plan.sampling.max_tokens * self.plan.sampling.n

    def add(self, chunk: TokenChunk) -> None:
        """Take one more chunk of the run."""
        self.num_tokens += len(chunk.token_ids)
        self.texts.setdefault(chunk.index, []).append(chunk.text)

    def publish(self, now_ms: int) -> None:
        """Note the time of a chunk that readers did not have."""
        if self.last_token_ms:
            self.gaps_ms.append(max(0, now_ms - self.last_token_ms))  # a clock may be set back
        self.first_token_ms = self.first_token_ms or now_ms
        self.last_token_ms = now_ms

    @property
    def is_aborted(self) -> bool:
        """Return whether the run was stopped before its end."""
        return self.finished is not None and _status(self.finished) is EndStatus.CANCELLED

    def text(self, index: int = 0) -> str:
        """Return the text of a choice as readers have it: a run that is stopped early has not repeated all of it."""
        text = "".join(self.texts.get(index, ()))
        begun = self.begun.text(index)
        return text if len(text) > len(begun) else begun

    def citations(self) -> tuple[Citation, ...]:
        """Return which passage supports which sentence, over all choices."""
        return tuple(
            citation
            for index in sorted({*self.begun.indexes, *self.texts})
            for citation in self.plan.cite(self.text(index), index=index)
        )


def end_of(draft: Draft, identity: EngineIdentity, now_ms: int) -> End:
    """Return the end of a run that decoded to its end; the writer fills in counts and hashes."""
    finished = draft.finished
    assert finished is not None, "play() yields Finished last"
    routed = draft.routed
    reasons = {choice.index: choice.finish_reason for choice in finished.choices}
    return End(
        status=_status(finished),
        finish_reason=reasons.get(0, FinishReason.STOP),
        usage=finished.usage,
        timings=_timings(draft, finished, now_ms),
        citations=draft.citations(),
        strategy=draft.plan.strategy.value,
        strategy_reason=draft.reason,
        model=identity.model,
        engine=identity.engine,
        intent=routed.intent.intent if routed.intent else "",
        passage_ids=tuple(passage.passage_id for passage in passages_of(routed)),
        choices=tuple(
            Choice(index=index, finish_reason=reason, num_tokens=0, sha256="") for index, reason in reasons.items()
        ),
        explanation=_explanation(draft),
    )


def broken_end(routed: RoutedRequest, error: GeaError, now_ms: int) -> End:
    """Return the end of a run that `error` broke off: as cancelled if it is that, else as failed."""
    return msgspec.structs.replace(early_end(error), timings=Timings(total_ms=_since_receipt(routed, now_ms)))


def passages_of(routed: RoutedRequest) -> tuple[Passage, ...]:
    """Return the passages of a request: those that the client gave, else those that were found. All have an id."""
    if routed.request.passages is not None:
        return given_passages(routed.request)
    return routed.retrieval.passages if routed.retrieval else ()


def _status(finished: Finished) -> EndStatus:
    reasons = [choice.finish_reason for choice in finished.choices]
    if FinishReason.ABORT in reasons:
        return EndStatus.CANCELLED
    if FinishReason.LENGTH in reasons:
        return EndStatus.INCOMPLETE
    return EndStatus.COMPLETED


def _timings(draft: Draft, finished: Finished, now_ms: int) -> Timings:
    routed = draft.routed
    return Timings(
        queue_ms=finished.queue_ms,
        intent_ms=routed.intent.took_ms if routed.intent else 0.0,
        retrieval_ms=routed.retrieval.took_ms if routed.retrieval else 0.0,
        prefill_ms=finished.prefill_ms,
        ttft_ms=_since_receipt(routed, draft.first_token_ms),
        decode_ms=finished.decode_ms,
        total_ms=_since_receipt(routed, now_ms),
    )


def _since_receipt(routed: RoutedRequest, at_ms: int) -> float:
    """Return the milliseconds since the router's receipt: not below 0, though its clock may be ahead of ours."""
    return float(max(0, at_ms - routed.received_ms))


def _explanation(draft: Draft) -> Explanation | None:
    if not draft.routed.request.explain:
        return None
    return Explanation(intent=draft.routed.intent, retrieval=draft.routed.retrieval, prompt=draft.plan.prompt_text)
