from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from ops.embedded import BrokerKind, EmbeddedTansu, MissingPrerequisiteError, choose_broker, make_broker
from ops.embedded.jars import jars_folder, kafka_version
from ops.embedded.kafka_config import server_properties
from ops.embedded.ping import ping_kafka, ping_redis
from ops.embedded.process import free_ports


def machine(folder: Path, *, java: str | None = None, maven: bool = False) -> dict[str, str]:
    """Return the environment of a machine with these programs and no others."""
    if java is not None:
        _program(folder / "java", f"echo 'openjdk version \"{java}\" 2024-01-01' >&2")
    if maven:
        _program(folder / "mvn", "exit 0")
    return {"PATH": str(folder), "GEA_CACHE": str(folder / "cache")}


def _program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_kafka_is_chosen_where_java_and_maven_are(tmp_path: Path) -> None:
    choice = choose_broker(environ=machine(tmp_path, java="21.0.2", maven=True))
    assert choice.kind is BrokerKind.KAFKA
    assert not choice.is_fallback
    assert "21.0.2" in choice.reason


@pytest.mark.parametrize(
    ("java", "maven", "named"),
    [
        (None, True, "Java is missing"),
        ("11.0.1", True, "Java 11.0.1 is too old"),
        ("17.0.1", False, "Maven is missing"),
    ],
)
def test_tansu_is_chosen_otherwise_and_the_reason_names_what_to_install(
    tmp_path: Path, java: str | None, maven: bool, named: str
) -> None:
    choice = choose_broker(environ=machine(tmp_path, java=java, maven=maven))
    assert choice.is_fallback
    assert choice.reason.startswith(named)
    assert "install" in choice.reason
    assert "without guarantees" in choice.reason
    assert "\n" not in choice.reason


def test_maven_is_not_needed_once_the_jars_are_there(tmp_path: Path) -> None:
    environ = machine(tmp_path, java="17.0.1")
    jars_folder(tmp_path / "cache").mkdir(parents=True)
    assert choose_broker(environ=environ).kind is BrokerKind.KAFKA


def test_choice_can_be_forced_and_a_wrong_name_is_refused(tmp_path: Path) -> None:
    environ = machine(tmp_path, java="17.0.1", maven=True)
    assert choose_broker("tansu", environ).is_fallback
    assert choose_broker(environ=environ | {"GEA_BROKER": "tansu"}).is_fallback
    with pytest.raises(MissingPrerequisiteError, match="'rabbit'; it must be kafka or tansu"):
        choose_broker(environ=environ | {"GEA_BROKER": "rabbit"})


def test_server_properties_keep_to_the_loopback_address_and_make_no_topics(tmp_path: Path) -> None:
    text = server_properties(data=tmp_path, port=1111, controller_port=2222, advertised="127.0.0.1:3333")
    values = dict(line.split("=", 1) for line in text.splitlines())
    assert values["listeners"] == "PLAINTEXT://127.0.0.1:1111,CONTROLLER://127.0.0.1:2222"
    assert values["advertised.listeners"] == "PLAINTEXT://127.0.0.1:3333"
    assert values["controller.quorum.voters"] == "1@127.0.0.1:2222"
    assert values["auto.create.topics.enable"] == "false"
    assert values["group.initial.rebalance.delay.ms"] == "0"
    assert values["group.min.session.timeout.ms"] == "1000"


def test_compose_runs_the_same_kafka_as_the_pom() -> None:
    compose = Path(__file__).resolve().parents[2] / "compose.yaml"
    assert f"apache/kafka:{kafka_version()}\n" in compose.read_text()


async def test_ping_of_a_closed_or_silent_or_foreign_port_is_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.embedded.ping.PING_TIMEOUT_S", 0.05)
    (closed,) = free_ports(1)
    assert not await ping_kafka(closed)
    assert not await ping_redis(closed)
    for reply in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"):
        ended = asyncio.Semaphore(0)

        async def answer(
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            reply: bytes = reply,
            ended: asyncio.Semaphore = ended,
        ) -> None:
            writer.write(reply)
            await reader.read()
            writer.close()
            await writer.wait_closed()
            ended.release()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            assert not await ping_kafka(port)
            assert not await ping_redis(port)
            await ended.acquire()
            await ended.acquire()


def test_importing_the_package_loads_neither_torch_nor_clients() -> None:
    code = "import sys, ops.embedded; print(sorted({'torch', 'transformers', 'aiokafka', 'redis'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


@pytest.mark.kafka
async def test_the_fallback_starts_and_says_what_it_is(tmp_path: Path) -> None:
    async with make_broker(choose_broker("tansu"), tmp_path) as broker:
        assert isinstance(broker, EmbeddedTansu)
        assert broker.broker_name.startswith("Tansu ")
        assert "memory-only" in broker.broker_name
        assert await ping_kafka(int(broker.bootstrap.rpartition(":")[2]))
    assert not await ping_kafka(int(broker.bootstrap.rpartition(":")[2]))
