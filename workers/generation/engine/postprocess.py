"""Turns logits into tokens: draws row by row, and keeps guesses for as long as they equal what is drawn.

Knows sequences and logits, not how a step came about. The invariants: every token is the draw of its own position, so
that guesses change the speed and never the text; whatever one request makes fail, its neighbours go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.generation.engine.output import OutputWriter
from workers.generation.engine.plan import Scheduled
from workers.generation.engine.sampler import Drawn, Row, sample
from workers.generation.engine.scheduler import Scheduler
from workers.generation.engine.sequence import ActiveRequest, Sequence, State


class Ends(Protocol):
    """Who ends requests."""

    def finish(self, request: ActiveRequest) -> None:
        """End a request whose choices have all ended."""
        ...

    def fail(self, request: ActiveRequest, error: Exception) -> None:
        """End a request with an error; one that is over is left alone."""
        ...


@dataclass(slots=True, eq=False)
class _Cursor:
    """A sequence at one of its rows of logits."""

    sequence: Sequence
    row: int
    draft: list[int]
    num_accepted: int = 0


class Postprocess:
    """What follows a step."""

    def __init__(self, scheduler: Scheduler, writer: OutputWriter, ends: Ends, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._writer = writer
        self._ends = ends
        self._clock = clock
        self.num_drawn = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def run(self, items: Iterable[Scheduled], logits: torch.Tensor) -> None:
        """Note what has been read, and draw on for everybody who has read all, `logits` `(rows that draw, vocab)`."""
        cursors: list[_Cursor] = []
        row = 0
        for item in items:
            if item.sequence.state is State.RUNNING:  # no other choice of the request has failed
                cursors += [_Cursor(reader, row, item.draft) for reader in self._read(item)]
            row += item.num_logits
        drawing = cursors
        while drawing:
            drawing = self._round(drawing, logits)
        for cursor in cursors:
            self._settle(cursor)

    def _read(self, item: Scheduled) -> list[Sequence]:
        """Note a chunk; return who draws on: at a prompt's end all choices that have no output to read."""
        sequence = item.sequence
        self._scheduler.advance(sequence, item.end)
        if not item.is_drawing:
            return []
        if not sequence.followers:
            return [sequence]
        readers = [sequence, *self._scheduler.fork(sequence)]
        return [reader for reader in readers if len(reader.tokens) == reader.num_computed]

    def _round(self, cursors: list[_Cursor], logits: torch.Tensor) -> list[_Cursor]:
        """Draw one token for each; return those whose guess was right, at their next row."""
        ready = [(cursor, row) for cursor in cursors if (row := self._row(cursor.sequence)) is not None]
        if not ready:
            return []
        places = [cursor.row for cursor, _ in ready]
        picked = logits if places == list(range(len(logits))) else logits[places]  # (len(ready), vocab)
        drawn = sample(picked, [row for _, row in ready])
        return [cursor for (cursor, _), each in zip(ready, drawn, strict=True) if self._take(cursor, each)]

    def _row(self, sequence: Sequence) -> Row | None:
        """Return what the sampler needs; None for a request that has failed, or fails here by its form."""
        if sequence.state is not State.RUNNING:
            return None
        try:
            mask = None if sequence.constraint is None else sequence.constraint.mask()
        except Exception as error:
            self._ends.fail(sequence.request, error)
            return None
        return Row(sequence.sampler, sequence.num_output, mask)

    def _take(self, cursor: _Cursor, drawn: Drawn | Exception) -> bool:
        """Append a drawn token; say whether the next row is its continuation."""
        sequence = cursor.sequence
        if sequence.state is not State.RUNNING:  # another choice of the request has failed in this round
            return False
        request = sequence.request
        if isinstance(drawn, Exception):
            self._scheduler.taint_all(request)
            self._ends.fail(request, drawn)
            return False
        if request.first_token_s is None:
            request.first_token_s = self._clock()
        try:
            self._writer.append(sequence, drawn.token_id, drawn.logprob)
        except Exception as error:
            self._ends.fail(request, error)
            return False
        self.num_drawn += 1
        if sequence.end is not None or cursor.num_accepted == len(cursor.draft):
            return False
        if drawn.token_id != cursor.draft[cursor.num_accepted]:
            return False
        cursor.num_accepted += 1
        cursor.row += 1
        return True

    def _settle(self, cursor: _Cursor) -> None:
        """Keep what the right guesses have put into the cache, and count them."""
        sequence, num_draft = cursor.sequence, len(cursor.draft)
        if num_draft:
            self.num_draft_tokens += num_draft
            self.num_accepted_tokens += cursor.num_accepted
            sequence.lookup.record(len(sequence.tokens), num_draft, cursor.num_accepted)
        if sequence.state is not State.RUNNING:
            return
        if cursor.num_accepted:
            self._scheduler.advance(sequence, sequence.num_computed + cursor.num_accepted)
        if sequence.end is not None:
            self._scheduler.release(sequence)
            if not sequence.request.unfinished:
                self._ends.finish(sequence.request)
