"""Which sequence holds which blocks of the paged cache, and which full blocks can be shared.

Knows block numbers and digests of tokens, no tensors and no requests. The invariants: a block is free, idle (in the
prefix cache, unused), held, or dirty, and only one of them; a block in the prefix cache is full and never written
again; what a failed request has written is cleared before anybody reads it.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from workers.generation.engine.batch import CacheLayout

DIGEST_BYTES = 32


def root_digest(identity: str, cache_salt: str) -> bytes:
    """Return where the chains of one tenant begin: no other salt, model or layout ever meets them."""
    text = f"{len(identity)}:{identity}{cache_salt}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the name of a full block: its tokens and, through `parent`, all tokens before it."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


class BlockPool:
    """Hands out blocks, the lowest first, so that the used ones stay close together.

    When all are in use, the block of the prefix cache that has been idle for longest is given away.
    """

    def __init__(self, layout: CacheLayout, *, has_prefix_cache: bool = True) -> None:
        self.num_blocks = layout.num_blocks
        self.block_size = layout.block_size
        self._has_prefix_cache = has_prefix_cache
        self._free = list(range(layout.num_blocks))  # a heap
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._refs = [0] * layout.num_blocks
        self._digests: list[bytes | None] = [None] * layout.num_blocks
        self._blocks: dict[bytes, int] = {}  # the prefix cache, by digest
        self._tainted: set[int] = set()  # held blocks that a failure may have left numbers in
        self._dirty: list[int] = []  # such blocks that nobody holds any more

    @property
    def num_free(self) -> int:
        """Return how many blocks can be taken."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Return how many of them the prefix cache still knows."""
        return len(self._idle)

    @property
    def num_active(self) -> int:
        """Return how many blocks somebody holds."""
        return self.num_blocks - self.num_free - len(self._dirty)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks so many positions need."""
        return -(-num_tokens // self.block_size)

    def num_refs(self, block: int) -> int:
        """Return how many hold a block."""
        return self._refs[block]

    def is_tainted(self, blocks: Iterable[int]) -> bool:
        """Say whether a failed request has written into one of these blocks."""
        return bool(self._tainted) and not self._tainted.isdisjoint(blocks)

    def take(self, count: int) -> list[int]:
        """Take blocks that nobody holds; the caller has asked `num_free`."""
        assert count <= self.num_free
        taken = [self._take_one() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more: those that `find` has returned, or somebody's who goes on apart."""
        for block in blocks:
            if not self._refs[block]:
                del self._idle[block]
            self._refs[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks, in its order. What is in the prefix cache stays there, its end goes first.

        Whatever was computed from a tainted block is tainted, too.
        """
        if self.is_tainted(blocks):
            first = next(place for place, block in enumerate(blocks) if block in self._tainted)
            self.forget(blocks[first:])
        for block in reversed(blocks):
            assert self._refs[block] > 0, "a block was given back twice"
            self._refs[block] -= 1
            if not self._refs[block]:
                self._rest(block)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known beginning of a chain."""
        found: list[int] = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, block: int, digest: bytes) -> None:
        """Let others share a full block. Of two equal ones the first stays in the prefix cache."""
        assert self._refs[block] > 0
        is_new = digest not in self._blocks and self._digests[block] is None
        if self._has_prefix_cache and is_new and block not in self._tainted:
            self._digests[block] = digest
            self._blocks[digest] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop held blocks from the prefix cache: a failure may have left numbers there that are not finite."""
        for block in blocks:
            assert self._refs[block] > 0
            self._drop_digest(block)
            self._tainted.add(block)

    def clean(self) -> list[int]:
        """Return the dirty blocks, which are free from now on: the caller clears them before anything runs."""
        dirty, self._dirty = sorted(self._dirty), []
        for block in dirty:
            heapq.heappush(self._free, block)
        return dirty

    def _take_one(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        block, _ = self._idle.popitem(last=False)
        self._drop_digest(block)
        return block

    def _drop_digest(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._blocks[digest]
            self._digests[block] = None

    def _rest(self, block: int) -> None:
        if block in self._tainted:
            self._tainted.remove(block)
            self._dirty.append(block)
        elif self._digests[block] is not None:
            self._idle[block] = None
        else:
            heapq.heappush(self._free, block)
