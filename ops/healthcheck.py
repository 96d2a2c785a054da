"""`gea-healthcheck`: is Kafka there, and does a worker of the pool work? Exit 0 or 1, and one line that says why.

Made to be called every few seconds by a container's health check: no torch, no rich, one connection, bounded time.
Redis is only warned about, because answers go on without it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ops.errors import CommandError
from schemas.errors import GeaError
from schemas.worker import Pool, WorkerState

if TYPE_CHECKING:
    from ops.connection import Connection
    from schemas.worker import WorkerStatus

TIMEOUT_S = 5.0
MAX_TIMEOUT_S = 300.0
REDIS_TIMEOUT_S = 1.0
MAX_AGE_S = 5.0  # five missed heartbeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The verdict. `why` is one line for people."""

    is_healthy: bool
    why: str
    warnings: tuple[str, ...] = ()
    num_ready: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "healthy": self.is_healthy,
            "why": self.why,
            "warnings": list(self.warnings),
            "ready_workers": self.num_ready,
        }


def main() -> None:
    """Check, say why, and exit with 0 or 1."""
    # structlog imports rich for its console, and drags in a third of all the time this takes; it does without as well.
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
    logging.disable(logging.CRITICAL)  # the one line says it
    gc.disable()  # nothing that lives so briefly needs it
    sys.exit(check(sys.argv[1:]))


def check(arguments: Sequence[str]) -> int:
    """Check, say why, and return the exit code."""
    options = _parser().parse_args(arguments)
    began = time.monotonic()
    health = _examine(options)
    took_ms = (time.monotonic() - began) * 1000
    for warning in health.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if options.json:
        print(json.dumps(health.to_json() | {"took_ms": round(took_ms, 1)}))
    else:
        print(f"{'healthy' if health.is_healthy else 'unhealthy'}: {health.why}")
    return 0 if health.is_healthy else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gea-healthcheck", description="Exit 0 if healthy, else 1, and say why.")
    parser.add_argument(
        "--pool", choices=[pool.value for pool in Pool], help="also ask for a ready worker of this pool"
    )
    parser.add_argument("--colour", help="only workers of this colour count")
    parser.add_argument("--local", action="store_true", help="only workers of this host count")
    parser.add_argument(
        "--kafka", metavar="HOST:PORT", help="Kafka, instead of the running stack's or GEA_KAFKA_BOOTSTRAP"
    )
    parser.add_argument("--config", type=Path, help="configuration file (GEA_CONFIG)")
    parser.add_argument("--name", default="default", help="name of the stack on this machine")
    parser.add_argument("--timeout", type=_seconds, default=TIMEOUT_S, help="seconds after which it is unhealthy")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{text} is not allowed: above 0 to {MAX_TIMEOUT_S:g}")
    return seconds


def _examine(options: argparse.Namespace) -> Health:
    from ops.connection import find_connection

    try:
        connection = find_connection(
            kafka=options.kafka, config=options.config, name=options.name, environ=os.environ, is_trusted=True
        )
        return asyncio.run(_ask(connection, options))
    except (CommandError, GeaError) as error:
        return Health(is_healthy=False, why=error.message)
    except TimeoutError:
        return Health(is_healthy=False, why=f"Kafka did not answer within {options.timeout:g} s")


async def _ask(connection: Connection, options: argparse.Namespace) -> Health:
    redis = asyncio.create_task(_redis_warning(connection))
    try:
        async with asyncio.timeout(options.timeout):
            workers = await _workers(connection) if options.pool else await _reach(connection)
    finally:
        warning = await redis
    warnings = (warning,) if warning else ()
    return judge(connection.bootstrap, options, workers, warnings)


def judge(
    bootstrap: str, options: argparse.Namespace, workers: Sequence[WorkerStatus], warnings: tuple[str, ...]
) -> Health:
    """Return the verdict, given that Kafka has answered."""
    if not options.pool:
        return Health(is_healthy=True, why=f"Kafka at {bootstrap} answers", warnings=warnings)
    asked = [each for each in workers if each.pool.value == options.pool and options.colour in (None, each.colour)]
    asked = [each for each in asked if not options.local or _lives_here(each)]
    ready = [each for each in asked if each.state is WorkerState.READY]
    aside = [each for each in asked if each.state is WorkerState.SUSPENDED]
    if options.local and aside and not ready:  # it comes back by itself: nobody should restart it
        warnings = (*warnings, *(f"{each.worker_id} has stepped aside: {each.reason}" for each in aside))
        return Health(is_healthy=True, why=f"{len(aside)} {options.pool} worker(s) aside for now", warnings=warnings)
    where = f"{options.pool} worker" + (f" of colour {options.colour}" if options.colour else "")
    where += " on this host" if options.local else ""
    if ready:
        return Health(is_healthy=True, why=f"{len(ready)} ready {where}(s)", warnings=warnings, num_ready=len(ready))
    states = ", ".join(
        f"{each.worker_id} is {each.state}" + (f" ({each.reason})" if each.reason else "") for each in asked
    )
    return Health(is_healthy=False, why=f"no ready {where}" + (f": {states}" if states else ""), warnings=warnings)


def _lives_here(status: WorkerStatus) -> bool:
    """Return whether a worker is a process of this host; one that was killed still has a status for some seconds."""
    if status.host != socket.gethostname():
        return False
    try:
        os.kill(status.pid, 0)  # asks, and sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def _workers(connection: Connection) -> Sequence[WorkerStatus]:
    from ops.roster import RosterReader

    async with connection.broker("gea-healthcheck") as broker, RosterReader(broker, max_age_s=MAX_AGE_S) as roster:
        return roster.workers()


async def _reach(connection: Connection) -> Sequence[WorkerStatus]:
    from streams.topics import REQUESTS

    async with connection.broker("gea-healthcheck") as broker:
        if not await broker.partitions(REQUESTS):
            raise CommandError(f"Kafka at {connection.bootstrap} answers, but there is no topic {REQUESTS}")
    return ()


async def _redis_warning(connection: Connection) -> str | None:
    """Say PING by hand: the client library would take longer to import than the whole check may take."""
    from urllib.parse import urlsplit

    url = urlsplit(connection.settings.redis.url)
    if url.scheme != "redis" or not url.hostname:
        return None  # TLS and sockets are the workers' to watch
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(url.hostname, url.port or 6379)
            try:
                writer.write(b"PING\r\n")
                answer = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return f"Redis at {url.hostname}:{url.port or 6379} does not answer; conversations are not remembered"
    # An error reply (NOAUTH) is an answer too.
    return None if answer[:1] in (b"+", b"-") else f"Redis at {url.hostname}:{url.port or 6379} answers strangely"


if __name__ == "__main__":
    main()
