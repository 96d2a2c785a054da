"""List, show and redrive dead letters."""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ops.commands.options import Config, Json, Kafka, StackName
from ops.connection import find_connection
from ops.errors import CommandError
from ops.letter_view import body_of, row_of, shown, table_of
from ops.stack import DEFAULT_NAME
from ops.terminal import Reporter, emit_json, run
from streams.clock import now_ms

if TYPE_CHECKING:
    from ops.dlq import DeadLetterLog, LetterFilter, Stored
    from schemas.failure import Redriven
    from streams.broker import Broker

app = typer.Typer(
    help="Records that could not succeed: list them, look at them, send them in again.", no_args_is_help=True
)

MAX_REPORTED = 10_000  # rows of a JSON object; the counts go on
UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

Places = Annotated[
    list[str] | None, typer.Argument(metavar="PLACE", help="Places as `gea dlq list` shows them, for instance 0:17.")
]
Code = Annotated[str | None, typer.Option("--code", help="Only letters of this code, for instance undecodable.")]
Topic = Annotated[str | None, typer.Option("--topic", help="Only letters that came from this topic.")]
RequestId = Annotated[str | None, typer.Option("--request-id", help="Only letters of this request.")]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Only letters of this tenant.")]
Since = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help="Not older: 90s, 30m, 2h, 7d, or 2026-01-31T12:00.")
]
Until = Annotated[str | None, typer.Option("--until", metavar="TIME", help="Older than this; as --since.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=100_000, help="At most so many, the newest.")]


def list_(
    code: Code = None,
    topic: Topic = None,
    request_id: RequestId = None,
    tenant: Tenant = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = 50,
    kafka: Kafka = None,
    config: Config = None,
    name: StackName = DEFAULT_NAME,
    as_json: Json = False,
) -> None:
    """List dead letters, the newest last."""
    wanted = _filter(code=code, topic=topic, request_id=request_id, tenant=tenant, since=since, until=until)
    found = run(_newest(kafka, config, name, wanted, limit))
    if as_json:
        emit_json({**found.counts(), "letters": found.rows()}, is_ascii=True)
        return
    Console().print(table_of(found.letters, found.redriven, now_ms()))
    _tell_counts(found)


def show(
    places: Places = None,
    code: Code = None,
    topic: Topic = None,
    request_id: RequestId = None,
    tenant: Tenant = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = 5,
    kafka: Kafka = None,
    config: Config = None,
    name: StackName = DEFAULT_NAME,
    as_json: Json = False,
) -> None:
    """Show dead letters whole: reason, origin, headers and the body, decoded where it can be."""
    wanted = _filter(places, code=code, topic=topic, request_id=request_id, tenant=tenant, since=since, until=until)
    found = run(_newest(kafka, config, name, wanted, limit))
    if not found.letters:
        raise CommandError("no dead letter fits", code="not_found", report={"letters": []})
    if as_json:
        rows = [row | {"body": body_of(each.letter)} for row, each in zip(found.rows(), found.letters, strict=True)]
        emit_json({**found.counts(), "letters": rows}, is_ascii=True)
        return
    console = Console(highlight=False, soft_wrap=True)
    for each in found.letters:
        console.print(shown(each, found.redriven.get(each.place), now_ms()), markup=False)
    _tell_counts(found)


def redrive(
    places: Places = None,
    code: Code = None,
    topic: Topic = None,
    request_id: RequestId = None,
    tenant: Tenant = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most so many, the oldest first.")] = None,
    is_all: Annotated[
        bool, typer.Option("--all", help="Every letter; needed where nothing narrows the choice.")
    ] = False,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Only show what would be sent.")] = False,
    is_forced: Annotated[
        bool, typer.Option("--force", help="Also what would most likely fail again; needs a place or filter.")
    ] = False,
    is_again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Also letters redriven before, under the same id; answered anew after router.marker_ttl_s.",
        ),
    ] = False,
    kafka: Kafka = None,
    config: Config = None,
    name: StackName = DEFAULT_NAME,
    as_json: Json = False,
) -> None:
    """Send dead letters in again. Requests get a new id, always the same for one letter: repeats are answered once."""
    wanted = _filter(places, code=code, topic=topic, request_id=request_id, tenant=tenant, since=since, until=until)
    if is_forced and not wanted.is_explicit:
        raise CommandError("--force needs a place or a filter such as --code")
    if not wanted.is_explicit and not is_all:
        raise CommandError("say which: a place, a filter such as --code or --since, or --all")
    report = run(_redrive(kafka, config, name, wanted, limit, is_dry, is_forced, is_again, is_quiet=as_json))
    if report["refused"]:
        why = f"{report['refused']} of {report['refused'] + report['sent']} letters cannot be redriven"
        raise CommandError(why, code="refused", report=report)
    if not (report["sent"] or report["skipped"]):
        raise CommandError("no dead letter fits", code="not_found", report=report)
    if as_json:
        emit_json(report, is_ascii=True)


