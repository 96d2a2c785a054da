"""Which worker owns which partition."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from streams.assignor import Subscriber, assign, assign_group
from streams.broker import TopicPartition
from streams.kafka_assignor import assignor_of

names = st.sets(st.text(max_size=8), min_size=1, max_size=9)
counts = st.integers(0, 70)


def places(count: int, topic: str = "t") -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in range(count)]


def workers(count: int, salt: int = 0) -> list[str]:
    return [f"generation-blue-{salt}-{number}" for number in range(count)]


def owners(shares: dict[str, frozenset[TopicPartition]]) -> dict[TopicPartition, str]:
    return {place: name for name, share in shares.items() for place in share}


@settings(deadline=None)
@given(counts, names)
def test_every_partition_has_one_owner_and_every_worker_floor_or_ceil(count: int, group: set[str]) -> None:
    shares = assign(places(count), group)
    assert shares.keys() == group
    assert sum(len(share) for share in shares.values()) == len(owners(shares)) == count
    assert {len(share) for share in shares.values()} <= {count // len(group), -(-count // len(group))}


@settings(deadline=None)
@given(
    names.map(sorted).flatmap(lambda group: st.tuples(st.just(group), st.permutations(group))),
    st.permutations(places(9)),
)
def test_the_order_of_partitions_and_workers_does_not_matter(
    groups: tuple[list[str], list[str]], shuffled: list[TopicPartition]
) -> None:
    group, shuffled_group = groups
    assert assign(shuffled, shuffled_group) == assign(places(9), group)


def test_the_assignment_is_the_same_in_every_process() -> None:
    shares = assign(places(6), ["a", "b", "c"])
    found = {name: sorted(place.partition for place in share) for name, share in shares.items()}
    assert found == {"a": [0, 5], "b": [1, 2], "c": [3, 4]}


def test_a_group_without_workers_owns_nothing() -> None:
    assert assign(places(3), []) == {}


def num_moved(count: int, before: list[str], after: list[str]) -> int:
    old, new = owners(assign(places(count), before)), owners(assign(places(count), after))
    return sum(old[place] != new[place] for place in places(count))


def fewest_moves(count: int, num_workers: int) -> int:
    """Return how many partitions any balanced assignment moves at least when one worker joins `num_workers`.

    A leave is the same change backwards.
    """
    floor, extra = divmod(count, num_workers)
    loads = [floor + (number < extra) for number in range(num_workers)]
    new_floor, new_extra = divmod(count, num_workers + 1)
    kept = 0
    for num_old_extra in (new_extra, new_extra - 1):  # the newcomer has floor or ceil
        if 0 <= num_old_extra <= num_workers:
            rooms = [new_floor + (number < num_old_extra) for number in range(num_workers)]
            kept = max(kept, sum(map(min, loads, rooms)))
    return count - kept


def test_a_join_or_leave_moves_at_most_a_third_more_than_any_balanced_assignment_must() -> None:
    """Measured: 1.25 times the minimum over these sizes; dealing out in turn moves 3.6 times the minimum."""
    num_all = num_fewest = 0
    for count in (8, 12, 16, 32, 64, 128):
        for num_workers in (1, 2, 3, 4, 5, 7, 8, 12, 16):
            if num_workers >= count:
                continue
            for salt in range(3):
                group = workers(num_workers + 1, salt)
                moved, fewest = num_moved(count, group[:-1], group), fewest_moves(count, num_workers)
                assert fewest <= moved <= 2 * fewest + 6
                num_all += moved
                num_fewest += fewest
    assert num_all <= 1.33 * num_fewest


def test_a_worker_that_returns_gets_back_what_it_had() -> None:
    group = workers(5)
    before = assign(places(64), group)
    assert assign(places(64), [*group[1:], group[0]]) == before


def test_topics_with_the_same_subscribers_are_balanced_together() -> None:
    members = {each: Subscriber(name=each, topics=frozenset({"t", "u"})) for each in "abc"}
    shares = assign_group(members, {"t": places(4), "u": places(4, "u")})
    assert sorted(len(share) for share in shares.values()) == [2, 3, 3]


def test_a_topic_goes_to_its_subscribers_only() -> None:
    members = {
        "1": Subscriber(name="both", topics=frozenset({"t", "u"})),
        "2": Subscriber(name="one", topics=frozenset({"t"})),
    }
    shares = assign_group(members, {"t": places(4), "u": places(3, "u")})
    assert len(shares["2"]) == 2
    assert set(places(3, "u")) <= shares["1"]
    assert shares["1"] | shares["2"] == {*places(4), *places(3, "u")}


def test_two_members_of_the_same_name_both_work() -> None:
    members = {each: Subscriber(name="same", topics=frozenset({"t"})) for each in ("x-1", "x-2")}
    shares = assign_group(members, {"t": places(4)})
    assert [len(share) for share in shares.values()] == [2, 2]
    alone = assign_group({"x-2": members["x-2"], "y": Subscriber(name="y", topics=frozenset({"t"}))}, {"t": places(4)})
    assert sum(len(share) for share in alone.values()) == 4


def test_members_of_a_kafka_group_are_known_by_the_name_in_their_metadata() -> None:
    cluster = SimpleNamespace(partitions_for_topic=lambda topic: {0, 1, 2, 3} if topic == "t" else None)
    one, two = assignor_of("a"), assignor_of("b")
    members = {
        "id-9": one.metadata({"t", "unknown"}),
        "id-1": two.metadata({"t"}),
        "other": SimpleNamespace(subscription=["t"], user_data=b""),
    }
    found = one.assign(cluster, members)
    expected = assign(places(4), ["a", "b", "other"])
    for member_id, name in (("id-9", "a"), ("id-1", "b"), ("other", "other")):
        assert {TopicPartition(p.topic, p.partition) for p in found[member_id].partitions()} == expected[name]
        assert found[member_id].encode()
    assert one.name == two.name
