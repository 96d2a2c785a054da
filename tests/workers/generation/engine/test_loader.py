"""Loading a model: what the settings say reaches the engine."""

from __future__ import annotations

from dataclasses import fields, replace

from workers.generation.engine.batch import CacheLayout
from workers.generation.engine.limits import Limits
from workers.generation.engine.loader import _limits
from workers.generation.engine.settings import LocalEngineSettings, Preemption

LAYOUT = CacheLayout(num_blocks=4, block_size=16, bytes_per_block=1_000, identity="x")


def test_every_limit_that_is_a_setting_has_its_value() -> None:
    plain = LocalEngineSettings()
    shared = {field.name for field in fields(Limits)} & {field.name for field in fields(plain)}
    assert {"max_draft", "max_speculative_rows", "max_batched_tokens"} <= shared
    for name in shared - {"preemption"}:
        value = getattr(plain, name) + 1
        assert getattr(_limits(replace(plain, **{name: value}), LAYOUT), name) == value
    assert not _limits(replace(plain, prefix_cache=False), LAYOUT).has_prefix_cache


def test_only_preemption_by_swap_has_blocks_in_host_memory() -> None:
    for preemption, num_blocks in ((Preemption.RECOMPUTE, 0), (Preemption.SWAP, 7)):
        found = _limits(LocalEngineSettings(preemption=preemption, max_swap_bytes=7_999), LAYOUT)
        assert (found.preemption, found.swap_blocks) == (preemption, num_blocks)
