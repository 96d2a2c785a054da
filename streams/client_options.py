"""What an application may say to the client: the fields of a request, and how long to wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import msgspec

from schemas.codec import convert
from schemas.errors import ConfigError
from schemas.request import GenerationRequest, Message, Priority, Retrieval, Strategy
from schemas.response_format import ResponseFormat
from schemas.retrieval import Passage
from streams import topics


class RequestOptions(TypedDict, total=False):
    """The fields of a request beside prompt and messages; ranges in `schemas.request`."""

    system: str | None
    session_id: str | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: dict[str, float] | None
    seed: int | None
    stop: tuple[str, ...] | None
    stop_token_ids: tuple[int, ...] | None
    logprobs: int | None
    n: int | None
    response_format: ResponseFormat | None
    intent: str | None
    passages: tuple[Passage, ...] | None
    strategy: Strategy | None
    retrieval: Retrieval
    num_passages: int | None
    language: str | None
    explain: bool
    priority: Priority
    reader_lease_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """`timeout_s`: how long an end is awaited. `deadline_s`: how long GEA may work on a request; None: as GEA likes.

    A request without an own deadline outlives our patience: its answer can be replayed. With one, its end is awaited
    `grace_s` longer, so that a late refusal is seen.

    Sending and connecting are tried again for `connect_s`.
    """

    tenant: str = "default"
    requests_topic: str = topics.REQUESTS
    tokens_topic: str = topics.TOKENS
    control_topic: str = topics.CONTROL
    timeout_s: float = 120.0
    deadline_s: float | None = None
    grace_s: float = 3.0
    connect_s: float = 15.0

    def __post_init__(self) -> None:
        for key, low, high in (("timeout_s", 0.001, 86_400), ("grace_s", 0, 3_600), ("connect_s", 0.001, 3_600)):
            if not low <= getattr(self, key) <= high:
                raise ConfigError(f"client.{key}: {getattr(self, key)} is not allowed: {low} to {high}")
        check_seconds("client.deadline_s", self.deadline_s)


def check_seconds(key: str, seconds: float | None) -> None:
    """Raise ConfigError that names `key` unless the time is sensible."""
    if seconds is not None and not 0 < seconds <= 86_400:
        raise ConfigError(f"{key}: {seconds} is not allowed: above 0 to 86400")


def as_request(prompt: str | Sequence[Message] | GenerationRequest, options: RequestOptions) -> GenerationRequest:
    """Make a request of what `generate` was given. Raises InvalidRequestError for a field of a wrong type."""
    if isinstance(prompt, GenerationRequest):
        made = msgspec.structs.replace(prompt, **options)
    elif isinstance(prompt, str):
        made = GenerationRequest(prompt=prompt, **options)
    else:
        made = GenerationRequest(messages=tuple(prompt), **options)
    return convert(msgspec.to_builtins(made), GenerationRequest)  # checks the types, which Python does not
