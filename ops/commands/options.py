"""Options that several commands share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Kafka = Annotated[
    str | None,
    typer.Option("--kafka", metavar="HOST:PORT", help="Kafka to connect to, instead of the running stack's."),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", envvar="GEA_CONFIG", help="Configuration file.", exists=True, dir_okay=False),
]
StackName = Annotated[str, typer.Option("--name", help="Name of the stack on this machine.")]
Colour = Annotated[str, typer.Option("--colour", envvar="GEA_COLOUR", help="Version of the pool, for instance blue.")]
