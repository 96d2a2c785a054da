"""Follow the token topic as it is written, for eyes and for scripts."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from ops.commands.options import Config, Json, Kafka, StackName
from ops.connection import Connection, find_connection
from ops.errors import CommandError
from ops.stack import DEFAULT_NAME
from ops.terminal import emit_json, run, safe_markup

if TYPE_CHECKING:
    from schemas.tokens import TokenRecord
    from streams.broker import LogReader, Record

POLL_MS = 500
COLOURS = {"claim": "cyan", "delta": "white", "see": "blue", "retract": "yellow", "reset": "yellow", "end": "green"}


def tail(
    request_id: Annotated[str | None, typer.Argument(help="Only this request; ends with it.")] = None,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="From the oldest record, not from now.")
    ] = False,
    kafka: Kafka = None,
    config: Config = None,
    name: StackName = DEFAULT_NAME,
    as_json: Json = False,
) -> None:
    """Show the records of the token topic as they come: one line a record, or one JSON object with --json."""
    connection = find_connection(kafka=kafka, config=config, name=name, environ=os.environ)
    run(_tail(connection, request_id, from_beginning, as_json))


async def _tail(connection: Connection, request_id: str | None, from_beginning: bool, as_json: bool) -> None:
    from streams.broker import TopicPartition
    from streams.topics import TOKENS

    async with connection.broker("gea-tail") as broker:
        num_partitions = await broker.partitions(TOKENS)
        if not num_partitions:
            raise CommandError(f"there is no topic {TOKENS}: `gea topics apply` creates it")
        reader = await broker.reader({TopicPartition(TOKENS, number): None for number in range(num_partitions)})
        try:
            if from_beginning:
                for place, begin in (await reader.begin_offsets()).items():
                    reader.seek(place, begin)
            await _follow(reader, request_id, as_json)
        finally:
            await reader.close()


async def _follow(reader: LogReader, request_id: str | None, as_json: bool) -> None:
    from schemas.errors import DecodeError, InvalidRequestError
    from schemas.tokens import Kind
    from streams.token_reader import decode_token

    console = Console(highlight=False, soft_wrap=True)
    while True:
        for record in await reader.poll(timeout_ms=POLL_MS):
            key = (record.key or b"").decode(errors="replace")
            if request_id not in (None, key):
                continue
            try:
                token = decode_token(record)
            except (DecodeError, InvalidRequestError) as error:
                _show_undecodable(console, record, key, error.message, as_json)
                continue
            if as_json:
                emit_json({"request_id": key, **_place(record), **msgspec.to_builtins(token)})
            else:
                console.print(line_of(record, key, token))
            if request_id is not None and token.kind is Kind.END:
                return


def line_of(record: Record, request_id: str, token: TokenRecord) -> str:
    """Return one record as a line with markup."""
    clock = time.strftime("%H:%M:%S", time.localtime(record.timestamp_ms / 1000))
    style = COLOURS[token.kind.value]
    epoch = f"{token.epoch.hop}.{token.epoch.generation}"
    place = f"[dim]{clock} {record.partition}:{record.offset}[/]"
    said = f"[{style}]{token.kind}[/] [dim]{epoch} #{token.seq}[/] {safe_markup(_text(token))}"
    return f"{place} {safe_markup(request_id)} {said}"


def _text(token: TokenRecord) -> str:
    if token.end is not None:
        end = token.end
        why = f" {end.failure.code}: {end.failure.message}" if end.failure else ""
        words = [end.status.value, end.finish_reason.value, end.strategy, f"{end.usage.completion_tokens} tokens"]
        return " ".join(word for word in words if word) + why
    if token.see is not None:
        return f"→ {token.see.topic} {token.see.partition}:{token.see.offset}"
    return repr(token.text) if token.text else ""


def _place(record: Record) -> dict[str, Any]:
    return {"partition": record.partition, "offset": record.offset, "timestamp_ms": record.timestamp_ms}


def _show_undecodable(console: Console, record: Record, key: str, why: str, as_json: bool) -> None:
    if as_json:
        emit_json({"request_id": key, **_place(record), "undecodable": why})
    else:
        console.print(
            f"[red]{record.partition}:{record.offset} {safe_markup(key)} cannot be decoded: {safe_markup(why)}[/]"
        )
