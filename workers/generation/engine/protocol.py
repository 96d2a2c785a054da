"""What an engine is to the generation stage: requests of token ids in, streams of tokens out.

Knows no topics, prompts or strategies. The invariants: every accepted request ends in exactly one `Finished` or in one
error out of its stream, and `usage.completion_tokens` is the number of token ids that the stream handed out, once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from schemas.tokens import FinishReason, TokenLogprob, Usage
from workers.generation.engine.statistics import EngineStatistics


class Precision(StrEnum):
    """The number format of the weights, and of the KV cache where `KVPrecision` leaves it open."""

    FP32 = "fp32"
    """32-bit floats; exact on CPU."""
    BF16 = "bf16"
    """bfloat16: half the memory, other digits."""
    FP16 = "fp16"
    """IEEE half: half the memory, more digits than bf16, a smaller range."""
    INT8 = "int8"
    """Weights in 8 bits with a scale for each group of inputs; activations stay per row."""
    FP8 = "fp8"
    """8-bit floats (e4m3) on CUDA devices that multiply them."""


class KVPrecision(StrEnum):
    """The number format of cached keys and values."""

    AUTO = "auto"
    """As the weights; fp16 for 8-bit weights."""
    FP32 = "fp32"
    """32-bit floats."""
    BF16 = "bf16"
    """bfloat16."""
    FP16 = "fp16"
    """IEEE half."""
    INT8 = "int8"
    """8 bits with a scale for each position and head."""


class ConstraintKind(StrEnum):
    """What a constraint's `value` is."""

    JSON_OBJECT = "json_object"
    """Any JSON object; no value."""
    JSON_SCHEMA = "json_schema"
    """JSON that fits a JSON schema, given as JSON text."""
    REGEX = "regex"
    """Text that a regular expression matches as a whole."""
    CHOICE = "choice"
    """One of several strings, given as a JSON list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintSpec:
    """The form that an answer must have, token by token."""

    kind: ConstraintKind
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when to stop. The names and meanings are those of the request.

    Order of effects: repetition penalty (prompt and output), presence and frequency penalty (output only), logit bias,
    temperature, top_k, top_p (over what top_k left), min_p. `logprobs` are those of the unmodified distribution, as in
    vLLM; 0 asks for the drawn token alone.
    """

    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    n: int = 1
    constraint: ConstraintSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A prompt as token ids. `request_id` is unique among the requests in flight.

    `output` are tokens of each choice, by index, that an earlier run has drawn already. They are taken as they stand
    and handed out first, as chunks like any other, but without logprobs; the next token of each choice is then the one
    that an undisturbed run would draw. Choices beyond the given ones begin with their first token. Usage counts them.
    Tokens beyond the end of their choice are left out; a request whose choices have all ended needs no step.

    The lowest `priority` runs first, equal ones in their order. Blocks of the prefix cache are shared only among
    requests of equal `cache_salt` (the tenant).
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    output: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Tokens of one choice, in order. `text` may be empty while a character or a stop string is still open.

    The token that ended the choice (end of sequence, stop token) is among `token_ids`; its text is not published.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnd:
    """How one choice ended. `stop_reason` is the stop string or token id that ended it, None for end of sequence.

    `repetition_ratio` is the share of its 4-grams of tokens that had occurred in it before; 0 below four tokens.
    """

    index: int
    finish_reason: FinishReason
    num_tokens: int
    stop_reason: str | int | None = None
    repetition_ratio: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last item of a stream: all choices by index, tokens counted over all of them.

    `prefill_ms` counts from admission to the first token, `decode_ms` from there to the end, `queue_ms` before both.
    """

    choices: tuple[ChoiceEnd, ...]
    usage: Usage
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


EngineEvent = TokenChunk | Finished


class EngineStream(Protocol):
    """The events of one request: chunks, then one `Finished`, then the end of the iteration.

    Raises EngineUnavailableError where the engine died, InternalError where this request alone failed.
    """

    @property
    def request_id(self) -> str:
        """Return the id that the request was submitted under."""
        ...

    def __aiter__(self) -> AsyncIterator[EngineEvent]: ...

    async def __anext__(self) -> EngineEvent: ...


class Tokenizer(Protocol):
    """Text to token ids and back. Calls take up to milliseconds per kilobyte: keep long texts off the event loop."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Return the ids that end an answer."""
        ...

    def encode(self, text: str, *, is_start: bool = True) -> tuple[int, ...]:
        """Return the ids of text by anybody: the names of control tokens in it are ordinary text.

        `is_start`: nothing stands before the text. Some tokenizers have a space there that is not in the text.
        """
        ...

    def encode_control(self, text: str, *, is_start: bool = True) -> tuple[int, ...]:
        """Return the ids of text of ours: the names of control tokens in it become control tokens."""
        ...

    def count(self, text: str) -> int:
        """Return the number of tokens of `encode`."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without control tokens; bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to the text; nothing for control tokens and ids out of range."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """What shaped the text. Equal identities continue each other's output."""

    engine: str
    model: str
    weights_hash: str
    tokenizer_hash: str
    precision: str
    max_context: int


class Engine(Protocol):
    """Runs many requests at once. Methods belong to the event loop that called `start`; none of them blocks it."""

    @property
    def identity(self) -> EngineIdentity:
        """Return what shapes the text. Known after `start`."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Known after `start`."""
        ...

    async def start(self) -> None:
        """Load and warm. Returns when the first request would run at full speed.

        Raises ConfigError for a model that this engine cannot run.
        """
        ...

    def submit(self, request: EngineRequest) -> EngineStream:
        """Queue a request.

        Raises PromptTooLongError if not one new token would fit, InvalidRequestError for an unusable field (`output`
        with more choices than n, or with ids that the model does not know) or an id that is already in flight,
        RejectedError if the queue is full, EngineUnavailableError if it is not running.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request within one step; its stream ends with `abort`. Unknown ids are ignored."""
        ...

    def statistics(self) -> EngineStatistics:
        """Return what the engine does now."""
        ...

    async def stop(self) -> None:
        """End what runs with EngineUnavailableError and free everything. Idempotent."""
        ...
