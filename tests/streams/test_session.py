"""Turns, pins and markers; and what is left of them when the store is away."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from schemas.envelope import Origin, Reply
from streams.memory_store import MemoryStore
from streams.session import Marker, SessionLimits, SessionStore, Turn, _key


def turn(number: int) -> Turn:
    return Turn(request_id=f"r{number}", user=f"question {number}", assistant=f"答え {number}")


def marker(offset: int) -> Marker:
    return Marker(origin=Origin(partition=0, offset=offset), reply=Reply(topic="gea.tokens", partition=1))


async def test_turns_are_kept_in_order_once_and_no_more_than_allowed() -> None:
    sessions = SessionStore(MemoryStore(), SessionLimits(max_turns=3))
    for number in range(5):
        assert await sessions.append_turn("t", "s", turn(number))
    assert not await sessions.append_turn("t", "s", turn(4))
    assert await sessions.last_turns("t", "s", 10) == (turn(2), turn(3), turn(4))
    assert await sessions.last_turns("t", "s", 1) == (turn(4),)


async def test_tenants_and_sessions_are_apart() -> None:
    sessions = SessionStore(MemoryStore())
    await sessions.append_turn("a", "s", turn(1))
    assert await sessions.last_turns("b", "s", 5) == ()
    assert await sessions.last_turns("a", "s2", 5) == ()


ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,6}", fullmatch=True)


@given(ids, ids, ids, ids)
def test_two_sessions_never_share_a_key(tenant: str, session: str, tenant2: str, session2: str) -> None:
    same = (tenant, session) == (tenant2, session2)
    assert (_key("turns", tenant, session) == _key("turns", tenant2, session2)) is same


async def test_forgotten_turns_are_gone() -> None:
    sessions = SessionStore(MemoryStore())
    await sessions.append_turn("t", "s", turn(1))
    await sessions.forget("t", "s")
    assert await sessions.last_turns("t", "s", 5) == ()


async def test_a_turn_that_cannot_be_read_is_left_out() -> None:
    store = MemoryStore()
    sessions = SessionStore(store)
    await store.append(_key("turns", "t", "s"), "r0", b"\xc1", max_items=5, ttl_s=60)
    await sessions.append_turn("t", "s", turn(1))
    assert await sessions.last_turns("t", "s", 5) == (turn(1),)


async def test_the_first_pin_counts() -> None:
    sessions = SessionStore(MemoryStore())
    assert await sessions.pin("t", "s", "generation", "blue") == "blue"
    assert await sessions.pin("t", "s", "generation", "green") == "blue"
    assert await sessions.pin("t", "s", "intent", "green") == "green"


async def test_a_repeat_finds_the_first_marker_and_the_same_origin_its_own() -> None:
    sessions = SessionStore(MemoryStore())
    assert await sessions.mark("r", marker(1)) == marker(1)
    assert await sessions.mark("r", marker(1)) == marker(1)
    assert await sessions.mark("r", marker(9)) == marker(1)


async def test_without_the_store_there_is_no_memory_and_one_line_per_outage() -> None:
    store = MemoryStore()
    sessions = SessionStore(store)
    await sessions.append_turn("t", "s", turn(1))
    with capture_logs() as logs:
        for _ in range(2):
            store.down = True
            assert not await sessions.append_turn("t", "s", turn(2))
            assert await sessions.last_turns("t", "s", 5) == ()
            assert await sessions.pin("t", "s", "generation", "green") == "green"
            assert await sessions.mark("r", marker(3)) == marker(3)
            assert not sessions.is_available
            store.down = False
            assert await sessions.last_turns("t", "s", 5) == (turn(1),)
            assert sessions.is_available
    assert sessions.statistics() == {"failures": 8, "outages": 2}
    assert [log["log_level"] for log in logs] == ["warning", "info"] * 2
