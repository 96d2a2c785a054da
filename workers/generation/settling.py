"""What becomes of a request whose run was broken off: handed on as a new record, or put aside and ended.

Knows records, the policy and the outbox, no engine. The invariant: the request ends once, or a record with a higher hop
stands for it before its own is acknowledged.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import structlog

from schemas.envelope import RoutedRequest
from schemas.errors import BrokerUnavailableError, GeaError, InvalidRequestError
from streams.clock import now_ms
from streams.delivery import Delivery
from workers.failure_policy import Decision, Verdict, decide
from workers.generation.run import Run
from workers.handler import epoch_of
from workers.outbox import Outbox

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOn:
    """A request that a new record takes on: at once, or when the retry of `decision` is due."""

    error: GeaError
    decision: Decision | None = None


async def settle(
    outbox: Outbox, delivery: Delivery, run: Run, routed: RoutedRequest, error: GeaError, *, max_attempts: int
) -> HandOn | None:
    """Do with a request that failed what the policy says; return how it goes on if it has not ended.

    One that is cancelled ends as that, whatever the error.
    """
    decision = decide(
        error,
        attempt=routed.attempt,
        now_ms=now_ms(),
        deadline_ms=routed.deadline_ms,
        jitter=random.uniform(-1, 1),
        max_attempts=max_attempts,
    )
    if decision.verdict in (Verdict.RETRY, Verdict.DEAD_LETTER):
        delivery.fail()
    if decision.verdict is Verdict.RETRY and not run.is_cancelled:
        return HandOn(error=error, decision=decision)
    if decision.verdict is Verdict.DEAD_LETTER and not run.is_cancelled:
        await outbox.dead_letter(delivery.record, error)
    try:
        await run.fail(error)
    except InvalidRequestError as refusal:  # its place takes no record at all: nobody can be told
        await outbox.dead_letter(delivery.record, refusal)
    except BrokerUnavailableError as away:
        return HandOn(error=away)
    return None


async def hand_on(outbox: Outbox, delivery: Delivery, routed: RoutedRequest, to: HandOn, topic: str) -> None:
    """Produce the request again with a higher hop: its next run outranks this one, and goes on with its text."""
    error, again = to.error, msgspec.structs.replace(routed, hop=routed.hop + 1)
    log.warning("request_handed_on", code=error.code, reason=error.message, hop=again.hop)
    try:
        if to.decision is not None:
            await outbox.retry(routed, to.decision, topic)
        else:
            await outbox.forward(again, topic)
    except InvalidRequestError as refusal:  # it does not fit into a record any more
        await outbox.end(again.reply, again.request_id, refusal, epoch=epoch_of(delivery, again.hop))
