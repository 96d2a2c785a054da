"""Where a request goes next, from what is known about it. Pure; the same function serves every pool."""

from __future__ import annotations

from schemas.envelope import RoutedRequest
from schemas.request import GenerationRequest, Retrieval
from schemas.worker import Pool
from streams.topics import pool_topic


def next_pool(routed: RoutedRequest) -> Pool:
    """Return the next pool: intent and retrieval are skipped where their result is there or not wanted."""
    if routed.intent is None and _wants_intent(routed.request):
        return Pool.INTENT
    if routed.retrieval is None and _wants_retrieval(routed):
        return Pool.RETRIEVAL
    return Pool.GENERATION


def next_topic(routed: RoutedRequest) -> str:
    """Return the topic of the next pool in the colour that the router chose."""
    pool = next_pool(routed)
    colour = getattr(routed.route, pool.value)
    assert isinstance(colour, str)
    return pool_topic(pool, colour)


def partition_key(routed: RoutedRequest) -> bytes:
    """Return the key on the request path: turns of one session keep their order and their worker."""
    return (routed.request.session_id or routed.request_id).encode()


def _wants_intent(request: GenerationRequest) -> bool:
    """With the strategy fixed and no look-up to decide on, the intent would change nothing."""
    is_retrieval_settled = request.passages is not None or request.retrieval is not Retrieval.AUTO
    return request.strategy is None or not is_retrieval_settled


def _wants_retrieval(routed: RoutedRequest) -> bool:
    request = routed.request
    if request.passages is not None or request.retrieval is Retrieval.OFF:
        return False
    if request.retrieval is Retrieval.ON or routed.intent is None:
        return True
    return routed.intent.needs_retrieval
