"""How much memory the cache may take: a share of what is free once the weights stand.

Knows the machine, its control groups and CUDA's allocator, no models. A cache on the CPU takes its pages as they are
first written, so that a generous one costs nothing until it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")
LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Of control groups, version 2 and 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Where an engine's memory goes. `activation_bytes` is an estimate of the widest step's."""

    weights_bytes: int
    kv_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return the sum."""
        return self.weights_bytes + self.kv_bytes + self.activation_bytes


def free_bytes(device: torch.device, limit_bytes: int | None = None) -> int:
    """Return what this process may still take on a device; `limit_bytes` bounds all of it on the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    bounds = [psutil.virtual_memory().available, *_cgroup_bytes(CGROUP)]
    if limit_bytes is not None:
        bounds.append(limit_bytes - psutil.Process().memory_info().rss)
    return max(0, min(bounds))


def num_blocks(
    *,
    wanted_tokens: int | None,
    max_sequences: int,
    max_context: int,
    block_size: int,
    bytes_per_block: int,
    free_bytes: int,
    share: float,
) -> int:
    """Return how many blocks a cache gets. Where nothing is wanted, as many as all sequences need at their longest.

    A number that is wanted is given whether it fits or not: the caller says so.
    """
    if wanted_tokens is not None:
        return max(1, wanted_tokens // block_size)
    most = max_sequences * -(-max_context // block_size)
    return max(1, min(most, int(free_bytes * share) // bytes_per_block))


def _cgroup_bytes(root: Path) -> Iterator[int]:
    """Yield what the control group of this process has left, where it has a limit."""
    for limit_name, used_name in LIMITS:
        try:
            limit, used = (root / limit_name).read_text().strip(), (root / used_name).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():  # else "max"
            yield int(limit) - int(used)
