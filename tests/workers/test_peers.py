"""A worker's view of the others of its pool."""

from __future__ import annotations

import asyncio
from typing import Any

from schemas.codec import pack
from schemas.worker import Pool, WorkerState, WorkerStatus
from streams.directory import Directory
from streams.memory import MemoryBroker
from streams.topics import WORKERS, topic_specs
from workers.peers import Peers


async def say(broker: MemoryBroker, name: str, **fields: Any) -> None:
    known: dict[str, Any] = {
        "pool": Pool.INTENT,
        "colour": "blue",
        "state": WorkerState.READY,
        "updated_ms": 1,
        "partitions": (1,),
    }
    producer = await broker.producer()
    await producer.send(WORKERS, pack(WorkerStatus(worker_id=name, **(known | fields))), key=name.encode())


async def test_only_a_peer_that_gives_its_partitions_up_has_departed() -> None:
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(1))
    async with Directory(broker) as directory:
        peers = Peers(directory, Pool.INTENT, "blue", "a")
        for name in "abc":
            await say(broker, name)
        await directory.wait_until(lambda: len(directory.workers()) == 3, timeout_s=5)
        assert peers.has_ready()
        departed = asyncio.create_task(peers.departed())
        await say(broker, "b", state=WorkerState.DRAINING)
        await say(broker, "other", colour="green", partitions=())
        await say(broker, "b", partitions=(1, 2))
        await directory.wait_until(lambda: directory.workers(colour="green") != (), timeout_s=5)
        assert not departed.done()
        await say(broker, "b", state=WorkerState.SUSPENDED, partitions=())
        await asyncio.wait_for(departed, 5)
        departed = asyncio.create_task(peers.departed())
        await asyncio.sleep(0)
        await (await broker.producer()).send(WORKERS, None, key=b"c")
        await asyncio.wait_for(departed, 5)


async def test_without_a_directory_there_are_no_peers() -> None:
    peers = Peers(None, Pool.INTENT, "blue", "a")
    assert list(peers.all()) == []
    assert not peers.has_ready()
