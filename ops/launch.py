"""Start one worker process: its command, its environment, its log."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ops
from ops.embedded import encoder_folder, language_model_folder, process
from ops.stack import Part, Process, Role
from schemas.worker import Pool
from workers.settings import Settings

ROOT = Path(ops.__file__).resolve().parents[1]
DEMO = ROOT / "ops" / "demo"
LOG_TAIL_LINES = 12
LOG_LINE_CHARS = 400
MAX_LOG_LINES = 500  # looked at; a log may be long
DULL_FIELDS = frozenset({"event", "level", "time", "pool", "colour", "worker_id", "logger", "exception"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLaunch:
    """What a worker process is started with."""

    pool: Pool
    name: str
    colour: str
    config: Path
    log: Path
    environ: Mapping[str, str]
    dies_with_us: bool


def worker_command(pool: Pool, *, colour: str, config: Path, name: str | None) -> list[str]:
    """Return the command line of a worker process."""
    command = [sys.executable, "-m", "workers", pool.value, "--colour", colour, "--config", str(config)]
    return [*command, "--name", name] if name else command


def worker_environment(
    pool: Pool, settings: Settings, overrides: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a worker: ours, the `overrides`, and a bound on the threads of its libraries."""
    own = dict(os.environ if environ is None else environ)
    threads = str(settings.resources.of(pool).cpu_limit)
    own |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    own |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), own.get("PYTHONPATH")]))}
    return own | dict(overrides)


def metrics_environment(settings: Settings, number: int) -> dict[str, str]:
    """Return the variable that gives the n-th worker of a stack, from 0, a metrics port of its own, if any is set."""
    first = settings.worker.metrics_port
    return {"GEA_WORKER_METRICS_PORT": str(first + number)} if first else {}  # 0 is any free port already


def spawn_worker(launch: WorkerLaunch) -> Part:
    """Start the process and return it as a part of a stack; it is not ready yet."""
    pid, created_at = process.spawn(
        worker_command(launch.pool, colour=launch.colour, config=launch.config, name=launch.name),
        log=launch.log,
        die_with_parent=launch.dies_with_us,
        environ=launch.environ,
    )
    return Part(
        role=Role.WORKER,
        name=launch.name,
        process=Process(pid=pid, created_at=created_at),
        log=str(launch.log),
        pool=launch.pool,
        colour=launch.colour,
    )


async def default_environment(settings: Settings, say: Callable[[str], None]) -> dict[str, str]:
    """Return the variables that name what ships with GEA, for settings that name none: models, intents, templates.

    The language model is converted first if it never was (about 30 s). Raises EmbeddedError.
    """
    found: dict[str, str] = {}
    if settings.intent.encoder is None or settings.retrieval.encoder is None:
        encoder = str(encoder_folder())
        found |= {"GEA_INTENT_ENCODER": settings.intent.encoder or encoder}
        found |= {"GEA_RETRIEVAL_ENCODER": settings.retrieval.encoder or encoder}
    if settings.intent.intents is None:
        found["GEA_INTENT_INTENTS"] = str(DEMO / "intents.yaml")
    if settings.generation.templates is None:
        found["GEA_GENERATION_TEMPLATES"] = str(DEMO / "templates.yaml")
    if settings.generation.model is None:
        found["GEA_GENERATION_MODEL"] = str(await asyncio.to_thread(language_model_folder, say=say))
    return found


def worker_name(pool: Pool, number: int, *, stack: str, is_shared_broker: bool) -> str:
    """Return the lasting name of the n-th worker of a pool; on a shared broker it names stack and host too."""
    short = f"{pool}-{number}"
    if not is_shared_broker:
        return short
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:40]
    return f"{stack}-{short}-{host}"


def log_tail(log: Path, num_lines: int = LOG_TAIL_LINES) -> tuple[str, ...]:
    """Return the last lines of a log for people: our JSON events in short, repeated ones once."""
    if not log.exists():
        return ("(no output)",)
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [_shorten(line) for line in text.splitlines()[-MAX_LOG_LINES:] if line.strip()]
    distinct = [line for number, line in enumerate(lines) if line not in lines[:number]]
    return tuple(line[:LOG_LINE_CHARS] for line in distinct[-num_lines:]) or ("(no output)",)


def _shorten(line: str) -> str:
    try:
        event = json.loads(line)
    except ValueError:
        return line
    if not isinstance(event, dict) or "event" not in event:
        return line
    fields = (f"{key}={value}" for key, value in event.items() if key not in DULL_FIELDS)
    return " ".join([str(event.get("level", "")), str(event["event"]), *fields])
