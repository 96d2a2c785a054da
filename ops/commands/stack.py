"""Start, stop and watch the stack of this machine."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ops.commands.options import Colour, Config, Json, Kafka, StackName
from ops.errors import CommandError
from ops.stack import DEFAULT_NAME, StackFolder, StackState, list_stacks, running_stack
from ops.terminal import Reporter, emit_json, finish, program, run, safe_markup
from schemas.worker import Pool

if TYPE_CHECKING:
    from ops.up import Plan
    from schemas.worker import WorkerStatus

KNOWLEDGE = Path(__file__).resolve().parents[1] / "demo" / "knowledge"
WATCH_S = 1.0
STYLES = {"ready": "green", "failed": "red"}

Replicas = Annotated[
    list[str] | None, typer.Option("--replicas", metavar="POOL=N", help="Workers of a pool; repeatable.")
]


def up(
    kafka: Kafka = None,
    redis: Annotated[
        str | None, typer.Option("--redis", metavar="URL", help="Redis to use, instead of an own one.")
    ] = None,
    replicas: Replicas = None,
    knowledge: Annotated[
        bool, typer.Option("--knowledge/--no-knowledge", help="Publish the demo's help centre at the start.")
    ] = True,
    colour: Colour = "blue",
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when everything is ready; `gea down` stops it.")
    ] = False,
    config: Config = None,
    name: StackName = DEFAULT_NAME,
    as_json: Json = False,
) -> None:
    """Start Kafka, Redis, the router and the workers, and wait until all are ready. Ctrl-C stops everything."""
    folder = StackFolder(name)
    documents = (KNOWLEDGE,) if knowledge else ()
    plan = make_plan(config=config, kafka=kafka, redis=redis, replicas=replicas, colour=colour, documents=documents)
    run(_up(folder, plan, detach, as_json))


def make_plan(
    *,
    config: Path | None,
    kafka: str | None = None,
    redis: str | None = None,
    replicas: list[str] | None = None,
    colour: str = "blue",
    documents: tuple[Path, ...] = (),
    dies_with_us: bool = False,
) -> Plan:
    """Return what to start, checked. Raises CommandError or ConfigError."""
    from ops.connection import config_path
    from ops.up import Plan
    from streams.settings import BrokerSettings, StoreSettings
    from workers.settings import load_settings

    if kafka is not None:
        BrokerSettings(bootstrap=kafka)  # refuses what is no address, before anything is started
    if redis is not None:
        StoreSettings(url=redis)
    path = config_path(config)
    return Plan(
        config=path,
        settings=load_settings(path, os.environ),
        kafka=kafka,
        redis=redis,
        replicas=parse_replicas(replicas or []),
        colour=colour,
        documents=documents,
        dies_with_us=dies_with_us,
    )


def parse_replicas(words: list[str]) -> dict[Pool, int]:
    """Read `pool=n` words. Raises CommandError that names what is allowed."""
    found = {}
    for word in words:
        pool, _, number = word.partition("=")
        if pool not in list(Pool) or not (number.isascii() and number.isdigit() and int(number) <= 64):
            raise CommandError(f"--replicas {word}: POOL=N is expected, POOL one of {', '.join(Pool)}, N 0 to 64")
        found[Pool(pool)] = int(number)
    return found


async def _up(folder: StackFolder, plan: Plan, detach: bool, as_json: bool) -> None:
    from ops.up import start_stack

    reporter = Reporter()
    began = time.monotonic()
    state = await start_stack(folder, plan, reporter)
    try:
        reporter.say(f"\nGEA is up after {time.monotonic() - began:.1f} s; logs: {folder.logs}")
        other = "" if folder.name == DEFAULT_NAME else f" --name {folder.name}"
        reporter.say(f'Ask: {program()} ask{other} "How many days do I have to return shoes?"')
        if detach:
            reporter.say(f"Stop: {program()} down{other}")
            folder.save(msgspec.structs.replace(state, owner=None))
        else:
            reporter.say(f"Stop: Ctrl-C, or {program()} down{other}")
        if as_json:
            emit_json(describe(state))
        if not detach:
            await _watch(state, reporter)
    except asyncio.CancelledError:  # Ctrl-C or SIGTERM: the ordinary end
        reporter.say("stopping")
        await finish(_stop(folder, plan, reporter))


async def _watch(state: StackState, reporter: Reporter) -> None:
    """Tell once of every part that ends."""
    left = list(state.parts)
    while True:
        for part in [part for part in left if not part.process.is_running()]:
            left.remove(part)
            reporter.warn(f"{part.name} (pid {part.process.pid}) has ended; its log: {part.log}")
        await asyncio.sleep(WATCH_S)


async def _stop(folder: StackFolder, plan: Plan, reporter: Reporter) -> None:
    from ops.down import stop_stack

    await stop_stack(folder, reporter, drain_s=plan.settings.worker.drain_s + 5)
    reporter.say("GEA is down")


def down(
    every: Annotated[bool, typer.Option("--all", help="Every stack of this user, not only the named one.")] = False,
    purge: Annotated[bool, typer.Option("--purge", help="Delete its data and logs too.")] = False,
    name: StackName = DEFAULT_NAME,
    as_json: Json = False,
) -> None:
    """Stop a stack: workers, Redis, Kafka. Also right when nothing runs."""
    from ops.down import purge as purge_folder
    from ops.down import stop_stack

    reporter = Reporter()
    folders = list_stacks() if every else [StackFolder(name)]
    stopped = []
    for folder in folders:
        if run(stop_stack(folder, reporter)):
            stopped.append(folder.name)
        if purge:
            purge_folder(folder)
    if not stopped:
        reporter.say("nothing was running")
    if as_json:
        emit_json({"stopped": stopped})


def status(
    kafka: Kafka = None,
    config: Config = None,
    name: StackName = DEFAULT_NAME,
    as_json: Json = False,
) -> None:
    """Show the stack and the workers that live."""
    from ops.connection import find_connection

    state = None if kafka else StackFolder(name).load()
    if state is not None and running_stack(name) is None:
        raise CommandError(_unready(state), code="not_running")
    connection = find_connection(kafka=kafka, config=config, name=name, environ=os.environ)
    workers = run(_workers(connection))
    if as_json:
        stack = describe(connection.stack) if connection.stack else None
        emit_json({"bootstrap": connection.bootstrap, "stack": stack, "workers": [_row(each) for each in workers]})
    else:
        _show(connection.stack, connection.bootstrap, workers)


def _unready(state: StackState) -> str:
    if state.owner is not None and state.owner.is_running():
        return f"stack {state.name!r} is starting (pid {state.owner.pid}); logs: {state.folder}/logs"
    if state.is_running():
        return f"stack {state.name!r} was not started to its end: `gea down` clears up"
    return f"stack {state.name!r} has ended without being stopped: `gea down` clears up, `gea up` starts it again"


async def _workers(connection: Any) -> list[WorkerStatus]:
    from ops.roster import RosterReader

    async with connection.broker("gea-status") as broker, RosterReader(broker) as roster:
        found: list[WorkerStatus] = roster.workers()
        return found


def describe(state: StackState) -> dict[str, Any]:
    """Return what `--json` tells about a stack; the address of Redis without its password."""
    parts = [
        {
            "role": part.role.value,
            "name": part.name,
            "pid": part.process.pid,
            "running": part.process.is_running(),
            "log": part.log,
            **({"address": part.address} if part.address else {}),
            **({"pool": part.pool.value, "colour": part.colour} if part.pool else {}),
        }
        for part in state.parts
    ]
    return {
        "name": state.name,
        "folder": state.folder,
        "bootstrap": state.bootstrap,
        "redis_url": without_password(state.redis_url),
        "broker": state.broker,
        "parts": parts,
    }


def without_password(url: str) -> str:
    """Return a URL without what stands between `:` and `@`."""
    scheme, mark, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")
    return f"{scheme}{mark}{credentials.partition(':')[0]}@{place}" if at else url


def _row(status: WorkerStatus) -> dict[str, Any]:
    from ops.roster import age_s

    return {
        "pool": status.pool.value,
        "colour": status.colour,
        "worker": status.worker_id,
        "state": status.state.value,
        "model": status.model,
        "requests_in_flight": status.requests_in_flight,
        "tokens_in_flight": status.tokens_in_flight,
        "handled": status.num_handled,
        "lag": status.lag,
        "partitions": list(status.partitions),
        "error_rate": status.error_rate,
        "age_s": round(age_s(status), 1),
        "host": status.host,
        "pid": status.pid,
        **({"reason": status.reason} if status.reason else {}),
    }


def _show(stack: StackState | None, bootstrap: str, workers: list[WorkerStatus]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if stack is not None:
        console.print(f"stack {stack.name}: {stack.broker} at {stack.bootstrap}, {stack.folder}")
        for part in stack.parts:
            if not part.process.is_running():
                console.print(f"[yellow]! {part.name} (pid {part.process.pid}) has ended; its log: {part.log}[/]")
    else:
        console.print(f"Kafka at {bootstrap}")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("pool", "colour", "worker", "state", "model", "partitions", "busy", "done", "lag", "age"):
        table.add_column(column, no_wrap=column not in ("model", "partitions"))
    rows = [_row(status) for status in workers]
    for row in rows:
        style = STYLES.get(row["state"], "yellow")
        named = [safe_markup(row[key]) for key in ("colour", "worker")]
        numbers = [str(row[key]) for key in ("requests_in_flight", "handled", "lag")]
        state, age = f"[{style}]{row['state']}[/]", f"{row['age_s']:.1f} s"
        partitions = ranges_of(row["partitions"])
        table.add_row(row["pool"], *named, state, safe_markup(row["model"]), partitions, *numbers, age)
    console.print(table if workers else "no worker lives")
    for row in rows:
        if "reason" in row:
            why = " ".join((row["worker"], "is", row["state"] + ":", row["reason"]))
            console.print(f"[{STYLES.get(row['state'], 'yellow')}]! {safe_markup(why)}[/]")


def ranges_of(numbers: list[int]) -> str:
    """Return ascending numbers for eyes: `0-3 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return " ".join("-".join(map(str, run)) for run in runs)
