from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from ops.embedded import EmbeddedKafka, MissingPrerequisiteError, ServerError, ServerHandle, is_running, stop
from ops.embedded.jars import fetch_jars, find_java, kafka_version

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module", autouse=True)
def _kafka_can_run() -> None:
    try:
        find_java()
        fetch_jars()
    except MissingPrerequisiteError as missing:
        pytest.skip(str(missing))


async def write(bootstrap: str, value: bytes) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic("kept", 1, 1)])
    await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer:
        await producer.send_and_wait("kept", value)


async def read(bootstrap: str) -> bytes | None:
    async with AIOKafkaConsumer("kept", bootstrap_servers=bootstrap, auto_offset_reset="earliest") as consumer:
        value: bytes | None = (await consumer.getone()).value
        return value


async def test_records_outlive_a_stop_and_a_kill(tmp_path: Path) -> None:
    kafka = EmbeddedKafka(tmp_path / "kafka", log_folder=tmp_path / "logs")
    async with kafka:
        assert kafka.broker_name == f"Apache Kafka {kafka_version()}"
        await write(kafka.bootstrap, b"still here")
    async with kafka:
        assert await read(kafka.bootstrap) == b"still here"
        assert kafka.handle is not None
        os.killpg(kafka.handle.pid, signal.SIGKILL)
        await kafka.stop()
        await kafka.start()
        assert await read(kafka.bootstrap) == b"still here"
    assert (tmp_path / "logs" / "kafka.log").stat().st_size > 0
    assert not is_running(kafka.handle)


async def test_two_brokers_at_once_do_not_meet(tmp_path: Path) -> None:
    first, second = EmbeddedKafka(tmp_path / "a"), EmbeddedKafka(tmp_path / "b")
    await asyncio.gather(first.start(), second.start())
    try:
        assert first.bootstrap != second.bootstrap
        await write(first.bootstrap, b"a")
        await write(second.bootstrap, b"b")
        assert await read(first.bootstrap) == b"a"
    finally:
        await asyncio.gather(first.stop(), second.stop())


async def test_port_in_use_is_reported_with_the_log(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        kafka = EmbeddedKafka(tmp_path, port=taken.getsockname()[1])
        with pytest.raises(ServerError, match=r"ended at start .*its log: .*kafka\.log"):
            await kafka.start()


async def test_advertised_address_is_what_clients_are_told(tmp_path: Path) -> None:
    async with EmbeddedKafka(tmp_path, advertised="127.0.0.1:1") as kafka:
        assert kafka.bootstrap == "127.0.0.1:1"
        assert kafka.handle is not None
        assert kafka.handle.port != 1


async def test_detached_broker_is_stopped_by_its_handle(tmp_path: Path) -> None:
    handle = await EmbeddedKafka(tmp_path, detached=True).start()
    known_again = ServerHandle.from_dict(handle.to_dict())
    try:
        assert is_running(known_again)
    finally:
        await stop(known_again)
    assert not is_running(handle)


async def test_cancelled_start_leaves_nothing_running(tmp_path: Path) -> None:
    kafka = EmbeddedKafka(tmp_path)
    launched = asyncio.Event()
    prepare = kafka._prepare

    async def prepare_and_tell() -> object:
        launch = await prepare()
        launched.set()
        return launch

    kafka._prepare = prepare_and_tell  # type: ignore[method-assign, assignment]
    starting = asyncio.create_task(kafka.start())
    await launched.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert kafka.handle is None
    ours = [p for p in _processes() if str(tmp_path) in p]
    assert ours == []


def _processes() -> list[str]:
    import psutil

    return [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
