"""Which records of a token stream count, decided from the log alone.

Every reader and every worker feeds the records of one request, in the order of their partition, to a `StreamView`
and comes to the same text. It knows nothing of Kafka, clocks or models.

The rules (DESIGN, "Claims"): a claim counts only if its epoch is greater than that of every earlier counting claim
and no end came before; records of another epoch or owner are ignored; only the expected next token of a choice is
taken, repeats are dropped, a missing one raises StreamGapError. A run that starts behind what is already visible is
compared with it: what is equal stays invisible, a difference surfaces as a reset and the new text.

A worker that takes over claims first and reads afterwards. If it can draw the tokens that the earlier run would have
drawn, it goes on behind the last visible one (`resume` of `streams.token_writer`); otherwise it writes a reset and
begins anew. `StreamView.origin` is the claim that says what the visible text was made from.

The invariant: at most one end; the visible text is always that of one run, joined to the text it continued.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from schemas.errors import StreamGapError
from schemas.tokens import Choice, Claim, End, Epoch, Kind, TokenLogprob, TokenRecord, Usage
from streams.stream_events import Event, StreamEnded, StreamReset, StreamSeen, TextAppended, TextRetracted
from streams.stream_text import ChoiceText, Run


class StreamView:
    """The stream of one request as its log stands. Feed it every record of the request, in order."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._visible: dict[int, ChoiceText] = {}
        self.end: End | None = None
        self.claim_offset: int | None = None
        """Offset of the claim that counts now."""
        self.num_ignored = 0
        """Records of owners that do not count, and repeats."""

    @property
    def epoch(self) -> Epoch | None:
        """Return the epoch of the claim that counts, None before the first."""
        return self._run.epoch if self._run else None

    @property
    def owner(self) -> str | None:
        """Return the nonce of the run whose claim counts, None before the first."""
        return self._run.owner if self._run else None

    @property
    def origin(self) -> Claim | None:
        """Return the claim that describes what the visible text was made from, by its `plan`.

        None if nothing is visible, if nobody has described it, or if the choices come from different plans.
        """
        origins = [text.origin for text in self._visible.values() if not text.is_empty]
        first = origins[0] if origins else None
        if first is None or any(origin is None or origin.plan != first.plan for origin in origins):
            return None
        return first

    @property
    def is_ended(self) -> bool:
        """Return whether the effective end has come."""
        return self.end is not None

    @property
    def is_orphaned(self) -> bool:
        """Return whether records came, but no claim: the view began in the middle of the stream."""
        return self._run is None and self.num_ignored > 0

    @property
    def usage(self) -> Usage:
        """Return the usage of the end; before it, the tokens that are visible."""
        if self.end is not None:
            return self.end.usage
        return Usage(completion_tokens=sum(len(text.token_ids) for text in self._visible.values()))

    @property
    def indexes(self) -> tuple[int, ...]:
        """Return the choices that have records; after a reset they are empty until they are written again."""
        return tuple(sorted(self._visible))

    def text(self, index: int = 0) -> str:
        """Return the visible text of a choice."""
        return self._visible[index].text if index in self._visible else ""

    def token_ids(self, index: int = 0) -> tuple[int, ...]:
        """Return the visible tokens of a choice."""
        return tuple(self._visible[index].token_ids) if index in self._visible else ()

    def next_seq(self, index: int = 0) -> int:
        """Return the seq at which a new owner continues a choice."""
        return len(self._visible[index].token_ids) if index in self._visible else 0

    def is_owned_by(self, epoch: Epoch, owner: str) -> bool:
        """Return whether the claim of this run counts now."""
        return self._run is not None and self._run.epoch == epoch and self._run.owner == owner

    def apply(self, record: TokenRecord, offset: int) -> tuple[Event, ...]:
        """Take the next record of the request and return what a reader sees of it.

        Raises StreamGapError if a record before this one is missing; the view is unchanged then.
        """
        if record.kind is Kind.SEE:
            return (StreamSeen(see=record.see),) if record.see is not None and self._run is None else ()
        if self.is_ended:
            return self._ignore()
        if record.claim is not None and (self._run is None or record.epoch > self._run.epoch):
            self._run = Run(record.epoch, record.owner)
            self.claim_offset = offset
        run = self._run
        if run is None or record.epoch != run.epoch or record.owner != run.owner:
            return self._ignore()
        if record.claim is not None and record.claim.plan:
            run.origin = record.claim
        match record.kind:
            case Kind.CLAIM:
                return ()
            case Kind.DELTA:
                return self._delta(run, record)
            case Kind.RETRACT:
                return self._retract(run, record)
            case Kind.RESET:
                return self._reset(run, record)
            case Kind.END:
                return self._end(run, record)

    def _ignore(self) -> tuple[Event, ...]:
        self.num_ignored += 1
        return ()

    def _delta(self, run: Run, record: TokenRecord) -> tuple[Event, ...]:
        if not self._is_next(run, record):
            return self._ignore()
        text = self._start(run, record.index, record.seq)
        if text.is_empty:
            text.origin = run.origin
        text.append(record)
        self._count(run, record)
        return self._surface(record.index, text, record)

    def _retract(self, run: Run, record: TokenRecord) -> tuple[Event, ...]:
        if not self._is_next(run, record):
            return self._ignore()
        text = self._start(run, record.index, record.seq)
        if not text.text.endswith(record.text):
            raise StreamGapError(f"choice {record.index}: the text to withdraw is not the last that was sent")
        text.text = text.text.removesuffix(record.text)
        text.marks = {at: min(chars, len(text.text)) for at, chars in text.marks.items()}
        self._count(run, record)
        if self._visible.get(record.index) is text:
            return (TextRetracted(index=record.index, text=record.text),) if record.text else ()
        return self._surface(record.index, text, record)

    def _reset(self, run: Run, record: TokenRecord) -> tuple[Event, ...]:
        if record.seq < run.num_tokens():
            return self._ignore()
        run.tokenless.clear()
        run.origin = record.claim if record.claim is not None and record.claim.plan else None
        voided = [index for index, text in sorted(self._visible.items()) if text.text or text.token_ids]
        indexes = {0, *self._visible, *run.texts}
        run.texts = {index: ChoiceText() for index in indexes}
        self._visible = {index: run.texts[index] for index in self._visible}
        return tuple(StreamReset(index=index) for index in voided)

    def _end(self, run: Run, record: TokenRecord) -> tuple[Event, ...]:
        assert record.end is not None
        texts = {index: self._whole(run, index, seq, sha256) for index, seq, sha256 in _claims_of(record)}
        events: list[Event] = []
        for index, text in texts.items():
            events.extend(self._settle(index, text))
        self.end = record.end
        return (*events, StreamEnded(end=record.end))

    def _is_next(self, run: Run, record: TokenRecord) -> bool:
        """Return False for a repeat; raise StreamGapError if a record is missing before this one."""
        written = run.texts.get(record.index)
        if written is None:
            return True
        expected = len(written.token_ids)
        if record.seq > expected:
            raise StreamGapError(f"choice {record.index}: expected token {expected}, got {record.seq}")
        if record.seq < expected:
            return False
        return bool(record.token_ids) or record.kind not in run.tokenless.get(record.index, ())

    def _start(self, run: Run, index: int, seq: int) -> ChoiceText:
        """Return the text that the run writes on; its first record joins it to what is visible."""
        if index not in run.texts:
            visible = self._visible.get(index)
            if visible is None and seq == 0:
                run.texts[index] = self._visible[index] = ChoiceText()
            elif visible is not None and seq == len(visible.token_ids):
                run.texts[index] = visible
            elif visible is not None and seq in visible.marks:
                run.texts[index] = visible.cut(seq)
            else:
                seen = len(visible.token_ids) if visible else 0
                raise StreamGapError(f"choice {index}: the run starts at token {seq}, {seen} are known")
        return run.texts[index]

    def _count(self, run: Run, record: TokenRecord) -> None:
        if record.token_ids:
            run.tokenless.pop(record.index, None)
        else:
            run.tokenless.setdefault(record.index, set()).add(record.kind)

    def _surface(self, index: int, text: ChoiceText, record: TokenRecord) -> tuple[Event, ...]:
        visible = self._visible.setdefault(index, text)  # a reset may have been the first record
        if visible is text:
            return _appended(index, record.text, record.token_ids, record.logprobs)
        if not text.agrees_with(visible):
            return self._settle(index, text)
        if len(text.token_ids) < len(visible.token_ids) or len(text.text) < len(visible.text):
            return ()
        num_seen = len(visible.token_ids)
        logprobs = tuple(text.logprobs[num_seen:]) if len(text.logprobs) == len(text.token_ids) else None
        self._visible[index] = text
        return _appended(index, text.text[len(visible.text) :], tuple(text.token_ids[num_seen:]), logprobs)

    def _settle(self, index: int, text: ChoiceText) -> tuple[Event, ...]:
        """Make `text` the visible one, by a reset where it differs."""
        visible = self._visible.get(index)
        self._visible[index] = text
        if visible is None or visible is text or visible.same_as(text):
            return ()
        logprobs = tuple(text.logprobs) if text.logprobs and len(text.logprobs) == len(text.token_ids) else None
        return (StreamReset(index=index), *_appended(index, text.text, tuple(text.token_ids), logprobs))

    def _whole(self, run: Run, index: int, num_tokens: int, sha256: str) -> ChoiceText:
        """Return the text that an end speaks of, checked against its number of tokens and its hash."""
        visible = self._visible.get(index) or ChoiceText()
        text = run.texts.get(index)
        if text is None:
            text = visible
            if sha256 and num_tokens != len(visible.token_ids):
                if num_tokens not in visible.marks:
                    raise StreamGapError(f"choice {index}: ended at {num_tokens}, {len(visible.token_ids)} are known")
                text = visible.cut(num_tokens)
        elif num_tokens > len(text.token_ids):
            raise StreamGapError(f"choice {index}: ended at token {num_tokens}, {len(text.token_ids)} came")
        if sha256 and hashlib.sha256(text.text.encode()).hexdigest() != sha256:
            raise StreamGapError(f"choice {index}: the text differs from the hash of its end")
        return text


def _appended(
    index: int, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None
) -> tuple[Event, ...]:
    if not text and not token_ids:
        return ()
    return (TextAppended(index=index, text=text, token_ids=token_ids, logprobs=logprobs),)


def _claims_of(record: TokenRecord) -> tuple[tuple[int, int, str], ...]:
    """Return index, number of tokens and hash of every choice that an end speaks of."""
    assert record.end is not None
    choices: Mapping[int, Choice] = {choice.index: choice for choice in record.end.choices}
    if choices:
        return tuple((index, choice.num_tokens, choice.sha256) for index, choice in sorted(choices.items()))
    return ((record.index, record.seq, record.end.sha256),)
