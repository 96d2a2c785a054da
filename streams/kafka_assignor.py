"""Our assignor as aiokafka wants it: a class, which each consumer gets of its own.

aiokafka keeps assignor classes and calls class methods, so state on a shared class would be shared by all consumers of
a process (aiokafka#1175). Here a class holds one consumer's stable name and nothing else; the name travels to the
group's leader in the metadata of the member.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from streams.assignor import Subscriber, assign_group
from streams.broker import TopicPartition

PROTOCOL = "gea-rendezvous"
VERSION = 0


def assignor_of(member: str) -> type[Any]:
    """Return the assignor class of the consumer with that stable name."""

    class RendezvousAssignor(AbstractPartitionAssignor):  # type: ignore[misc]  # aiokafka has no types
        name = PROTOCOL

        @classmethod
        def assign(cls, cluster: Any, members: Mapping[str, Any]) -> dict[str, Any]:
            return _assignments(cluster, members)

        @classmethod
        def metadata(cls, topics: Iterable[str]) -> Any:
            return ConsumerProtocolMemberMetadata(VERSION, sorted(topics), member.encode("utf-8", "replace"))

        @classmethod
        def on_assignment(cls, assignment: Any) -> None:
            return None

    return RendezvousAssignor


def _assignments(cluster: Any, members: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the leader sends to every member. A topic that the cluster does not know has no partitions."""
    subscribers = {
        member_id: Subscriber(name=_name(member_id, metadata.user_data), topics=frozenset(metadata.subscription))
        for member_id, metadata in members.items()
    }
    topics = {topic for subscriber in subscribers.values() for topic in subscriber.topics}
    places = {
        topic: [TopicPartition(topic, number) for number in cluster.partitions_for_topic(topic) or ()]
        for topic in topics
    }
    shares = assign_group(subscribers, places)
    return {
        member_id: ConsumerProtocolMemberAssignment(VERSION, _by_topic(share), b"")
        for member_id, share in shares.items()
    }


def _name(member_id: str, user_data: bytes | None) -> str:
    """Return the stable name of a member; a client that sends none is known by its id."""
    return user_data.decode("utf-8", "replace") if user_data else member_id


def _by_topic(share: frozenset[TopicPartition]) -> list[tuple[str, list[int]]]:
    topics = sorted({place.topic for place in share})
    return [(topic, sorted(place.partition for place in share if place.topic == topic)) for topic in topics]
