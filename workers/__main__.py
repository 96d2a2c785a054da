"""`python -m workers POOL`: one worker process of one pool and colour.

Reads the environment once, waits for Kafka, loads, works until SIGTERM or SIGINT, drains. Exit code 0 after a drain,
1 when the worker failed or a second signal ended the drain, 2 for a bad configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from schemas.errors import ConfigError, GeaError
from schemas.worker import Pool
from streams.cancellations import Cancellations
from streams.control_follower import ControlFollower
from streams.directory import Directory
from streams.telemetry import Metrics, configure_logging, serve_metrics
from workers.build import HandlerBuilder, Loader, build_handler, build_placement, preload
from workers.connect import await_topics, kafka_broker, limits_of, outlier_limits, start_producer
from workers.outbox import Outbox
from workers.runtime import Worker, default_worker_id
from workers.settings import Settings, load_settings
from workers.stop_signals import StopSignals, end_at_once

CATCH_UP_S = 10.0  # a worker that cannot read what was cancelled works all the same

log = structlog.get_logger(__name__)


def main(
    arguments: Sequence[str] | None = None, *, build: HandlerBuilder = build_handler, load: Loader = preload
) -> int:
    """Run one worker and return the exit code of its process. `build` and `load` make the pool's handler."""
    options = _parse(arguments)
    pool, colour = Pool(options.pool), options.colour
    worker_id = options.name or default_worker_id(pool, colour)
    try:
        settings = load_settings(options.config, os.environ)
        configure_logging(settings.logging.level, pool=pool.value, colour=colour, worker_id=worker_id)
        asyncio.run(_run(settings, pool, colour, worker_id, build, load))
    except ConfigError as error:
        sys.stderr.write(f"gea worker: {error.message}\n")
        return 2
    except Exception as error:
        code = error.code if isinstance(error, GeaError) else "internal"
        log.exception("worker_failed", code=code, reason=str(error))
        return 1
    return 0


async def _run(
    settings: Settings, pool: Pool, colour: str, worker_id: str, build: HandlerBuilder, load: Loader
) -> None:
    """Connect, build and work. A signal during the start ends it at once, later it drains the worker, or ends that."""
    stop = asyncio.Event()
    main_task = asyncio.current_task()
    worker: Worker | None = None

    def on_stop() -> None:
        if worker is not None and worker.ready.is_set():
            stop.set()
        elif main_task is not None:
            main_task.cancel()

    signals = StopSignals(on_stop, end_at_once)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.take)
    try:
        async with AsyncExitStack() as stack:
            broker = await stack.enter_async_context(kafka_broker(settings, client_id=worker_id))
            loading = asyncio.create_task(asyncio.to_thread(load, pool, settings))
            num_token_partitions = await await_topics(broker)
            producer = await start_producer(broker)
            stack.push_async_callback(producer.close)
            cancellations = Cancellations(max_age_s=settings.router.max_deadline_s)
            control = await stack.enter_async_context(ControlFollower(broker, cancellations))
            directory = Directory(broker)  # started by the worker
            await loading
            outbox = Outbox(
                producer,
                worker_id=worker_id,
                num_token_partitions=num_token_partitions,
                metrics=_metrics(settings, pool, colour, stack),
                placement=build_placement(settings, broker, directory, stack),
            )
            handler = await build(pool, settings, broker, outbox, stack, colour=colour, cancellations=cancellations)
            await control.catch_up(CATCH_UP_S)
            worker = Worker(
                broker,
                handler,
                outbox,
                worker_id=worker_id,
                colour=colour,
                limits=limits_of(settings, pool),
                heartbeat_s=settings.worker.heartbeat_s,
                drain_s=settings.worker.drain_s,
                grace_s=settings.worker.grace_s,
                directory=directory,
                outliers=outlier_limits(settings),
            )
            await worker.run(stop)
    except asyncio.CancelledError:
        log.info("stopped_before_ready")


def _metrics(settings: Settings, pool: Pool, colour: str, stack: AsyncExitStack) -> Metrics | None:
    """Serve metrics if a port is set. Raises ConfigError if it is taken."""
    if settings.worker.metrics_port is None:
        return None
    metrics = Metrics(pool=pool.value, colour=colour)
    server = serve_metrics(metrics.registry, settings.worker.metrics_port, host=settings.worker.metrics_host)
    stack.callback(server.close)
    log.info("metrics", host=settings.worker.metrics_host, port=server.port)
    return metrics


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers", description="One worker process of one pool.")
    parser.add_argument("pool", choices=[pool.value for pool in Pool])
    parser.add_argument("--colour", default="blue", help="version of the pool (default: blue)")
    parser.add_argument("--config", type=Path, default=None, help="YAML file, see ops/config/prod.yaml")
    parser.add_argument("--name", default=None, help="stable name of this worker (default: from pool, host and pid)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
