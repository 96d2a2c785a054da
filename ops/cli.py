"""`gea`: every command in one place. Importing this module loads neither torch nor a Kafka client."""

from __future__ import annotations

from typing import Annotated

import typer

from ops.commands import ask, bench, bench_engine, cancel, demo, dlq, knowledge, stack, tail, topics, worker
from ops.terminal import command, start

app = typer.Typer(
    name="gea",
    help="Streaming generation on Kafka: start it, ask it, watch it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_asked: bool) -> None:
    if not is_asked:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        typer.echo(f"gea {version('gea-core')}")
    except PackageNotFoundError:
        typer.echo("gea, run from a checkout that is not installed")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Streaming generation on Kafka: start it, ask it, watch it."""


app.command()(command(demo.demo))
app.command()(command(stack.up))
app.command()(command(stack.down))
app.command()(command(stack.status))
app.command()(command(ask.ask))
app.command()(command(ask.chat))
app.command()(command(tail.tail))
app.command()(command(ask.replay))
app.command()(command(cancel.cancel))
app.command()(command(knowledge.ingest))
app.command()(command(worker.worker))

topics.app.command("apply")(command(topics.apply))
topics.app.command("show")(command(topics.show))
app.add_typer(topics.app, name="topics")

dlq.app.command("list")(command(dlq.list_))
dlq.app.command("show")(command(dlq.show))
dlq.app.command("redrive")(command(dlq.redrive))
app.add_typer(dlq.app, name="dlq")

bench.app.command("chaos")(command(bench.chaos))
bench.app.command("pipeline")(command(bench.pipeline))
bench.app.command("engine")(command(bench_engine.engine))
bench.app.command("memory")(command(bench_engine.memory))
bench.app.command("quality")(command(bench_engine.quality))
app.add_typer(bench.app, name="bench")

knowledge.train.command("intent")(command(knowledge.train_intent))
app.add_typer(knowledge.train, name="train")


def main() -> None:
    """Run the command line."""
    start(app)


if __name__ == "__main__":
    main()
