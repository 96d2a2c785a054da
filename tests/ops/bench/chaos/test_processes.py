"""Worker processes are real ones: they are killed, asked to stop, and started again; here without any Kafka."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from ops.bench.chaos.processes import WorkerProcess, Workers, bare_environment
from ops.bench.chaos.stack import Size, configuration
from schemas.worker import Pool

NOWHERE = "127.0.0.1:1"


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(configuration(Size(), NOWHERE, "redis://127.0.0.1:1/0")))
    made = Workers(tmp_path, config, dict(os.environ))
    made.prepare()
    try:
        yield made
    finally:
        await made.close()
        assert not any(each.is_alive for each in made.running.values())


async def waiting(workers: Workers, pool: Pool) -> WorkerProcess:
    """Start a worker and return it once it waits for Kafka."""
    one = workers.start(pool, f"{pool}-1")
    while b"waiting_for_broker" not in (one.log.read_bytes() if one.log.exists() else b""):
        assert not await workers.ready(one, 0.05)
        assert one.is_alive
    return one


async def test_a_killed_worker_is_gone_at_once_and_comes_back_as_another_process(workers: Workers) -> None:
    one = workers.start(Pool.ROUTER, "router-1")
    assert workers.of(Pool.ROUTER) == [one]
    workers.kill(one)
    assert await workers.gone(one, 5)
    assert one.process.exitcode == -signal.SIGKILL
    assert workers.of(Pool.ROUTER) == []
    assert workers.revive() == []  # its end was ours
    another = workers.start(Pool.ROUTER, "router-1")
    assert another.process.pid != one.process.pid


async def test_whoever_dies_unasked_is_remembered_and_started_again(workers: Workers) -> None:
    one = workers.start(Pool.ROUTER, "router-1")
    assert one.process.pid is not None
    os.kill(one.process.pid, signal.SIGKILL)
    assert await workers.gone(one, 5)
    (again,) = workers.revive()
    assert again.is_alive
    assert len(workers.unexpected) == 1
    assert "router-1" in workers.unexpected[0]


async def test_a_worker_that_waits_for_kafka_stops_in_order(workers: Workers) -> None:
    one = await waiting(workers, Pool.GENERATION)
    assert await workers.stop(one, 10) == 0
    assert one.census() is None


async def test_a_worker_that_does_not_stop_in_time_is_killed(workers: Workers) -> None:
    one = await waiting(workers, Pool.ROUTER)
    assert one.process.pid is not None
    os.kill(one.process.pid, signal.SIGSTOP)
    assert await workers.stop(one, 0.1) is None
    assert not one.is_alive


async def test_all_are_started_and_the_first_that_is_not_ready_in_time_is_named(workers: Workers) -> None:
    names = {"router-1": Pool.ROUTER, "router-2": Pool.ROUTER}
    late = await workers.start_all(names, 0.05)
    assert late is workers.running["router-1"]
    assert set(workers.running) == set(names)
    assert await workers.start_all({}, 0.05) is None


def test_workers_of_a_bench_see_no_variable_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEA_WORKER_DRAIN_S", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("ANOTHER", "kept")
    environ = bare_environment()
    assert "GEA_WORKER_DRAIN_S" not in environ
    assert (environ["OMP_NUM_THREADS"], environ["ANOTHER"]) == ("1", "kept")
