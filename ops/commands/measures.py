"""Measure the models of single stages, without Kafka: how often the intent is right, how often the passage is found."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from ops.commands.options import Config, Json
from ops.connection import PACKAGE, config_path
from ops.errors import CommandError
from ops.terminal import emit_json

if TYPE_CHECKING:
    from workers.retrieval.evaluate import Score
    from workers.settings import Settings

DEMO = PACKAGE / "demo"


def intent(
    dataset: Annotated[
        Path,
        typer.Option("--dataset", help="Texts with their intents (JSONL, JSON or CSV).", exists=True, dir_okay=False),
    ] = DEMO / "intents.jsonl",
    split: Annotated[str, typer.Option("--split", help="Rows of this split are measured.")] = "test",
    min_accuracy: Annotated[float, typer.Option("--min-accuracy", min=0, max=1, help="Fail below it.")] = 0.0,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Classify texts with known intents, without Kafka, and report how often that is right."""
    settings = _settings(config)
    head = Path(settings.intent.head) if settings.intent.head else None
    numbers, shown = _classify(dataset, split, _encoder_folder(settings.intent.encoder), head)
    Console(stderr=as_json, highlight=False).print(shown)
    numbers |= {"dataset": str(dataset), "split": split}
    if numbers["accuracy"] < min_accuracy:
        why = f"accuracy {numbers['accuracy']} is below {min_accuracy}"
        raise CommandError(why, code="below_threshold", report=numbers)
    if as_json:
        emit_json(numbers)


def _classify(dataset: Path, split: str, encoder_path: Path, head: Path | None) -> tuple[dict[str, Any], str]:
    from workers.encoder import Encoder  # with torch
    from workers.intent.classifier import IntentClassifier
    from workers.intent.dataset import load_rows
    from workers.intent.evaluate import evaluate, render

    rows = [row for row in load_rows(dataset) if row.split == split]
    if not rows:
        raise CommandError(f"{dataset} has no rows of split {split!r}")
    encoder = Encoder(encoder_path)
    try:
        numbers = evaluate(rows, IntentClassifier.load(encoder, head))
    finally:
        encoder.close()
    return numbers, render(numbers)


def retrieval(
    questions: Annotated[
        Path, typer.Option("--dataset", help="Questions with their passages (JSONL).", exists=True, dir_okay=False)
    ] = DEMO / "questions.jsonl",
    knowledge: Annotated[
        Path, typer.Option("--knowledge", help="Markdown files that they are asked of.", exists=True)
    ] = DEMO / "knowledge",
    beir: Annotated[
        Path | None, typer.Option("--beir", help="A collection in BEIR's form instead of both.", exists=True)
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="How many passages count as found.")] = 4,
    min_hit: Annotated[float, typer.Option("--min-hit", min=0, max=1, help="Fail if a group is below it.")] = 0.0,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Look passages up, without Kafka, and report how often the right one is found."""
    settings = _settings(config)
    scores = asyncio.run(_look_up(_encoder_folder(settings.retrieval.encoder), questions, knowledge, beir, k))
    table = Table("group", "questions", f"hit@{k}", "MRR@10", f"recall@{k}", "nDCG@10")
    for each in scores:
        values = (f"{value:.4f}" for value in (each.hit, each.mrr, each.recall, each.ndcg))
        table.add_row(each.group, str(each.num_questions), *values)
    Console(stderr=as_json, highlight=False).print(table)
    numbers = {"groups": [asdict(each) for each in scores]}
    if low := [each.group for each in scores if each.hit < min_hit]:
        why = f"hit@{k} is below {min_hit} in {', '.join(low)}"
        raise CommandError(why, code="below_threshold", report=numbers)
    if as_json:
        emit_json(numbers)


async def _look_up(encoder_path: Path, questions: Path, folder: Path, beir: Path | None, k: int) -> list[Score]:
    from workers.encoder import Encoder  # with torch
    from workers.retrieval import evaluate
    from workers.retrieval.knowledge import KnowledgeBase
    from workers.retrieval.markdown import read_documents

    try:
        asked = evaluate.read_questions(questions)
    except msgspec.MsgspecError as error:
        raise CommandError(f"{questions}: {error}") from error
    encoder = Encoder(encoder_path)
    try:
        if beir is not None:
            return await evaluate.evaluate_beir(encoder, beir, k=k)
        knowledge = KnowledgeBase(encoder)
        try:
            await knowledge.put(read_documents(folder))
            return await evaluate.evaluate_questions(knowledge, asked, k=k)
        finally:
            knowledge.close()
    except (ValueError, KeyError) as error:  # only the collection's lines are read here
        if beir is None:
            raise
        raise CommandError(f"{beir} is not in BEIR's form: {error!r}") from error
    finally:
        encoder.close()


def _settings(config: Path | None) -> Settings:
    from workers.settings import load_settings

    return load_settings(config_path(config), os.environ)


def _encoder_folder(configured: str | None) -> Path:
    from ops.embedded import encoder_folder

    return Path(configured) if configured else encoder_folder()
