"""What an application asks for, and the range of every field.

`GenerationRequest` is the public door: its names are stable, fields are only added. `None` means "the default of the
deployment". Knows nothing of topics, models or sessions beyond their names.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from schemas.errors import InvalidRequestError
from schemas.response_format import ResponseFormat, TextFormat, check_response_format
from schemas.retrieval import Passage

ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
MAX_PROMPT_BYTES = 262_144
MAX_MESSAGES = 256
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 300
MAX_PASSAGES = 20
MAX_NAME_CHARS = 512  # of an id or a title: each stands in the end record, and again in every citation


class Role(StrEnum):
    """Who speaks in a message."""

    SYSTEM = "system"
    """Instructions; kept always."""
    USER = "user"
    """The person who asks."""
    ASSISTANT = "assistant"
    """An earlier answer."""


class Retrieval(StrEnum):
    """Whether passages are looked up."""

    AUTO = "auto"
    """As the intent says."""
    ON = "on"
    """Always."""
    OFF = "off"
    """Never."""


class Strategy(StrEnum):
    """How the answer is made. The strategies issue adds the rest of the twelve."""

    KNOWLEDGE = "knowledge"
    """Grounded in passages, with citations."""
    DIALOGUE = "dialogue"
    """Conversation with the turns of the session."""
    CONTINUATION = "continuation"
    """The model goes on with the prompt as it stands, without a chat template."""
    TEMPLATE = "template"
    """A prepared text of the intent."""


class Priority(StrEnum):
    """The lane of a request where requests wait. Lanes share by weight: none waits for ever."""

    HIGH = "high"
    """Before the others."""
    NORMAL = "normal"
    """The default."""
    LOW = "low"
    """Work that nobody waits for."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a conversation that the client sends in full."""

    role: Role
    content: str


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Exactly one of `prompt` and `messages` is given; see `RANGES` for the numbers."""

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    system: str | None = None
    session_id: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    n: int | None = None
    response_format: ResponseFormat | None = None
    intent: str | None = None
    passages: tuple[Passage, ...] | None = None
    strategy: Strategy | None = None
    retrieval: Retrieval = Retrieval.AUTO
    num_passages: int | None = None
    language: str | None = None
    explain: bool = False
    priority: Priority = Priority.NORMAL
    reader_lease_s: float | None = None  # cancelled when no reader has said for so long that he is there

    @property
    def has_form(self) -> bool:
        """Return whether the answer must have a form, so that nothing but the model can write it."""
        return self.response_format is not None and not isinstance(self.response_format, TextFormat)

    def last_user_text(self) -> str:
        """Return what the person asks now: the prompt, or the last user message."""
        if self.prompt is not None:
            return self.prompt
        users = [message.content for message in self.messages or () if message.role is Role.USER]
        return users[-1] if users else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """An inclusive range; `above` excludes the lower bound."""

    low: float
    high: float
    above: bool = False
    is_whole: bool = False

    def __contains__(self, value: float) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else (int, float)):
            return False  # no such number, although it may be equal to one
        return (self.low < value if self.above else self.low <= value) and value <= self.high  # never true for NaN

    def __str__(self) -> str:
        return f"{'above ' if self.above else ''}{self.low:g} to {self.high:g}{', whole' if self.is_whole else ''}"


RANGES: dict[str, Range] = {
    "max_tokens": Range(low=1, high=1_048_576, is_whole=True),  # the deployment's `max_length` lowers it
    "temperature": Range(low=0, high=2),
    "top_p": Range(low=0, high=1),  # 0 keeps the most likely token only
    "top_k": Range(low=0, high=1_000_000, is_whole=True),  # 0 switches it off
    "min_p": Range(low=0, high=1),
    "repetition_penalty": Range(low=0, high=10, above=True),
    "presence_penalty": Range(low=-2, high=2),
    "frequency_penalty": Range(low=-2, high=2),
    "seed": Range(low=0, high=2**63 - 1, is_whole=True),
    "logprobs": Range(low=0, high=20, is_whole=True),
    "n": Range(low=1, high=8, is_whole=True),
    "num_passages": Range(low=1, high=MAX_PASSAGES, is_whole=True),
    "reader_lease_s": Range(low=1, high=3_600),
}
LOGIT_BIAS_RANGE = Range(low=-100, high=100)


def validate(request: GenerationRequest, *, max_tokens: int | None = None) -> None:
    """Check every field against its range.

    `max_tokens` is the deployment's upper bound. Raises InvalidRequestError with the field and the allowed range.
    """
    _check_text(request)
    _check_numbers(request, max_tokens)
    _check_lists(request)
    _check_form(request)
    _check_ids(request)


def _refuse(field: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {message}", field=field)


def _check_text(request: GenerationRequest) -> None:
    if (request.prompt is None) == (request.messages is None):
        raise _refuse("prompt", "give exactly one of prompt and messages")
    if request.prompt is not None and not request.prompt.strip():
        raise _refuse("prompt", "must not be empty or white space")
    if request.messages is not None:
        if not 1 <= len(request.messages) <= MAX_MESSAGES:
            raise _refuse("messages", f"1 to {MAX_MESSAGES} messages are allowed")
        if request.messages[-1].role is not Role.USER or not request.messages[-1].content.strip():
            raise _refuse("messages", "the last one must come from the user and must not be empty")
    texts = [request.prompt or "", request.system or "", *(m.content for m in request.messages or ())]
    num_bytes = sum(_num_bytes(text) for text in texts)
    if num_bytes > MAX_PROMPT_BYTES:
        field = "prompt" if request.prompt is not None else "messages"
        raise _refuse(field, f"{num_bytes} bytes of text: at most {MAX_PROMPT_BYTES} are allowed")


def _num_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:  # JSON escapes can make it, UTF-8 cannot
        raise _refuse("prompt", "a lone surrogate is no text") from error


def _check_numbers(request: GenerationRequest, max_tokens: int | None) -> None:
    for field, allowed in RANGES.items():
        if field == "max_tokens" and max_tokens is not None:
            allowed = Range(low=1, high=max_tokens, is_whole=True)
        value = getattr(request, field)
        if value is not None and value not in allowed:
            raise _refuse(field, f"{value!r} is not allowed: {allowed}")


def _check_lists(request: GenerationRequest) -> None:
    stop = request.stop or ()
    if _is_text(stop) or len(stop) > MAX_STOP_STRINGS or not all(map(_is_stop, stop)):
        raise _refuse("stop", f"at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters are allowed")
    token_ids = request.stop_token_ids or ()
    if len(token_ids) > MAX_STOP_TOKENS or not all(map(_is_token_id, token_ids)):
        raise _refuse("stop_token_ids", f"at most {MAX_STOP_TOKENS} ids of 0 to {2**31 - 1} are allowed")
    bias = request.logit_bias or {}
    if len(bias) > MAX_LOGIT_BIAS:
        raise _refuse("logit_bias", f"at most {MAX_LOGIT_BIAS} tokens are allowed")
    for token_id, value in bias.items():
        if not _is_token_name(token_id):
            raise _refuse("logit_bias", f"{str(token_id)[:20]!r} is no token id: 0 to {2**31 - 1}")
        if value not in LOGIT_BIAS_RANGE:
            raise _refuse("logit_bias", f"{value} is not allowed: {LOGIT_BIAS_RANGE}")
    if len(request.passages or ()) > MAX_PASSAGES:
        raise _refuse("passages", f"at most {MAX_PASSAGES} are allowed")
    for passage in request.passages or ():
        check_passage(passage)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_stop(text: object) -> bool:
    return isinstance(text, str) and 1 <= len(text) <= MAX_STOP_CHARS


def _is_token_id(token_id: object) -> bool:
    """Say whether this is an id: 5.0 and True are equal to one, but none."""
    return type(token_id) is int and 0 <= token_id < 2**31


def _is_token_name(token_id: object) -> bool:
    """Say whether this is an id as text, the form that keys have in JSON."""
    is_text = isinstance(token_id, str) and token_id.isascii() and token_id.isdigit() and len(token_id) <= 10
    return is_text and int(str(token_id)) < 2**31


def check_passage(passage: Passage) -> None:
    """Check the names and numbers of a passage. Raises InvalidRequestError."""
    for name in ("passage_id", "document_id", "title", "language"):
        if len(getattr(passage, name)) > MAX_NAME_CHARS:
            raise _refuse("passages", f"{name}: at most {MAX_NAME_CHARS} characters are allowed")
    for name in ("semantic_rank", "keyword_rank"):
        if not 0 <= getattr(passage, name) < 2**31:
            raise _refuse("passages", f"{name}: 0 to {2**31 - 1} is allowed")
    if not all(math.isfinite(score) for score in (passage.score, passage.semantic_score, passage.keyword_score)):
        raise _refuse("passages", "a score must be a finite number")


def _check_form(request: GenerationRequest) -> None:
    if request.response_format is not None:
        check_response_format(request.response_format)
    if request.has_form and request.strategy is Strategy.TEMPLATE:
        raise _refuse("response_format", "a prepared text has no form: leave the strategy open, or choose another")


def _check_ids(request: GenerationRequest) -> None:
    for field in ("session_id", "intent", "language"):
        value = getattr(request, field)
        if value is not None:
            check_id(field, value)


def check_id(field: str, value: str) -> None:
    """Check that `value` may serve as an id: 1 to 128 of letters, digits, `.`, `_`, `:`, `-`.

    Raises InvalidRequestError.
    """
    if not ID_PATTERN.fullmatch(value):
        raise _refuse(field, "1 to 128 letters, digits, '.', '_', ':' or '-' are allowed, the first a letter or digit")
