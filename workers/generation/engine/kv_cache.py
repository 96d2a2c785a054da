"""Keys and values of the running sequences: one slot of fixed length for each, allocated once.

Knows slots, no requests. The invariants: a slot has one owner at a time, and what stands beyond a sequence's length is
finite (zeros or an earlier owner's values), so that a masked position never turns into NaN.
"""

from __future__ import annotations

import torch


class SlotPool:
    """Hands out slots, the lowest first, so that the used ones stay close together."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Return how many slots have no owner."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Take `count` slots; the caller has asked `num_free`."""
        assert count <= len(self._free)
        slots = tuple(self._free.pop() for _ in range(count))
        self._used.update(slots)
        return slots

    def give_back(self, slot: int) -> None:
        """Free one slot, exactly once."""
        self._used.remove(slot)
        self._free.append(slot)
        self._free.sort(reverse=True)


class SlotCache:
    """Two tensors `(num_layers, num_slots, num_kv_heads, max_context, head_dim)`."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_context: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, max_context, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another, in all layers."""
        for cache in (self.keys, self.values):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    def clear(self, slot: int) -> None:
        """Set a slot to zeros in all layers."""
        for cache in (self.keys, self.values):
            cache[:, slot] = 0
