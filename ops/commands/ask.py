"""Ask, chat, and ask again for an answer that is already in the log."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO
from uuid import uuid4

import typer

from ops.commands.options import Config, Json, Kafka, StackName
from ops.connection import find_connection
from ops.errors import CommandError
from ops.stack import DEFAULT_NAME
from ops.terminal import INTERRUPTED, Reporter, emit_json, first_interrupt, run, without_controls
from schemas.request import GenerationRequest, Priority, Retrieval, Strategy
from schemas.response_format import ChoiceFormat, JsonSchema, JsonSchemaFormat, RegexFormat, ResponseFormat
from schemas.tokens import EndStatus, FinishReason

if TYPE_CHECKING:
    from ops.answering import Answered
    from streams.answer import Chunk, ChunkStream
    from streams.client import GeaClient

TIMEOUT_S = 120.0
CUT = "the answer is cut: no more tokens were allowed (finish_reason length); --max-tokens may allow more"
CANCEL_S = 5.0  # a cancelled request ends within milliseconds where workers run

Session = Annotated[str | None, typer.Option("--session", help="Remember the turns of this conversation.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="At most so many tokens of answer.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 is greedy; up to 2.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed draws the same answer.")]
StrategyOption = Annotated[Strategy | None, typer.Option("--strategy", help="Instead of the router's choice.")]
RetrievalOption = Annotated[Retrieval, typer.Option("--retrieval", help="Whether passages are looked up.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait; a later answer can be replayed.")]
Deadline = Annotated[float | None, typer.Option("--deadline", help="Seconds after which GEA gives the request up.")]


@dataclass(slots=True)
class TextPrinter:
    """Prints the chunks of choice 0 as they come; a withdrawn text is marked and printed anew."""

    out: TextIO
    is_at_line_start: bool = True
    has_printed: bool = False

    def __call__(self, chunk: Chunk) -> None:
        if chunk.index != 0:
            return
        if chunk.is_reset or chunk.retracted:
            self._write(
                "\n[the text above is withdrawn]\n" if chunk.is_reset else f"\n[withdrawn: {chunk.retracted}]\n"
            )
        self._write(chunk.text)

    def finish(self) -> None:
        """End the line."""
        if not self.is_at_line_start:
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self.out.write(without_controls(text) if self.out.isatty() else text)
            self.out.flush()
            self.has_printed = True
            self.is_at_line_start = text.endswith("\n")


def ask(
    question: Annotated[str, typer.Argument(help="What you want to know; - reads it from stdin.")],
    session: Session = None,
    strategy: StrategyOption = None,
    retrieval: RetrievalOption = Retrieval.AUTO,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    timeout: Timeout = TIMEOUT_S,
    deadline: Deadline = None,
    priority: Annotated[Priority, typer.Option("--priority", help="Its lane where requests wait.")] = Priority.NORMAL,
    reader_lease: Annotated[
        float | None, typer.Option("--reader-lease", help="Seconds after which GEA cancels it if we are gone.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", help="The answer is JSON that fits the JSON schema in this file.")
    ] = None,
    regex: Annotated[str | None, typer.Option("--regex", help="The answer matches this pattern as a whole.")] = None,
    choice: Annotated[list[str] | None, typer.Option("--choice", help="The answer is one of these; repeat it.")] = None,
    kafka: Kafka = None,
    config: Config = None,
    name: StackName = DEFAULT_NAME,
    as_json: Json = False,
) -> None:
    """Produce a request and print its answer as it comes. Ctrl-C cancels it; a second one leaves at once."""
    request = GenerationRequest(
        prompt=sys.stdin.read() if question == "-" else question,
        session_id=session,
        strategy=strategy,
        retrieval=retrieval,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        priority=priority,
        reader_lease_s=reader_lease,
        response_format=response_format(json_schema, regex, choice),
    )
    answered, is_ours = run(_ask(request, timeout, deadline, kafka, config, name, as_json))
    if as_json:
        emit_json(answered.to_json())
    else:
        show_footer(answered)
    if answered.end.status is EndStatus.CANCELLED:
        raise typer.Exit(INTERRUPTED if is_ours else 1)


def response_format(json_schema: Path | None, regex: str | None, choices: list[str] | None) -> ResponseFormat | None:
    """Return the form that the options ask for. Raises CommandError for more than one, or a file without a schema."""
    if sum(given is not None for given in (json_schema, regex, choices or None)) > 1:
        raise CommandError("give one of --json-schema, --regex and --choice", code="invalid_request")
    if json_schema is not None:
        try:
            schema = json.loads(json_schema.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise CommandError(f"--json-schema {json_schema}: {error}", code="invalid_request") from error
        if not isinstance(schema, dict):
            raise CommandError(f"--json-schema {json_schema}: a JSON object is expected", code="invalid_request")
        return JsonSchemaFormat(json_schema=JsonSchema(schema=schema))
    if regex is not None:
        return RegexFormat(pattern=regex)
    return ChoiceFormat(choices=tuple(choices)) if choices else None


async def _ask(
    request: GenerationRequest,
    timeout_s: float,
    deadline_s: float | None,
    kafka: str | None,
    config: Path | None,
    name: str,
    as_json: bool,
) -> tuple[Answered, bool]:
    """Return the answer, and whether an interrupt has cancelled it."""
    async with open_client(kafka, config, name) as client:
        printer = TextPrinter(sys.stderr if as_json else sys.stdout)
        try:
            stream = client.generate(request, timeout_s=timeout_s, deadline_s=deadline_s)
            Reporter().note(f"request {stream.request_id}; Ctrl-C cancels it")
            return await _follow_or_cancel(client, stream, printer)
        finally:
            printer.finish()


async def _follow_or_cancel(client: GeaClient, stream: ChunkStream, printer: TextPrinter) -> tuple[Answered, bool]:
    """Follow a stream to its end; the first interrupt cancels the request and shows what came, the second leaves."""
    from ops import answering
    from streams.racing import racing

    with first_interrupt() as interrupted:
        async with racing(answering.follow(stream, on_chunk=printer), interrupted.wait()) as (following, _):
            if not following.done():
                Reporter().note("cancelling; Ctrl-C again leaves at once")
                await client.cancel(stream.request_id, reason="interrupted by its reader")
                await asyncio.wait((following,), timeout=CANCEL_S)
            if not following.done():
                why = f"the cancel of request {stream.request_id} is sent, but nobody has ended it in {CANCEL_S:g} s"
                raise CommandError(f"{why}: does a worker of every pool run?", code="response_timeout")
            return following.result(), interrupted.is_set()


def open_client(kafka: str | None, config: Path | None, name: str, *, tenant: str = "default") -> GeaClient:
    """Return a client for the stack or broker that the options name, not yet opened."""
    from streams.client import ClientSettings, GeaClient

    connection = find_connection(kafka=kafka, config=config, name=name, environ=os.environ)
    return GeaClient(connection.broker_settings("gea-ask"), ClientSettings(tenant=tenant))


def show_footer(answered: Answered) -> None:
    """Tell people what stands behind an answer, on stderr."""
    reporter = Reporter()
    for citation in answered.end.citations:
        reporter.note(f"[{citation.title or citation.passage_id}] {citation.passage_id}")
    _warn(answered, reporter)
    reporter.note(
        f"{answered.end.strategy} · {answered.tokens} tokens · first after {answered.ttft_ms:.0f} ms · "
        f"{answered.tokens_per_s:.1f} tokens/s · {answered.request_id}"
    )


def _warn(answered: Answered, reporter: Reporter) -> None:
    """Say why an answer is not whole, where it is not."""
    if answered.end.status is EndStatus.CANCELLED:
        reporter.warn(f"cancelled: {answered.end.failure.message}" if answered.end.failure else "cancelled")
    elif answered.end.finish_reason is FinishReason.LENGTH:
        reporter.warn(CUT)


def chat(
    session: Session = None,
    strategy: StrategyOption = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    kafka: Kafka = None,
    config: Config = None,
    name: StackName = DEFAULT_NAME,
) -> None:
    """Talk; the turns of the session are remembered. Ctrl-D ends."""
    session = session or f"chat-{uuid4().hex[:12]}"
    reporter = Reporter()
    with asyncio.Runner() as runner:
        client = open_client(kafka, config, name)
        runner.run(client.__aenter__())
        try:
            reporter.note(f"session {session}; Ctrl-D ends, Ctrl-C stops an answer")
            while (line := _read_line()) is not None:
                if not line.strip():
                    continue
                request = GenerationRequest(
                    prompt=line,
                    session_id=session,
                    strategy=strategy,
                    max_tokens=max_tokens,
                    temperature=temperature,
                )
                _take_turn(runner, client, request, reporter)
        finally:
            runner.run(client.__aexit__(None, None, None))


def _read_line() -> str | None:
    try:
        if not sys.stdin.isatty():
            return sys.stdin.readline() or None
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        return None


def _take_turn(runner: asyncio.Runner, client: GeaClient, request: GenerationRequest, reporter: Reporter) -> None:
    """One question and its answer; a failure is told, and the conversation goes on."""
    from ops import answering
    from schemas.errors import GeaError

    printer = TextPrinter(sys.stdout)
    try:
        answered = runner.run(
            answering.ask(client, request, on_chunk=printer, timeout_s=TIMEOUT_S, cancel_on_close=True)
        )
        printer.finish()
        _warn(answered, reporter)
    except KeyboardInterrupt:
        reporter.note("cancelled")
    except (CommandError, GeaError) as error:
        reporter.fail(str(error))
    finally:
        printer.finish()


def replay(
    request_id: Annotated[str, typer.Argument(help="Identity of the request, as `gea ask` shows it.")],
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for an answer that has not ended.")
    ] = 30.0,
    kafka: Kafka = None,
    config: Config = None,
    name: StackName = DEFAULT_NAME,
    as_json: Json = False,
) -> None:
    """Print an earlier answer again, read from the log."""
    answered = run(_replay(request_id, timeout, kafka, config, name, as_json))
    if as_json:
        emit_json(answered.to_json())
    else:
        show_footer(answered)


async def _replay(
    request_id: str, timeout_s: float, kafka: str | None, config: Path | None, name: str, as_json: bool
) -> Answered:
    from ops import answering
    from schemas.errors import ResponseTimeoutError

    async with open_client(kafka, config, name) as client:
        printer = TextPrinter(sys.stderr if as_json else sys.stdout)
        try:
            return await answering.follow(client.replay(request_id, timeout_s=timeout_s), on_chunk=printer)
        except ResponseTimeoutError as error:
            if printer.has_printed:
                raise
            why = f"no answer of a request {request_id!r} is in the log, after {timeout_s:g} s of waiting"
            raise CommandError(why, code=error.code) from error
        finally:
            printer.finish()
