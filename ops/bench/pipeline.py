"""What the pipeline carries on a real Kafka with a scripted engine, what Kafka adds, and how peers do the same work."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ops.bench.pipeline_path import (
    HOPS,
    SIZE,
    Passage,
    carry,
    client_of,
    pass_alone,
    worker_processes,
    workers_in_process,
    write_settings,
)
from ops.bench.pipeline_race import ITEM_BYTES, MODES, WORKS, Race, RaceOptions, summary
from ops.embedded import EmbeddedKafka, EmbeddedRedis
from ops.errors import CommandError
from ops.percentile import nearest_rank
from streams.kafka import KafkaBroker
from streams.settings import BrokerSettings
from streams.topics import topic_specs

ROOT = Path(__file__).parents[2]
PEERS_FOLDER = ROOT / ".venv-bench"
REQUIREMENTS = "ops/requirements/bench.txt"
PEERS = ("faststream", "quixstreams", "aiokafka", "confluent-kafka")
TTFT_P50_MS, TTFT_P99_MS = 15.0, 40.0
WARM_UP = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """`peers_python` has the peers; None leaves them out. `num_alone` requests pass the idle stack one at a time."""

    peers_python: Path | None
    num_requests: int = 1_000
    at_once: int = 64
    num_alone: int = 100
    repeats: int = 3
    window_s: float = 2.0
    num_partitions: int = 16
    in_flight: int = 256


def find_peers(given: Path | None) -> Path:
    """Return the interpreter that has the peers. Raises CommandError that says how to make one."""
    python = given or PEERS_FOLDER / "bin" / "python"
    how = (
        f"python3 -m venv {PEERS_FOLDER.name}",
        f"{PEERS_FOLDER.name}/bin/pip install --require-hashes -r {REQUIREMENTS}",
        "or leave them out: --no-peers",
    )
    if not python.exists():
        raise CommandError(f"FastStream and Quix Streams are not there: no {python}", details=how)
    if not peer_versions(python):
        raise CommandError(f"{python} has no FastStream or no Quix Streams", details=how)
    return python


def peer_versions(python: Path) -> dict[str, str]:
    """Return what an interpreter has of the peers, empty if one is missing."""
    ask = f"from importlib.metadata import version\nfor name in {PEERS!r}: print(version(name))"
    found = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=False, timeout=60)
    return dict(zip(PEERS, found.stdout.split(), strict=True)) if found.returncode == 0 else {}


async def run_pipeline(options: PipelineOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all parts and return their figures with the conditions. Raises CommandError, EmbeddedError."""
    with tempfile.TemporaryDirectory(prefix="gea-pipeline-") as temporary:
        folder = Path(temporary)
        say("starting Kafka and Redis")
        async with EmbeddedKafka(folder / "kafka") as kafka, EmbeddedRedis(folder / "redis") as redis:
            assert redis.handle is not None
            found: dict[str, Any] = {"conditions": conditions(options, kafka.broker_name)}
            found |= await _path(options, folder, kafka.bootstrap, redis.url, say)
            async with KafkaBroker(BrokerSettings(bootstrap=kafka.bootstrap, client_id="bench")) as broker:
                race = RaceOptions(
                    bootstrap=kafka.bootstrap,
                    peers_python=options.peers_python,
                    repeats=options.repeats,
                    window_s=options.window_s,
                    num_partitions=options.num_partitions,
                    in_flight=options.in_flight,
                )
                found["work"] = summary(await Race(broker, race, say).run())
    return found


async def _path(
    options: PipelineOptions, folder: Path, bootstrap: str, redis_url: str, say: Callable[[str], None]
) -> dict[str, Any]:
    config, settings = write_settings(folder, bootstrap, redis_url)
    async with KafkaBroker(BrokerSettings(bootstrap=bootstrap, client_id="bench")) as broker:
        await broker.create_topics(topic_specs(SIZE.num_partitions))
        say("starting one worker for each pool")
        async with worker_processes(folder / "workers", config) as workers, client_of(bootstrap) as client:
            await pass_alone(client, broker, WARM_UP, say)
            on_kafka = await pass_alone(client, broker, options.num_alone, say)
            say(f"{options.num_requests} requests, {options.at_once} at once")
            load = await carry(client, broker, workers, num_requests=options.num_requests, at_once=options.at_once)
    async with workers_in_process(settings) as memory, client_of(memory) as client:
        await pass_alone(client, memory, WARM_UP, say)
        in_process = await pass_alone(client, memory, options.num_alone, say)
    return {"load": load.figures(), "idle": idle_figures(on_kafka, in_process)}


def idle_figures(on_kafka: Sequence[Passage], in_process: Sequence[Passage]) -> dict[str, Any]:
    """Return the time to the first text on both, what Kafka adds to it, and hop by hop."""
    ttft = {
        "kafka": percentiles([each.ttft_ms for each in on_kafka]),
        "in_process": percentiles([each.ttft_ms for each in in_process]),
    }
    added = {key: round(ttft["kafka"][key] - ttft["in_process"][key], 1) for key in ("p50", "p99")}
    return {
        "ttft_ms": ttft,
        "ttft_added_ms": added,
        "is_within_target": added["p50"] <= TTFT_P50_MS and added["p99"] <= TTFT_P99_MS,
        "hops_ms": {
            name: {
                "kafka": percentiles([each.hops_ms[at] for each in on_kafka]),
                "in_process": percentiles([each.hops_ms[at] for each in in_process]),
            }
            for at, name in enumerate(HOPS)
        },
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return median and 99th percentile by nearest rank. Raises CommandError for no values."""
    if not values:
        raise CommandError("no request was seen on all of its hops")
    return {f"p{p}": round(nearest_rank(values, p / 100), 1) for p in (50, 99)}


def conditions(options: PipelineOptions, broker: str) -> dict[str, Any]:
    """Return under what all this was measured."""
    versions = {"python": platform.python_version(), "gea's aiokafka": version("aiokafka")}
    entrants = {name: how for name, how in MODES.items() if name == "gea" or options.peers_python is not None}
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "busy": round(os.getloadavg()[0], 1),
        "broker": f"{broker}, one node on this machine",
        "versions": versions | (peer_versions(options.peers_python) if options.peers_python else {}),
        "path": f"one process per pool, {SIZE.num_partitions} partitions, scripted engine of 20 to 200 tokens",
        "work": f"one process each, {options.num_partitions} partitions, {options.in_flight} in flight, "
        f"items of {ITEM_BYTES} bytes and 50 to 150 % of {', '.join(str(work.work_ms) for work in WORKS)} ms",
        "runs": f"{options.repeats} of {options.window_s:g} s each, in turns",
        "entrants": entrants,
    }
