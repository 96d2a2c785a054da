"""Answers from the passages: quotes the sentence that says it, then lets the model add what the passages also say.

The quotation is our doing, not the model's. Measured on the demo's tuning questions, SmolLM2-135M alone states the fact
of the given passage in 28–53 % of the answers, depending on the prompt; the quoted sentences carry it in 84 %. So the
best sentences are published first and stand at the start of the answer that the model goes on with, and each further
sentence of the model is published only if one sentence of the quoted passage supports it in words, numbers and
negation. A model that reads well needs no crutch: `quotes=False` leaves the answer to it.

Chinese answers are quotations alone, because the model is English. Without passages the answer says so. An answer that
must have a form has neither: the model alone writes it, from the passages that there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from schemas.request import Strategy
from schemas.retrieval import Passage
from workers.generation.engine.protocol import SamplingParams
from workers.generation.strategies.conversation import history_of, system_of
from workers.generation.strategies.evidence import (
    Gist,
    Sentence,
    best_sentences,
    is_chinese,
    is_supported,
    overlap,
    says_something,
    sentences,
)
from workers.generation.strategies.plan import FixedPiece, Plan, StrategyContext, fixed, sampling_for

MAX_PASSAGES = 2  # of one to four passages, the model states the fact most often with one or two
MAX_QUOTED = 2
QUOTE_GAP = 0.4  # a second sentence this much below the best one seldom adds to it
MAX_ADDED_TOKENS = 48
REPEATED = 0.7  # share of terms from which a sentence says again what has been quoted
SYSTEM = "You are the helpful assistant of a shop. Answer the customer's question from the help centre."
NOTHING_FOUND = {
    "en": "I could not find anything about this in the knowledge base, so I would rather not guess.",
    "zh": "知识库里没有找到相关内容，我不想乱猜。",
}


class KnowledgeStrategy:
    """Grounded in passages, with citations."""

    name = Strategy.KNOWLEDGE

    def __init__(self, *, quotes: bool = True) -> None:
        self._quotes = quotes

    def plan(self, context: StrategyContext) -> Plan:
        """Return quotation and prompt. Greedy and without repetition penalty, unless the request says otherwise:
        both would lead the model away from the words of the passages."""
        sampling = sampling_for(context, temperature=0.0, repetition_penalty=1.0)
        chinese = context.language.startswith("zh") or is_chinese(context.request.last_user_text())
        given = tuple(passage for passage in context.passages if says_something(passage.text))
        context = replace(context, passages=given)
        if context.request.has_form:  # the answer is the model's alone, whatever its language
            return self._drawn(context, sampling)
        if not given:
            text = NOTHING_FOUND["zh" if chinese else "en"]
            return Plan(strategy=self.name, sampling=sampling, pieces=fixed(context, text))
        quoted = _quotation(context, is_whole=chinese) if chinese or self._quotes else []
        pieces = fixed(context, *_joined(quoted, "" if chinese else " "))
        num_quoted = sum(len(piece.token_ids) for piece in pieces)
        if chinese or num_quoted >= sampling.max_tokens:  # nothing is left for the model to say
            return Plan(strategy=self.name, sampling=sampling, pieces=pieces, passages=context.passages)
        plan = self._drawn(context, sampling, num_quoted=num_quoted)
        return _with_quotation(plan, pieces) if pieces else plan

    def _drawn(self, context: StrategyContext, sampling: SamplingParams, *, num_quoted: int = 0) -> Plan:
        """Return the plan of an answer that the model writes."""
        budget = context.prompter.budget(context.max_tokens)
        if num_quoted:  # the quotation stands between the prompt and what the model adds
            budget = min(budget, context.prompter.max_context - num_quoted - MAX_ADDED_TOKENS)
        prompt = context.prompter.chat(
            system=system_of(context.request, SYSTEM),
            history=history_of(context),
            passages=context.passages[:MAX_PASSAGES],
            compose=lambda passages: _question(context.request.last_user_text(), passages),
            budget=budget,
        )
        return Plan(
            strategy=self.name,
            sampling=sampling,
            prompt=prompt.token_ids,
            passages=context.passages,
            prompt_text=prompt.text,
        )


def _with_quotation(plan: Plan, pieces: tuple[FixedPiece, ...]) -> Plan:
    """Let the answer start with the quotation: published by us, and part of what the model has said already."""
    tokens = tuple(token_id for piece in pieces for token_id in piece.token_ids)
    text = "".join(piece.text for piece in pieces)
    wanted = min(plan.sampling.max_tokens, len(tokens) + MAX_ADDED_TOKENS)
    quoted_from = next(passage for passage in plan.passages if pieces[0].text in passage.text)
    said, sources = Gist.of(text), [Gist.of(sentence.text) for sentence in sentences(quoted_from.text)]

    def may_publish(sentence: str) -> bool:
        gist = Gist.of(sentence)
        return overlap(gist, said) < REPEATED and any(is_supported(gist, source) for source in sources)

    assert plan.prompt is not None
    return replace(
        plan,
        sampling=replace(plan.sampling, max_tokens=wanted),
        pieces=pieces,
        prompt=plan.prompt + tokens,
        prompt_text=plan.prompt_text + text,
        may_publish=may_publish,
    )


def _quotation(context: StrategyContext, *, is_whole: bool) -> list[Sentence]:
    """Return the sentence that answers the question, and a second one if it is nearly as good.

    Where the quotation is the whole answer (`is_whole`), the second one may come from another passage.
    """
    hits = best_sentences(context.request.last_user_text(), context.passages)
    if not hits:
        return []
    best, passage, first = hits[0]
    near = [(source, s) for score, source, s in hits[1:MAX_QUOTED] if is_whole or score >= best - QUOTE_GAP]
    chosen = [first, *(s for source, s in near if is_whole or source is passage)]
    same_passage = all(source is passage for source, _ in near)
    return sorted(chosen, key=lambda sentence: sentence.start) if same_passage else chosen


def _joined(quoted: Sequence[Sentence], space: str) -> list[str]:
    return [f"{space if place else ''}{sentence.text}" for place, sentence in enumerate(quoted)]


def _question(question: str, passages: Sequence[Passage]) -> str:
    if not passages:
        return question
    shown = "\n\n".join(f"{p.title}: {p.text}" if p.title else p.text for p in passages)
    return f"Help centre:\n{shown}\n\nQuestion: {question}\nAnswer with the exact fact from the help centre."
