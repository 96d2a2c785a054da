"""What stands in the dead-letter topic: the record as it came, where it stood, and why it was given up."""

from __future__ import annotations

import msgspec


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record that cannot succeed. `value`, `key` and header values are the raw bytes."""

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
