"""Greedy decoding straight over a `ModelRunner`: mixed steps of prompt chunks, decodes and drafts, as the engine makes.

Prompts begin one step after the other, so that chunks of one stand next to decodes of another. Blocks are handed out
in a shuffled order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from workers.generation.engine.batch import ModelRunner, Segment, StepBatch


@dataclass(slots=True)
class _Answer:
    tokens: list[int]
    num_prompt: int
    guide: Sequence[int]
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.num_prompt :])


def run_greedy(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    chunk: int = 7,
    guides: Sequence[Sequence[int]] = (),
) -> list[tuple[int, ...]]:
    """Return `num_tokens` tokens for each prompt.

    `guides` are what each answer may become: where given, up to three tokens of it are drafted in each step, every
    second time with the last one wrong.
    """
    guided = guides or [()] * len(prompts)
    answers = [_Answer(list(prompt), len(prompt), guide) for prompt, guide in zip(prompts, guided, strict=True)]
    blocks = list(range(runner.layout.num_blocks))
    random.Random(3).shuffle(blocks)
    for number in range(10_000):
        running = [answer for answer in answers[: number + 1] if len(answer.output) < num_tokens]
        if not running and number >= len(answers):
            return [answer.output[:num_tokens] for answer in answers]
        if running:
            _step(runner, running, blocks, chunk, is_spoiled=number % 2 == 1)
    raise AssertionError("no end of decoding")


def _step(runner: ModelRunner, running: list[_Answer], blocks: list[int], chunk: int, *, is_spoiled: bool) -> None:
    segments = [_segment(answer, chunk, runner.vocab_size, is_spoiled=is_spoiled) for answer in running]
    for answer, segment in zip(running, segments, strict=True):
        while len(answer.block_table) * runner.layout.block_size < segment.end:
            answer.block_table.append(blocks.pop())
    logits = runner.forward(StepBatch(segments=tuple(segments)))
    assert logits.shape == (sum(segment.num_logits for segment in segments), runner.vocab_size)
    rows = torch.split(logits.argmax(dim=-1), [segment.num_logits for segment in segments])
    for answer, segment, drawn in zip(running, segments, rows, strict=True):
        _accept(answer, segment, drawn.tolist())


def _segment(answer: _Answer, chunk: int, vocab_size: int, *, is_spoiled: bool) -> Segment:
    missing = answer.tokens[answer.num_computed :]
    drafts: list[int] = []
    if len(missing) == 1 and answer.output:
        drafts = list(answer.guide[len(answer.output) : len(answer.output) + 3])
        if drafts and is_spoiled:
            drafts[-1] = (drafts[-1] + 1) % vocab_size
    piece = missing[:chunk]
    num_logits = 1 + len(drafts) if len(piece) == len(missing) else 0
    return Segment(
        token_ids=(*piece, *drafts), start=answer.num_computed, block_table=answer.block_table, num_logits=num_logits
    )


def _accept(answer: _Answer, segment: Segment, drawn: list[int]) -> None:
    """Take the drawn tokens up to the first one that its draft was not."""
    drafts = list(segment.token_ids[len(segment.token_ids) - len(drawn) + 1 :]) if drawn else []
    answer.num_computed = segment.end - len(drafts)
    for place, token in enumerate(drawn):
        answer.tokens.append(token)
        if place >= len(drafts) or drafts[place] != token:
            return
        answer.num_computed += 1
