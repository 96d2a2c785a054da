"""What an engine tells of itself while it works. Plain values: who shows them, and under which names, is elsewhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """What the engine does now. `num_…` count from the start; `last_step_ms` is a Unix time, 0 before the first step.

    `fragmentation` is the share of the active blocks' positions that hold no token; `allocator_slack_bytes` is what the
    device's allocator has reserved and not handed out. `prefix_queries` and `prefix_hits` count prompt tokens.
    `tokens_per_s` and `step_ms` are smoothed over the last steps; `batch_size` and `step_tokens` are the sequences of
    the last one, and the tokens that it put through the model.
    """

    running: int = 0
    waiting: int = 0
    tokens_in_flight: int = 0
    batch_size: int = 0
    step_tokens: int = 0
    step_ms: float = 0.0
    tokens_per_s: float = 0.0
    last_step_ms: int = 0
    num_steps: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    swap_ops: int = 0
    active_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0
    fragmentation: float = 0.0
    allocator_slack_bytes: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    failure: str = ""
    """Why the engine is dead; empty while it lives."""

    @property
    def kv_usage(self) -> float:
        """Return the share of the cache's blocks that running sequences hold."""
        return self.active_blocks / self.total_blocks if self.total_blocks else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Return the share of prompt tokens that the prefix cache has saved."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0
