"""What stands in the dead-letter topic: the record as it came, where it stood, why it was given up; and redrives."""

from __future__ import annotations

import msgspec


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record that cannot succeed. `value`, `key` and header values are the raw bytes.

    `is_left_out`: they were too large to stand here, and are to be found at topic, partition and offset only.
    """

    code: str
    message: str
    topic: str
    partition: int
    offset: int
    value: bytes | None = None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    request_id: str = ""
    worker_id: str = ""
    failed_ms: int = 0
    is_left_out: bool = False


class Redriven(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Says that the letter at `offset` of this partition was sent in again: to `topic`, a request as `request_id`."""

    offset: int
    topic: str
    redriven_ms: int
    request_id: str = ""
