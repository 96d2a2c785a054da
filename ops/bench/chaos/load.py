"""The requests of the bench, and the readers that follow them. All of it follows from a seed.

Each kind of request stresses another part of what shapes the next token; conversations send a turn only after they saw
the end of the one before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from ops.bench.chaos.checker import Seen
from schemas.errors import GeaError
from schemas.request import GenerationRequest, Retrieval, Strategy
from streams.answer import Chunk
from streams.client import GeaClient
from streams.clock import now_ms

TOPICS = (
    "shoes",
    "a parcel",
    "the shop on Sunday",
    "sizes",
    "repairs",
    "gift cards",
    "a refund",
    "配送",
    "les retours",
)
QUESTIONS = ("Tell me about", "What do you know of", "Write a long story about", "How do I go about")
STOPS = ("thirty", "你好", "closes at", "Grüße", "receipt", "the shop", "\n\n")
NUM_TURNS = 3  # of a conversation


class LoadKind(StrEnum):
    """What a request is for."""

    GREEDY = "greedy"
    """The likeliest token each time."""
    SAMPLED = "sampled"
    """Drawn, with a seed."""
    CHOICES = "choices"
    """Two choices at once."""
    STOPPED = "stopped"
    """Ends at a stop string, if it comes."""
    PENALISED = "penalised"
    """Penalties that count what was said before."""
    SESSION = "session"
    """A conversation."""
    ALL_POOLS = "all_pools"
    """Through intent and retrieval as well; the others go from the router to generation."""


KINDS = tuple(LoadKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request before it is sent. `turn` counts from 0 within its conversation."""

    request_id: str
    kind: LoadKind
    request: GenerationRequest
    turn: int = 0


@dataclass(slots=True, kw_only=True)
class Asked:
    """A request that was sent, and what its reader saw."""

    planned: Planned
    seen: Seen


@dataclass(slots=True)
class Load:
    """Draws conversations (most of one turn) and follows their answers. `on_tokens` is told of each chunk's tokens."""

    seed: str
    max_tokens: int
    on_tokens: Callable[[int], None]
    asked: list[Asked] = field(default_factory=list)
    num_drawn: int = 0

    def draw(self) -> tuple[Planned, ...]:
        """Return the next conversation."""
        number, self.num_drawn = self.num_drawn, self.num_drawn + 1
        return conversation(self.seed, number, self.max_tokens)

    async def hold(self, client: GeaClient, turns: tuple[Planned, ...]) -> None:
        """Hold one conversation; it breaks off where a turn's end is not seen."""
        for planned in turns:
            asked = Asked(planned=planned, seen=Seen(request_id=planned.request_id, sent_ms=now_ms()))
            self.asked.append(asked)
            await self._follow(client, planned, asked.seen)
            if not asked.seen.ends:
                return

    async def _follow(self, client: GeaClient, planned: Planned, seen: Seen) -> None:
        try:
            async for chunk in client.generate(planned.request, request_id=planned.request_id):
                take(seen, chunk, now_ms())
                if chunk.token_ids:
                    self.on_tokens(len(chunk.token_ids))
        except GeaError as error:
            seen.failure = f"{error.code}: {error.message}"


def take(seen: Seen, chunk: Chunk, at_ms: int) -> None:
    """Do with a chunk what every application does: withdraw, forget, append."""
    if chunk.end is not None:
        seen.ends.append(chunk.end)
        return
    if chunk.is_reset:
        seen.num_resets += 1
        seen.texts[chunk.index], seen.token_ids[chunk.index] = "", []
    text = seen.texts.get(chunk.index, "")
    seen.texts[chunk.index] = text.removesuffix(chunk.retracted) + chunk.text
    seen.token_ids.setdefault(chunk.index, []).extend(chunk.token_ids)
    if chunk.token_ids:
        seen.arrivals.append(at_ms)


def conversation(seed: str, number: int, max_tokens: int) -> tuple[Planned, ...]:
    """Return the `number`-th conversation of a seed: the same each time."""
    draw = random.Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)]
    session = f"s-{seed}-{number}" if kind is LoadKind.SESSION else None
    return tuple(
        Planned(
            request_id=f"{kind}-{seed}-{number}-{turn}",
            kind=kind,
            request=_request(draw, kind, session, max_tokens),
            turn=turn,
        )
        for turn in range(NUM_TURNS if session else 1)
    )


def _request(draw: random.Random, kind: LoadKind, session: str | None, max_tokens: int) -> GenerationRequest:
    is_through_all = kind is LoadKind.ALL_POOLS
    is_drawn = kind in (LoadKind.SAMPLED, LoadKind.CHOICES, LoadKind.SESSION)
    is_penalised = kind is LoadKind.PENALISED
    return GenerationRequest(
        prompt=f"{draw.choice(QUESTIONS)} {draw.choice(TOPICS)}, {draw.randrange(1_000_000)}.",
        session_id=session,
        strategy=None if is_through_all else Strategy.DIALOGUE,
        retrieval=Retrieval.AUTO if is_through_all else Retrieval.OFF,
        max_tokens=draw.randint(max_tokens // 3, max_tokens),
        temperature=0.8 if is_drawn else 0.0,
        top_p=0.9 if is_drawn else None,
        seed=draw.randrange(2**31),
        n=2 if kind is LoadKind.CHOICES else None,
        stop=(draw.choice(STOPS), draw.choice(STOPS)) if kind is LoadKind.STOPPED else None,
        repetition_penalty=1.3 if is_penalised else 1.05,
        presence_penalty=0.4 if is_penalised else None,
        frequency_penalty=0.3 if is_penalised else None,
    )
