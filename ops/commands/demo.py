"""The demo's command line; what it does stands in `ops.demo_command`."""

from __future__ import annotations

from typing import Annotated

import typer

from ops.commands.options import Config, Json

QUESTION = "How many days do I have to return shoes?"


def demo(
    question: Annotated[str, typer.Argument(help="What to ask the shop's help centre.")] = QUESTION,
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running, for gea ask, chat and tail.")] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Start everything, ask one question, show the answer as it comes, and stop everything again."""
    from ops.demo_command import run_demo

    run_demo(question, keep=keep, config=config, as_json=as_json)
