"""Apache Kafka as a child process: one KRaft node with a folder of its own.

    async with EmbeddedKafka(folder) as kafka:
        connect(kafka.bootstrap)

Knows nothing of topics. The data folder outlives the server: a second start of the same folder goes on where the first
ended, on another port if none is named. `start` returns only when the broker serves metadata.
"""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from ops.embedded import process
from ops.embedded.cache import Say
from ops.embedded.errors import EmbeddedError, PreparationError
from ops.embedded.jars import Java, KafkaJars, fetch_jars, find_java
from ops.embedded.kafka_config import JVM_OPTIONS, server_properties
from ops.embedded.ping import ping_kafka
from ops.embedded.server import EmbeddedServer, Launch

READY_TIMEOUT_S = 60.0
LOG4J_CONFIG = Path(__file__).with_name("log4j2.yaml")


class EmbeddedKafka(EmbeddedServer):
    """One broker; see `EmbeddedServer`.

    Parameters:
        folder: data and settings of this broker
        port: the client port; a free one if None
        log_folder: where `kafka.log` goes; `folder` if None
        advertised: `host:port` that clients are told to connect to; the broker's own if None
        detached: leave the broker running when this process ends
        cache: folder of the jars; see `cache_folder`
        extra_listener, extra: a second listener and further settings; see `server_properties`
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        log_folder: Path | None = None,
        advertised: str | None = None,
        detached: bool = False,
        cache: Path | None = None,
        java_options: Sequence[str] = (),
        extra_listener: str | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, (log_folder or folder) / "kafka.log", port=port, detached=detached)
        self._advertised, self._cache, self._java_options = advertised, cache, java_options
        self._extra_listener, self._extra = extra_listener, extra

    @property
    def bootstrap(self) -> str:
        """Where clients connect: `host:port`."""
        return self.address

    @property
    def broker_name(self) -> str:
        """Name and version, for instance `Apache Kafka 4.4.0`."""
        assert self.handle is not None, "not started"
        return self.handle.name

    async def _prepare(self) -> Launch:
        java = await asyncio.to_thread(find_java)
        jars = await asyncio.to_thread(fetch_jars, self._cache)
        await asyncio.to_thread(_format, java, jars, self.folder)
        return Launch(
            name=f"Apache Kafka {jars.version}",
            command=lambda port: self._command(java, jars, port),
            ping=ping_kafka,
            address=lambda port: self._advertised or f"127.0.0.1:{port}",
            ready_timeout_s=READY_TIMEOUT_S,
        )

    def _command(self, java: Java, jars: KafkaJars, port: int) -> list[str]:
        properties = self.folder / "server.properties"
        properties.write_text(
            server_properties(
                data=self.folder / "data",
                port=port,
                controller_port=process.free_ports(1)[0],
                advertised=self._advertised,
                extra_listener=self._extra_listener,
                extra=self._extra,
            )
        )
        return [*_java_command(java, jars, self._java_options), "kafka.Kafka", str(properties)]


async def prepare(cache: Path | None = None, say: Say = print) -> KafkaJars:
    """Fetch the jars and record the class-data archive, unless both are there. Safe to run twice at once.

    Raises as `fetch_jars` and `find_java`; a class-data archive that cannot be recorded is only reported.
    """
    java = await asyncio.to_thread(find_java)
    jars = await asyncio.to_thread(fetch_jars, cache, say)
    if not jars.archive(java).exists():
        say("recording Kafka's classes for quicker starts")
        try:
            await _record_classes(java, jars, cache)
        except EmbeddedError as error:
            say(f"not recorded: {error}")
    return jars


async def _record_classes(java: Java, jars: KafkaJars, cache: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix="gea-kafka-") as temporary:
        folder = Path(temporary)
        recorded = folder / "classes.jsa"
        async with EmbeddedKafka(folder, cache=cache, java_options=[f"-XX:ArchiveClassesAtExit={recorded}"]):
            pass  # the archive is written at the end of the process
        if not recorded.exists():
            raise PreparationError("Java wrote no class-data archive")
        part = jars.folder / f".{uuid.uuid4().hex}.part"
        shutil.copyfile(recorded, part)
        part.replace(jars.archive(java))


def _java_command(java: Java, jars: KafkaJars, options: Sequence[str] = ()) -> list[str]:
    archive = jars.archive(java)
    shared = [f"-XX:SharedArchiveFile={archive}"] if archive.exists() and not options else []
    logging = f"-Dlog4j2.configurationFile={LOG4J_CONFIG}"
    return [java.path, *JVM_OPTIONS, *options, *shared, logging, "-cp", jars.class_path()]


def _format(java: Java, jars: KafkaJars, folder: Path) -> None:
    """Make the data folder as `kafka-storage format` does; complete or not at all."""
    data = folder / "data"
    if data.exists():
        return
    with tempfile.TemporaryDirectory(prefix=".format-", dir=folder) as temporary:
        unfinished = Path(temporary) / "data"
        properties = Path(temporary) / "format.properties"
        properties.write_text(server_properties(data=unfinished, port=9092, controller_port=9093))
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        command = [*_java_command(java, jars), "kafka.tools.StorageTool", "format"]
        command += [f"--cluster-id={cluster_id}", f"--config={properties}"]  # an id may begin with a dash
        answer = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if answer.returncode:
            lines = (answer.stderr or answer.stdout).strip().splitlines() or ["no output"]
            raise PreparationError(f"Kafka's data folder could not be formatted: {lines[-1]}")
        unfinished.rename(data)
