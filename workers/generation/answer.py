"""What one run has produced so far, and the end record that sums it up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    Usage,
)
from workers.generation.engine import EngineIdentity, Finished, TokenChunk
from workers.generation.strategies import Plan
from workers.outbox import failure_of
from workers.retrieval.given import given_passages


@dataclass(slots=True)
class Draft:
    """An answer in the making. Times are Unix milliseconds."""

    routed: RoutedRequest
    plan: Plan
    reason: str = ""
    texts: dict[int, list[str]] = field(default_factory=dict)
    first_token_ms: int = 0
    last_token_ms: int = 0
    gaps_ms: list[int] = field(default_factory=list)
    finished: Finished | None = None

    def add(self, chunk: TokenChunk, now_ms: int) -> None:
        """Take one more chunk."""
        if self.first_token_ms:
            self.gaps_ms.append(now_ms - self.last_token_ms)
        self.first_token_ms = self.first_token_ms or now_ms
        self.last_token_ms = now_ms
        self.texts.setdefault(chunk.index, []).append(chunk.text)

    def text(self, index: int = 0) -> str:
        """Return the text of a choice."""
        return "".join(self.texts.get(index, ()))

    def citations(self) -> tuple[Citation, ...]:
        """Return which passage supports which sentence, over all choices."""
        return tuple(
            citation for index in sorted(self.texts) for citation in self.plan.cite(self.text(index), index=index)
        )


def end_of(draft: Draft, identity: EngineIdentity, now_ms: int) -> End:
    """Return the end of a run that decoded to its end; the writer fills in counts and hashes."""
    finished = draft.finished
    assert finished is not None, "play() yields Finished last"
    routed = draft.routed
    reasons = {choice.index: choice.finish_reason for choice in finished.choices}
    return End(
        status=_status(list(reasons.values())),
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


def failed_end(routed: RoutedRequest, error: GeaError, now_ms: int) -> End:
    """Return the end of a run that `error` broke off."""
    return End(
        status=EndStatus.FAILED,
        finish_reason=FinishReason.ERROR,
        usage=Usage(),
        timings=Timings(total_ms=float(now_ms - routed.received_ms)),
        failure=failure_of(error),
    )


def passages_of(routed: RoutedRequest) -> tuple[Passage, ...]:
    """Return the passages of a request: those that the client gave, else those that were found. All have an id."""
    if routed.request.passages is not None:
        return given_passages(routed.request)
    return routed.retrieval.passages if routed.retrieval else ()


def _status(reasons: list[FinishReason]) -> EndStatus:
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
        ttft_ms=float(max(0, draft.first_token_ms - routed.received_ms)),
        decode_ms=finished.decode_ms,
        total_ms=float(now_ms - routed.received_ms),
    )


def _explanation(draft: Draft) -> Explanation | None:
    if not draft.routed.request.explain:
        return None
    return Explanation(intent=draft.routed.intent, retrieval=draft.routed.retrieval, prompt=draft.plan.prompt_text)
