"""A routed request, as tests of workers change it to their needs."""

from __future__ import annotations

from schemas.envelope import Origin, Reply, RoutedRequest
from schemas.request import GenerationRequest
from streams.topics import TOKENS

ROUTED = RoutedRequest(
    request_id="r-1",
    request=GenerationRequest(prompt="x", session_id="s-1"),
    reply=Reply(topic=TOKENS, partition=0),
    origin=Origin(partition=0, offset=0),
    seed=7,
    received_ms=1,
    deadline_ms=2**50,
)
