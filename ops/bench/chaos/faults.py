"""What is done to a stack, in which order: a plan that follows from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Set
from enum import StrEnum


class FaultGroup(StrEnum):
    """Faults that are switched together."""

    KILLS = "kills"
    """`kill -9` of workers; always on."""
    OVERLAP = "overlap"
    """Kills that overlap: two at once, and a second one right after a take-over began."""
    MEMBERSHIP = "membership"
    """Workers that join, and leave in order."""
    BROKER = "broker"
    """The broker is restarted or killed."""
    REDIS = "redis"
    """Redis freezes, forgets everything, evicts everything."""
    PROXY = "proxy"
    """Connections to Kafka are cut, half-closed, slowed, swallowed, refused."""


class FaultKind(StrEnum):
    """One fault."""

    KILL = "kill"
    """A generation worker is killed."""
    KILL_OTHER = "kill_other"
    """A router, an intent or a retrieval worker is killed."""
    KILL_PAIR = "kill_pair"
    """Two generation workers are killed within a session's time: two kills."""
    KILL_TAKER = "kill_taker"
    """A generation worker is killed, and another one as soon as somebody has claimed what it left: two kills."""
    LEAVE = "leave"
    """A generation worker is asked to stop (SIGTERM) and comes back."""
    JOIN = "join"
    """One more generation worker joins, and leaves in order after a while."""
    BROKER_RESTART = "broker_restart"
    """Kafka stops in order and comes back."""
    BROKER_KILL = "broker_kill"
    """Kafka is killed and comes back."""
    REDIS_FREEZE = "redis_freeze"
    """Redis stands still for some seconds (SIGSTOP)."""
    REDIS_FLUSH = "redis_flush"
    """Redis forgets everything."""
    REDIS_EVICT = "redis_evict"
    """Redis has no memory for a second: it evicts everything and refuses writes."""
    CUT = "cut"
    """Every connection to Kafka is reset."""
    HALF_CLOSE = "half_close"
    """Kafka's side of every connection ends, ours stays open."""
    DELAY = "delay"
    """Every byte to and from Kafka takes longer, for some seconds."""
    THROTTLE = "throttle"
    """Connections to Kafka become narrow, for some seconds."""
    BLACKHOLE = "blackhole"
    """Connections stay open and nothing arrives, for some seconds."""
    REFUSE = "refuse"
    """Connections are reset and new ones refused, for some seconds."""


GROUPS = {
    FaultGroup.KILLS: (FaultKind.KILL, FaultKind.KILL_OTHER),
    FaultGroup.OVERLAP: (FaultKind.KILL_PAIR, FaultKind.KILL_TAKER),
    FaultGroup.MEMBERSHIP: (FaultKind.LEAVE, FaultKind.JOIN),
    FaultGroup.BROKER: (FaultKind.BROKER_RESTART, FaultKind.BROKER_KILL),
    FaultGroup.REDIS: (FaultKind.REDIS_FREEZE, FaultKind.REDIS_FLUSH, FaultKind.REDIS_EVICT),
    FaultGroup.PROXY: (
        FaultKind.CUT,
        FaultKind.HALF_CLOSE,
        FaultKind.DELAY,
        FaultKind.THROTTLE,
        FaultKind.BLACKHOLE,
        FaultKind.REFUSE,
    ),
}
NUM_KILLS = {FaultKind.KILL: 1, FaultKind.KILL_OTHER: 1, FaultKind.KILL_PAIR: 2, FaultKind.KILL_TAKER: 2}
WEIGHTS = {FaultKind.KILL: 5, FaultKind.KILL_OTHER: 2, FaultKind.KILL_PAIR: 2, FaultKind.KILL_TAKER: 2}
KILLS_PER_FAULT = 50  # every other kind comes once in so many kills, and at least once in a plan


def plan(draw: random.Random, num_kills: int, groups: Set[FaultGroup]) -> tuple[FaultKind, ...]:
    """Return faults in their order, among them exactly `num_kills` kills."""
    allowed = [kind for group in FaultGroup if group in groups | {FaultGroup.KILLS} for kind in GROUPS[group]]
    kills: list[FaultKind] = [kind for kind in NUM_KILLS if kind in allowed and sum(NUM_KILLS.values()) <= num_kills]
    left = num_kills - sum(NUM_KILLS[kind] for kind in kills)
    while left > 0:
        fitting = [kind for kind in NUM_KILLS if kind in allowed and NUM_KILLS[kind] <= left]
        (kind,) = draw.choices(fitting, [WEIGHTS[each] for each in fitting])
        kills.append(kind)
        left -= NUM_KILLS[kind]
    others = [kind for kind in allowed if kind not in NUM_KILLS] * max(1, num_kills // KILLS_PER_FAULT)
    mixed = kills + others
    draw.shuffle(mixed)
    return tuple(mixed)
