"""What the bench starts: Kafka behind a proxy, Redis, and the worker processes; all on free ports, in one folder.

Everybody who is tested reaches Kafka through the proxy, because the broker advertises the proxy's address. The bench
itself looks at the log and the groups by a second listener, which no fault touches.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from ops.bench.chaos.processes import Workers, bare_environment
from ops.bench.proxy import Proxy
from ops.embedded import EmbeddedKafka, EmbeddedRedis, process
from ops.launch import DEMO
from schemas.worker import Pool
from streams.client import ClientSettings, GeaClient
from streams.kafka import KafkaBroker
from streams.kafka_groups import KafkaGroups
from streams.settings import BrokerSettings, Timeouts
from streams.topics import topic_specs
from workers.build import FAKE_MODULES
from workers.settings import EngineKind, KafkaSection, Settings, load_settings

DIRECT = "DIRECT"
READY_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """How soon a group notices a death."""

    session_ms: int = 1_500
    heartbeat_ms: int = 500


DEFAULTS = KafkaSection()
SHORT = Sessions()
PRODUCTION = Sessions(session_ms=DEFAULTS.session_timeout_ms, heartbeat_ms=DEFAULTS.heartbeat_interval_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of everything. `num_generation` workers of generation, one of intent and retrieval, two routers."""

    engine: EngineKind = EngineKind.FAKE
    model: Path | None = None
    num_generation: int = 3
    num_routers: int = 2
    num_partitions: int = 6
    pace_ms: float = 25.0
    sessions: Sessions = SHORT

    @property
    def names(self) -> dict[str, Pool]:
        """Return the lasting name of every worker."""
        counts = {
            Pool.ROUTER: self.num_routers,
            Pool.INTENT: 1,
            Pool.RETRIEVAL: 1,
            Pool.GENERATION: self.num_generation,
        }
        return {f"{pool}-{number}": pool for pool, count in counts.items() for number in range(1, count + 1)}


@dataclass(slots=True)
class ChaosStack:
    """One stack. `async with` starts and stops it."""

    folder: Path
    size: Size
    kafka: EmbeddedKafka = field(init=False)
    redis: EmbeddedRedis = field(init=False)
    proxy: Proxy = field(init=False)
    workers: Workers = field(init=False)
    direct: KafkaBroker = field(init=False)
    groups: KafkaGroups = field(init=False)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def settings(self) -> Settings:
        """Return the configuration of the workers."""
        return load_settings(self.folder / "config.yaml", {})

    def client(self, timeout_s: float) -> GeaClient:
        """Return a client that goes through the proxy, as an application does."""
        return GeaClient(self.proxy.address, ClientSettings(timeout_s=timeout_s, connect_s=timeout_s / 2))

    async def start(self) -> None:
        """Start everything and wait until every worker is ready. Raises EmbeddedError, RuntimeError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        port, direct_port = process.free_ports(2)
        self.proxy = await self._stack.enter_async_context(Proxy(("127.0.0.1", port)))
        self.kafka = EmbeddedKafka(
            self.folder / "kafka",
            port=port,
            advertised=self.proxy.address,
            extra_listener=f"{DIRECT}://127.0.0.1:{direct_port}",
            extra={
                "listener.security.protocol.map": f"PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,{DIRECT}:PLAINTEXT",
                "inter.broker.listener.name": DIRECT,
            },
        )
        self._stack.push_async_callback(self.kafka.stop)
        self.redis = EmbeddedRedis(self.folder / "redis")
        self._stack.push_async_callback(self.redis.stop)
        await asyncio.gather(self.kafka.start(), self.redis.start())
        timeouts = Timeouts(request_ms=5_000, send_ms=7_500, close_ms=2_000)
        reach = BrokerSettings(bootstrap=f"127.0.0.1:{direct_port}", client_id="bench")
        self.direct = await self._stack.enter_async_context(KafkaBroker(reach, timeouts))
        self.groups = await self._stack.enter_async_context(KafkaGroups(reach, timeouts))
        await self.direct.create_topics(topic_specs(self.size.num_partitions))
        await self._start_workers()

    async def restart_kafka(self, *, is_killed: bool, away_s: float = 0.0) -> None:
        """Stop the broker (in order, or by `kill -9`) and start it again on the same port and data."""
        handle = self.kafka.handle
        assert handle is not None, "not started"
        if is_killed:
            os.killpg(handle.pid, signal.SIGKILL)
        await self.kafka.stop()
        await asyncio.sleep(away_s)
        await self.kafka.start()

    async def tell_redis(self, *commands: str) -> None:
        """Send commands to Redis, over its own protocol; clients are made in `streams` alone."""
        assert self.redis.handle is not None, "not started"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.redis.handle.port)
        try:
            for command in commands:
                writer.write(command.encode() + b"\r\n")
                async with asyncio.timeout(5):
                    await reader.readline()
        finally:
            writer.close()

    def signal_redis(self, number: signal.Signals) -> None:
        """Freeze it (SIGSTOP) or let it go on (SIGCONT)."""
        assert self.redis.handle is not None, "not started"
        os.kill(self.redis.handle.pid, number)

    async def stop(self) -> None:
        """Stop everything. Idempotent."""
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start_workers(self) -> None:
        config = self.folder / "config.yaml"
        assert self.redis.handle is not None
        config.write_text(yaml.safe_dump(configuration(self.size, self.proxy.address, self.redis.url)))
        heavy = ("workers.generation.engine.local",) if self.size.engine is EngineKind.LOCAL else ()
        self.workers = Workers(self.folder / "workers", config, bare_environment(), (*FAKE_MODULES, *heavy))
        self.workers.folder.mkdir(exist_ok=True)
        self.workers.prepare()
        self._stack.push_async_callback(self.workers.close)
        if (late := await self.workers.start_all(self.size.names, READY_S)) is not None:
            raise RuntimeError(f"{late.name} did not become ready: see {late.log}")


def configuration(size: Size, bootstrap: str, redis_url: str) -> dict[str, Any]:
    """Return what the workers' YAML holds."""
    return {
        "kafka": {
            "bootstrap": bootstrap,
            "partitions": size.num_partitions,
            "replication": 1,
            "request_timeout_ms": 4_000 if size.sessions == SHORT else DEFAULTS.request_timeout_ms,
            "session_timeout_ms": size.sessions.session_ms,
            "heartbeat_interval_ms": size.sessions.heartbeat_ms,
            "rebalance_timeout_ms": 10_000,
        },
        "redis": {"url": redis_url},
        "router": {"deadline_s": 900, "max_queue_depth": 100_000},
        "intent": {"intents": str(DEMO / "intents.yaml")},
        "generation": {
            "engine": size.engine.value,
            "fake_pace_ms": size.pace_ms,
            "model": str(size.model) if size.model else None,
            "templates": str(DEMO / "templates.yaml"),
            "max_sequences": 16,
        },
        "resources": {"generation_service": {"cpu_limit": 1}},
        "worker": {"drain_s": 10},
    }
