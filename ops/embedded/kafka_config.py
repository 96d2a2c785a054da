"""The settings of the embedded broker: one KRaft node that is broker and controller, on the loopback address.

Values differ from Kafka's defaults only where one node, a laptop or a test asks for it; the reason is beside each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NODE_ID = 1

JVM_OPTIONS = (
    "-Xms64m",
    "-Xmx512m",
    "-XX:+UseSerialGC",  # no concurrent collector threads beside the model's on a small machine
    "-XX:TieredStopAtLevel=1",  # the start and the first requests matter more than peak throughput
    "-Xshare:auto",  # a class-data archive that does not fit is ignored
    "-Xlog:disable",
    "-Xlog:all=error:stderr",  # and not reported at each start
    "-Djava.awt.headless=true",
)

FIXED = {
    "process.roles": "broker,controller",
    "node.id": str(NODE_ID),
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    # One node holds the only replica of everything.
    "default.replication.factor": "1",
    "min.insync.replicas": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # A first commit creates these: fifty partitions each would take seconds.
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    # Topics are made on purpose, by `gea topics apply`.
    "auto.create.topics.enable": "false",
    "num.partitions": "4",
    # The first member of a group starts at once; a killed worker is noticed within a second if it asks for that.
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    # After `kill -9` the node registers again only once its old session is over: 9 s by default.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    # Small files and few threads. Flushing stays with the operating system, as it is by default.
    "log.segment.bytes": str(16 << 20),
    "log.index.size.max.bytes": str(1 << 20),
    "log.cleaner.dedupe.buffer.size": str(16 << 20),
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "2",
    "num.recovery.threads.per.data.dir": "1",
}


def server_properties(
    *,
    data: Path,
    port: int,
    controller_port: int,
    advertised: str | None = None,
    extra_listener: str | None = None,
    extra: Mapping[str, str] | None = None,
) -> str:
    """Return the text of `server.properties`.

    `advertised` is the `host:port` that clients are told, for instance of a proxy before the broker. `extra_listener`
    (`NAME://host:port`) stands beside the plain one; `extra` overrides any setting.
    """
    also = f",{extra_listener}" if extra_listener else ""
    own = {
        "log.dirs": str(data),
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}{also}",
        "advertised.listeners": f"PLAINTEXT://{advertised or f'127.0.0.1:{port}'}{also}",
        # A static quorum: the controller's port may differ at each start of the same folder.
        "controller.quorum.voters": f"{NODE_ID}@127.0.0.1:{controller_port}",
    }
    return "".join(f"{key}={_escape(value)}\n" for key, value in (FIXED | own | dict(extra or {})).items())


def _escape(value: str) -> str:
    # java.util.Properties reads a backslash as an escape.
    return value.replace("\\", "\\\\")
