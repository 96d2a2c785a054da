"""Publish knowledge and train the intent classifier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.commands.options import Config, Json, Kafka, StackName
from ops.connection import Connection, find_connection
from ops.errors import CommandError
from ops.stack import DEFAULT_NAME
from ops.terminal import Reporter, emit_json, run

if TYPE_CHECKING:
    from ops.ingest import Report

Paths = Annotated[list[Path], typer.Argument(help="Markdown files, or folders of them.")]


def ingest(
    paths: Paths,
    tenant: Annotated[str, typer.Option("--tenant", help="Who owns the documents.")] = "default",
    kafka: Kafka = None,
    config: Config = None,
    name: StackName = DEFAULT_NAME,
    as_json: Json = False,
) -> None:
    """Publish Markdown as documents; unchanged ones are left alone."""
    connection = find_connection(kafka=kafka, config=config, name=name, environ=os.environ)
    report = run(_ingest(connection, paths, tenant))
    reporter = Reporter()
    for each in report.skipped:
        reporter.warn(f"skipped {each.what}: {each.why}")
    reporter.step("knowledge", report.summary())
    if not report.published and not report.unchanged:
        raise CommandError("nothing was published", report=report.to_json())
    if as_json:
        emit_json(report.to_json())


async def _ingest(connection: Connection, paths: list[Path], tenant: str) -> Report:
    from ops import ingest as ingestion

    reporter = Reporter()

    def show(done: int, total: int) -> None:
        if done % 100 == 0 and done < total:
            reporter.note(f"{done} of {total} published")

    async with connection.broker("gea-ingest") as broker:
        return await ingestion.ingest(broker, paths, tenant=tenant, on_published=show)


train = typer.Typer(help="Train what learns from your data.", no_args_is_help=True)


def train_intent(
    dataset: Annotated[
        Path, typer.Option("--dataset", help="Utterances with their intents (JSONL or CSV).", exists=True)
    ],
    output: Annotated[Path, typer.Option("--output", help="Folder for the trained head.")],
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Train the head of the intent classifier; `intent.head` in the configuration then names the folder."""
    from ops.connection import config_path
    from ops.embedded import encoder_folder
    from workers.settings import load_settings

    settings = load_settings(config_path(config), os.environ)
    encoder = Path(settings.intent.encoder) if settings.intent.encoder else encoder_folder()
    from workers.intent.train import run as run_training  # with torch

    result = run_training(dataset, output, encoder)
    Reporter().step("intent head", str(output))
    if as_json:
        emit_json(result)
