"""Blocks are free, idle, held or dirty, and only one of them; what is shared is never given to anybody else."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.generation.engine.batch import CacheLayout
from workers.generation.engine.kv_cache import BlockPool, block_digest, root_digest


def pool_of(num_blocks: int, *, has_prefix_cache: bool = True) -> BlockPool:
    layout = CacheLayout(num_blocks=num_blocks, block_size=4, bytes_per_block=1, identity="m")
    return BlockPool(layout, has_prefix_cache=has_prefix_cache)


ROOT = root_digest("m", "")


def test_lowest_blocks_are_handed_out_first() -> None:
    pool = pool_of(6)
    first = pool.take(3)
    assert first == [0, 1, 2]
    pool.give_back([1])
    assert pool.take(2) == [1, 3]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_partly_filled_block_is_a_block(num_tokens: int, num_blocks: int) -> None:
    assert pool_of(1).num_blocks_for(num_tokens) == num_blocks


def test_a_chain_is_found_as_far_as_it_is_known() -> None:
    pool, digests = pool_of(4), [ROOT]
    for place in range(3):
        digests.append(block_digest(digests[-1], range(place * 4, place * 4 + 4)))
    held = pool.take(2)
    for block, digest in zip(held, digests[1:], strict=False):
        pool.publish(block, digest)
    assert pool.find(digests[1:]) == held
    pool.give_back(held)
    assert (pool.find(digests[1:]), pool.num_free, pool.num_idle) == (held, 4, 2)
    pool.share(held)
    assert [pool.num_refs(block) for block in held] == [1, 1]
    assert pool.num_idle == 0


def test_digests_depend_on_everything_before_and_on_whose_they_are() -> None:
    names = {root_digest(identity, salt) for identity, salt in (("m", ""), ("m", "a"), ("ma", ""), ("m:", "a"))}
    assert len(names) == 4
    assert block_digest(ROOT, [1, 2]) == block_digest(ROOT, (1, 2))
    children = {block_digest(parent, tokens) for parent in names for tokens in ((1, 2), (2, 1), (1,), (258,))}
    assert len(children) == 16


def test_block_that_was_idle_for_longest_is_given_away_and_the_end_of_a_sequence_first() -> None:
    pool = pool_of(4)
    first, second = pool.take(2), pool.take(2)
    for number, block in enumerate((*first, *second)):
        pool.publish(block, block_digest(ROOT, [number]))
    pool.give_back(second)
    pool.give_back(first)
    assert [pool.take(1)[0] for _ in range(4)] == [second[1], second[0], first[1], first[0]]
    assert not pool.find([block_digest(ROOT, [0])])


def test_of_two_equal_blocks_the_first_stays_known() -> None:
    pool, digest = pool_of(2), block_digest(ROOT, [1])
    first, second = pool.take(2)
    pool.publish(first, digest)
    pool.publish(second, digest)
    pool.give_back([second])
    assert (pool.find([digest]), pool.num_idle) == ([first], 0)


def test_without_a_prefix_cache_nothing_is_found() -> None:
    pool = pool_of(1, has_prefix_cache=False)
    (block,) = pool.take(1)
    pool.publish(block, block_digest(ROOT, [1]))
    pool.give_back([block])
    assert (pool.find([block_digest(ROOT, [1])]), pool.num_idle, pool.num_free) == ([], 0, 1)


def test_tainted_block_is_found_no_more_and_free_once_it_has_been_cleared() -> None:
    pool, digest = pool_of(3), block_digest(ROOT, [1])
    blocks = pool.take(3)
    pool.publish(blocks[1], digest)
    pool.share(blocks[1:2])  # a neighbour reads it
    pool.forget(blocks[1:2])
    assert not pool.find([digest])
    pool.give_back(blocks)  # what stands behind it came out of it
    assert (pool.num_free, pool.num_active, pool.clean()) == (1, 1, [blocks[2]])
    pool.give_back(blocks[1:2])
    assert (pool.num_free, pool.clean(), pool.num_free, pool.clean()) == (2, [blocks[1]], 3, [])


def test_a_block_is_given_back_once() -> None:
    pool = pool_of(1)
    blocks = pool.take(1)
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(blocks)


class Pool(RuleBasedStateMachine):
    """Sequences take, share, publish, taint and give back, in any order; a plain model keeps account."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(7)
        self.held: list[list[int]] = []
        self.known: dict[bytes, int] = {}  # what was published, and not forgotten
        self.counter = 0

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        if count > self.pool.num_free:
            return
        before = Counter(block for blocks in self.held for block in blocks)
        taken = self.pool.take(count)
        assert len(set(taken)) == count and not before.keys() & set(taken), "somebody's block was given away"
        self.held.append(taken)
        for digest in [digest for digest, block in self.known.items() if block in taken]:
            del self.known[digest]

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        blocks = self.held[which % len(self.held)]
        self.pool.share(blocks)
        self.held.append(list(blocks))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def publish(self, which: int) -> None:
        blocks = self.held[which % len(self.held)]
        self.counter += 1
        digest = block_digest(ROOT, [self.counter])
        self.pool.publish(blocks[0], digest)
        if self.pool.find([digest]):
            self.known[digest] = blocks[0]

    @precondition(lambda self: self.known)
    @rule(which=st.integers(0, 99))
    def hit(self, which: int) -> None:
        digest = sorted(self.known)[which % len(self.known)]
        assert self.pool.find([digest]) == [self.known[digest]]
        self.pool.share([self.known[digest]])
        self.held.append([self.known[digest]])

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), is_failed=st.booleans())
    def end(self, which: int, is_failed: bool) -> None:
        blocks = self.held.pop(which % len(self.held))
        if is_failed:
            self.pool.forget(blocks)
        before = set(self.known.values())
        self.pool.give_back(blocks)
        for digest in [digest for digest in self.known if not self.pool.find([digest])]:
            del self.known[digest]
        if is_failed:
            assert not set(self.known.values()) & set(blocks)
        assert set(self.known.values()) <= before

    @rule()
    def clean(self) -> None:
        dirty = self.pool.clean()
        assert not set(dirty) & {block for blocks in self.held for block in blocks}

    @invariant()
    def references_sum_up(self) -> None:
        expected = Counter(block for blocks in self.held for block in blocks)
        assert {block: self.pool.num_refs(block) for block in range(7)} == {b: expected[b] for b in range(7)}
        assert self.pool.num_active == len(expected)

    def teardown(self) -> None:
        while self.held:
            self.pool.give_back(self.held.pop())
        self.pool.clean()
        assert (self.pool.num_free, self.pool.num_active) == (7, 0)
        assert sorted(self.pool.take(7)) == list(range(7))


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = Pool.TestCase
