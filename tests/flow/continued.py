"""A request whose worker dies in mid-answer: how it is asked and cut, and what its reader and the log must show."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.tokens import End, EndStatus, FinishReason, Kind, TokenLogprob, TokenRecord
from schemas.worker import Pool
from streams.claims import StreamView
from streams.client import GeaClient
from streams.topics import pool_topic
from tests.flow.harness import DIALOGUE, Installation
from tests.flow.holds import Gate
from tests.flow.records import view_of
from workers.generation.engine.fake import FakeEngine

GENERATION = pool_topic(Pool.GENERATION, "blue")
SCRIPT = "é🌶️ <s <stop 你好.<stop> never said"  # characters of several bytes, and what only begins like the stop string
STOP = ("<stop>",)
TEXT = "é🌶️ <s <stop 你好."
NUM_TOKENS = len(f"{TEXT}{STOP[0]}".encode())
SHORT: dict[str, Any] = {**DIALOGUE, "stop": STOP}


@dataclass(slots=True)
class Heard:
    """What a reader was told, chunk by chunk."""

    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_resets: int = 0
    end: End | None = None


async def ask(client: GeaClient, prompt: str = "tell me", **fields: Any) -> Heard:
    heard = Heard()
    async for chunk in client.generate(prompt, request_id="r-1", **fields):
        if chunk.is_reset:
            heard.num_resets += 1
            heard.texts.pop(chunk.index, None)
            heard.token_ids.pop(chunk.index, None)
        heard.texts[chunk.index] = heard.texts.get(chunk.index, "") + chunk.text
        heard.token_ids.setdefault(chunk.index, []).extend(chunk.token_ids)
        heard.logprobs.extend(chunk.logprobs or ())
        heard.end = chunk.end or heard.end
    return heard


async def start_path(gea: Installation, engine: FakeEngine, name: str = "generation-1") -> None:
    """Start a router and a generation worker: all that a request of a fixed strategy passes."""
    await gea.start(Pool.ROUTER, "router-1")
    await gea.start(Pool.GENERATION, name, engine)


async def published(gea: Installation, num_tokens: int, index: int = 0) -> None:
    """Wait until readers have so many tokens of a choice."""
    async with asyncio.timeout(5):
        await gea.broker.until(lambda: view_of(gea, "r-1").next_seq(index) >= num_tokens)


async def halted(gea: Installation, client: GeaClient, gate: Gate, **fields: Any) -> asyncio.Task[Heard]:
    """Ask a worker that stands still at the gate."""
    await start_path(gea, FakeEngine(SCRIPT, pause=gate))
    asking = asyncio.create_task(ask(client, **SHORT, **fields))
    await gate.reached.wait()
    return asking


async def cut_at(gea: Installation, client: GeaClient, num_tokens: int, **fields: Any) -> asyncio.Task[Heard]:
    """Ask, and let the worker die when readers have so many tokens and no more are coming."""
    asking = await halted(gea, client, Gate(stop_at=num_tokens), **fields)
    await published(gea, num_tokens)
    await gea.kill("generation-1")
    return asking


def deltas_that_count(gea: Installation) -> list[TokenRecord]:
    """Return the deltas that a reader takes; every record of a run without zombies does."""
    view = StreamView()
    counted = []
    for offset, record in enumerate(gea.tokens_of("r-1")):
        before = view.num_ignored
        view.apply(record, offset)
        if record.kind is Kind.DELTA and view.num_ignored == before:
            counted.append(record)
    return counted


def check_once(gea: Installation, num_tokens: Mapping[int, int]) -> None:
    """Each token of each choice stands in the log once, and the request has ended once.

    No record before the end is ignored; after it, only the claims of who took the answered request over may stand.
    """
    records = gea.tokens_of("r-1")
    assert [record.kind for record in records].count(Kind.END) == 1
    assert Kind.RESET not in [record.kind for record in records]
    for index, count in num_tokens.items():
        written = [(r.seq + at) for r in records if r.index == index for at in range(len(r.token_ids))]
        assert written == list(range(count))
    kinds = [record.kind for record in records]
    after_end = kinds[kinds.index(Kind.END) + 1 :]
    assert set(after_end) <= {Kind.CLAIM}
    assert view_of(gea, "r-1").num_ignored == len(after_end)


def check_end(end: End | None, num_tokens: int, reason: FinishReason = FinishReason.STOP) -> None:
    assert end is not None
    assert (end.status, end.finish_reason) == (EndStatus.COMPLETED, reason)
    assert end.usage.completion_tokens == num_tokens
    assert end.usage.prompt_tokens > 0


def check_whole(heard: Heard) -> None:
    """The reader was told the whole text once, and its end."""
    assert (heard.texts[0], heard.num_resets) == (TEXT, 0)
    check_end(heard.end, NUM_TOKENS)
