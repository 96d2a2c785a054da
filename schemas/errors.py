"""Every error that GEA raises on purpose, grouped by what the caller does about it.

    GeaError
    ├── InvalidRequestError        change the request
    │   ├── PromptTooLongError         the prompt can never fit
    │   ├── DeadlineExceededError      ask again with a later deadline
    │   └── UnsupportedVersionError    use a version that this side knows
    ├── DecodeError                bytes that are no message of ours: dead-letter them
    ├── RejectedError              come back after `retry_after_s`
    ├── RequestCancelledError      somebody who may has cancelled the request
    ├── UnavailableError           a part that we depend on is away: retry
    │   ├── BrokerUnavailableError     Kafka
    │   ├── StoreUnavailableError      Redis
    │   └── EngineUnavailableError     the generation engine is dead or stopping
    ├── ResponseTimeoutError       no answer yet; it can be replayed later
    ├── StreamError                the token stream cannot be read on
    │   ├── StreamExpiredError         its start has left the topic
    │   └── StreamGapError             a token is missing
    ├── RequestFailedError         the request ended as `failed`; `code` says why
    ├── ConfigError                the process must not start
    └── InternalError              a fault of ours

`code` and `retriable` are data on the class, so that a policy can be written as a table.
"""

from __future__ import annotations

from typing import ClassVar

MAX_MESSAGE_CHARS = 1_000  # a message quotes what came in, and must fit into every record that tells of it


class GeaError(Exception):
    """Root of the tree. `code` is stable and goes over the wire, `message` is for people: cut, and valid UTF-8."""

    code: ClassVar[str] = "internal"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        self.message = _sendable(message)
        super().__init__(self.message)


def _sendable(message: str) -> str:
    short = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}…"
    return short.encode("utf-8", "replace").decode()


class InvalidRequestError(GeaError):
    """A field is missing, of the wrong type or out of its range. `field` names it (None: the whole body)."""

    code = "invalid_request"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLongError(InvalidRequestError):
    """The prompt can never fit into the model's context window or the KV pool."""

    code = "prompt_too_long"


class DeadlineExceededError(InvalidRequestError):
    """The deadline of the request has passed."""

    code = "deadline_exceeded"


class UnsupportedVersionError(InvalidRequestError):
    """The major version of a message is not known here."""

    code = "unsupported_version"


class DecodeError(GeaError):
    """The bytes are no MessagePack map of the expected type, or break a size limit."""

    code = "undecodable"


class RejectedError(GeaError):
    """Admission refused the request for now."""

    code = "overloaded"
    retriable = True

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestCancelledError(GeaError):
    """The request was cancelled: it ends as `cancelled`, not as failed."""

    code = "cancelled"


class UnavailableError(GeaError):
    """A part that we depend on does not answer in its bounded time."""

    code = "unavailable"
    retriable = True


class BrokerUnavailableError(UnavailableError):
    """Kafka does not answer."""

    code = "broker_unavailable"


class StoreUnavailableError(UnavailableError):
    """Redis does not answer."""

    code = "store_unavailable"


class EngineUnavailableError(UnavailableError):
    """The generation engine is dead, stuck or stopping."""

    code = "engine_unavailable"


class ResponseTimeoutError(GeaError):
    """No terminal record arrived in time. The request goes on: replay the stream later."""

    code = "response_timeout"
    retriable = True

    def __init__(self, message: str, *, request_id: str) -> None:
        super().__init__(message)
        self.request_id = request_id


class StreamError(GeaError):
    """The token stream of a request cannot be read on."""

    code = "stream_error"


class StreamExpiredError(StreamError):
    """The start of the stream has left the topic by retention."""

    code = "stream_expired"


class StreamGapError(StreamError):
    """A record of the stream is missing: text would be lost."""

    code = "stream_gap"


class RequestFailedError(GeaError):
    """The request ended as `failed`; `failure_code` is the code of its end record.

    `retry_after_s`: when to come back, where GEA was too busy.
    """

    code = "request_failed"

    def __init__(
        self, message: str, *, failure_code: str, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.failure_code = failure_code
        self.field = field
        self.retry_after_s = retry_after_s


class ConfigError(GeaError):
    """A setting is unknown or out of range; the message names its key."""

    code = "config"


class InternalError(GeaError):
    """A fault of ours."""

    code = "internal"
