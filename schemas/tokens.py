"""The records of a token stream. All records of one request stand in one partition, keyed by request_id.

Identity of a record is `(request_id, epoch, index, seq)`: `index` is the choice (n > 1), `seq` the number of tokens of
that choice before this record. Every `text` is valid UTF-8. How readers decide which records count: `streams.claims`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

from schemas.intent import IntentResult
from schemas.retrieval import RetrievalResult

TOKEN_RECORD_VERSION = 1


class Epoch(NamedTuple):
    """Who may write: compared in this order, greater wins, equal loses.

    `hop` is raised by whoever re-produces a request; `generation` is the consumer group's generation at assignment.
    """

    hop: int
    generation: int


class Kind(StrEnum):
    """What a record does to the stream."""

    CLAIM = "claim"
    """A run opens without text yet."""
    DELTA = "delta"
    """Text and tokens are appended."""
    SEE = "see"
    """The request is a repeat: its stream stands at another place."""
    RETRACT = "retract"
    """Text that was already sent is withdrawn."""
    RESET = "reset"
    """The text so far is void; seq starts again at 0."""
    END = "end"
    """The stream is over."""


class EndStatus(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    """The answer is whole."""
    INCOMPLETE = "incomplete"
    """Cut by a limit: max_tokens or the context window."""
    FAILED = "failed"
    """No answer, `failure` says why."""
    CANCELLED = "cancelled"
    """Stopped on request."""


class FinishReason(StrEnum):
    """Why decoding stopped, in the field's words."""

    STOP = "stop"
    """End of sequence, a stop string or a stop token."""
    LENGTH = "length"
    """max_tokens or the context window."""
    ABORT = "abort"
    """Cancelled."""
    ERROR = "error"
    """Failed."""


class Claim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Opens a run. `from_seq` is the first seq that the run writes, by choice; `engine`, `model`, `tokenizer` and
    `precision` name what shapes the text.

    `plan` is a hash of prompt and decoding plan, `memory` what the prompt took from the session, as pairs of question
    and answer: so whoever continues the text has the same prompt, even if the session's memory is lost. The run that
    begins a text tells them on its first record of it; a claim that only takes over leaves them empty.
    """

    from_seq: tuple[int, ...] = (0,)
    model: str = ""
    tokenizer: str = ""
    precision: str = ""
    plan: str = ""
    memory: tuple[tuple[str, str], ...] = ()
    engine: str = ""


class See(msgspec.Struct, frozen=True, kw_only=True):
    """Where the stream of the request stands."""

    topic: str
    partition: int
    offset: int


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request failed. `field` names the field of a refused request."""

    code: str
    message: str
    field: str | None = None
    retry_after_s: float | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens, counted once, as published."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Milliseconds, on the workers' clocks. `ttft_ms` counts from the router's receipt to the first token."""

    queue_ms: float = 0.0
    intent_ms: float = 0.0
    retrieval_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    decode_ms: float = 0.0
    total_ms: float = 0.0


class Citation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A passage that supports a sentence. `start` and `end` are character offsets into the text of choice `index`."""

    passage_id: str
    title: str = ""
    start: int = 0
    end: int = 0
    score: float = 0.0
    index: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log-probability of one token, with the likeliest alternatives (token id as text, as in `logit_bias`)."""

    token_id: int
    logprob: float
    top: dict[str, float] = {}


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """How one of n choices ended; `sha256` is the hex digest of its whole text in UTF-8."""

    index: int
    finish_reason: FinishReason
    num_tokens: int
    sha256: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Each stage's output, for requests with `explain`."""

    intent: IntentResult | None = None
    retrieval: RetrievalResult | None = None
    prompt: str = ""


class End(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request ended. With n > 1 `finish_reason` and `sha256` are those of choice 0, `choices` has all.

    `num_records` counts the records of the run that wrote this end, the end itself included.
    """

    status: EndStatus
    finish_reason: FinishReason
    usage: Usage = Usage()
    timings: Timings = Timings()
    citations: tuple[Citation, ...] = ()
    strategy: str = ""
    strategy_reason: str = ""
    model: str = ""
    engine: str = ""
    intent: str = ""
    passage_ids: tuple[str, ...] = ()
    num_records: int = 0
    sha256: str = ""
    choices: tuple[Choice, ...] = ()
    failure: Failure | None = None
    explanation: Explanation | None = None


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One record of a token stream. `owner` is the nonce of the run; `claim` may ride on its first record."""

    kind: Kind
    epoch: Epoch
    owner: str
    v: int = TOKEN_RECORD_VERSION
    index: int = 0
    seq: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    claim: Claim | None = None
    see: See | None = None
    end: End | None = None
