"""What every StateStore must do; run on memory and on a real server."""

from __future__ import annotations

import asyncio

from streams.store import StateStore


async def check_store(store: StateStore) -> None:
    """Go through the operations once."""
    await store.ping()
    assert await store.get("v") is None
    await store.set("v", b"\x00\xff", ttl_s=60)
    assert await store.get("v") == b"\x00\xff"
    assert await store.set_if_absent("v", b"other", ttl_s=60) == b"\x00\xff"
    assert await store.set_if_absent("w", b"new", ttl_s=60) == b"new"
    assert await store.set_if_absent("w", b"new", ttl_s=60) == b"new"
    standing = await asyncio.gather(*(store.set_if_absent("x", b"%d" % n, ttl_s=60) for n in range(20)))
    assert len(set(standing)) == 1

    assert await store.last("l", 3) == ()
    for number in range(6):
        assert await store.append("l", f"id{number}", b"%d" % number, max_items=4, ttl_s=60)
    assert not await store.append("l", "id5", b"again", max_items=4, ttl_s=60)
    assert await store.last("l", 10) == (b"2", b"3", b"4", b"5")
    assert await store.last("l", 2) == (b"4", b"5")
    assert await store.last("l", 0) == ()
    appended = await asyncio.gather(*(store.append("m", "same", b"x", max_items=4, ttl_s=60) for _ in range(10)))
    assert sum(appended) == 1

    await store.delete("l")
    await store.delete("v")
    assert (await store.last("l", 3), await store.get("v")) == ((), None)
