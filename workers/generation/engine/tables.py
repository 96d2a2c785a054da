"""The block tables of sequences: how they grow, are shared, are named for the prefix cache, and are let go.

Knows one sequence at a time, not who runs. The invariant: a block that is written has one holder. Full blocks may be
shared, they are behind every write; a tail that a fork shares is copied before its next token.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from workers.generation.engine.kv_cache import BlockPool, block_digest
from workers.generation.engine.sequence import Sequence, State

Copy = tuple[Sequence, int, int]  # for whom, from, to


class BlockTables:
    """Block tables over one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def num_missing(self, sequence: Sequence, end: int) -> int:
        """Return how many blocks must be taken before the tokens up to `end` can be written."""
        missing = max(0, self._pool.num_blocks_for(end) - len(sequence.block_table))
        return missing + self._is_tail_shared(sequence)

    def grow(self, sequence: Sequence, end: int) -> list[Copy]:
        """Make room for the tokens up to `end`; return what has to be copied for it."""
        table, copies = sequence.block_table, []
        if self._is_tail_shared(sequence):
            place = sequence.num_computed // self._pool.block_size
            (own,) = self._pool.take(1)
            copies.append((sequence, table[place], own))
            self._pool.give_back(table[place : place + 1])
            table[place] = own
        table += self._pool.take(max(0, self._pool.num_blocks_for(end) - len(table)))
        return copies

    def hits(self, sequence: Sequence) -> list[int]:
        """Return the blocks of the prefix cache that a sequence can begin with. Its last token is always read."""
        if sequence.state is State.SWAPPED:
            return []
        count = (sequence.num_readable - 1) // self._pool.block_size
        self._digest(sequence, count)
        return self._pool.find(sequence.digests[:count])

    def begin(self, sequence: Sequence, hits: Ordered[int]) -> None:
        """Give a sequence blocks of the prefix cache."""
        self._pool.share(hits)
        sequence.block_table = list(hits)
        sequence.num_computed = len(hits) * self._pool.block_size
        sequence.num_published = len(hits)

    def restore(self, sequence: Sequence) -> None:
        """Give a sequence blocks for what it has in host memory."""
        sequence.block_table = self._pool.take(sequence.num_swapped)
        sequence.num_published = 0

    def publish(self, sequence: Sequence) -> None:
        """Let others share the blocks that a sequence has filled."""
        num_full = sequence.num_computed // self._pool.block_size
        if sequence.num_published < num_full and not self._pool.is_tainted(sequence.block_table):
            self._digest(sequence, num_full)
            for place in range(sequence.num_published, num_full):
                self._pool.publish(sequence.block_table[place], sequence.digests[place])
            sequence.num_published = num_full

    def fork(self, first: Sequence, follower: Sequence) -> None:
        """Let a sequence go on with all that another has read."""
        self._pool.share(first.block_table)
        follower.block_table = list(first.block_table)
        follower.digests = list(first.digests)
        follower.num_computed, follower.num_published = first.num_computed, first.num_published

    def let_go(self, sequence: Sequence) -> None:
        """Give all blocks of a sequence back; those that it filled stay in the prefix cache for a while."""
        self._pool.give_back(sequence.block_table)
        sequence.block_table = []

    def taint(self, sequence: Sequence, position: int) -> None:
        """Let nobody read what stands from `position` on in a sequence's blocks."""
        self._pool.forget(sequence.block_table[position // self._pool.block_size :])

    def _is_tail_shared(self, sequence: Sequence) -> bool:
        """Say whether the block of the next token is also a fork's."""
        place = sequence.num_computed // self._pool.block_size
        return place < len(sequence.block_table) and self._pool.num_refs(sequence.block_table[place]) > 1

    def _digest(self, sequence: Sequence, count: int) -> None:
        """Name the first `count` full blocks of a sequence."""
        digests, size = sequence.digests, self._pool.block_size
        for place in range(len(digests), count):
            parent = digests[-1] if digests else sequence.request.root
            digests.append(block_digest(parent, sequence.tokens[place * size : (place + 1) * size]))
