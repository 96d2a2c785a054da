"""What is said about requests while they are on their way: the records of `gea.control`, keyed by request_id."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from schemas.errors import InvalidRequestError
from schemas.request import check_id

MAX_REASON_CHARS = 256


class ControlKind(StrEnum):
    """What is said."""

    CANCEL = "cancel"
    """Stop the request, wherever it is."""
    ALIVE = "alive"
    """Its reader is still there: the lease of a request with `reader_lease_s` begins anew."""


class Control(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One saying. It counts only for a request of the same tenant. `sent_ms` is a Unix time in milliseconds."""

    kind: ControlKind
    request_id: str
    tenant: str = "default"
    sent_ms: int = 0
    reason: str = ""


def check_control(control: Control) -> None:
    """Check every field against its range. Raises InvalidRequestError with the field and the allowed range."""
    check_id("request_id", control.request_id)
    check_id("tenant", control.tenant)
    if len(control.reason) > MAX_REASON_CHARS:
        raise InvalidRequestError(
            f"reason: {len(control.reason)} characters, at most {MAX_REASON_CHARS} are allowed", field="reason"
        )
    if not control.reason.isprintable():  # readers, logs and terminals show it
        raise InvalidRequestError("reason: only printable characters on one line are allowed", field="reason")
