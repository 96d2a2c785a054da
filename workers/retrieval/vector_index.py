"""The semantic channel: vectors of one tenant's passages in FAISS, compared exactly by inner product.

Ids are strings outside and 64-bit numbers inside. Not thread-safe: one thread owns an index.
"""

from __future__ import annotations

from collections.abc import Sequence

import faiss
import numpy as np

from workers.encoder import Vectors


class VectorIndex:
    """Unit vectors under string ids; inner product of unit vectors is their cosine."""

    def __init__(self, dimension: int) -> None:
        self._index = faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))
        self._numbers: dict[str, int] = {}
        self._ids: dict[int, str] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def upsert(self, ids: Sequence[str], vectors: Vectors) -> None:
        """Put vectors (N, D) float32 under N different ids, in the place of earlier ones."""
        assert len(set(ids)) == len(ids) == len(vectors)
        if not ids:
            return
        self.remove(ids)
        numbers = np.arange(self._next_number, self._next_number + len(ids), dtype=np.int64)
        self._next_number += len(ids)
        self._index.add_with_ids(np.ascontiguousarray(vectors, dtype=np.float32), numbers)
        for id_, number in zip(ids, numbers.tolist(), strict=True):
            self._numbers[id_] = number
            self._ids[number] = id_

    def remove(self, ids: Sequence[str]) -> None:
        """Remove ids; unknown ones are fine."""
        numbers = [self._numbers.pop(id_) for id_ in ids if id_ in self._numbers]
        if numbers:
            self._index.remove_ids(faiss.IDSelectorBatch(np.array(numbers, dtype=np.int64)))
            for number in numbers:
                del self._ids[number]

    def search(self, queries: Vectors, k: int) -> list[list[tuple[str, float]]]:
        """Return the k nearest ids with their cosine for each of the queries (N, D), best first; fewer if there are.

        Equal cosines stand in the order of the ids.
        """
        k = min(k, len(self))
        if k <= 0 or not len(queries):
            return [[] for _ in range(len(queries))]
        scores, numbers = self._index.search(np.ascontiguousarray(queries, dtype=np.float32), k)  # (N, k) each
        return [
            sorted(
                # FAISS fills with -1 where it found no more, and a vector with NaN is near to nothing.
                ((self._ids[number], score) for number, score in zip(*row, strict=True) if number in self._ids),
                key=lambda hit: (-hit[1], hit[0]),
            )
            for row in zip(numbers.tolist(), scores.tolist(), strict=True)
        ]
