"""Only the very processes that were started count as ready, and one that cannot be is noticed at once."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from ops.launch import log_tail
from ops.readiness import PartDiedError, await_ready, watch
from ops.roster import RosterReader
from ops.stack import Part, Process, Role
from schemas.codec import pack
from schemas.envelope import CE_TYPE, WORKER_TYPE
from schemas.errors import UnavailableError
from schemas.worker import Pool, WorkerState, WorkerStatus
from streams.clock import now_ms
from streams.memory import MemoryBroker
from streams.topics import WORKERS, topic_specs

PID = 4242


@pytest.fixture
async def broker() -> MemoryBroker:
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(2))
    return broker


def part(tmp_path: Path, pid: int = PID) -> Part:
    log = tmp_path / "intent-1.log"
    return Part(role=Role.WORKER, name="intent-1", process=Process(pid=pid, created_at=1.0), log=str(log))


def write_log(part: Part, text: str) -> Part:
    Path(part.log).write_text(text)
    return part


async def publish(
    broker: MemoryBroker, state: WorkerState, *, pid: int = PID, host: str = "", reason: str = ""
) -> None:
    status = WorkerStatus(
        worker_id="intent-1",
        pool=Pool.INTENT,
        colour="blue",
        state=state,
        updated_ms=now_ms(),
        pid=pid,
        host=host or socket.gethostname(),
        reason=reason,
    )
    producer = await broker.producer()
    headers = ((CE_TYPE, WORKER_TYPE.encode()),)
    await producer.send(WORKERS, pack(status), key=b"intent-1", headers=headers)


async def test_ready_worker_ends_the_wait(broker: MemoryBroker, tmp_path: Path) -> None:
    ready: list[str] = []
    waiting = asyncio.create_task(
        await_ready(broker, [part(tmp_path)], lambda part, _: ready.append(part.name), timeout_s=10)
    )
    await publish(broker, WorkerState.STARTING)
    await publish(broker, WorkerState.READY)
    await waiting
    assert ready == ["intent-1"]


async def test_earlier_worker_of_the_same_name_or_another_host_does_not_count(
    broker: MemoryBroker, tmp_path: Path
) -> None:
    await publish(broker, WorkerState.READY, pid=PID + 1)
    await publish(broker, WorkerState.READY, host="elsewhere")
    with pytest.raises(PartDiedError, match="was not ready within"):
        await await_ready(broker, [part(tmp_path)], lambda *_: None, timeout_s=0.2)


async def test_worker_that_says_it_failed_ends_the_wait_with_its_reason(broker: MemoryBroker, tmp_path: Path) -> None:
    await publish(broker, WorkerState.FAILED, reason="no weights")
    with pytest.raises(PartDiedError, match=r"no weights.*intent-1\.log"):
        await await_ready(broker, [part(tmp_path)], lambda *_: None, timeout_s=10)


async def test_broker_that_comes_back_is_asked_again(broker: MemoryBroker, tmp_path: Path) -> None:
    broker.down = True
    waiting = asyncio.create_task(await_ready(broker, [part(tmp_path)], lambda *_: None, timeout_s=10))
    await asyncio.sleep(0)
    broker.down = False
    await publish(broker, WorkerState.READY)
    await waiting


async def test_dead_process_is_noticed_with_the_end_of_its_log(tmp_path: Path) -> None:
    dead = write_log(part(tmp_path, pid=2**22 - 1), "first\nthe reason\n")
    with pytest.raises(PartDiedError, match="ended at start") as caught:
        await watch(lambda: [dead])
    assert caught.value.details == ("first", "the reason")


async def test_roster_reads_what_lives_and_forgets_what_left(broker: MemoryBroker) -> None:
    await publish(broker, WorkerState.READY)
    async with RosterReader(broker) as roster:
        assert [each.worker_id for each in roster.workers(Pool.INTENT)] == ["intent-1"]
        assert roster.workers(Pool.ROUTER) == []
        producer = await broker.producer()
        await producer.send(WORKERS, None, key=b"intent-1")
        await roster.poll(1000)
        assert roster.workers() == []


async def test_roster_names_a_missing_topic() -> None:
    with pytest.raises(UnavailableError, match="gea topics apply"):
        async with RosterReader(MemoryBroker()):
            pytest.fail("opened")


def test_log_tail_shortens_events_and_shows_repeated_lines_once(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text('{"event": "waiting", "level": "info", "time": "1", "reason": "no broker"}\n' * 3 + "plain\n")
    assert log_tail(log) == ("info waiting reason=no broker", "plain")
    assert log_tail(tmp_path / "none.log") == ("(no output)",)
