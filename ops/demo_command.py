"""`gea demo`: from nothing to an answer that streams out of Kafka, and back to nothing."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ops.answering import Answered, ask
from ops.commands.ask import TIMEOUT_S, TextPrinter
from ops.commands.stack import KNOWLEDGE, make_plan
from ops.connection import find_connection
from ops.down import purge, stop_stack
from ops.stack import DEFAULT_NAME, StackFolder, StackState, running_stack, stacks_folder
from ops.terminal import Reporter, emit_json, finish, program, run
from ops.up import Plan, start_stack
from schemas.request import GenerationRequest
from streams.client import GeaClient

NAME_PREFIX = "demo-"
FAILURE_KEPT_S = 3600.0


@dataclass(slots=True)
class Phases:
    """Seconds of each phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Measure the block as phase `name`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - began, 2)


def run_demo(question: str, *, keep: bool, config: Path | None, as_json: bool) -> None:
    """Run the demo from its start to its end; the answer goes to stdout, or to stderr with `as_json`."""
    plan = make_plan(config=config, documents=(KNOWLEDGE,), dies_with_us=not keep)
    run(_demo(question, keep, plan, as_json))


async def _demo(question: str, keep: bool, plan: Plan, as_json: bool) -> None:
    reporter, phases = Reporter(), Phases()
    request = GenerationRequest(prompt=question, explain=True)
    await _sweep(reporter)
    folder = StackFolder(DEFAULT_NAME if keep else f"{NAME_PREFIX}{secrets.token_hex(4)}")
    state = running_stack(folder.name) if keep else None
    is_ours = state is None
    is_done = False
    try:
        if state is None:
            with phases.measured("start"):
                state = await start_stack(folder, plan, reporter)
        with phases.measured("answer"):
            answered = await _ask(state, request, as_json)
        is_done = True
    finally:
        if is_ours and not (keep and is_done):
            with phases.measured("stop"):
                await finish(_stop(folder, is_done))
        elif is_ours and state is not None:
            _let_go(folder, state)
    _show(answered, state, phases, reporter)
    if keep:
        gea = program()
        reporter.say(f'\nIt goes on running. Ask more: {gea} ask "…", {gea} chat, {gea} status. Stop it: {gea} down')
    if as_json:
        emit_json(describe(answered, state, phases))


async def _ask(state: StackState, request: GenerationRequest, as_json: bool) -> Answered:
    out = sys.stderr if as_json else sys.stdout
    print(f"\n{request.prompt}\n", file=out, flush=True)
    printer = TextPrinter(out)
    connection = find_connection(kafka=state.bootstrap, name=state.name, environ=os.environ)
    async with GeaClient(connection.broker_settings("gea-demo")) as client:
        try:
            return await ask(client, request, on_chunk=printer, timeout_s=TIMEOUT_S)
        finally:
            printer.finish()


def describe(answered: Answered, state: StackState, phases: Phases) -> dict[str, Any]:
    """Return what `gea demo --json` prints."""
    return {
        **answered.to_json(),
        "passages": _passages(answered),
        "broker": state.broker,
        "seconds": phases.seconds | {"all": round(sum(phases.seconds.values()), 2)},
    }


def _passages(answered: Answered) -> list[dict[str, Any]]:
    explained = answered.end.explanation
    found = explained.retrieval.passages if explained and explained.retrieval else ()
    if not found:
        return [{"passage_id": passage_id} for passage_id in answered.end.passage_ids]
    return [{"passage_id": each.passage_id, "title": each.title, "score": round(each.score, 4)} for each in found]


def _show(answered: Answered, state: StackState, phases: Phases, reporter: Reporter) -> None:
    reporter.say("")
    end = answered.end
    cited = {each.passage_id: each for each in end.citations}
    for each in cited.values():
        reporter.step("citation", f"{each.title or each.passage_id} ({each.passage_id})")
    for number, passage in enumerate(_passages(answered), start=1):
        reporter.step(f"passage {number}", f"{passage.get('title', '')} ({passage['passage_id']})".strip())
    reporter.step("strategy", f"{end.strategy}: {end.strategy_reason}")
    reporter.step("intent", end.intent)
    reporter.step("first token", f"after {answered.ttft_ms:.0f} ms")
    reporter.step("tokens", f"{answered.tokens} at {answered.tokens_per_s:.1f} tokens/s")
    reporter.step("broker", state.broker)
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.seconds.items())
    reporter.step("time", f"{spent}; in all {sum(phases.seconds.values()):.1f} s")


async def _sweep(reporter: Reporter) -> None:
    """Clear up after demos that were killed, and remove what demos that failed have left some time ago."""
    for folder in _earlier_demos():
        state = folder.load()
        if state is None and folder.age_s() > FAILURE_KEPT_S:
            purge(folder)
        if state is not None and not (state.owner and state.owner.is_running()):
            await stop_stack(folder, reporter, drain_s=2.0)
            purge(folder)


def _earlier_demos() -> list[StackFolder]:
    return [StackFolder(path.name) for path in stacks_folder().glob(f"{NAME_PREFIX}*")]


async def _stop(folder: StackFolder, is_done: bool) -> None:
    """Stop everything; the logs of a demo that failed stay for a while."""
    await stop_stack(folder, _Silent(), drain_s=5.0)
    if is_done:
        purge(folder)


def _let_go(folder: StackFolder, state: StackState) -> None:
    folder.save(msgspec.structs.replace(state, owner=None))


class _Silent:
    """Stopping the demo is not worth a line a part."""

    def step(self, name: str, text: str = "", seconds: float | None = None) -> None:
        return None
