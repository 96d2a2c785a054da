"""What becomes of a request after an error: tried again later, put aside, or answered. A table, and pure.

Knows errors and times, not topics' contents or stages. The invariant: a request is retried a bounded number of times
and never past its deadline, so every decision leads to one end. Errors that no single request is to blame for (Kafka
away, the engine dead, a wrong configuration) are no outcome of a request: the verdict is then `STAGE`, the record stays
uncommitted or is re-produced, and nothing is told to the reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from schemas.errors import (
    BrokerUnavailableError,
    ConfigError,
    DeadlineExceededError,
    DecodeError,
    EngineUnavailableError,
    GeaError,
    InternalError,
    InvalidRequestError,
    PromptTooLongError,
    RejectedError,
    RequestCancelledError,
    RequestFailedError,
    ResponseTimeoutError,
    StoreUnavailableError,
    StreamError,
    StreamExpiredError,
    StreamGapError,
    UnavailableError,
    UnsupportedVersionError,
)
from streams.topics import RETRY_DELAYS_S, RETRY_LONG, RETRY_SHORT

MAX_ATTEMPTS = 3  # default of `retry.max_attempts`: 5 s, 60 s, 60 s
JITTER = 0.2  # share of a delay: what failed together does not come back together


class Verdict(StrEnum):
    """What becomes of the request."""

    RETRY = "retry"
    """Produced again after a delay; nothing is told to the reader."""
    DEAD_LETTER = "dead_letter"
    """Its record is put aside for operators, and the request ends as failed."""
    ANSWER = "answer"
    """The request ends with the error's code: the caller can do something about it, operators cannot."""
    STAGE = "stage"
    """No outcome of this request: the stage or its process deals with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A verdict; with `RETRY` the retry topic, and the Unix time in milliseconds before which it is not due."""

    verdict: Verdict
    topic: str = ""
    not_before_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The retry topics of the first attempts (the last one repeats), at most `max_attempts` of them, then `final`."""

    final: Verdict
    topics: tuple[str, ...] = ()
    max_attempts: int | None = None


ANSWER = Rule(final=Verdict.ANSWER)
ASIDE = Rule(final=Verdict.DEAD_LETTER)
STAGE = Rule(final=Verdict.STAGE)
AWAY = Rule(final=Verdict.ANSWER, topics=(RETRY_SHORT, RETRY_LONG))
FAULT = Rule(final=Verdict.DEAD_LETTER, topics=(RETRY_SHORT,), max_attempts=2)  # it may be this worker's alone

RULES: dict[type[GeaError], Rule] = {
    GeaError: FAULT,
    InternalError: FAULT,
    StreamError: FAULT,
    StreamGapError: FAULT,
    RejectedError: AWAY,
    UnavailableError: AWAY,
    StoreUnavailableError: AWAY,
    InvalidRequestError: ANSWER,
    PromptTooLongError: ANSWER,
    DeadlineExceededError: ANSWER,
    UnsupportedVersionError: ANSWER,
    RequestCancelledError: ANSWER,
    StreamExpiredError: ANSWER,
    DecodeError: ASIDE,
    ResponseTimeoutError: ASIDE,  # a reader's error: a worker that meets it has a fault, which waiting does not cure
    RequestFailedError: ASIDE,
    BrokerUnavailableError: STAGE,
    EngineUnavailableError: STAGE,
    ConfigError: STAGE,
}


def decide(
    error: GeaError,
    *,
    attempt: int,
    now_ms: int,
    deadline_ms: int,
    jitter: float = 0.0,
    max_attempts: int = MAX_ATTEMPTS,
) -> Decision:
    """Decide about a request that failed.

    `attempt` counts the retries so far, `jitter` in -1 to 1 moves the delay by up to `JITTER` of it. A retry that
    would come due at the deadline or after it is the final outcome now.
    """
    assert -1 <= jitter <= 1, f"jitter {jitter}"
    rule = rule_of(type(error))
    if not rule.topics or attempt >= min(max_attempts, rule.max_attempts or max_attempts):
        return Decision(verdict=rule.final)
    topic = rule.topics[min(attempt, len(rule.topics) - 1)]
    not_before_ms = now_ms + round(RETRY_DELAYS_S[topic] * 1000 * (1 + JITTER * jitter))
    if not_before_ms >= deadline_ms:
        return Decision(verdict=rule.final)
    return Decision(verdict=Verdict.RETRY, topic=topic, not_before_ms=not_before_ms)


def rule_of(kind: type[GeaError]) -> Rule:
    """Return the rule of an error class, for one without a row of its own that of its nearest ancestor."""
    return next(RULES[parent] for parent in kind.__mro__ if parent in RULES)
