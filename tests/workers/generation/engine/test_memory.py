from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workers.generation.engine import memory
from workers.generation.engine.memory import free_bytes, num_blocks

CPU = torch.device("cpu")
SHAPE = {"max_sequences": 4, "max_context": 100, "block_size": 16, "bytes_per_block": 1_000}


def test_cache_holds_every_sequence_at_its_longest_where_there_is_room() -> None:
    assert num_blocks(wanted_tokens=None, free_bytes=10**9, share=0.5, **SHAPE) == 4 * 7


def test_cache_is_bounded_by_a_share_of_what_is_free() -> None:
    assert num_blocks(wanted_tokens=None, free_bytes=20_000, share=0.5, **SHAPE) == 10
    assert num_blocks(wanted_tokens=None, free_bytes=0, share=0.5, **SHAPE) == 1


def test_a_wanted_size_is_taken_as_it_is() -> None:
    assert num_blocks(wanted_tokens=4_096, free_bytes=20_000, share=0.5, **SHAPE) == 256


@pytest.mark.parametrize(
    ("names", "limit", "used", "left"),
    [
        (memory.LIMITS[0], "5000", "2000", 3_000),
        (memory.LIMITS[0], "max", "2000", None),
        (memory.LIMITS[1], "5000", "1000", 4_000),
        (memory.LIMITS[0], "1000", "2000", 0),
    ],
)
def test_control_groups_bound_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], limit: str, used: str, left: int | None
) -> None:
    for name, text in zip(names, (limit, used), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    found = free_bytes(CPU)
    assert found > 10**6 if left is None else found == left


def test_own_limit_counts_what_the_process_has_already() -> None:
    assert free_bytes(CPU, limit_bytes=1 << 20) == 0
    assert 0 < free_bytes(CPU, limit_bytes=1 << 44) <= 1 << 44
