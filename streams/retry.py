"""What a record of `gea.retry.*` says about itself: where it returns to, and not before when.

Knows headers, not what the record holds. One topic per delay, so that a long delay never stands before a short one.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.envelope import NOT_BEFORE_MS, TARGET, Headers, header, whole_number
from schemas.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOrder:
    """Produce the record again to topic `target`, not before a Unix time in milliseconds."""

    target: str
    not_before_ms: int

    def headers(self) -> Headers:
        """Return the headers that say so."""
        return ((TARGET, self.target.encode()), (NOT_BEFORE_MS, str(self.not_before_ms).encode()))


def read_order(headers: Headers) -> RetryOrder:
    """Read the order of a retried record. Raises InvalidRequestError that names the header."""
    target = header(headers, TARGET)
    if not target:
        raise InvalidRequestError(f"header {TARGET}: missing", field=TARGET)
    not_before_ms = whole_number(headers, NOT_BEFORE_MS, 2**53)
    if not_before_ms is None:
        raise InvalidRequestError(f"header {NOT_BEFORE_MS}: missing", field=NOT_BEFORE_MS)
    return RetryOrder(target=target, not_before_ms=not_before_ms)


def without_order(headers: Headers) -> Headers:
    """Return the headers as the target's readers know them."""
    return tuple((name, value) for name, value in headers if name not in (TARGET, NOT_BEFORE_MS))
