"""Writes the token stream of one run of a request.

The first text goes out at once, then tokens are gathered for a few tokens or milliseconds; one record is on its way at
a time, which keeps the order and gathers more while the broker is slow. After a failed send nothing more is written:
the next owner continues. It does not know whether its claim counts; only the log does (`streams.claims`).
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec

from schemas.envelope import Reply
from schemas.errors import BrokerUnavailableError, GeaError, InternalError, InvalidRequestError
from schemas.tokens import Claim, End, EndStatus, Epoch, Kind, TokenLogprob, TokenRecord
from streams.broker import Producer, Record
from streams.claims import StreamView
from streams.settings import check_range
from streams.stream_text import PendingChoice, check_text, filled
from streams.token_record import new_owner, send_token


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLimits:
    """When a record goes out: at `max_tokens` or after `max_delay_ms`; `append` waits above `max_pending_tokens`.

    `send_ms` bounds one send and lies above the producer's own bound.
    """

    max_tokens: int = 6
    max_delay_ms: int = 30
    max_pending_tokens: int = 512
    send_ms: int = 20_000

    def __post_init__(self) -> None:
        check_range("writer.max_tokens", self.max_tokens, 1, 256)
        check_range("writer.max_delay_ms", self.max_delay_ms, 0, 10_000)
        check_range("writer.max_pending_tokens", self.max_pending_tokens, self.max_tokens, 65_536)
        check_range("writer.send_ms", self.send_ms, 10, 120_000)


class TokenWriter:
    """Writes the stream of one run: `append` … `end`, in an `async with`. One task calls it.

    A fresh run's claim rides on its first record. A take-over writes it by `claim()`, reads what stands before it and
    passes that view to `resume()`. Every run says by `describe()` what its text is made from before it appends any.
    """

    def __init__(
        self,
        producer: Producer,
        reply: Reply,
        request_id: str,
        *,
        epoch: Epoch,
        owner: str | None = None,
        claim: Claim = Claim(),  # noqa: B008 - frozen
        limits: WriterLimits = WriterLimits(),
    ) -> None:
        self.request_id = request_id
        self.epoch = epoch
        self.owner = owner or new_owner()
        self.num_records = 0
        self._producer = producer
        self._reply = reply
        self._claim: Claim | None = claim  # rides on the next record
        self._is_claimed = False
        self._limits = limits
        self._choices: dict[int, PendingChoice] = {}
        self._lock = asyncio.Lock()  # held while records are on their way
        self._pending = asyncio.Event()
        self._due = asyncio.Event()
        self._room = asyncio.Event()
        self._flusher: asyncio.Task[None] | None = None
        self._failure: GeaError | None = None
        self._is_closed = False

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all choices that are written, by this run or continued from earlier ones."""
        return sum(choice.num_tokens for choice in self._choices.values())

    async def claim(self) -> int:
        """Write the claim alone and return its offset; read the stream up to there before going on."""
        self._check_open()
        if self._is_claimed:
            raise InternalError(f"request {self.request_id}: claimed already")
        async with self._lock:
            return (await self._send(self._record(Kind.CLAIM))).offset

    def describe(self, claim: Claim) -> None:
        """Say what the text from here on is made from: the claim rides, as a whole, on the next record."""
        self._claim = claim

    def resume(self, view: StreamView) -> None:
        """Continue what `view` shows: the next tokens of each choice, and hashes over the whole text."""
        for index in view.indexes:
            choice = self._choices[index] = PendingChoice(num_tokens=view.next_seq(index))
            choice.digest.update(view.text(index).encode())
            choice.is_first_text_out = bool(view.text(index))

    async def append(
        self,
        index: int,
        text: str,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
    ) -> None:
        """Add text and tokens to choice `index`; waits while too much is pending.

        Text without tokens goes out with the next token or the end. Raises BrokerUnavailableError once a send failed,
        InternalError for text that is no valid UTF-8 (nothing of it is written then).
        """
        self._check_open()
        check_text(text)
        while self._num_pending() >= self._limits.max_pending_tokens:
            self._room.clear()
            await self._room.wait()
            self._check_open()
        choice = self._choices.setdefault(index, PendingChoice())
        choice.text += text
        choice.token_ids.extend(token_ids)
        choice.logprobs.extend(logprobs or ())
        self._notice()

    async def reset(self) -> None:
        """Void all text so far, pending text included; every choice starts again at seq 0."""
        self._check_open()
        async with self._lock:
            record = self._record(Kind.RESET, seq=self.num_tokens)
            self._choices = {index: PendingChoice() for index in self._choices}
            await self._send(record)

    async def end(self, end: End) -> Record:
        """Write what is pending and the end, with number of records, tokens and hashes filled in.

        Where the broker has refused a record (InvalidRequestError: nothing of it was written), an end that is failed
        or cancelled may follow.
        """
        if end.status in (EndStatus.FAILED, EndStatus.CANCELLED) and isinstance(self._failure, InvalidRequestError):
            self._failure = None
            self._choices = {index: choice.written() for index, choice in self._choices.items()}
        self._check_open()
        async with self._lock:
            await self._flush(is_last=True)
            seq = self._choice(0).num_tokens
            record = await self._send(
                self._record(Kind.END, seq=seq, end=filled(end, self._choices, self.num_records + 1))
            )
        await self.close()
        return record

    async def close(self) -> None:
        """Stop writing; what is pending is dropped. Idempotent, does not close the producer."""
        self._is_closed = True
        flusher, self._flusher = self._flusher, None
        if flusher is not None:
            flusher.cancel()
            await asyncio.wait((flusher,))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _choice(self, index: int) -> PendingChoice:
        return self._choices.get(index) or PendingChoice()

    def _num_pending(self) -> int:
        return sum(len(choice.token_ids) for choice in self._choices.values())

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise InternalError(f"request {self.request_id}: the stream is closed")

    def _notice(self) -> None:
        """Wake the flusher for what is pending."""
        num_pending = self._num_pending()
        if not num_pending:
            return
        self._pending.set()
        if num_pending >= self._limits.max_tokens or any(choice.is_urgent for choice in self._choices.values()):
            self._due.set()
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush_pending())

    async def _flush_pending(self) -> None:
        try:
            while True:
                await self._pending.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._limits.max_delay_ms / 1000):
                        await self._due.wait()
                async with self._lock:
                    self._pending.clear()
                    self._due.clear()
                    await self._flush()
                self._room.set()
        except GeaError:
            return  # the failure is kept: the next append or end raises it
        finally:
            self._room.set()

    async def _flush(self, *, is_last: bool = False) -> None:
        self._check_open()
        for index, choice in sorted(self._choices.items()):
            if choice.token_ids or (is_last and choice.text):
                seq, before = choice.num_tokens, choice.written()
                text, token_ids, logprobs = choice.take()
                delta = self._record(
                    Kind.DELTA, index=index, seq=seq, text=text, token_ids=token_ids, logprobs=logprobs
                )
                try:
                    await self._send(delta)
                except InvalidRequestError:
                    self._choices[index] = before  # the broker took nothing: counts and hashes speak of what is there
                    raise

    def _record(self, kind: Kind, **fields: Any) -> TokenRecord:
        claim = self._claim
        if claim is not None and kind is Kind.END:  # nobody goes on with a text that has ended
            claim = msgspec.structs.replace(claim, plan="", memory=())
        return TokenRecord(kind=kind, epoch=self.epoch, owner=self.owner, claim=claim, **fields)

    async def _send(self, record: TokenRecord) -> Record:
        try:
            async with asyncio.timeout(self._limits.send_ms / 1000):
                written = await send_token(self._producer, self._reply, self.request_id, record)
        except TimeoutError as error:
            self._failure = BrokerUnavailableError(f"no acknowledgement within {self._limits.send_ms} ms")
            raise self._failure from error
        except GeaError as error:
            self._failure = error
            raise
        except BaseException:
            self._failure = BrokerUnavailableError("a send was cut off: nobody knows whether it was written")
            raise
        if record.claim is not None:
            self._claim = None
        self._is_claimed = True
        self.num_records += 1
        return written
