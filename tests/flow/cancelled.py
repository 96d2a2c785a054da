"""A request that is cancelled while it is generated: how a worker is told, and what its stream must show."""

from __future__ import annotations

import hashlib

from schemas.tokens import End, EndStatus, FinishReason, Kind
from schemas.worker import Pool
from tests.flow.continued import GENERATION, SCRIPT
from tests.flow.harness import Installation
from tests.flow.records import all_committed, view_of


def cancel(gea: Installation, request_id: str = "r-1", tenant: str = "default", *, name: str = "generation-1") -> None:
    """Tell one worker."""
    gea.workers[name].cancellations.cancel(request_id, tenant, "no longer wanted")


def text_of(num_tokens: int) -> str:
    """Return what readers may have of that many tokens."""
    whole = SCRIPT.encode()[:num_tokens].decode(errors="ignore")
    for length in range(len("<stop>"), 0, -1):
        if whole.endswith("<stop>"[:length]):
            return whole[:-length]
    return whole


async def check_cancelled(gea: Installation, end: End | None, request_id: str = "r-1") -> None:
    """The stream has one end, which speaks of what stands in the log."""
    assert end is not None
    assert end.failure is not None
    assert (end.status, end.finish_reason, end.failure.code) == (EndStatus.CANCELLED, FinishReason.ABORT, "cancelled")
    records = gea.tokens_of(request_id)
    assert [record.kind for record in records].count(Kind.END) == 1
    assert Kind.RESET not in [record.kind for record in records]
    assert end.usage.completion_tokens == sum(len(record.token_ids) for record in records)
    assert end.sha256 in ("", hashlib.sha256(view_of(gea, request_id).text().encode()).hexdigest())
    await all_committed(gea, GENERATION, Pool.GENERATION)
