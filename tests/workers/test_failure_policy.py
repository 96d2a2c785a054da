"""What becomes of a request after an error, error by error."""

from __future__ import annotations

import pytest

from schemas import errors
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
from streams.topics import RETRY_LONG, RETRY_SHORT
from workers.failure_policy import RULES, Decision, Verdict, decide, rule_of

NOW = 1_700_000_000_000
FAR = NOW + 3_600_000
SHORT_MS, LONG_MS = 5_000, 60_000

Step = tuple[str, int] | Verdict
SHORT: Step = (RETRY_SHORT, SHORT_MS)
LONG: Step = (RETRY_LONG, LONG_MS)

COURSES: list[tuple[GeaError, list[Step]]] = [
    (RejectedError("the queue is full", retry_after_s=1), [SHORT, LONG, LONG, Verdict.ANSWER, Verdict.ANSWER]),
    (UnavailableError("remote engine"), [SHORT, LONG, LONG, Verdict.ANSWER]),
    (StoreUnavailableError("x"), [SHORT, LONG, LONG, Verdict.ANSWER]),
    (GeaError("x"), [SHORT, SHORT, Verdict.DEAD_LETTER]),
    (InternalError("x"), [SHORT, SHORT, Verdict.DEAD_LETTER, Verdict.DEAD_LETTER]),
    (StreamError("x"), [SHORT, SHORT, Verdict.DEAD_LETTER]),
    (StreamGapError("x"), [SHORT, SHORT, Verdict.DEAD_LETTER]),
    (StreamExpiredError("x"), [Verdict.ANSWER]),
    (InvalidRequestError("x"), [Verdict.ANSWER, Verdict.ANSWER]),
    (PromptTooLongError("x"), [Verdict.ANSWER]),
    (DeadlineExceededError("x"), [Verdict.ANSWER]),
    (UnsupportedVersionError("x"), [Verdict.ANSWER]),
    (RequestCancelledError("x"), [Verdict.ANSWER]),
    (DecodeError("x"), [Verdict.DEAD_LETTER]),
    (ResponseTimeoutError("x", request_id="r"), [Verdict.DEAD_LETTER]),
    (RequestFailedError("x", failure_code="internal"), [Verdict.DEAD_LETTER]),
    (BrokerUnavailableError("x"), [Verdict.STAGE, Verdict.STAGE]),
    (EngineUnavailableError("x"), [Verdict.STAGE, Verdict.STAGE]),
    (ConfigError("x"), [Verdict.STAGE]),
]


def expected(step: Step) -> Decision:
    if isinstance(step, Verdict):
        return Decision(verdict=step)
    topic, delay_ms = step
    return Decision(verdict=Verdict.RETRY, topic=topic, not_before_ms=NOW + delay_ms)


@pytest.mark.parametrize(("error", "course"), COURSES, ids=lambda value: getattr(value, "code", ""))
def test_each_error_takes_its_course(error: GeaError, course: list[Step]) -> None:
    taken = [decide(error, attempt=attempt, now_ms=NOW, deadline_ms=FAR) for attempt in range(len(course))]
    assert taken == [expected(step) for step in course]


def every_error(root: type[GeaError] = GeaError) -> set[type[GeaError]]:
    found = {root}
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            found |= every_error(child)
    return found


def test_every_error_is_classified_and_has_its_course_in_this_test() -> None:
    assert set(RULES) == every_error()
    assert {type(error) for error, _ in COURSES} == every_error()


def test_an_error_from_elsewhere_follows_its_nearest_ancestor() -> None:
    class RemoteEngineError(UnavailableError):
        """As an engine outside the tree may raise it."""

    assert rule_of(RemoteEngineError) is RULES[UnavailableError]


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (RejectedError("x", retry_after_s=1), Verdict.ANSWER),
        (UnavailableError("x"), Verdict.ANSWER),
        (InternalError("x"), Verdict.DEAD_LETTER),
    ],
)
def test_a_retry_that_would_be_due_at_the_deadline_is_the_final_outcome_now(error: GeaError, final: Verdict) -> None:
    assert decide(error, attempt=0, now_ms=NOW, deadline_ms=NOW + SHORT_MS).verdict is final
    assert decide(error, attempt=0, now_ms=NOW, deadline_ms=NOW + SHORT_MS + 1).verdict is Verdict.RETRY
    assert decide(error, attempt=0, now_ms=NOW, deadline_ms=NOW - 1).verdict is final


@pytest.mark.parametrize("jitter", [-1.0, -0.5, 0.0, 0.5, 1.0])
def test_jitter_moves_the_delay_by_up_to_a_fifth(jitter: float) -> None:
    decision = decide(InternalError("x"), attempt=0, now_ms=NOW, deadline_ms=FAR, jitter=jitter)
    assert decision.not_before_ms - NOW == SHORT_MS + round(1_000 * jitter)


@pytest.mark.parametrize("max_attempts", [0, 1, 2, 5])
def test_the_setting_bounds_the_attempts_of_every_rule(max_attempts: int) -> None:
    for kind, rule in RULES.items():
        error = next(error for error, _ in COURSES if type(error) is kind)
        verdicts = [
            decide(error, attempt=attempt, now_ms=NOW, deadline_ms=FAR, max_attempts=max_attempts).verdict
            for attempt in range(8)
        ]
        allowed = min(max_attempts, rule.max_attempts or max_attempts) if rule.topics else 0
        assert verdicts == [Verdict.RETRY] * allowed + [rule.final] * (8 - allowed)
