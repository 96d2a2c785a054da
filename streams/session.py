"""What is remembered between requests: the turns of a session, the colour it is pinned to, and where a request stands.

Losing it loses memory, never answers: while the store is away reading gives nothing and writing is skipped, which is
logged once per outage and counted. Knows what the values mean, not where they are kept.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import structlog

from schemas.codec import pack, unpack
from schemas.envelope import Origin, Reply
from schemas.errors import ConfigError, DecodeError, InvalidRequestError, StoreUnavailableError
from streams.settings import check_range
from streams.store import StateStore

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
log = structlog.get_logger(__name__)


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One question and its answer."""

    request_id: str
    user: str
    assistant: str
    ended_ms: int = 0


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request came from and where its stream stands. `tenant` owns it."""

    origin: Origin
    reply: Reply
    tenant: str = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """How much is kept and for how long. A marker must outlive every repeat of its request."""

    max_turns: int = 32
    turns_ttl_s: int = 86_400
    pin_ttl_s: int = 86_400
    marker_ttl_s: int = 21_600

    def __post_init__(self) -> None:
        check_range("session.max_turns", self.max_turns, 1, 1_024)
        for key in ("turns_ttl_s", "pin_ttl_s", "marker_ttl_s"):
            check_range(f"session.{key}", getattr(self, key), 1, 31_536_000)
        if self.marker_ttl_s < 60:
            raise ConfigError("session.marker_ttl_s: must be at least 60, or repeats are not recognised")


class SessionStore:
    """Turns, pins and markers in a StateStore; never raises because the store is away."""

    def __init__(self, store: StateStore, limits: SessionLimits = SessionLimits()) -> None:
        self._store = store
        self._limits = limits
        self._is_away = False
        self.num_failures = 0
        """Calls that the store did not answer."""
        self.num_outages = 0

    @property
    def is_available(self) -> bool:
        """Return whether the store answered the last call."""
        return not self._is_away

    async def append_turn(self, tenant: str, session_id: str, turn: Turn) -> bool:
        """Append a turn; False if its request_id is there already, or if it could not be kept."""
        appended = await self._try(
            self._store.append(
                _key("turns", tenant, session_id),
                turn.request_id,
                pack(turn),
                max_items=self._limits.max_turns,
                ttl_s=self._limits.turns_ttl_s,
            )
        )
        return bool(appended)

    async def last_turns(self, tenant: str, session_id: str, count: int) -> tuple[Turn, ...]:
        """Return the last turns, oldest first; nothing while the store is away."""
        items = await self._try(self._store.last(_key("turns", tenant, session_id), count))
        turns = (_read(item, Turn) for item in items or ())
        return tuple(turn for turn in turns if turn is not None)

    async def forget(self, tenant: str, session_id: str) -> None:
        """Remove all turns of a session."""
        await self._try(self._store.delete(_key("turns", tenant, session_id)))

    async def pin(self, tenant: str, session_id: str, pool: str, colour: str) -> str:
        """Pin a session to a colour of a pool unless it is pinned, and return the colour that counts."""
        key = _key(f"pin:{pool}", tenant, session_id)
        found = await self._try(self._store.set_if_absent(key, colour.encode(), ttl_s=self._limits.pin_ttl_s))
        return colour if found is None else found.decode(errors="replace")

    async def mark(self, request_id: str, marker: Marker) -> Marker:
        """Remember a request unless it is known, and return the marker that counts: another origin means a repeat."""
        key = f"gea:marker:{request_id}"
        found = await self._try(self._store.set_if_absent(key, pack(marker), ttl_s=self._limits.marker_ttl_s))
        return (_read(found, Marker) if found is not None else None) or marker

    async def marker(self, request_id: str) -> Marker | None:
        """Return the marker of a request, None if it is not known."""
        found = await self._try(self._store.get(f"gea:marker:{request_id}"))
        return _read(found, Marker) if found is not None else None

    async def unmark(self, request_id: str) -> None:
        """Forget a request that was refused, so that it may come again under its id."""
        await self._try(self._store.delete(f"gea:marker:{request_id}"))

    def statistics(self) -> dict[str, int]:
        """Return counters of failed calls and outages."""
        return {"failures": self.num_failures, "outages": self.num_outages}

    async def _try(self, call: Awaitable[T]) -> T | None:
        try:
            result = await call
        except StoreUnavailableError as error:
            self.num_failures += 1
            if not self._is_away:
                self._is_away = True
                self.num_outages += 1
                log.warning("store away, going on without memory", error=error.message)
            return None
        if self._is_away:
            self._is_away = False
            log.info("store is back", outages=self.num_outages)
        return result


def _key(kind: str, tenant: str, session_id: str) -> str:
    # ids may hold ':' but no '/', so that two pairs never give one key
    return f"gea:{kind}:{tenant}/{session_id}"


def _read(raw: bytes, type_: type[S]) -> S | None:
    """Read a value; None for one that another version has written."""
    try:
        return unpack(raw, type_)
    except (DecodeError, InvalidRequestError):
        return None
