"""Ask all demo questions and measure: does every request end, is the passage found, does the answer carry the fact?

The measuring is pure; `measure` puts it together from what each question gave.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ops.answering import Answered, ask
from ops.errors import CommandError
from ops.percentile import percentile
from schemas.errors import GeaError
from schemas.request import GenerationRequest
from streams.client import GeaClient

QUESTIONS = Path(__file__).with_name("demo") / "questions.jsonl"
LANGUAGES = ("en", "zh")
SPLITS = ("tuning", "held_out")
MIN_HIT_RATE = 0.9
MIN_FACT_RATE = 0.7
SEED = 7  # any: the run can be repeated


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question with the passage that answers it and the accepted spellings of the fact in it."""

    id: str
    language: str
    question: str
    passage_id: str
    fact: tuple[str, ...]
    split: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one question. `failure` says why there is no answer."""

    question: Question
    answer: str = ""
    passage_ids: tuple[str, ...] = ()
    strategy: str = ""
    ttft_ms: float | None = None
    total_ms: float = 0.0
    has_ended: bool = False
    failure: str = ""

    @property
    def is_hit(self) -> bool:
        """Whether the right passage was found, or a part of it (`id#2`)."""
        return self.question.passage_id in {each.partition("#")[0] for each in self.passage_ids}

    @property
    def has_fact(self) -> bool:
        """Whether the answer carries the fact."""
        return carries_fact(self.answer, self.question.fact)


def load_questions(path: Path = QUESTIONS, *, split: str | None = None, limit: int | None = None) -> list[Question]:
    """Return the questions; `limit` takes as many of each language. Raises CommandError that names the line."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                found.append(msgspec.json.decode(line, type=Question))
            except msgspec.MsgspecError as error:
                raise CommandError(f"{path}, line {number}: {error}") from error
    found = [each for each in found if split in (None, each.split)]
    if limit is not None:
        languages = sorted({each.language for each in found})
        found = [each for code in languages for each in [one for one in found if one.language == code][:limit]]
    return found


def plain(text: str) -> str:
    """Fold case and white space."""
    return " ".join(text.casefold().split())


def carries_fact(answer: str, spellings: Iterable[str]) -> bool:
    """Return whether the answer contains one of the accepted spellings, case and repeated white space aside."""
    text = plain(answer)
    return any(plain(spelling) in text for spelling in spellings)


async def ask_all(
    client: GeaClient,
    questions: Sequence[Question],
    *,
    num_at_once: int,
    timeout_s: float,
    on_done: Callable[[Outcome], None],
) -> list[Outcome]:
    """Ask every question, several at once, and return what became of each, in their order."""
    slots = asyncio.Semaphore(num_at_once)

    async def one(question: Question) -> Outcome:
        async with slots:
            outcome = await _ask(client, question, timeout_s)
        on_done(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(question)) for question in questions]
    return [task.result() for task in tasks]


async def _ask(client: GeaClient, question: Question, timeout_s: float) -> Outcome:
    request = GenerationRequest(prompt=question.question, seed=SEED)
    try:
        answered = await ask(client, request, on_chunk=lambda _: None, timeout_s=timeout_s)
    except CommandError as error:  # the request ended as failed
        return Outcome(question=question, has_ended=True, failure=error.message)
    except GeaError as error:
        return Outcome(question=question, failure=f"{error.code}: {error.message}")
    return outcome_of(question, answered)


def outcome_of(question: Question, answered: Answered) -> Outcome:
    """Return what an answer means for its question."""
    return Outcome(
        question=question,
        answer=answered.text,
        passage_ids=answered.end.passage_ids,
        strategy=answered.end.strategy,
        ttft_ms=answered.ttft_ms,
        total_ms=answered.total_ms,
        has_ended=True,
    )


def measure(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the numbers of some outcomes; rates of nothing are None."""
    count = len(outcomes)
    ttfts = [each.ttft_ms for each in outcomes if each.ttft_ms is not None]
    return {
        "questions": count,
        "ended": sum(each.has_ended for each in outcomes),
        "retrieval_hit_rate": _rate(sum(each.is_hit for each in outcomes), count),
        "answer_fact_rate": _rate(sum(each.has_fact for each in outcomes), count),
        "ttft_ms": {"p50": _rounded(percentile(ttfts, 0.5)), "p99": _rounded(percentile(ttfts, 0.99))},
    }


def measure_all(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the numbers over all, by language and by split, and whether they suffice."""
    languages = {code: _of(outcomes, language=code) for code in LANGUAGES}
    numbers = measure(outcomes)
    numbers["languages"] = {code: measure(some) for code, some in languages.items() if some}
    numbers["splits"] = {
        split: measure(_of(outcomes, split=split))
        | {"languages": {code: measure(_of(some, split=split)) for code, some in languages.items() if some}}
        for split in SPLITS
        if _of(outcomes, split=split)
    }
    numbers["misses"] = shortfalls(numbers)
    numbers["passed"] = not numbers["misses"]
    return numbers


def shortfalls(numbers: dict[str, Any]) -> list[str]:
    """Return, in words, every threshold that is missed, per language."""
    missed = []
    if numbers["ended"] != numbers["questions"]:
        missed.append(f"{numbers['questions'] - numbers['ended']} of {numbers['questions']} requests did not end")
    for code, some in numbers["languages"].items():
        for key, least in (("retrieval_hit_rate", MIN_HIT_RATE), ("answer_fact_rate", MIN_FACT_RATE)):
            if some[key] is None or some[key] < least:
                missed.append(f"{code}: {key} {some[key]} is below {least}")
    return missed if numbers["questions"] else ["there are no questions"]


def write_outcomes(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write one JSON line a question, for a closer look."""
    with path.open("w", encoding="utf-8") as file:
        for each in outcomes:
            row = {
                "id": each.question.id,
                "language": each.question.language,
                "split": each.question.split,
                "question": each.question.question,
                "answer": each.answer,
                "fact": each.question.fact,
                "has_fact": each.has_fact,
                "passage_id": each.question.passage_id,
                "passage_ids": each.passage_ids,
                "is_hit": each.is_hit,
                "strategy": each.strategy,
                "ttft_ms": each.ttft_ms,
                "total_ms": each.total_ms,
                "failure": each.failure,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _of(outcomes: Iterable[Outcome], *, language: str | None = None, split: str | None = None) -> list[Outcome]:
    return [
        each for each in outcomes if language in (None, each.question.language) and split in (None, each.question.split)
    ]


def _rate(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
