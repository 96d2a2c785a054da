"""Which worker of a group owns which partition: bounded-load rendezvous hashing.

Pure: decides by the partitions and the stable names of the workers alone, so every leader decides alike, whatever came
before, and a worker that returns under its name gets back what it had. The invariants: every partition has exactly one
owner, and workers with the same topics own floor or ceil of their share. A worker that joins or leaves moves little
more than the partitions that must move.

Each pair of partition and worker has a score; pairs are taken from the highest down, as long as the worker has room.
(Rendezvous: Thaler and Ravishankar 1998; bounded loads: Mirrokni, Thorup and Zadimoghaddam 2016.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from streams.broker import TopicPartition


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscriber:
    """One member of a group. `name` is stable over restarts; two members may have the same."""

    name: str
    topics: frozenset[str]


def assign(partitions: Iterable[TopicPartition], workers: Iterable[str]) -> dict[str, frozenset[TopicPartition]]:
    """Return the partitions of every worker; all of them together are `partitions`. Names are unique."""
    places, names = sorted(set(partitions)), sorted(set(workers))
    shares: dict[str, set[TopicPartition]] = {name: set() for name in names}
    if not names:
        return {}
    floor, num_extra = divmod(len(places), len(names))
    pairs = sorted(((_score(place, name), place, name) for place in places for name in names), reverse=True)
    owned: set[TopicPartition] = set()
    for _, place, name in pairs:
        share = shares[name]
        if place in owned or len(share) > floor or (len(share) == floor and not num_extra):
            continue
        num_extra -= len(share) == floor
        share.add(place)
        owned.add(place)
    return {name: frozenset(share) for name, share in shares.items()}


def assign_group(
    members: Mapping[str, Subscriber], partitions: Mapping[str, Iterable[TopicPartition]]
) -> dict[str, frozenset[TopicPartition]]:
    """Return the partitions of every member, by member id. `partitions` holds those of each topic.

    Topics with the same subscribers are dealt out together, so that these own floor or ceil of all of them.
    """
    names = _unique_names(members)
    lots: defaultdict[tuple[str, ...], list[TopicPartition]] = defaultdict(list)
    for topic, places in partitions.items():
        lots[tuple(sorted(m for m, each in members.items() if topic in each.topics))].extend(places)
    shares: dict[str, frozenset[TopicPartition]] = dict.fromkeys(members, frozenset())
    for subscribers, places in lots.items():
        by_name = assign(places, [names[member] for member in subscribers])
        for member in subscribers:
            shares[member] |= by_name[names[member]]
    return shares


def _unique_names(members: Mapping[str, Subscriber]) -> dict[str, str]:
    """Return a name per member id: its own for the first of that name, with a number for the others."""
    seen: defaultdict[str, int] = defaultdict(int)
    unique = {}
    for member_id, member in sorted(members.items()):
        number = seen[member.name]
        seen[member.name] += 1
        unique[member_id] = f"{member.name}\0{number}" if number else member.name
    return unique


def _score(place: TopicPartition, name: str) -> int:
    digest = blake2b(f"{place.topic}\0{place.partition}\0{name}".encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
