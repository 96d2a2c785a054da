"""What a router knows of requests, with the store and without."""

from __future__ import annotations

from schemas.envelope import Origin, Reply
from streams.memory_store import MemoryStore
from streams.session import Marker, SessionStore
from workers.router.known_requests import KnownRequests


def marker(offset: int) -> Marker:
    return Marker(origin=Origin(partition=0, offset=offset), reply=Reply(topic="gea.tokens", partition=0))


def known_requests() -> tuple[MemoryStore, KnownRequests]:
    store = MemoryStore()
    return store, KnownRequests(SessionStore(store))


async def test_a_repeat_is_recognised_with_the_store_without_it_and_after_it_forgot() -> None:
    store, known = known_requests()
    assert await known.mark("r-1", marker(1)) == marker(1)
    assert await known.mark("r-1", marker(2)) == marker(1)
    store.down = True
    assert await known.mark("r-1", marker(3)) == marker(1)
    assert await known.marker("r-1") == marker(1)
    store.down = False
    await store.delete("gea:marker:r-1")
    assert await known.mark("r-1", marker(4)) == marker(1)


async def test_a_refused_request_may_come_again() -> None:
    _, known = known_requests()
    await known.mark("r-1", marker(1))
    await known.forget("r-1")
    assert await known.marker("r-1") is None
    assert await known.mark("r-1", marker(2)) == marker(2)


async def test_what_comes_again_may_have_been_let_in_unless_the_store_denies_it() -> None:
    store, known = known_requests()
    assert not await known.may_be_admitted("r-1")
    await known.mark("r-1", marker(1))
    assert await known.may_be_admitted("r-1")
    store.down = True
    assert await known.may_be_admitted("r-2")


async def test_of_a_request_that_was_handed_over_only_the_store_tells() -> None:
    store, known = known_requests()
    await known.mark("r-1", marker(1))
    known.hand_over("r-1")
    assert await known.marker("r-1") == marker(1)
    await store.delete("gea:marker:r-1")  # the next router has refused it
    assert await known.mark("r-1", marker(2)) == marker(2)
