"""Run one worker in the foreground, in the place of this process."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import typer

from ops.commands.options import Colour, Config, Kafka, StackName
from ops.connection import BOOTSTRAP_VARIABLE, config_path
from ops.launch import default_environment, worker_command, worker_environment
from ops.stack import DEFAULT_NAME, running_stack
from ops.terminal import Reporter
from schemas.worker import Pool
from workers.settings import load_settings


def worker(
    pool: Annotated[Pool, typer.Argument(help="The pool to work in.")],
    colour: Colour = "blue",
    worker_id: Annotated[
        str | None, typer.Option("--worker", help="Lasting name of the worker; by default made from host and pid.")
    ] = None,
    kafka: Kafka = None,
    redis: Annotated[str | None, typer.Option("--redis", metavar="URL", help="Redis to use.")] = None,
    config: Config = None,
    name: StackName = DEFAULT_NAME,
) -> None:
    """Run one worker of a pool until SIGTERM or Ctrl-C; it joins the running stack unless told otherwise."""
    is_explicit = kafka is not None or config is not None or BOOTSTRAP_VARIABLE in os.environ
    stack = None if is_explicit else running_stack(name)
    path = config_path(config) if stack is None or not stack.config else config_path(None, {"GEA_CONFIG": stack.config})
    settings = load_settings(path, os.environ)
    reporter = Reporter()
    overrides = asyncio.run(default_environment(settings, reporter.note))
    if stack is not None:
        # Without its id: a worker that a person starts is stopped by that person, not by `gea down`.
        overrides |= {
            BOOTSTRAP_VARIABLE: stack.bootstrap,
            "GEA_REDIS_URL": stack.redis_url,
            "GEA_REDIS_STATE_URL": "null",
        }
    overrides |= {BOOTSTRAP_VARIABLE: kafka} if kafka else {}
    overrides |= {"GEA_REDIS_URL": redis, "GEA_REDIS_STATE_URL": "null"} if redis else {}
    command = worker_command(pool, colour=colour, config=path, name=worker_id)
    reporter.note(f"{pool} worker, Kafka at {overrides.get(BOOTSTRAP_VARIABLE, settings.kafka.bootstrap)}")
    os.execve(command[0], command, worker_environment(pool, settings, overrides))
