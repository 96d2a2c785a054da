"""Where a request goes next, from what is known about it. Pure; the same function serves every pool."""

from __future__ import annotations

from schemas.envelope import RoutedRequest
from schemas.request import GenerationRequest, Retrieval, Strategy
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
    """A fixed strategy leaves the intent nothing to decide, but a template is chosen by it."""
    return request.strategy in (None, Strategy.TEMPLATE)


def _wants_retrieval(routed: RoutedRequest) -> bool:
    """Passages that are given or fixed off are not looked up; of the fixed strategies only one reads them."""
    request = routed.request
    if request.passages is not None or request.retrieval is Retrieval.OFF:
        return False
    if request.retrieval is Retrieval.ON:
        return True
    if request.strategy is not None:
        return request.strategy is Strategy.KNOWLEDGE
    return routed.intent is None or routed.intent.needs_retrieval
