"""`gea-test`: measure answers, intent and retrieval, and say by the exit code whether they are good enough."""

from __future__ import annotations

import os
import secrets
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ops.commands import measures
from ops.commands.options import Config, Json, Kafka, StackName
from ops.commands.stack import KNOWLEDGE, make_plan
from ops.connection import BOOTSTRAP_VARIABLE, CONFIG_VARIABLE, Connection, find_connection
from ops.errors import CommandError
from ops.stack import DEFAULT_NAME, StackFolder, running_stack
from ops.terminal import Reporter, command, emit_json, finish, run, start

if TYPE_CHECKING:
    from ops.e2e import Outcome, Question

app = typer.Typer(
    name="gea-test",
    help="Measure answers, intent and retrieval; exit 1 if they are not good enough.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
NAME_PREFIX = "test-"


class Split(StrEnum):
    """Which half of the questions."""

    TUNING = "tuning"
    """May be looked at while tuning."""
    HELD_OUT = "held_out"
    """Is only measured."""


def e2e(
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Ask only so many questions of each language.")
    ] = None,
    split: Annotated[Split | None, typer.Option("--split", help="Only this half of the questions.")] = None,
    at_once: Annotated[int, typer.Option("--at-once", min=1, max=64, help="Questions in flight.")] = 4,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait for one answer.")] = 300.0,
    dataset: Annotated[
        Path | None, typer.Option("--dataset", help="Other questions (JSONL).", exists=True, dir_okay=False)
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Write every answer to this JSONL file.")] = None,
    kafka: Kafka = None,
    config: Config = None,
    name: StackName = DEFAULT_NAME,
    as_json: Json = False,
) -> None:
    """Ask the demo's questions through Kafka, on the running stack or one that is started for it."""
    from ops import e2e as measuring

    questions = measuring.load_questions(dataset or measuring.QUESTIONS, split=split, limit=limit)
    began = time.monotonic()
    is_named = kafka is not None or BOOTSTRAP_VARIABLE in os.environ or CONFIG_VARIABLE in os.environ
    if is_named or running_stack(name) is not None:
        connection = find_connection(kafka=kafka, config=config, name=name, environ=os.environ)
        outcomes = run(_ask_all(connection, questions, at_once, timeout))
    else:
        outcomes = run(_on_own_stack(questions, at_once, timeout, config))
    if output is not None:
        measuring.write_outcomes(output, outcomes)
    numbers = measuring.measure_all(outcomes) | {"seconds": round(time.monotonic() - began, 1)}
    _show(numbers, Console(stderr=as_json))
    if numbers["misses"]:
        raise CommandError("; ".join(numbers["misses"]), code="below_threshold", report=numbers)
    if as_json:
        emit_json(numbers)


async def _on_own_stack(
    questions: list[Question], at_once: int, timeout_s: float, config: Path | None
) -> list[Outcome]:
    from ops.down import purge, stop_stack
    from ops.up import start_stack

    folder = StackFolder(f"{NAME_PREFIX}{secrets.token_hex(4)}")
    reporter = Reporter()
    plan = make_plan(config=config, documents=(KNOWLEDGE,), dies_with_us=True)
    try:
        state = await start_stack(folder, plan, reporter)
        connection = find_connection(kafka=state.bootstrap, config=plan.config, name=folder.name, environ=os.environ)
        return await _ask_all(connection, questions, at_once, timeout_s)
    finally:
        await finish(stop_stack(folder, reporter, drain_s=5.0))
        purge(folder)


async def _ask_all(connection: Connection, questions: list[Question], at_once: int, timeout_s: float) -> list[Outcome]:
    from ops.e2e import ask_all
    from streams.client import GeaClient
    from streams.topics import REQUESTS

    reporter = Reporter()
    num_done = 0

    def show(outcome: Outcome) -> None:
        nonlocal num_done
        num_done += 1
        marks = f"{'hit' if outcome.is_hit else 'MISS'} {'fact' if outcome.has_fact else 'NO FACT'}"
        reporter.note(f"{num_done}/{len(questions)} {outcome.question.id} {outcome.failure or marks}")

    async with connection.broker("gea-test") as broker:  # one error now rather than one for every question
        if not await broker.partitions(REQUESTS):
            raise CommandError(f"Kafka at {connection.bootstrap} has no topic {REQUESTS}: see `gea topics apply`")
    async with GeaClient(connection.broker_settings("gea-test")) as client:
        return await ask_all(client, questions, num_at_once=at_once, timeout_s=timeout_s, on_done=show)


def _show(numbers: dict[str, Any], console: Console) -> None:
    table = Table("", "questions", "ended", "passage found", "fact in answer", "TTFT p50", "TTFT p99")
    for label, some in _rows(numbers):
        table.add_row(
            label,
            str(some["questions"]),
            str(some["ended"]),
            _percent(some["retrieval_hit_rate"]),
            _percent(some["answer_fact_rate"]),
            *(f"{value:.0f} ms" if value is not None else "–" for value in some["ttft_ms"].values()),
        )
    console.print(table)


def _rows(numbers: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    rows = [("all", numbers), *numbers["languages"].items()]
    for split, some in numbers["splits"].items():
        rows += [(split, some), *((f"{split} {code}", each) for code, each in some["languages"].items())]
    return rows


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


app.command()(command(e2e))
app.command()(command(measures.intent))
app.command()(command(measures.retrieval))


@app.callback()
def _group() -> None:
    """Measure answers, intent and retrieval; exit 1 if they are not good enough."""


def main() -> None:
    """Run the command line."""
    start(app)


if __name__ == "__main__":
    main()
