"""Create the topics and show them."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ops.commands.options import Config, Json, Kafka, StackName
from ops.connection import Connection, find_connection
from ops.errors import CommandError
from ops.stack import DEFAULT_NAME
from ops.terminal import Reporter, emit_json, run
from streams.broker import TopicSpec
from streams.topics import topic_specs

app = typer.Typer(help="Create the topics and show them.", no_args_is_help=True)

Colours = Annotated[list[str] | None, typer.Option("--colour", help="Colours whose pool topics are meant; repeatable.")]


def apply(
    colours: Colours = None,
    kafka: Kafka = None,
    config: Config = None,
    name: StackName = DEFAULT_NAME,
    as_json: Json = False,
) -> None:
    """Create the topics that are missing; existing ones are not changed."""
    connection = find_connection(kafka=kafka, config=config, name=name, environ=os.environ)
    specs = _specs(connection, colours)
    created = run(_apply(connection, specs))
    for topic in created:
        Reporter().step(topic, "created")
    Reporter().say(f"{len(created)} created, {len(specs) - len(created)} were there")
    if as_json:
        emit_json({"created": sorted(created), "topics": len(specs)})


def show(
    colours: Colours = None,
    kafka: Kafka = None,
    config: Config = None,
    name: StackName = DEFAULT_NAME,
    as_json: Json = False,
) -> None:
    """Show which topics exist, and how many partitions they have and should have."""
    connection = find_connection(kafka=kafka, config=config, name=name, environ=os.environ)
    rows = run(_show(connection, _specs(connection, colours)))
    missing = [row["name"] for row in rows if not row["partitions"]]
    if not as_json:
        table = Table("topic", "partitions", "configured", "settings")
        for row in rows:
            settings = " ".join(f"{key}={value}" for key, value in row["settings"].items())
            table.add_row(row["name"], str(row["partitions"] or "missing"), str(row["configured"]), settings)
        Console().print(table)
    if missing:
        why = f"missing: {', '.join(missing)}; `gea topics apply` creates them"
        raise CommandError(why, code="topics_missing", report={"topics": rows})
    if as_json:
        emit_json({"topics": rows})


def _specs(connection: Connection, colours: list[str] | None) -> tuple[TopicSpec, ...]:
    kafka = connection.settings.kafka
    return topic_specs(kafka.partitions, kafka.replication, tuple(colours or ("blue",)))


async def _apply(connection: Connection, specs: tuple[TopicSpec, ...]) -> list[str]:
    async with connection.broker("gea-topics") as broker:
        return list(await broker.create_topics(specs))


async def _show(connection: Connection, specs: tuple[TopicSpec, ...]) -> list[dict[str, Any]]:
    async with connection.broker("gea-topics") as broker:
        return [
            {
                "name": spec.name,
                "partitions": await broker.partitions(spec.name),
                "configured": spec.num_partitions,
                "settings": dict(spec.settings),
            }
            for spec in specs
        ]