@dataclass(slots=True, kw_only=True)
class _Found:
    """What a filter has found: the newest letters and how many there are."""

    letters: list[Stored]
    redriven: Mapping[str, Redriven]
    num_found: int
    num_unreadable: int

    @property
    def is_cut(self) -> bool:
        return self.num_found > len(self.letters)

    def rows(self) -> list[dict[str, Any]]:
        return [row_of(each, self.redriven.get(each.place)) for each in self.letters]

    def counts(self) -> dict[str, int]:
        return {"found": self.num_found, "shown": len(self.letters), "unreadable": self.num_unreadable}


@asynccontextmanager
async def _opened(kafka: Kafka, config: Config, name: str) -> AsyncIterator[tuple[Broker, DeadLetterLog]]:
    from ops.dlq import DeadLetterLog

    connection = find_connection(kafka=kafka, config=config, name=name, environ=os.environ)
    async with connection.broker("gea-dlq") as broker:
        yield broker, await DeadLetterLog.open(broker)


async def _newest(kafka: Kafka, config: Config, name: str, wanted: LetterFilter, limit: int) -> _Found:
    async with _opened(kafka, config, name) as (_, log):
        redriven = await log.redriven()
        newest: list[tuple[int, int, Stored]] = []  # a heap: only so many letters are held as are shown
        order = count()
        num_found = 0
        async for stored in log.letters(wanted):
            num_found += 1
            heapq.heappush(newest, (stored.letter.failed_ms, next(order), stored))
            if len(newest) > limit:
                heapq.heappop(newest)
        letters = [stored for _, _, stored in sorted(newest, key=lambda entry: entry[:2])]
        return _Found(letters=letters, redriven=redriven, num_found=num_found, num_unreadable=log.num_unreadable)


async def _redrive(
    kafka: Kafka,
    config: Config,
    name: str,
    wanted: LetterFilter,
    limit: int | None,
    is_dry: bool,
    is_forced: bool,
    is_again: bool,
    *,
    is_quiet: bool,
) -> dict[str, Any]:
    from ops.redrive import Outcome, redrive_letters

    counts = dict.fromkeys(Outcome, 0)
    rows: list[dict[str, Any]] = []
    reporter = Reporter()
    say = {Outcome.SENT: reporter.say, Outcome.SKIPPED: reporter.note, Outcome.REFUSED: reporter.warn}
    async with _opened(kafka, config, name) as (broker, log):
        async for step in redrive_letters(
            broker, log, wanted, is_dry=is_dry, is_forced=is_forced, is_again=is_again, limit=limit
        ):
            counts[step.outcome] += 1
            if not is_quiet:
                verb = "would be sent" if is_dry and step.outcome is Outcome.SENT else step.outcome.value
                say[step.outcome](f"{step.stored.place} {verb}: {step.text()}")
            if len(rows) < MAX_REPORTED:
                rows.append(step.to_json())
    cut = sum(counts.values()) > len(rows)
    return {outcome.value: number for outcome, number in counts.items()} | {
        "dry_run": is_dry,
        "letters": rows,
        "letters_cut": cut,
    }


def _filter(places: list[str] | None = None, **fields: str | None) -> LetterFilter:
    """Return the filter that the options describe. Raises CommandError that names a bad one."""
    from ops.dlq import LetterFilter

    for place in places or ():
        if not re.fullmatch(r"\d{1,6}:\d{1,18}", place, re.ASCII):
            raise CommandError(f"{place!r} is no place: partition:offset is expected, for instance 0:17")
    since_ms, until_ms = (_time_ms(f"--{key}", fields.pop(key)) for key in ("since", "until"))
    normal = (":".join(str(int(number)) for number in place.split(":")) for place in places or ())
    return LetterFilter(places=frozenset(normal), since_ms=since_ms, until_ms=until_ms, **fields)


def _time_ms(option: str, text: str | None) -> int | None:
    """Read a time: so long ago, or a date with or without a time of day, here where no zone is named."""
    if text is None:
        return None
    if match := re.fullmatch(r"(\d{1,9})([smhd])", text, re.ASCII):
        return now_ms() - int(match[1]) * UNITS_MS[match[2]]
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise CommandError(f"{option}: {text!r} is no time: 90s, 30m, 2h, 7d, or 2026-01-31T12:00") from None


def _tell_counts(found: _Found) -> None:
    reporter = Reporter()
    reporter.say(f"{found.num_found} dead letters fit" + (f", {len(found.letters)} shown" if found.is_cut else ""))
    if found.num_unreadable:
        reporter.warn(f"{found.num_unreadable} records of the topic are no dead letters")
